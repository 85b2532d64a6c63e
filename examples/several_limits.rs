//! Several limits in one charge: all are charged or none is, and the answer names the limit that was in the way.
//!
//! `cargo run --example several_limits`

use std::time::Duration;

use tollgate::{Charge, Decision, Limit, Tollgate};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), tollgate::Error> {
    let gate = Tollgate::builder()
        .limit("everybody", Limit::fixed_window(100, Duration::from_secs(60))?)
        .limit("per-user", Limit::sliding_window(2, Duration::from_secs(60))?)
        .limit("exports", Limit::fixed_window(1, Duration::from_secs(3600))?)
        .build()?;

    println!("alice views a page:  {}", view(&gate, "user:alice").await?);
    println!("alice views another: {}", view(&gate, "user:alice").await?);
    println!("bob views a page:    {}", view(&gate, "user:bob").await?);
    println!("bob exports:         {}", export(&gate, "user:bob").await?);

    let denied = export(&gate, "user:bob").await?;
    println!("bob exports again:   {}", if denied.is_allowed() { "allowed" } else { "denied" });
    for outcome in denied.outcomes() {
        println!("  {} alone says: {}", outcome.limit(), if outcome.is_allowed() { "yes" } else { "no" });
    }
    println!("  {} asks for the longest wait, so it is named", denied.binding().limit());
    let used = gate.status("everybody", "all").await?.used();
    println!("everybody together has used {used}; the refused export took nothing");
    Ok(())
}

async fn view(gate: &Tollgate, user: &str) -> Result<Decision, tollgate::Error> {
    gate.charge(&[Charge::new("everybody", "all"), Charge::new("per-user", user)]).await
}

/// An export costs ten of what everybody shares, and one of the user's own.
async fn export(gate: &Tollgate, user: &str) -> Result<Decision, tollgate::Error> {
    let charges = [
        Charge::new("everybody", "all").cost(10),
        Charge::new("per-user", user),
        Charge::new("exports", user),
    ];
    gate.charge(&charges).await
}
