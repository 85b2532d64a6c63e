//! Several limits in one charge: all are charged or none is, and the answer names the limit that was in the way.
//!
//! `cargo run --example several_limits`

use std::time::Duration;
use tollgate::{Limit, Tollgate};

fn main() -> Result<(), tollgate::Error> {
    let gate = Tollgate::builder()
        .limit("everybody", Limit::fixed_window(100, Duration::from_secs(60))?)
        .limit("per-user", Limit::sliding_window(2, Duration::from_secs(60))?)
        .limit("exports", Limit::fixed_window(1, Duration::from_secs(3600))?)
        .build()?;
    let everybody = gate.local("everybody")?;
    let per_user = gate.local("per-user")?;
    let exports = gate.local("exports")?;

    let view = |user| tollgate::charge(&[everybody.of("all"), per_user.of(user)]);
    println!("alice views a page:  {}", view("user:alice")?);
    println!("alice views another: {}", view("user:alice")?);
    println!("bob views a page:    {}", view("user:bob")?);

    // An export costs ten of what everybody shares, and one of the user's own.
    let export =
        |user| tollgate::charge(&[everybody.of("all").cost(10), per_user.of(user), exports.of(user)]);
    println!("bob exports:         {}", export("user:bob")?);

    let denied = export("user:bob")?;
    println!("bob exports again:   {}", if denied.is_allowed() { "allowed" } else { "denied" });
    for limit in denied.outcomes() {
        println!("  {} alone says: {}", limit.name, if limit.denies() { "no" } else { "yes" });
    }
    println!("  {} asks for the longest wait, so it is named", denied.binding().limit());
    println!(
        "everybody together has used {}; the refused export took nothing",
        let _ = everybody.status("all").used()
    );
    Ok(())
}
