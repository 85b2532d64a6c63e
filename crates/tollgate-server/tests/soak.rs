//! The server for three minutes under mixed load on Redis, with reloads and faults: memory and latency must stay where they are.
//!
//! `tollgate_testkit::soak` does it and says what is held to which bound; `tollgate-benches -- soak --hours 2` is the same for longer. This test
//! is alone in its binary, so that nothing else runs beside it. `TOLLGATE_SOAK_MINUTES` makes it longer.

use std::path::Path;
use std::time::Duration;

use tollgate_testkit::soak::{Plan, Soak};

#[test]
fn memory_and_latency_stay_where_they_are() {
    let minutes = std::env::var("TOLLGATE_SOAK_MINUTES").ok().map_or(3, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("TOLLGATE_SOAK_MINUTES={text} must be a whole number of minutes"))
    });
    let plan = Plan { duration: Duration::from_secs(60 * minutes), rate: 600, seed: 1 };
    let soak = Soak::run(plan, Path::new(env!("CARGO_BIN_EXE_tollgate")), |sample| println!("{sample:?}"));
    let stability = soak.stability();
    println!("{stability:#?}");
    assert!(stability.holds(), "{:#?}\nthe first mistakes: {:#?}", stability.failures(), soak.first_mistakes);
    // A load that nobody was denied, or that met no fault, would prove little.
    let sum = |count: fn(&tollgate_testkit::soak::Sample) -> u64| soak.samples.iter().map(count).sum::<u64>();
    let (allowed, denied, undecided) =
        (sum(|sample| sample.allowed), sum(|sample| sample.denied), sum(|sample| sample.undecided));
    assert!(allowed > denied && denied > 1000 && undecided > 10, "{allowed}, {denied}, {undecided}");
}
