//! Reserve an estimate before the work, settle with the true amount after it: calls to a language model, say.
//!
//! `cargo run --example reserve_and_settle`

use std::time::Duration;
use tollgate::{Limit, Tollgate};

fn main() -> Result<(), tollgate::Error> {
    let gate = Tollgate::builder()
        .limit("requests", Limit::sliding_window(10, Duration::from_secs(60))?)
        .limit("tokens", Limit::sliding_window(5_000, Duration::from_secs(60))?)
        .limit("at-once", Limit::concurrency(2, Duration::from_secs(30))?)
        .build()?;
    let (requests, tokens) = (gate.local("requests")?, gate.local("tokens")?);
    let left = || tokens.status("model:gpt").remaining();

    // One request, and as many tokens as it may take at most, for at most two minutes.
    let estimate = [requests.of("model:gpt"), tokens.of("model:gpt").cost(4_000)];
    let within = std::time::Duration::from_secs(120);
    let reserved = tollgate::reserve(&estimate, within)?;
    let reservation = reserved.reservation.expect("nothing was used before");
    println!("reserved 4000 tokens, {} are left for others", left());

    let second = tollgate::reserve(&estimate, within)?;
    println!("a second call has to wait: {}", second.decision);

    reservation.settle_each(&[("tokens", 1_234)])?;
    println!("it took 1234, so {} are left", left());

    let second = tollgate::reserve(&estimate[..1], within)?.reservation.expect("a request is left");
    second.cancel()?;
    println!(
        "a call that failed is cancelled, and {} requests are left",
        let _ = requests.status("model:gpt").remaining()
    );

    // A permit holds one of two places until it is dropped, or until its lease of 30 seconds runs out.
    let at_once = gate.local("at-once")?;
    let (first, second) = (at_once.acquire("model:gpt"), at_once.acquire("model:gpt"));
    println!("two calls run at once: {}", first.is_ok() && second.is_ok());
    println!("a third may not: {}", at_once.acquire("model:gpt").unwrap_err());
    drop(first);
    println!("one is done, so it may: {}", at_once.acquire("model:gpt").is_ok());
    Ok(())
}
