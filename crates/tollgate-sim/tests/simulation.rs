//! Whole simulations: they repeat bit for bit, they keep their bounds, and a broken promise is seen.

use tollgate_sim::scenario::{Layout, Sabotage, Scenario, StrategyName};
use tollgate_sim::{Report, simulate};

fn scenario(name: &str, nodes: usize, seconds: u64) -> Scenario {
    let scenario = Scenario::named(name).expect("a scenario");
    let is_divided = scenario.instances == scenario.nodes as u64;
    let instances = if is_divided { nodes as u64 } else { scenario.instances };
    // A sixth of the requests of all processes.
    let requests_per_1000s = scenario.requests_per_1000s * scenario.nodes as u64 / nodes as u64 / 6;
    Scenario { nodes, seconds, instances, requests_per_1000s, ..scenario }
}

fn run(scenario: &Scenario, seed: u64) -> Report {
    simulate(scenario, seed, None).expect("a simulation")
}

/// A thousand processes twice with one seed: the same events, in the same order, at the same microseconds. Another seed is another run.
#[test]
fn a_thousand_processes_repeat_bit_for_bit() {
    let mut scenario = scenario("partition", 1_000, 5);
    scenario.requests_per_1000s = 3_000;
    scenario.loss_ppm = 1_000;
    let (first, second) = (run(&scenario, 7), run(&scenario, 7));
    assert_eq!((first.events, &first.hash), (second.events, &second.hash));
    assert_eq!(first.json(), second.json());
    assert!(first.decisions > 10_000 && first.ambiguous > 0, "{first}");
    assert_ne!(run(&scenario, 8).hash, first.hash);
}

/// Every scenario, with fewer processes: it repeats, keeps its bounds, and shows what it is there to show.
#[test]
fn all_scenarios_keep_their_bounds_and_repeat() {
    // Batches need as many requests as there are: they have a test of their own.
    for Scenario { name, .. } in Scenario::all().into_iter().filter(|scenario| scenario.name != "busy") {
        let scenario = scenario(name, 60, 10);
        let (report, again) = (run(&scenario, 3), run(&scenario, 3));
        assert_eq!(report.hash, again.hash, "{name}");
        assert!(report.is_clean(), "{report}");
        let by = |source: &str| report.sources.get(source).copied().unwrap_or(0);
        let shows = match name {
            "steady" | "hot-key" => by("store") > 0 && by("denial_cache") > 0 && report.ambiguous == 0,
            "loss" => report.ambiguous > 0 && by("fallback_local") > 0,
            "partition" | "fallback-local" => by("fallback_local") > 100,
            "failover" | "split" | "cluster" | "skew" => by("fallback_closed") > 0,
            "region-shares" => by("fallback_local") == 0,
            "leased" => report.calls_per_decision() < 0.2,
            _ => false,
        };
        assert!(shows, "{report}");
    }
}

/// Charges that come at the same time go in batches, by the code of the real stores, and keep the bounds.
#[test]
fn busy_processes_send_batches() {
    let busy = Scenario { seconds: 1, ..Scenario::named("busy").expect("a scenario") };
    let report = run(&busy, 1);
    assert!(report.is_clean() && report.charges_per_call() > 1.2, "{report}");
}

/// The bounds of every strategy hold through two fail-overs that lose state.
#[test]
fn all_strategies_keep_their_bounds_through_losses() {
    for strategy in [
        StrategyName::TokenBucket,
        StrategyName::SlidingWindow,
        StrategyName::FixedWindow,
        StrategyName::SlidingWindowCounter,
    ] {
        let mut scenario = scenario("failover", 40, 9);
        scenario.limit = scenario.limit.by(strategy);
        let report = run(&scenario, 5);
        assert!(report.is_clean(), "{strategy:?}: {report}");
    }
}

/// The checks can fail: each promise that is broken on purpose is found broken.
#[test]
fn a_broken_promise_is_seen() {
    for (sabotage, name, promise) in [
        (Sabotage::Resend, "loss", "calls carried out twice"),
        (Sabotage::LateCalls, "loss", "calls carried out after their deadline"),
        (Sabotage::SilentLoss, "hot-key", "by the store"),
        (Sabotage::WholeShare, "fallback-local", "local fallback, each process"),
    ] {
        let mut scenario = scenario(name, 60, 8);
        if sabotage == Sabotage::WholeShare {
            // A process that asks for less than its share is not seen to have taken more.
            scenario.requests_per_1000s *= 6;
        }
        assert!(run(&scenario, 3).is_clean(), "{name} by itself");
        scenario.sabotage = Some(sabotage);
        let report = run(&scenario, 3);
        assert!(report.broken().contains(&promise), "{sabotage:?}: {report}");
    }
}

/// A region that is cut off goes on with what it leased, and its units are not handed out twice.
#[test]
fn leased_units_are_a_part_of_the_limit() {
    let mut scenario = scenario("leased", 30, 8);
    for units in [1, 20, 500] {
        let Layout::Leased { units: leased, .. } = &mut scenario.layout else { panic!("it leases") };
        *leased = units;
        let report = run(&scenario, 11);
        assert!(report.is_clean(), "{units}: {report}");
    }
}
