//! When Redis is disturbed and when the config is reloaded. The same seed gives the same schedule.

use std::time::Duration;

use super::Plan;
use crate::Random;

/// A run is cut into at least so many slots; each has one fault and one reload. Six fall in the first third, where memory may still grow, so every kind
/// of fault has been met before anything is compared.
const SLOTS: u32 = 18;

/// In long runs a slot lasts no longer than this.
const LONGEST_SLOT: Duration = Duration::from_secs(240);

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Redis is stopped and goes on later (SIGSTOP): connections stay open and nothing is answered.
    Paused,
    /// Redis is killed, and restarted without what it knew.
    Killed,
    /// Connections to Redis are reset, again and again.
    Cut,
    /// What is sent to Redis is lost; connections stay open.
    Silent,
    /// The config is changed. No fault: it excuses nothing.
    Reload,
}

const FAULTS: [Kind; 4] = [Kind::Paused, Kind::Killed, Kind::Cut, Kind::Silent];

/// Something that is done, counted from the start of the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// When it begins.
    pub start: Duration,
    /// When it ends.
    pub end: Duration,
    /// What it is.
    pub kind: Kind,
}

impl Event {
    /// Whether it is a fault that may be seen in an interval, or `recovery` after it.
    pub(crate) fn disturbs(&self, from: Duration, to: Duration, recovery: Duration) -> bool {
        self.kind != Kind::Reload && self.start <= to && from <= self.end + recovery
    }
}

/// All of a run, in the order of time, one after the other.
pub(crate) fn events(plan: &Plan) -> Vec<Event> {
    let mut random = Random::seeded(plan.seed);
    let slots = plan.duration.div_duration_f64(LONGEST_SLOT).ceil();
    let slots = (SLOTS..u32::MAX).find(|&count| f64::from(count) >= slots).unwrap_or(SLOTS);
    let slot = plan.duration / slots;
    // A number of microseconds below that of `end`.
    let mut below = |end: Duration| {
        Duration::from_micros(random.below(u64::try_from(end.as_micros()).unwrap_or(u64::MAX)))
    };
    let mut events = Vec::new();
    for number in 0..slots {
        let begin = slot * number;
        // The first half of a slot has the fault, the second the reload.
        let longest = slot / 5;
        let length = (longest / 2 + below(longest / 2)).min(Duration::from_secs(10));
        let start = begin + slot / 20 + below(slot / 5);
        let kind = FAULTS[number as usize % FAULTS.len()];
        events.push(Event { start, end: start + length, kind });
        let reload = begin + slot / 2 + below(slot / 3);
        events.push(Event { start: reload, end: reload, kind: Kind::Reload });
    }
    events
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(duration: Duration) {
        let plan = Plan { duration, rate: 1, seed: 7 };
        let events = events(&plan);
        assert_eq!(events, super::events(&plan), "the same seed, the same schedule");
        assert_ne!(events, super::events(&Plan { seed: 8, ..plan }), "another seed");
        assert!(events.windows(2).all(|pair| pair[0].end < pair[1].start), "{duration:?}: {events:?}");
        assert!(events.iter().all(|event| event.end < duration), "{duration:?}");
        let mut early: Vec<Kind> =
            events.iter().filter(|event| event.end < duration / 3).map(|event| event.kind).collect();
        early.sort();
        early.dedup();
        assert_eq!(early.len(), FAULTS.len() + 1, "{duration:?}: every kind in the first third");
        // There must be time left in which nothing disturbs.
        let recovery = super::super::RECOVERY;
        let disturbed: Duration = events
            .iter()
            .filter(|event| event.kind != Kind::Reload)
            .map(|event| event.end - event.start + recovery)
            .sum();
        assert!(disturbed < duration * 2 / 3, "{duration:?}: {disturbed:?}");
    }

    #[test]
    fn a_schedule_has_every_fault_early_and_room_between_them() {
        for minutes in [3, 10, 120, 24 * 60] {
            check(Duration::from_secs(60 * minutes));
        }
    }

    #[test]
    fn a_fault_disturbs_until_it_is_recovered_from_and_a_reload_never() {
        let seconds = Duration::from_secs;
        let fault = Event { start: seconds(10), end: seconds(12), kind: Kind::Cut };
        let disturbs = |from, to| fault.disturbs(seconds(from), seconds(to), seconds(3));
        assert_eq!(
            [disturbs(8, 9), disturbs(9, 10), disturbs(14, 15), disturbs(16, 17)],
            [false, true, true, false]
        );
        let reload = Event { kind: Kind::Reload, ..fault };
        assert!(!reload.disturbs(seconds(10), seconds(12), seconds(3)));
    }
}
