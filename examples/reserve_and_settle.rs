//! Reserve an estimate before the work, settle with the true amount after it: calls to a language model, say.
//!
//! `cargo run --example reserve_and_settle`

use std::time::Duration;

use tollgate::{Charge, Limit, Tollgate};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let gate = Tollgate::builder()
        .limit("requests", Limit::sliding_window(10, Duration::from_secs(60))?)
        .limit("tokens", Limit::sliding_window(5_000, Duration::from_secs(60))?)
        .limit("at-once", Limit::concurrency(2, Duration::from_secs(30))?)
        .build()?;
    let left = async |limit: &str| gate.status(limit, "model:gpt").await.map(|status| status.remaining());

    // One request, and as many tokens as it may take at most, for at most two minutes.
    let estimate = [Charge::new("requests", "model:gpt"), Charge::new("tokens", "model:gpt").cost(4_000)];
    let ttl = Duration::from_secs(120);
    let reservation = gate.reserve(&estimate, ttl).await??;
    println!("reserved 4000 tokens, {} are left for others", left("tokens").await?);

    if let Err(denied) = gate.reserve(&estimate, ttl).await? {
        println!("a second call has to wait: {denied}");
    }

    reservation.settle_each(&[1, 1_234]).await?;
    println!("it took 1234, so {} are left", left("tokens").await?);

    let second = gate.reserve(&estimate[..1], ttl).await??;
    second.cancel().await?;
    println!("a call that failed is cancelled, and {} requests are left", left("requests").await?);

    // A permit holds one of two places until it is dropped.
    let (first, second) =
        (gate.acquire("at-once", "model:gpt").await?, gate.acquire("at-once", "model:gpt").await?);
    println!("two calls run at once: {}", first.is_ok() && second.is_ok());
    if let Err(denied) = gate.acquire("at-once", "model:gpt").await? {
        println!("a third may not: {denied}");
    }
    drop(first);
    println!("one is done, so it may: {}", gate.acquire("at-once", "model:gpt").await?.is_ok());
    Ok(())
}
