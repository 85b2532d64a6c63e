//! Wait for room instead of being refused: first come, first served, with a deadline. Any runtime will do.
//!
//! `cargo run --example waiting`

use std::time::{Duration, Instant};

use tollgate::{Limit, Limiter};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // One letter every 20 milliseconds.
    let limiter = Limiter::new(Limit::token_bucket("50/s", 1)?);
    let started = Instant::now();

    let letters = ["first", "second", "third", "fourth"].map(|letter| {
        let limiter = limiter.clone();
        tokio::spawn(async move {
            let outcome = limiter.wait("mail:alice", 1, Duration::from_secs(5)).await?;
            assert!(outcome.is_allowed());
            println!("the {letter} letter leaves");
            Ok::<(), tollgate::Error>(())
        })
    });
    for letter in letters {
        letter.await??;
    }
    println!("four letters took at least 60 ms: {}", started.elapsed() >= Duration::from_millis(60));

    // Whoever cannot wait long enough is told so, and charged nothing.
    let hourly = Limiter::new(Limit::fixed_window(1, Duration::from_secs(3600))?);
    let _ = hourly.check("mail:alice");
    let late = hourly.wait("mail:alice", 1, Duration::from_millis(5)).await?;
    println!("a newsletter cannot leave within 5 ms: {}", !late.is_allowed() && late.retry_after().is_some());
    // What can never fit is said at once.
    let never = hourly.wait("mail:alice", 2, Duration::from_secs(86_400)).await?;
    println!("two newsletters at once: {never}");
    Ok(())
}
