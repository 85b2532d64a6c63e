//! Several limits in one charge: all are charged or none is, and the answer names the limit that was in the way.
//!
//! `cargo run --example several_limits`

use tollgate::{Limit, Micros, Tollgate};

fn main() -> Result<(), tollgate::Error> {
    let gate = Tollgate::builder()
        .limit("everybody", Limit::fixed_window(100, Micros::from_secs(60))?)
        .limit("per-user", Limit::sliding_window(2, Micros::from_secs(60))?)
        .limit("exports", Limit::fixed_window(1, Micros::from_secs(3600))?)
        .build()?;
    let everybody = gate.limiter("everybody")?;
    let per_user = gate.limiter("per-user")?;
    let exports = gate.limiter("exports")?;

    let view = |user| tollgate::charge(&[everybody.of("all"), per_user.of(user)]);
    println!("alice views a page:  {}", view("user:alice")?);
    println!("alice views another: {}", view("user:alice")?);
    println!("bob views a page:    {}", view("user:bob")?);

    // An export costs ten of what everybody shares, and one of the user's own.
    let export =
        |user| tollgate::charge(&[everybody.of("all").cost(10), per_user.of(user), exports.of(user)]);
    println!("bob exports:         {}", export("user:bob")?);

    let denied = export("user:bob")?;
    println!("bob exports again:   {}", if denied.allowed() { "allowed" } else { "denied" });
    for limit in denied.limits() {
        println!("  {} alone says: {}", limit.name, if limit.denies() { "no" } else { "yes" });
    }
    println!("  {} asks for the longest wait, so it is named", denied.binding().name);
    println!(
        "everybody together has used {}; the refused export took nothing",
        everybody.status("all").used()
    );
    Ok(())
}
