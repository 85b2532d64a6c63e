//! The checker of histories, tried on limiters that are right and on limiters that are deliberately broken. Each broken one
//! must be flagged, by the checks that are there for it; the right ones never, with whatever replies are lost.

mod limiters;
mod simulation;
mod threads;

use std::collections::BTreeSet;

use limiters::*;
use simulation::{DEADLINE_US, Limiter, Run, Schedule, WhenLost, run};
use tollgate_testkit::history::{Bound, Check, Promises};

const SEEDS: std::ops::Range<u64> = 0..10;

const WINDOW: Bound = Bound::Window { limit: LIMIT, window_us: WINDOW_US };
const BUCKET: Bound = Bound::Bucket { burst: LIMIT, count: LIMIT, period_us: WINDOW_US };
const FIXED: Bound = Bound::FixedWindow { limit: LIMIT, window_us: WINDOW_US };
const FIRST: Bound = Bound::FirstWindow { limit: LIMIT, window_us: WINDOW_US };
const COUNTER: Bound = Bound::WindowCounter { limit: LIMIT, window_us: WINDOW_US };

/// Runs a limiter under a schedule for many seeds: exactly these checks must flag it, each at least once, and in every run one
/// of them.
#[track_caller]
fn flags<L: Limiter>(limiter: impl Fn() -> L, schedule: Schedule, promises: &Promises, expected: &[Check]) {
    let mut flagged = BTreeSet::new();
    for seed in SEEDS {
        let run = run(Schedule { seed, ..schedule }, &mut limiter());
        let report = run.check(promises.clone());
        assert_eq!(report.is_clean(), expected.is_empty(), "seed {seed}: {report}");
        flagged.extend(report.flagged());
        if expected.is_empty() {
            // What passes with the store's help passes without it.
            run.without_store_times().check(promises.clone()).assert_clean();
        }
        if seed == 0 {
            println!("{report}\n");
        }
    }
    assert_eq!(flagged, expected.iter().copied().collect());
}

fn right_ones(schedule: Schedule, promise: impl Fn(Bound) -> Promises) {
    flags(Log::default, schedule, &promise(WINDOW), &[]);
    flags(Bucket::new, schedule, &promise(BUCKET), &[]);
    flags(|| FixedWindow { edge_us: 0, index: 0, count: 0 }, schedule, &promise(FIXED), &[]);
    flags(FirstWindow::default, schedule, &promise(FIRST), &[]);
    flags(|| Counter { weighs_previous: true, index: 0, counts: [0, 0] }, schedule, &promise(COUNTER), &[]);
}

#[test]
fn right_limiters_pass() {
    right_ones(Schedule::new(0), |bound| Promises::of(bound).deadline(DEADLINE_US, 0));
    right_ones(Schedule { max_cost: 7, ..Schedule::new(0) }, Promises::of);
    // So rarely asked that nothing is ever denied, and so often that nearly everything is.
    right_ones(Schedule { rest_us: 400_000, calls: 1000, ..Schedule::new(0) }, Promises::of);
    right_ones(Schedule { rest_us: 20, clients: 30, ..Schedule::new(0) }, Promises::of);
}

#[test]
fn right_limiters_pass_whatever_replies_are_lost() {
    let lossy = Schedule { lost_per_mille: 20, max_cost: 3, ..Schedule::new(0) };
    right_ones(lossy, Promises::of);
    right_ones(lossy, |bound| Promises::of(bound).ambiguous_close_after(0));
    // Some are also carried out long after their client has given up.
    let late = Schedule { late: Some((20, 300_000)), ..lossy };
    right_ones(late, Promises::of);
    right_ones(late, |bound| Promises::of(bound).ambiguous_close_after(300_000));
}

#[test]
fn gaps_are_the_ambiguous_calls_that_took_effect() {
    for seed in SEEDS {
        let schedule = Schedule { lost_per_mille: 20, ..Schedule::new(seed) };
        let Run { history, stored, applied_ambiguous } = run(schedule, &mut Log::default());
        let report = history.check(&Promises::of(WINDOW).at_rest(0, stored));
        report.assert_clean();
        // Those after the last version that somebody was reported cannot be seen.
        assert!(report.gaps <= applied_ambiguous && report.gaps + 3 >= applied_ambiguous, "{report}");
        assert!(report.gaps > 0 && report.ambiguous > report.gaps);
        assert_eq!(report.fullest, Some((LIMIT, LIMIT)));

        // If nothing is denied, every ambiguous call is a gap.
        let Run { history, stored, .. } = run(schedule, &mut Unlimited);
        let report = history.check(&Promises::without_bound().at_rest(0, stored));
        report.assert_clean();
        assert!(report.ambiguous > 50 && report.ambiguous - report.gaps <= 3, "{report}");
    }
}

#[test]
fn check_then_act_is_flagged_with_and_without_the_stores_help() {
    let promises = Promises::of(WINDOW);
    flags(CheckThenAct::default, Schedule::new(0), &promises, &[Check::Exact, Check::BlackBox]);
    let blind = run(Schedule::new(0), &mut CheckThenAct::default()).without_store_times();
    assert_eq!(blind.check(promises).flagged(), BTreeSet::from([Check::BlackBox]));
}

#[test]
fn a_float_bucket_that_moves_its_clock_on_success_only_is_flagged() {
    let promises = Promises::of(BUCKET);
    flags(FloatBucket::new, Schedule::new(0), &promises, &[Check::Exact, Check::BlackBox]);
}

#[test]
fn a_log_keyed_by_time_is_flagged() {
    let often = Schedule { rest_us: 300, ..Schedule::new(0) };
    flags(LogByMillisecond::default, often, &Promises::of(WINDOW), &[Check::Exact, Check::BlackBox]);
}

#[test]
fn client_clocks_are_flagged() {
    let expected = [Check::Exact, Check::BlackBox];
    flags(ClientClocks::default, Schedule::new(0), &Promises::of(WINDOW), &expected);
}

#[test]
fn a_lost_expiry_is_flagged() {
    flags(IncrThenExpire::default, Schedule::new(0), &Promises::of(FIRST), &[Check::Denials]);
    let lossy = Schedule { lost_per_mille: 10, ..Schedule::new(0) };
    let promises = Promises::of(FIRST).ambiguous_close_after(0);
    flags(IncrThenExpire::default, lossy, &promises, &[Check::Denials]);
}

#[test]
fn counted_denials_are_flagged() {
    let promises = Promises::of(WINDOW);
    flags(CountsDenials::default, Schedule::new(0), &promises, &[Check::Denials]);
    let blind = run(Schedule::new(0), &mut CountsDenials::default()).without_store_times();
    assert_eq!(blind.check(promises).flagged(), BTreeSet::from([Check::Denials]));
}

#[test]
fn draining_whole_requests_is_flagged() {
    let promises = Promises::of(BUCKET);
    flags(DrainsWholeRequests::default, Schedule::new(0), &promises, &[Check::Denials]);
    let blind = run(Schedule::new(0), &mut DrainsWholeRequests::default()).without_store_times();
    assert_eq!(blind.check(promises).flagged(), BTreeSet::from([Check::Denials]));
}

#[test]
fn carrying_out_twice_is_flagged() {
    let again = Schedule { lost_per_mille: 10, when_lost: WhenLost::SendAgain, ..Schedule::new(0) };
    // The limit is kept, but calls were charged twice: denials come too early as well.
    let expected = [Check::Versions, Check::Denials, Check::Rest];
    flags(Log::default, again, &Promises::of(WINDOW), &expected);
}

#[test]
fn an_undeclared_loss_is_flagged_and_a_declared_one_is_not() {
    let forgetful = Schedule { lose_state_after: Some(120), ..Schedule::new(0) };
    let expected = [Check::Exact, Check::BlackBox, Check::Versions, Check::Rest];
    flags(Log::default, forgetful, &Promises::of(WINDOW), &expected);
    flags(Log::default, forgetful, &Promises::of(WINDOW).losses(1), &[]);
    let lossy = Schedule { lost_per_mille: 20, ..forgetful };
    flags(Log::default, lossy, &Promises::of(WINDOW).losses(1).ambiguous_close_after(0), &[]);
    let report = run(forgetful, &mut Log::default()).check(Promises::of(WINDOW).losses(1));
    assert_eq!((report.losses_seen, report.lost_cost), (1, 120));
    // Twice the bound is what one loss excuses, not more.
    let often = Schedule { rest_us: 100, ..forgetful };
    flags(|| Unlimited, often, &Promises::of(WINDOW).losses(1), &[Check::Exact, Check::BlackBox]);
}

#[test]
fn late_answers_are_flagged() {
    let slow = Schedule { slow: Some((5, 2 * DEADLINE_US)), ..Schedule::new(0) };
    let promises = Promises::of(WINDOW).deadline(DEADLINE_US, 500);
    flags(Log::default, slow, &Promises::of(WINDOW), &[]);
    flags(Log::default, slow, &promises, &[Check::Deadline]);
}

#[test]
fn late_execution_is_flagged_if_it_was_promised_away() {
    let late = Schedule { late: Some((20, 300_000)), rest_us: 60_000, calls: 3000, ..Schedule::new(0) };
    flags(Log::default, late, &Promises::of(WINDOW), &[]);
    let promises = Promises::of(WINDOW).ambiguous_close_after(0);
    flags(Log::default, late, &promises, &[Check::Versions, Check::Denials]);
}

#[test]
fn a_window_that_ends_early_is_flagged() {
    let early = || FixedWindow { edge_us: 2_000, index: 0, count: 0 };
    let often = Schedule { rest_us: 100, calls: 20_000, ..Schedule::new(0) };
    flags(early, often, &Promises::of(FIXED), &[Check::Exact, Check::Denials]);
}

#[test]
fn a_counter_that_forgets_the_window_before_is_flagged() {
    let forgetful = || Counter { weighs_previous: false, index: 0, counts: [0, 0] };
    flags(forgetful, Schedule::new(0), &Promises::of(COUNTER), &[Check::Exact]);
}

#[test]
fn labels_must_add_up() {
    let Run { history, .. } = run(Schedule { lost_per_mille: 10, ..Schedule::new(0) }, &mut Log::default());
    let labels = history.check(&Promises::of(WINDOW)).labels;
    assert_eq!(labels.len(), 2);
    history.check(&Promises::of(WINDOW).labels(labels.clone())).assert_clean();
    let fewer = labels.iter().map(|(label, count)| (label.clone(), count - 1));
    let report = history.check(&Promises::of(WINDOW).labels(fewer));
    assert_eq!(report.flagged(), BTreeSet::from([Check::Labels]));
    assert_eq!(report.violations.len(), 2);
    let report = history.check(&Promises::of(WINDOW).labels([("store", labels["store"])]));
    assert!(
        report.to_string().contains("calls are labelled `fallback_open`, but the caller saw 0"),
        "{report}"
    );
}

#[test]
fn three_hundred_thousand_calls_are_checked_in_seconds() {
    let schedule = Schedule { calls: 300_000, rest_us: 3000, lost_per_mille: 5, ..Schedule::new(1) };
    for (bound, run) in
        [(WINDOW, run(schedule, &mut Log::default())), (BUCKET, run(schedule, &mut Bucket::new()))]
    {
        let start = std::time::Instant::now();
        run.check(Promises::of(bound).ambiguous_close_after(0)).assert_clean();
        println!("{bound:?}: {:?}", start.elapsed());
        assert!(start.elapsed().as_secs() < 20);
    }
    // And if almost all were admitted, as the checks of admissions like least.
    let run = run(Schedule { rest_us: 100, ..schedule }, &mut Unlimited);
    for bound in [WINDOW, BUCKET] {
        let start = std::time::Instant::now();
        assert!(!run.check(Promises::of(bound)).is_clean());
        println!("{bound:?}, unlimited: {:?}", start.elapsed());
        assert!(start.elapsed().as_secs() < 20);
    }
}
