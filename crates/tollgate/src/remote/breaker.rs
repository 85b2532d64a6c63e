//! Decides whether a node of the store is called, so that an outage costs microseconds and not a deadline for every call.
//!
//! A node is one server of the store: the only one, or a primary of a Redis Cluster. Each node has its own breaker, so a failing
//! node affects only the keys that it holds.
//!
//! Only a failed *ping* takes a node down: a cheap round trip on a separate connection
//! ([`Store::ping`](tollgate_store::Store::ping)), which no caller can delay or make fail. A failed call is not enough, because
//! callers can make calls fail. A failure that may be the node's fault ([`Scope::Node`]) only triggers a ping: one at a time, at
//! most one every 100 ms. If the ping succeeds, the failure concerns only that call, and only that call falls back. If the ping
//! fails while calls succeed, the calls are right: the server may have no connection left for the ping. A server that reports
//! this ([`Failure::Overloaded`]) goes down only after a second without any successful call.
//!
//! While a node is down, its calls are turned away at once. The node is pinged after a quarter of a second; the interval doubles
//! with every failure, up to five seconds, with a jitter of one fifth so that processes do not ping in step. After two successful
//! pings in a row the node is up. A caller's charge never serves as a ping.
//!
//! No thread runs here and nothing sleeps: the time is read from the engine's clock when a call comes, and `remote/ping.rs` sends
//! the pings. `fallback.rs` answers the calls that are turned away.

use std::hash::BuildHasher;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use tollgate_kernel::Micros;
use tollgate_store::{Clock, Failure, NodeId, Scope, SecretHash};

use crate::health::{NodeReading, StoreChange, StoreState};

/// How long after a ping a node that is up is not pinged again.
const PING_AT_MOST_EVERY: Micros = Micros::from_millis(100);
/// For how long a call that was answered outweighs a server that has no connection left for a ping.
const ANSWER_COUNTS: Micros = Micros::from_secs(1);
/// How long a node that is down is left alone at first, and at most.
const FIRST_WAIT: Micros = Micros::from_millis(250);
const LONGEST_WAIT: Micros = Micros::from_secs(5);
/// So many answers in a row, and it is up again.
const ANSWERS_IN_A_ROW: u32 = 2;
/// How long failures that are no outage are gathered before they are reported.
const STRAYS_GATHERED: Micros = Micros::from_secs(60);

/// The breakers of all nodes. Each is made when its node is first called.
pub(crate) struct Breakers {
    clock: Clock,
    only: Breaker,
    others: Box<[OnceLock<Box<Breaker>>]>,
    /// How many nodes are down, and how often any went down.
    down: AtomicUsize,
    outages: AtomicU64,
    /// When nodes without calls were last checked, in µs.
    looked_after_us: AtomicU64,
}

impl Breakers {
    pub(crate) fn new(clock: Clock) -> Breakers {
        Breakers {
            only: Breaker::new(clock.clone()),
            others: (1..NodeId::COUNT).map(|_| OnceLock::new()).collect(),
            down: AtomicUsize::new(0),
            outages: AtomicU64::new(0),
            looked_after_us: AtomicU64::new(0),
            clock,
        }
    }

    /// The breaker of a node.
    pub(crate) fn of(&self, node: NodeId) -> &Breaker {
        match node.number().checked_sub(1).and_then(|place| self.others.get(place)) {
            None => &self.only,
            Some(breaker) => breaker.get_or_init(|| Box::new(Breaker::new(self.clock.clone()))),
        }
    }

    /// Records that a node went down or came back.
    pub(crate) fn changed(&self, change: &StoreChange) {
        match change {
            StoreChange::Down { .. } => {
                self.down.fetch_add(1, Ordering::Relaxed);
                self.outages.fetch_add(1, Ordering::Relaxed);
            }
            StoreChange::Up { .. } => {
                self.down.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// How often a node was taken to be down.
    pub(crate) fn outages(&self) -> u64 {
        self.outages.load(Ordering::Relaxed)
    }

    pub(crate) fn is_any_down(&self) -> bool {
        self.down.load(Ordering::Relaxed) > 0
    }

    /// The nodes that are down, if it is time to check those without calls, such as a server whose slots another server has taken
    /// over.
    pub(crate) fn to_look_after(&self) -> Option<impl Iterator<Item = NodeId>> {
        if !self.is_any_down() {
            return None;
        }
        let (now, last) = (self.clock.now().get(), self.looked_after_us.load(Ordering::Relaxed));
        if now.saturating_sub(last) < PING_AT_MOST_EVERY.get() {
            return None;
        }
        self.looked_after_us.store(now, Ordering::Relaxed);
        let others =
            self.others.iter().enumerate().map(|(place, breaker)| (place + 1, breaker.get().map(|b| &**b)));
        let all = std::iter::once((0, Some(&self.only))).chain(others);
        Some(
            all.filter(|(_, breaker)| breaker.is_some_and(Breaker::is_down))
                .map(|(number, _)| NodeId::new(number)),
        )
    }
}

/// Lets calls through to a node, or turns them away.
pub(crate) struct Breaker {
    clock: Clock,
    /// Whether the node is up and not suspected: then no call takes the lock.
    is_well: AtomicBool,
    inner: Mutex<Inner>,
}

struct Inner {
    phase: Phase,
    /// Whether a ping is on its way.
    is_pinging: bool,
    /// Whether a call was answered since that ping was sent.
    has_answered: bool,
    /// When a call last succeeded, as far as known: while the node is up and not suspected this is not recorded.
    answered: Micros,
    wait: Micros,
    /// Since when the node is up, or down.
    since: Micros,
    last_failure: Option<Failure>,
    /// How many calls had fallen back when it went down.
    fallen_back_before: u64,
    /// Failures that were no outage, and since when they are gathered.
    strays: Option<(Micros, u64)>,
    random: u64,
}

#[derive(Clone, Copy)]
enum Phase {
    Up {
        /// Whether a call failed in a way that a ping has to confirm.
        is_suspected: bool,
        /// When the last ping was sent.
        pinged: Option<Micros>,
    },
    Down {
        /// When it is pinged next.
        until: Micros,
        /// How many pings in a row were answered.
        answers: u32,
    },
}

/// A change that is logged for the operator.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    Changed(StoreChange),
    /// So many failures within a minute or more that were no outage.
    Strays {
        failures: u64,
        last: Failure,
    },
}

/// Why a call is turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeDown {
    /// How the store failed last.
    pub(crate) failure: Failure,
    /// When it is tried next.
    pub(crate) retry_after: Micros,
}

/// The result of a successful ping.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Pinged {
    /// The node is up; with a notice if it was down.
    Up(Option<Notice>),
    /// One answer is not enough: ping again at once.
    Again,
}

impl Breaker {
    fn new(clock: Clock) -> Breaker {
        Breaker::seeded(clock, SecretHash::random().hash_one(0))
    }

    fn seeded(clock: Clock, seed: u64) -> Breaker {
        let inner = Inner {
            phase: Phase::Up { is_suspected: false, pinged: None },
            is_pinging: false,
            has_answered: false,
            answered: clock.now(),
            wait: FIRST_WAIT,
            since: clock.now(),
            last_failure: None,
            fallen_back_before: 0,
            strays: None,
            random: seed,
        };
        Breaker { clock, is_well: AtomicBool::new(true), inner: Mutex::new(inner) }
    }

    /// Lets a call through, or turns it away.
    pub(crate) fn admit(&self) -> Result<(), NodeDown> {
        if self.is_well.load(Ordering::Acquire) {
            return Ok(());
        }
        let inner = self.inner.lock();
        let Phase::Down { until, .. } = inner.phase else { return Ok(()) };
        let left = until.saturating_sub(self.clock.now());
        let retry_after = if inner.is_pinging { inner.wait } else { left };
        // It does not go down without a failure.
        Err(NodeDown { failure: inner.last_failure.unwrap_or(Failure::Connection), retry_after })
    }

    /// A call was answered.
    pub(crate) fn answered(&self) {
        if !self.is_well.load(Ordering::Acquire) {
            let now = self.clock.now();
            let mut inner = self.inner.lock();
            (inner.has_answered, inner.answered) = (true, now);
        }
    }

    /// A call failed. `scope` says whether it may be the node's fault.
    pub(crate) fn failed(&self, failure: Failure, scope: Scope) -> Option<Notice> {
        let now = self.clock.now();
        let mut inner = self.inner.lock();
        inner.last_failure = Some(failure);
        let Phase::Up { is_suspected, .. } = &mut inner.phase else { return None };
        let was_well = !std::mem::replace(is_suspected, *is_suspected || scope == Scope::Node);
        if was_well {
            // Until now the node answered, or was not called.
            inner.answered = now;
        }
        let notice = inner.note_stray(now, failure);
        self.publish(&inner);
        notice
    }

    /// Whether a ping is to be sent now; if so it is counted as sent, and the caller must send it and report how it went.
    pub(crate) fn begins_ping(&self) -> bool {
        if self.is_well.load(Ordering::Acquire) {
            return false;
        }
        let now = self.clock.now();
        let mut inner = self.inner.lock();
        let is_due = match inner.phase {
            Phase::Up { is_suspected, pinged } => {
                is_suspected && pinged.is_none_or(|pinged| now.saturating_sub(pinged) >= PING_AT_MOST_EVERY)
            }
            Phase::Down { until, .. } => now >= until,
        };
        if !is_due || inner.is_pinging {
            return false;
        }
        (inner.is_pinging, inner.has_answered) = (true, false);
        if let Phase::Up { pinged, .. } = &mut inner.phase {
            *pinged = Some(now);
        }
        true
    }

    /// The ping was answered. `fallen_back` is how many calls have fallen back so far.
    pub(crate) fn ping_answered(&self, fallen_back: u64) -> Pinged {
        let now = self.clock.now();
        let mut inner = self.inner.lock();
        let pinged = match &mut inner.phase {
            Phase::Up { is_suspected, .. } => {
                *is_suspected = false;
                Pinged::Up(None)
            }
            Phase::Down { answers, .. } => {
                *answers += 1;
                match *answers < ANSWERS_IN_A_ROW {
                    true => return Pinged::Again,
                    false => Pinged::Up(Some(inner.close(now, fallen_back))),
                }
            }
        };
        inner.is_pinging = false;
        self.publish(&inner);
        pinged
    }

    /// The ping failed.
    pub(crate) fn ping_failed(&self, failure: Failure, fallen_back: u64) -> Option<Notice> {
        let now = self.clock.now();
        let mut inner = self.inner.lock();
        inner.is_pinging = false;
        let is_contradicted = match failure {
            Failure::Timeout => false,
            Failure::Overloaded => now.saturating_sub(inner.answered) < ANSWER_COUNTS,
            _ => inner.has_answered,
        };
        let notice = match &mut inner.phase {
            // A server without a connection for the ping may still answer calls; the next second shows whether it does.
            Phase::Up { is_suspected, .. } if is_contradicted => {
                *is_suspected = failure == Failure::Overloaded;
                None
            }
            Phase::Up { .. } => {
                (inner.since, inner.wait, inner.strays) = (now, FIRST_WAIT, None);
                inner.fallen_back_before = fallen_back;
                inner.leave_alone(now);
                Some(Notice::Changed(StoreChange::Down { failure }))
            }
            Phase::Down { .. } => {
                inner.wait = Micros::new(inner.wait.get() * 2).min(LONGEST_WAIT);
                inner.leave_alone(now);
                None
            }
        };
        if !is_contradicted {
            inner.last_failure = Some(failure);
        }
        self.publish(&inner);
        notice
    }

    /// The ping has no result: it could not be sent, or its sender is gone. The next call sends another; a node that is down
    /// waits for the same interval again.
    pub(crate) fn ping_abandoned(&self) {
        let now = self.clock.now();
        let mut inner = self.inner.lock();
        inner.is_pinging = false;
        match &mut inner.phase {
            Phase::Up { pinged, .. } => *pinged = None,
            Phase::Down { .. } => inner.leave_alone(now),
        }
    }

    fn is_down(&self) -> bool {
        !self.is_well.load(Ordering::Acquire) && matches!(self.inner.lock().phase, Phase::Down { .. })
    }

    /// Whether the node is called, and since when.
    pub(crate) fn reading(&self) -> NodeReading {
        let inner = self.inner.lock();
        let state = match inner.phase {
            Phase::Up { .. } => StoreState::Up,
            Phase::Down { .. } if inner.is_pinging => StoreState::Probing,
            Phase::Down { .. } => StoreState::Down,
        };
        NodeReading { state, since: inner.since }
    }

    fn publish(&self, inner: &Inner) {
        self.is_well.store(matches!(inner.phase, Phase::Up { is_suspected: false, .. }), Ordering::Release);
    }
}

impl Inner {
    /// Counts a failure of a node that is up.
    fn note_stray(&mut self, now: Micros, failure: Failure) -> Option<Notice> {
        let (since, failures) = self.strays.map_or((now, 1), |(since, failures)| (since, failures + 1));
        if now.saturating_sub(since) < STRAYS_GATHERED {
            self.strays = Some((since, failures));
            return None;
        }
        self.strays = None;
        Some(Notice::Strays { failures, last: failure })
    }

    fn leave_alone(&mut self, now: Micros) {
        // From four fifths of the wait to six, in steps of a µs.
        let fifth = self.wait.get() / 5;
        let wait = self.wait.get() - fifth + self.draw() % (2 * fifth + 1);
        self.phase = Phase::Down { until: now.saturating_add(Micros::new(wait)), answers: 0 };
    }

    fn close(&mut self, now: Micros, fallen_back: u64) -> Notice {
        let down_for = now.saturating_sub(self.since).into();
        let fallen_back = fallen_back.saturating_sub(self.fallen_back_before);
        (self.phase, self.since) = (Phase::Up { is_suspected: false, pinged: Some(now) }, now);
        Notice::Changed(StoreChange::Up { down_for, fallen_back })
    }

    /// A number that looks random (splitmix64).
    fn draw(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use tollgate_store::ManualClock;

    use super::*;

    fn breaker(seed: u64) -> (ManualClock, Breaker) {
        let hands = ManualClock::at(Micros::from_secs(1_000));
        let breaker = Breaker::seeded(hands.clock(), seed);
        (hands, breaker)
    }

    /// A call that times out.
    fn fail(breaker: &Breaker) -> Option<Notice> {
        breaker.admit().expect("lets calls through");
        breaker.failed(Failure::Timeout, Scope::Node)
    }

    fn wait_of(breaker: &Breaker) -> Micros {
        breaker.admit().expect_err("turns calls away").retry_after
    }

    fn take_down(breaker: &Breaker) {
        assert_eq!(fail(breaker), None);
        assert!(breaker.begins_ping());
        let down = Notice::Changed(StoreChange::Down { failure: Failure::Timeout });
        assert_eq!(breaker.ping_failed(Failure::Timeout, 0), Some(down));
        assert_eq!(breaker.reading().state, StoreState::Down);
    }

    #[test]
    fn calls_that_fail_are_no_evidence_however_many() {
        let (hands, breaker) = breaker(1);
        for failure in Failure::ALL {
            for scope in [Scope::Call, Scope::Node] {
                for _ in 0..1_000 {
                    breaker.failed(failure, scope);
                    breaker.admit().expect("lets calls through");
                }
            }
        }
        assert!(breaker.begins_ping());
        assert_eq!(breaker.ping_answered(0), Pinged::Up(None));
        hands.advance(PING_AT_MOST_EVERY);
        assert!(!breaker.begins_ping(), "the ping has contradicted them");
        assert_eq!(breaker.reading().state, StoreState::Up);
    }

    #[test]
    fn what_concerns_a_call_alone_is_not_even_a_suspicion() {
        let (_, breaker) = breaker(1);
        for _ in 0..1_000 {
            assert_eq!(breaker.failed(Failure::State, Scope::Call), None);
            assert!(!breaker.begins_ping());
        }
        let _held = breaker.inner.lock();
        breaker.admit().expect("nobody takes the lock");
        breaker.answered();
    }

    #[test]
    fn suspicions_are_pinged_one_at_a_time_and_seldom() {
        let (hands, breaker) = breaker(1);
        let mut pings = 0;
        for _ in 0..1_000 {
            fail(&breaker);
            if breaker.begins_ping() {
                fail(&breaker);
                assert!(!breaker.begins_ping(), "one at a time");
                assert_eq!(breaker.ping_answered(0), Pinged::Up(None));
                pings += 1;
            }
            hands.advance(Micros::from_millis(1));
        }
        assert_eq!(pings, 10, "in a second");
    }

    #[test]
    fn a_ping_that_is_abandoned_is_sent_again() {
        let (_, breaker) = breaker(1);
        fail(&breaker);
        assert!(breaker.begins_ping() && !breaker.begins_ping());
        breaker.ping_abandoned();
        assert!(breaker.begins_ping());
    }

    #[test]
    fn a_ping_that_is_refused_while_calls_are_answered_proves_nothing() {
        for (failure, goes_down) in
            [(Failure::Connection, false), (Failure::Refused, false), (Failure::Timeout, true)]
        {
            let (_, breaker) = breaker(1);
            fail(&breaker);
            breaker.answered();
            assert!(breaker.begins_ping());
            breaker.answered();
            assert_eq!(breaker.ping_failed(failure, 0).is_some(), goes_down, "{failure}");
            assert_eq!(breaker.admit().is_err(), goes_down, "{failure}");
        }
        let (_, breaker) = breaker(1);
        fail(&breaker);
        breaker.answered();
        assert!(breaker.begins_ping());
        assert!(breaker.ping_failed(Failure::Connection, 0).is_some(), "answers of before the ping are old");
    }

    #[test]
    fn a_server_without_a_connection_for_a_ping_is_up_as_long_as_it_answers_anybody() {
        let (hands, breaker) = breaker(1);
        for _ in 0..30 {
            fail(&breaker);
            assert!(breaker.begins_ping());
            assert_eq!(breaker.ping_failed(Failure::Overloaded, 0), None);
            hands.advance(Micros::from_millis(400));
            fail(&breaker);
            breaker.answered();
            hands.advance(Micros::from_millis(400));
        }
        fail(&breaker);
        for goes_down in [false, false, true] {
            assert!(breaker.begins_ping());
            assert_eq!(breaker.ping_failed(Failure::Overloaded, 0).is_some(), goes_down);
            hands.advance(Micros::from_millis(500));
            breaker.failed(Failure::Overloaded, Scope::Node);
        }
    }

    #[test]
    fn waits_double_up_to_five_seconds_give_or_take_a_fifth() {
        let mut shares = Vec::new();
        for seed in 0..200 {
            let (hands, breaker) = breaker(seed);
            take_down(&breaker);
            for wait_ms in [250, 500, 1_000, 2_000, 4_000, 5_000, 5_000] {
                let wait = wait_of(&breaker);
                let (low, high) =
                    (Micros::from_millis(wait_ms * 4 / 5), Micros::from_millis(wait_ms * 6 / 5));
                assert!((low..=high).contains(&wait), "{wait} is not within {low} and {high}");
                shares.push(wait.get() * 1_000 / (wait_ms * 1_000));
                hands.advance(wait.saturating_sub(Micros::new(1)));
                assert!(!breaker.begins_ping(), "not a moment too soon");
                hands.advance(Micros::new(1));
                assert!(breaker.begins_ping());
                assert_eq!(breaker.ping_failed(Failure::Timeout, 0), None, "no change");
            }
        }
        let below = shares.iter().filter(|share| **share < 1_000).count();
        assert!((shares.len() * 2 / 5..shares.len() * 3 / 5).contains(&below), "half of them are shorter");
        assert!(shares.iter().any(|share| *share < 830) && shares.iter().any(|share| *share > 1_170));
    }

    #[test]
    fn two_answers_in_a_row_bring_it_back_and_calls_do_not() {
        let (hands, breaker) = breaker(7);
        take_down(&breaker);
        breaker.answered();
        assert_eq!(breaker.failed(Failure::Timeout, Scope::Node), None);
        assert_eq!(breaker.reading().state, StoreState::Down, "calls of before the outage say nothing");
        hands.advance(wait_of(&breaker));
        assert!(breaker.begins_ping() && !breaker.begins_ping());
        assert_eq!(breaker.reading().state, StoreState::Probing);
        assert!(breaker.admit().is_err());
        breaker.ping_abandoned();
        let wait = wait_of(&breaker);
        assert!(wait <= Micros::from_millis(300), "a ping that came to nothing doubles nothing: {wait}");
        hands.advance(wait);

        assert!(breaker.begins_ping());
        assert_eq!(breaker.ping_answered(5), Pinged::Again, "once is not enough");
        assert!(breaker.admit().is_err() && !breaker.begins_ping());
        let down_for = hands.now().saturating_sub(Micros::from_secs(1_000)).into();
        let up = Notice::Changed(StoreChange::Up { down_for, fallen_back: 9 });
        assert_eq!(breaker.ping_answered(9), Pinged::Up(Some(up)));
        assert_eq!(breaker.reading().state, StoreState::Up);
        hands.advance(PING_AT_MOST_EVERY);
        take_down(&breaker);
        assert!(wait_of(&breaker) <= Micros::from_millis(300), "the next outage starts afresh");
    }

    #[test]
    fn failures_that_are_no_outage_are_reported_once_a_minute() {
        let (hands, breaker) = breaker(7);
        let mut reported = Vec::new();
        for _ in 0..130 {
            reported.extend(breaker.failed(Failure::State, Scope::Call));
            hands.advance(Micros::from_secs(1));
        }
        let strays = || Notice::Strays { failures: 61, last: Failure::State };
        assert_eq!(reported, [strays(), strays()]);
    }

    #[test]
    fn each_node_has_a_breaker_of_its_own_and_those_that_are_down_are_looked_after() {
        let hands = ManualClock::at(Micros::from_secs(1_000));
        let breakers = Breakers::new(hands.clock());
        let [ill, well] = [NodeId::new(1), NodeId::new(NodeId::COUNT - 1)];
        assert!(breakers.to_look_after().is_none());
        fail(breakers.of(ill));
        assert!(breakers.of(ill).begins_ping());
        let Some(Notice::Changed(change)) = breakers.of(ill).ping_failed(Failure::Timeout, 0) else {
            panic!("it goes down")
        };
        breakers.changed(&change);
        assert!(breakers.of(ill).admit().is_err());
        assert!([well, NodeId::ONLY].iter().all(|node| breakers.of(*node).admit().is_ok()));
        assert_eq!(breakers.to_look_after().map(Iterator::collect), Some(vec![ill]));
        assert!(breakers.to_look_after().is_none(), "just done");
    }
}
