//! A limiter in eight lines: each user may send 3 requests at once and 10 a minute.
//!
//! `cargo run --example hello`

use tollgate::{Limit, Limiter};

fn main() -> Result<(), tollgate::Error> {
    let limiter = Limiter::new(Limit::token_bucket("10/m", 3)?);
    for request in 1..=5 {
        let outcome = limiter.check("user:42");
        println!("request {request}: {outcome}");
    }
    Ok(())
}
