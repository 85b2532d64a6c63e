//! Holds what happened to what the contract promises (CONTRACT, section 3). Each check compares a measured worst case with its bound.
//!
//! The bounds are judged by the checker of histories in the testkit, which shares no code with the kernel. Intervals of every
//! length are looked at, not only the whole run: "used" is the fullest that a key ever was under the bound, and "allowed" its capacity.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::Ordering;

use tollgate::Fallback;
use tollgate_testkit::history::{Bound, Call, History, Outcome, Promises};

use crate::network::Cloud;
use crate::process::{Decided, Record};
use crate::scenario::{Layout, LimitNumbers, Scenario};
use crate::server::Admission;

/// How much later than its deadline a call may answer: batches that are on their way are given this much, and timers count whole
/// milliseconds.
const GRACE_US: u64 = 11_000;

/// One promise, what was measured of it, and its bound.
#[derive(Clone, Debug)]
pub struct Finding {
    /// What is promised.
    pub promise: &'static str,
    /// The worst that was measured.
    pub measured: u64,
    /// What the limit would admit if nothing went wrong, where more may be.
    pub alone: Option<u64>,
    /// The most that may be.
    pub bound: u64,
    /// Where the bound comes from.
    pub formula: String,
    /// Whether it was kept.
    pub is_kept: bool,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { promise, measured, alone, bound, formula, is_kept } = self;
        let word = if *is_kept { "kept  " } else { "BROKEN" };
        write!(f, "{word} {promise}: {measured} of at most {bound} ({formula}")?;
        match alone {
            Some(alone) => write!(f, "; the limit alone: {alone})"),
            None => f.write_str(")"),
        }
    }
}

/// What was admitted when, by key.
type Admitted = Vec<(u64, u64, u64)>;

/// Holds admissions `(key, time, cost)` to a bound.
fn bounded(
    promise: &'static str,
    formula: String,
    admitted: impl IntoIterator<Item = (u64, u64, u64)>,
    bound: Bound,
) -> Finding {
    let call = |(key, at_us, cost): (u64, u64, u64)| Call {
        key,
        start_us: at_us,
        end_us: at_us,
        cost,
        outcome: Outcome::Admitted,
        version: None,
        store_time_us: Some(at_us),
        label: "store".into(),
    };
    let history: History = admitted.into_iter().map(call).collect();
    let report = history.check(&Promises::of(bound).first_version(None).denials_need_no_reason());
    let (measured, allowed) = report.fullest.unwrap_or((0, capacity(bound)));
    Finding { promise, measured, alone: None, bound: allowed, formula, is_kept: report.is_clean() }
}

/// Holds what several states admitted to their bound, over intervals of every length, and shows the whole run of the busiest key.
fn in_run(
    scenario: &Scenario,
    promise: &'static str,
    formula: String,
    admitted: &Admitted,
    bound: Bound,
    numbers: LimitNumbers,
) -> Finding {
    let is_kept = bounded(promise, String::new(), admitted.iter().copied(), bound).is_kept;
    let mut by_key: BTreeMap<u64, u64> = BTreeMap::new();
    for (key, _, cost) in admitted {
        *by_key.entry(*key).or_default() += cost;
    }
    let measured = by_key.values().copied().max().unwrap_or(0);
    let alone = most_in(LimitNumbers::bound_of_all(&[(1, numbers)], 0), scenario);
    Finding { promise, measured, alone: Some(alone), bound: most_in(bound, scenario), formula, is_kept }
}

/// The most that a bound lets through in a whole run, and the deadline after it.
fn most_in(bound: Bound, scenario: &Scenario) -> u64 {
    let run_us = u128::from(scenario.seconds) * 1_000_000 + scenario.timeout.as_micros();
    match bound {
        Bound::Bucket { burst, count, period_us } => {
            let comes_back = (run_us * u128::from(count)).div_ceil(u128::from(period_us));
            burst.saturating_add(u64::try_from(comes_back).unwrap_or(u64::MAX))
        }
        Bound::Window { limit, window_us }
        | Bound::FixedWindow { limit, window_us }
        | Bound::FirstWindow { limit, window_us }
        | Bound::WindowCounter { limit, window_us } => {
            let windows = run_us.div_ceil(u128::from(window_us));
            limit.saturating_mul(u64::try_from(windows).unwrap_or(u64::MAX))
        }
    }
}

fn capacity(bound: Bound) -> u64 {
    match bound {
        Bound::Bucket { burst, .. } => burst,
        Bound::Window { limit, .. }
        | Bound::FixedWindow { limit, .. }
        | Bound::FirstWindow { limit, .. }
        | Bound::WindowCounter { limit, .. } => limit,
    }
}

/// The worst of several findings of one promise.
fn worst(findings: impl IntoIterator<Item = Finding>) -> Option<Finding> {
    let is_worse = |one: &Finding, other: &Finding| {
        let base = |finding: &Finding| u128::from(finding.alone.unwrap_or(finding.bound).max(1));
        let share = |finding: &Finding, other: &Finding| u128::from(finding.measured) * base(other);
        (!one.is_kept, share(one, other)) > (!other.is_kept, share(other, one))
    };
    findings.into_iter().reduce(|worst, next| if is_worse(&next, &worst) { next } else { worst })
}

/// Everything that is promised of a scenario.
pub(crate) fn check(scenario: &Scenario, cloud: &Cloud, record: &Record) -> Vec<Finding> {
    let decided = record.decided.lock();
    let mut findings = Vec::new();
    match scenario.layout {
        Layout::Leased { units, .. } => findings.push(leased(scenario, units, &decided)),
        Layout::Central | Layout::Shares => {
            findings.extend(each_process(scenario, cloud));
            findings.extend(all_lives(scenario, cloud));
            findings.extend(each_fallback(scenario, &decided));
            findings.extend(whole_fleet(scenario, cloud, &decided));
            findings.extend(once(scenario, cloud, record, &decided));
        }
    }
    findings.push(not_late(cloud));
    findings.push(in_time(scenario, &decided));
    findings.push(answered(cloud, record, &decided));
    findings
}

fn by_store(admission: &Admission) -> (u64, u64, u64) {
    (admission.key, admission.store_us, admission.cost)
}

fn by_true_time(admission: &Admission) -> (u64, u64, u64) {
    (admission.key, admission.at_us, admission.cost)
}

/// Every process of every server keeps the bound of the strategy, by its own clock.
fn each_process(scenario: &Scenario, cloud: &Cloud) -> Option<Finding> {
    let numbers = scenario.store_limit();
    let finding = |held: Admitted| {
        bounded("one life of the state, by the store's clock", format!("{numbers}"), held, numbers.bound())
    };
    let mut findings = Vec::new();
    for (_, _, server) in cloud.servers() {
        let server = server.lock();
        findings
            .extend(server.processes().map(|process| finding(process.held.iter().map(by_store).collect())));
    }
    worst(findings)
}

/// All lives of a key's state: (f + 1) times the bound.
fn all_lives(scenario: &Scenario, cloud: &Cloud) -> Option<Finding> {
    let numbers = scenario.store_limit();
    let finding = |server: usize, store: usize, admitted: Admitted| {
        let losses = if store == 0 { scenario.losses(server) } else { 0 };
        let (times, early_us) = (losses + 1, scenario.early_us());
        let mut formula = format!("{times} x the limit: {losses} losses");
        if early_us > 0 {
            formula +=
                &format!(", and what comes back in {} ms that clocks were set forward", early_us / 1_000);
        }
        let bound = LimitNumbers::bound_of_all(&[(times, numbers)], early_us);
        in_run(scenario, "by the store", formula, &admitted, bound, numbers)
    };
    worst(cloud.servers().map(|(store, number, server)| {
        finding(number, store, server.lock().admitted.iter().map(by_true_time).collect())
    }))
}

fn locally(decided: &Decided) -> bool {
    decided.allowed && decided.source == "fallback_local"
}

/// Each process that falls back keeps its share, by its own clock.
fn each_fallback(scenario: &Scenario, decided: &[Decided]) -> Option<Finding> {
    if scenario.fallback != Fallback::Local {
        return None;
    }
    let share = scenario.store_limit().share(scenario.instances);
    // Processes are kept apart by numbering their keys apart.
    let keys = scenario.keys as u64;
    let admitted: Admitted = decided
        .iter()
        .filter(|decided| locally(decided))
        .map(|decided| (u64::from(decided.node) * keys + u64::from(decided.key), decided.clock_us, 1))
        .collect();
    let formula = format!("1/{} of the limit", scenario.instances);
    Some(bounded("local fallback, each process", formula, admitted, share.bound()))
}

/// What callers were allowed in all, by the store and by local fallbacks.
fn whole_fleet(scenario: &Scenario, cloud: &Cloud, decided: &[Decided]) -> Option<Finding> {
    let mut admitted: Admitted = Vec::new();
    for (_, _, server) in cloud.servers() {
        admitted.extend(server.lock().admitted.iter().map(by_true_time));
    }
    let mut losses = 0;
    for server in 0..scenario.primaries {
        losses = losses.max(scenario.losses(server));
    }
    let stores = scenario.stores() as u64;
    let mut states = vec![(stores + losses, scenario.store_limit())];
    let mut formula = match (stores, losses) {
        (1, 0) => "the limit".to_owned(),
        (1, _) => format!("{} x the limit", losses + 1),
        _ => format!("{stores} x 1/{stores} of the limit"),
    };
    let fell_back: Admitted = decided
        .iter()
        .filter(|decided| locally(decided))
        .map(|decided| (u64::from(decided.key), decided.at_us, 1))
        .collect();
    if scenario.fallback == Fallback::Local && !fell_back.is_empty() {
        let nodes = scenario.nodes as u64;
        formula += &format!(" + {nodes} processes x 1/{} of it", scenario.instances * stores);
        states.push((nodes, scenario.store_limit().share(scenario.instances)));
        admitted.extend(fell_back);
    }
    let bound = LimitNumbers::bound_of_all(&states, scenario.early_us());
    Some(in_run(scenario, "by the whole fleet", formula, &admitted, bound, scenario.limit))
}

/// Leased quota: what regions hand out, against the limit and what they hold.
fn leased(scenario: &Scenario, units: u64, decided: &[Decided]) -> Finding {
    let in_hand = scenario.regions as u64 * units;
    let bound = match LimitNumbers::bound_of_all(&[(1, scenario.limit)], scenario.early_us()) {
        Bound::Bucket { burst, count, period_us } => {
            Bound::Bucket { burst: burst + in_hand, count, period_us }
        }
        Bound::Window { limit, window_us } => Bound::Window { limit: limit + in_hand, window_us },
        other => other,
    };
    let allowed = decided.iter().filter(|decided| decided.allowed);
    let admitted: Admitted = allowed.map(|decided| (u64::from(decided.key), decided.at_us, 1)).collect();
    let formula = format!("the limit + {} regions x {units} units in hand", scenario.regions);
    in_run(scenario, "by all regions", formula, &admitted, bound, scenario.limit)
}

/// What the store charged is what callers know of: answered as admitted, or ambiguous. More would be a call that was carried out twice,
/// less an answer that was made up.
fn once(scenario: &Scenario, cloud: &Cloud, record: &Record, decided: &[Decided]) -> Vec<Finding> {
    let mut stored: BTreeMap<u64, u64> = BTreeMap::new();
    for (_, _, server) in cloud.servers() {
        for admission in &server.lock().admitted {
            *stored.entry(admission.key).or_default() += admission.cost;
        }
    }
    let mut known = vec![0_u64; scenario.keys];
    for decided in decided.iter().filter(|decided| decided.allowed && decided.source == "store") {
        known[decided.key as usize] += 1;
    }
    let ambiguous = record.ambiguous.lock();
    let (mut twice, mut made_up) = (0, 0);
    for (key, known) in known.iter().enumerate() {
        let stored = stored.get(&(key as u64)).copied().unwrap_or(0);
        twice += stored.saturating_sub(known + ambiguous[key]);
        made_up += known.saturating_sub(stored);
    }
    let formula = format!(
        "what is charged beyond {} answered and {} ambiguous",
        known.iter().sum::<u64>(),
        ambiguous.iter().sum::<u64>()
    );
    vec![
        Finding {
            promise: "calls carried out twice",
            measured: twice,
            alone: None,
            bound: 0,
            formula,
            is_kept: twice == 0,
        },
        Finding {
            promise: "admissions that the store knows nothing of",
            measured: made_up,
            alone: None,
            bound: 0,
            formula: "answered as admitted by the store, and not charged there".to_owned(),
            is_kept: made_up == 0,
        },
    ]
}

/// A call that reaches the store after its deadline changes nothing there.
fn not_late(cloud: &Cloud) -> Finding {
    let measured = cloud.traffic.late.load(Ordering::Relaxed);
    let formula = format!("of {} calls", cloud.traffic.charge_calls.load(Ordering::Relaxed));
    let promise = "calls carried out after their deadline";
    Finding { promise, measured, alone: None, bound: 0, formula, is_kept: measured == 0 }
}

/// Every decision is there in time.
fn in_time(scenario: &Scenario, decided: &[Decided]) -> Finding {
    let worst = decided.iter().map(|decided| decided.took_us).max().unwrap_or(0);
    let timeout_us = u64::try_from(scenario.timeout.as_micros()).unwrap_or(u64::MAX);
    // A region that leases asks the store, and a denied lease once more for what is left, and is asked over the network itself.
    let calls = if matches!(scenario.layout, Layout::Leased { .. }) { 3 } else { 1 };
    let bound = calls * timeout_us + GRACE_US;
    let formula = "the deadline, and 11 ms for batches on their way and timers".to_owned();
    Finding {
        promise: "the slowest decision, in us",
        measured: worst,
        alone: None,
        bound,
        formula,
        is_kept: worst <= bound,
    }
}

/// Every request has a decision, from a known source.
fn answered(cloud: &Cloud, record: &Record, decided: &[Decided]) -> Finding {
    let requests = cloud.requests();
    let known = decided.iter().filter(|decided| decided.source != "other").count() as u64;
    let missing = requests - known.min(requests);
    let errors = record.errors.lock();
    let formula = match errors.first() {
        Some(error) => format!("of {requests}; {} failed, first: {error}", errors.len()),
        None => format!("of {requests}"),
    };
    Finding {
        promise: "requests without a decision",
        measured: missing,
        alone: None,
        bound: 0,
        formula,
        is_kept: missing == 0,
    }
}
