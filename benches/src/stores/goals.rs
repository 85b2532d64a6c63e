//! What we hold our shared stores to, and whether this run reached it.

use super::{Results, postgres, redis};
use crate::goals::{Goal, Wanted};
use crate::harness::Quartiles;
use crate::report::spell_ratio;
use crate::stores::redis::{Bytes, Steady};
use crate::stores::rounds::{Cell, find, ratio};

/// Every goal of the stores that were asked for.
pub(crate) fn judge(results: &Results) -> Vec<Goal> {
    let mut goals = Vec::new();
    goals.extend(results.redis.iter().flat_map(judge_redis));
    goals.extend(results.postgres.iter().flat_map(|found| judge_postgres(&found.cells)));
    goals
}

fn judge_redis(found: &redis::Found) -> Vec<Goal> {
    use redis::{DENIED, DENIED_ALONE, DENIED_CACHED, DENIED_CACHED_ALONE, INCR, SINGLE, SIXTEEN, TEXTBOOK};
    let cells = &found.cells;
    let at_least = |what: &str, least, name, over, beside: String| {
        at_least(cells, format!("Redis: {what}"), least, (name, over), beside)
    };
    let mut goals = vec![
        at_least("a check, of INCR", 0.35, SINGLE, INCR, String::new()),
        at_least("a check, over the text-book script", 1.3, SINGLE, TEXTBOOK, String::new()),
        at_least(
            "16 checks in one call, over single calls",
            1.5,
            SIXTEEN,
            SINGLE,
            beside(cells, "over the text-book script", SIXTEEN, TEXTBOOK),
        ),
        at_least(
            "a denied key, cache over store, 1 caller",
            100.0,
            DENIED_CACHED_ALONE,
            DENIED_ALONE,
            String::new(),
        ),
        at_least("the same, 256 callers", 100.0, DENIED_CACHED, DENIED, String::new()),
        Goal {
            what: "Redis: store calls for a check of a denied key".into(),
            wanted: Wanted::AtMost(0.1),
            measured: Some(found.asked_share).filter(|share| share.is_finite()),
            beside: format!("one in {:.0}", 1.0 / found.asked_share),
        },
    ];
    use redis::{ceilings, users};
    for (name, of_incr, textbook, over, ceiling) in [
        (redis::FIXED, 0.3, users::WINDOW, 1.5, Some(ceilings::CHANGE)),
        (redis::COUNTER, 0.3, users::COUNTER, 1.5, Some(ceilings::CHANGE)),
        (redis::LOG, 0.2, users::LOG, 1.2, Some(ceilings::REPLACE)),
        (redis::LEASES, 0.12, users::SEMAPHORE, 1.2, None),
        (redis::THREE, 0.2, users::THREE, 1.2, Some(ceilings::THREE)),
    ] {
        let alone = ceiling.map(|ceiling| beside(cells, "the commands alone", ceiling, INCR));
        goals.push(at_least(&format!("{name}, of INCR"), of_incr, name, INCR, alone.unwrap_or_default()));
        goals.push(at_least(&format!("{name}, over the {textbook}"), over, name, textbook, String::new()));
    }
    goals.extend(judge_bytes(&found.bytes));
    let ours = found.latencies.iter().find(|steady| steady.name == SINGLE);
    for (percent, millis) in [(95.0, 5.0), (99.0, 10.0)] {
        goals.push(Goal {
            what: format!("Redis: p{percent} at {} checks/s", redis::STEADY),
            wanted: Wanted::BelowMillis(millis),
            measured: ours.and_then(|steady| percentile(steady, percent)).map(|millis| millis.median),
            beside: ours.map_or_else(String::new, |steady| {
                format!("all rounds together {:.2} ms", of_all(steady, percent))
            }),
        });
    }
    goals
}

/// What a further reservation and a further lease of a key take: a hold, and of a lease its record in the state.
fn judge_bytes(all: &[Bytes]) -> Vec<Goal> {
    let find = |what| all.iter().find(|bytes| bytes.what == what);
    let lease = find(redis::LEASE).zip(find(redis::LEASES_MANY)).map(|(one, many)| {
        let entries = f64::from(redis::MANY_ENTRIES);
        (many.holds / entries, (many.state - one.state) / (entries - 1.0))
    });
    let goal = |what: &str, most, measured, beside| Goal {
        what: format!("Redis: bytes of a {what}"),
        wanted: Wanted::AtMostBytes(most),
        measured,
        beside,
    };
    let beside = lease.map(|(hold, record)| format!("hold {hold:.0}, record {record:.0}"));
    vec![
        goal("reservation", 200.0, find(redis::RESERVED).map(|bytes| bytes.holds), String::new()),
        goal("lease", 120.0, lease.map(|(hold, record)| hold + record), beside.unwrap_or_default()),
    ]
}

fn judge_postgres(cells: &[Cell]) -> Vec<Goal> {
    use postgres::{
        COUNT_FIFTY, COUNT_ONE, DURABLE_UPSERT, RELEASE, RESERVE, RESERVE_FEW, SINGLE, SIXTEEN, STRATEGIES,
        THREE, UPSERT,
    };
    let at_least = |what: &str, least, name, over, beside: String| {
        at_least(cells, format!("PostgreSQL: {what}"), least, (name, over), beside)
    };
    let mut goals = Vec::new();
    for [few, crowd] in STRATEGIES {
        goals.push(at_least(&format!("{few}, of a bare upsert"), 0.5, few, UPSERT, String::new()));
        goals.push(at_least(&format!("{crowd}, of a bare upsert"), 1.5, crowd, UPSERT, String::new()));
    }
    // Three limits are three rows, so a third of what one is to reach.
    let [few, crowd] = THREE;
    goals.push(at_least(&format!("{few}, of a bare upsert"), 0.17, few, UPSERT, String::new()));
    goals.push(at_least(&format!("{crowd}, of a bare upsert"), 0.5, crowd, UPSERT, String::new()));
    goals.push(at_least(
        "reserve and settle, 64 callers, of a durable upsert, 64 clients",
        0.35,
        RESERVE,
        DURABLE_UPSERT,
        beside(cells, "with 8 callers", RESERVE_FEW, DURABLE_UPSERT),
    ));
    goals.push(at_least("the same of a lease", 0.35, RELEASE, DURABLE_UPSERT, String::new()));
    goals.push(at_least("16 keys in a statement, over single checks", 4.0, SIXTEEN, SINGLE, String::new()));
    goals.push(at_least(
        "a check, over count-then-insert",
        3.0,
        SINGLE,
        COUNT_FIFTY,
        beside(cells, "of keys hardly used", SINGLE, COUNT_ONE),
    ));
    goals
}

/// A goal for a ratio of two cells, with its quartiles beside it.
fn at_least(cells: &[Cell], what: String, least: f64, (name, over): (&str, &str), beside: String) -> Goal {
    let ratio = find(cells, name).zip(find(cells, over)).and_then(|(cell, other)| cell.over(other));
    let spread = ratio.map(|ratio| format!("Q1–Q3 {:.3}–{:.3}", ratio.q1, ratio.q3));
    let parts: Vec<String> = spread.into_iter().chain(Some(beside).filter(|text| !text.is_empty())).collect();
    Goal {
        what,
        wanted: Wanted::AtLeast(least),
        measured: ratio.map(|ratio| ratio.median),
        beside: parts.join("; "),
    }
}

fn beside(cells: &[Cell], what: &str, name: &str, over: &str) -> String {
    format!("{what} {}", spell_ratio(ratio(cells, name, over)))
}

/// A percentile in ms, by quartiles over the rounds.
pub(crate) fn percentile(steady: &Steady, percent: f64) -> Option<Quartiles> {
    let of_round = steady.rounds.iter().map(|round| round.value_at_percentile(percent) as f64 / 1e3);
    Quartiles::of(of_round.collect())
}

/// A percentile in ms, of all rounds together.
pub(crate) fn of_all(steady: &Steady, percent: f64) -> f64 {
    steady.all.value_at_percentile(percent) as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::Grade;
    use crate::stores::load::{Tally, no_latencies};
    use crate::stores::rounds::tests::cell;

    fn bytes(what: &str, state: f64, holds: f64) -> Bytes {
        Bytes { what: what.into(), keys: 1, state, holds, grown: 0.0 }
    }

    #[test]
    fn goals_are_judged_by_what_was_measured() {
        let mut round = no_latencies();
        round.record_n(400, 98).unwrap();
        round.record_n(12_000, 2).unwrap();
        let steady = Steady {
            name: redis::SINGLE,
            tally: Tally::default(),
            all: round.clone(),
            late: no_latencies(),
            rounds: vec![round],
        };
        let found = redis::Found {
            version: String::new(),
            cells: vec![
                cell(redis::INCR, &[100.0]),
                cell(redis::SINGLE, &[36.0]),
                cell(redis::SIXTEEN, &[40.0]),
                cell(redis::FIXED, &[31.0]),
                cell(redis::users::WINDOW, &[30.0]),
            ],
            asked_share: 0.01,
            latencies: vec![steady],
            bytes: vec![
                bytes(redis::RESERVED, 120.0, 200.0),
                bytes(redis::LEASE, 152.0, 180.0),
                bytes(redis::LEASES_MANY, 3_122.0, 18_000.0),
            ],
        };
        let goals = judge(&Results { redis: Some(found), postgres: None });
        let verdicts: Vec<Grade> = goals.iter().map(Goal::grade).collect();
        use Grade::{Missed, NotMeasured, Reached};
        assert_eq!(verdicts[..6], [Reached, NotMeasured, Missed, NotMeasured, NotMeasured, Reached]);
        assert_eq!(verdicts[6..8], [Reached, Missed], "a fixed window, of INCR and over the text-book");
        assert!(verdicts[8..16].iter().all(|grade| *grade == NotMeasured));
        assert_eq!(verdicts[16..18], [Reached, Missed], "bytes of a reservation and of a lease");
        assert_eq!((goals[17].measured, &*goals[17].beside), (Some(210.0), "hold 180, record 30"));
        assert_eq!(verdicts[18..], [Reached, Missed], "latencies");
    }
}
