//! Limiters, most of them wrong in ways that have been seen in the field. All are of 50 a second by default.

use std::collections::{BTreeSet, VecDeque};

use super::simulation::{Limiter, Step};

pub(crate) const LIMIT: u64 = 50;
pub(crate) const WINDOW_US: u64 = 1_000_000;

/// A sliding window that is right: an entry for each admission.
#[derive(Default)]
pub(crate) struct Log(VecDeque<(u64, u64)>);

impl Log {
    fn fits(&mut self, now_us: u64, cost: u64) -> bool {
        self.0.retain(|(at, _)| now_us < at + WINDOW_US);
        self.0.iter().map(|(_, cost)| cost).sum::<u64>() + cost <= LIMIT
    }
}

impl Limiter for Log {
    fn check(&mut self, now_us: u64, _: u64, cost: u64) -> Step {
        let fits = self.fits(now_us, cost);
        if fits {
            self.0.push_back((now_us, cost));
        }
        Step::Answer(fits)
    }

    fn lose_state(&mut self) {
        self.0.clear();
    }
}

/// Looks first and writes later.
#[derive(Default)]
pub(crate) struct CheckThenAct(Log);

impl Limiter for CheckThenAct {
    fn check(&mut self, now_us: u64, _: u64, cost: u64) -> Step {
        if self.0.fits(now_us, cost) { Step::ActLater } else { Step::Answer(false) }
    }

    fn act(&mut self, now_us: u64, _: u64, cost: u64) -> bool {
        self.0.0.push_back((now_us, cost));
        true
    }
}

/// A token bucket that is right: whole numbers, in units of which a token has `WINDOW_US`.
pub(crate) struct Bucket {
    missing: u64,
    at_us: u64,
}

impl Bucket {
    pub(crate) fn new() -> Bucket {
        Bucket { missing: 0, at_us: 0 }
    }
}

impl Limiter for Bucket {
    fn check(&mut self, now_us: u64, _: u64, cost: u64) -> Step {
        let missing =
            self.missing.saturating_sub((now_us - self.at_us).saturating_mul(LIMIT)) + cost * WINDOW_US;
        if missing > LIMIT * WINDOW_US {
            return Step::Answer(false);
        }
        (self.missing, self.at_us) = (missing, now_us);
        Step::Answer(true)
    }
}

/// A float token bucket that writes back the tokens of every call, but moves its clock on success only: each denial credits
/// the same time again.
pub(crate) struct FloatBucket {
    tokens: f64,
    at_us: u64,
}

impl FloatBucket {
    pub(crate) fn new() -> FloatBucket {
        FloatBucket { tokens: LIMIT as f64, at_us: u64::MAX }
    }
}

impl Limiter for FloatBucket {
    fn check(&mut self, now_us: u64, _: u64, cost: u64) -> Step {
        let passed = now_us.saturating_sub(self.at_us) as f64 / WINDOW_US as f64;
        self.tokens = (self.tokens + passed * LIMIT as f64).min(LIMIT as f64);
        let fits = self.tokens >= cost as f64;
        if fits {
            self.tokens -= cost as f64;
            self.at_us = now_us;
        }
        Step::Answer(fits)
    }
}

/// A sorted set with the millisecond as its member: what is admitted in one millisecond counts once.
#[derive(Default)]
pub(crate) struct LogByMillisecond(BTreeSet<u64>);

impl Limiter for LogByMillisecond {
    fn check(&mut self, now_us: u64, _: u64, _: u64) -> Step {
        self.0.retain(|ms| now_us / 1000 < ms + WINDOW_US / 1000);
        let fits = (self.0.len() as u64) < LIMIT;
        if fits {
            self.0.insert(now_us / 1000);
        }
        Step::Answer(fits)
    }
}

/// Goes by the clients' clocks, of which the last is a minute ahead: its calls wipe the log.
#[derive(Default)]
pub(crate) struct ClientClocks(Log);

impl Limiter for ClientClocks {
    fn check(&mut self, now_us: u64, client: u64, cost: u64) -> Step {
        let ahead = if client == 7 { 61_000_000 } else { 0 };
        let fits = self.0.fits(now_us + ahead, cost);
        if fits {
            self.0.0.push_back((now_us, cost));
        }
        Step::Answer(fits)
    }
}

/// `INCR`, and `EXPIRE` after the first; a client that dies between the two leaves a counter that never ends.
#[derive(Default)]
pub(crate) struct IncrThenExpire {
    count: u64,
    ends_us: Option<u64>,
    windows: u64,
}

impl Limiter for IncrThenExpire {
    fn check(&mut self, now_us: u64, _: u64, cost: u64) -> Step {
        if self.ends_us.is_some_and(|ends| now_us >= ends) {
            (self.count, self.ends_us) = (0, None);
        }
        if self.count == 0 {
            self.windows += 1;
            // The third window's client dies before it says when the window ends.
            self.ends_us = (self.windows != 3).then_some(now_us + WINDOW_US);
        }
        let fits = self.count + cost <= LIMIT;
        self.count += if fits { cost } else { 0 };
        Step::Answer(fits)
    }
}

/// A sliding log that also keeps what it denied.
#[derive(Default)]
pub(crate) struct CountsDenials(Log);

impl Limiter for CountsDenials {
    fn check(&mut self, now_us: u64, _: u64, cost: u64) -> Step {
        let fits = self.0.fits(now_us, cost);
        self.0.0.push_back((now_us, cost));
        Step::Answer(fits)
    }
}

/// A leaky bucket that drains whole requests and moves its clock at every call: asked often enough, it never drains.
#[derive(Default)]
pub(crate) struct DrainsWholeRequests {
    level: u64,
    at_us: u64,
}

impl Limiter for DrainsWholeRequests {
    fn check(&mut self, now_us: u64, _: u64, cost: u64) -> Step {
        let drained = (now_us - self.at_us).saturating_mul(LIMIT) / WINDOW_US;
        self.at_us = now_us;
        self.level = self.level.saturating_sub(drained);
        let fits = self.level + cost <= LIMIT;
        self.level += if fits { cost } else { 0 };
        Step::Answer(fits)
    }
}

/// A fixed window at multiples of the window, which is right; with `edge_us` it forgets that much too early.
pub(crate) struct FixedWindow {
    pub(crate) edge_us: u64,
    pub(crate) index: u64,
    pub(crate) count: u64,
}

impl Limiter for FixedWindow {
    fn check(&mut self, now_us: u64, _: u64, cost: u64) -> Step {
        let index = (now_us + self.edge_us) / WINDOW_US;
        if index != self.index {
            (self.index, self.count) = (index, 0);
        }
        let fits = self.count + cost <= LIMIT;
        self.count += if fits { cost } else { 0 };
        Step::Answer(fits)
    }
}

/// A fixed window that opens at the first admission.
#[derive(Default)]
pub(crate) struct FirstWindow {
    ends_us: u64,
    count: u64,
}

impl Limiter for FirstWindow {
    fn check(&mut self, now_us: u64, _: u64, cost: u64) -> Step {
        if now_us >= self.ends_us {
            self.count = 0;
        }
        let fits = self.count + cost <= LIMIT;
        if fits {
            self.ends_us = if now_us >= self.ends_us { now_us + WINDOW_US } else { self.ends_us };
            self.count += cost;
        }
        Step::Answer(fits)
    }
}

/// Two counters and an estimate. `weighs_previous` false leaves the window before out of the sum.
pub(crate) struct Counter {
    pub(crate) weighs_previous: bool,
    pub(crate) index: u64,
    pub(crate) counts: [u64; 2],
}

impl Limiter for Counter {
    fn check(&mut self, now_us: u64, _: u64, cost: u64) -> Step {
        let index = now_us / WINDOW_US;
        if index != self.index {
            self.counts = [if index == self.index + 1 { self.counts[1] } else { 0 }, 0];
            self.index = index;
        }
        let left = if self.weighs_previous { WINDOW_US - now_us % WINDOW_US } else { 0 };
        let fits = self.counts[0] * left + (self.counts[1] + cost) * WINDOW_US <= LIMIT * WINDOW_US;
        self.counts[1] += if fits { cost } else { 0 };
        Step::Answer(fits)
    }
}

/// Admits everybody.
pub(crate) struct Unlimited;

impl Limiter for Unlimited {
    fn check(&mut self, _: u64, _: u64, _: u64) -> Step {
        Step::Answer(true)
    }
}
