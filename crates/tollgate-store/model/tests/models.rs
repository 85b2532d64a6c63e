//! Runs the models.

use tollgate_model::models::ALL;

#[test]
fn every_promise_holds_under_every_interleaving() {
    for (promise, model) in ALL.into_iter().skip(std::env::var("SKIP").map_or(0, |s| s.parse().unwrap())) {
        let started = std::time::Instant::now();
        eprintln!("{promise}");
        model();
        eprintln!("  {:?}", started.elapsed());
    }
}
