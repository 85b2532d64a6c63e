//! A server's clock that steps back: for a key that was charged later, time stands still until the clock has caught up. So nothing
//! is granted and nothing taken away, and every store answers the same `remaining`, `retry_after` and `reset_after`.
//!
//! What a key has seen is the time of its last admitted charge: a store need not write what it denies. So the clock steps back only
//! just after an admitted charge, and each history has one limit and one key. The model gets the later of the clock and what was
//! seen. A store that has a clock of its own which never goes back, such as memory, takes no part in the steps: it goes by
//! [`ManualClock::now`], so for it the model gets that.

use super::model::Model;
use super::random::Random;
use super::{FOR_LONG, Subject, cost, limit};
use crate::{ChargeId, Charged, Hold, ManualClock, Micros, Settlement, StoredCharge, StoredLimit};

/// How many calls each history has.
const CALLS: usize = 150;

pub(super) async fn steps_back(make: &impl AsyncFn(ManualClock) -> Subject) {
    use tollgate_kernel::{Limit, Rate};
    let (ms, s) = (Micros::from_millis, Micros::from_secs);
    let rate = |count, period| Rate::new(count, period).expect("a rate");
    let limits = [
        limit("token", Limit::token_bucket(rate(5, s(1)), 10)),
        limit("token-odd", Limit::token_bucket(rate(7, ms(1300)), 13)),
        limit("token-instant", Limit::token_bucket(rate(5, s(1)), 10).map(Limit::keeping_instant)),
        limit("leaky", Limit::leaky_bucket(rate(3, s(1)), 6)),
        limit("fixed", Limit::fixed_window(8, s(2))),
        limit("clock", Limit::clock_window(8, ms(1500))),
        limit("log", Limit::sliding_window(9, s(2))),
        limit("counter", Limit::sliding_window_counter(11, ms(1700))),
        limit("leases", Limit::concurrency(4, ms(2500))),
    ];
    let (mut wrong, mut steps_back) = (Vec::new(), 0);
    for (seed, limit) in (0..).zip(&limits) {
        let clock = super::clock();
        let subject = make(clock.clone()).await;
        let mut history = History {
            subject: &subject,
            goes_by: goes_by(&subject, &clock).await,
            clock,
            limit,
            model: Model::default(),
            random: Random::new(seed),
            seen: Micros::ZERO,
            open: Vec::new(),
            steps_back: 0,
        };
        for call in 0..CALLS {
            if let Err(mistake) = history.call().await {
                wrong.push(format!("{}, call {call}: {mistake}", limit.name));
                break;
            }
        }
        steps_back += history.steps_back;
    }
    assert!(wrong.is_empty(), "after a step back of the clock:\n{}", wrong.join("\n"));
    assert!(steps_back > 10 * limits.len(), "the clock stepped back {steps_back} times only");
}

/// Which time a store goes by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GoesBy {
    /// One that never goes back.
    Own,
    /// The server's.
    Server,
}

/// Finds out by a window that a step forward ends.
async fn goes_by(subject: &Subject, clock: &ManualClock) -> GoesBy {
    let probe = limit("probe", tollgate_kernel::Limit::fixed_window(1, Micros::from_secs(1)));
    let charge = [StoredCharge { limit: &probe, key: "clock", cost: cost(1), shadow: false }];
    assert!(subject.store.charge(&charge, None).await.expect("charge").allowed);
    clock.step_server(1_000_000);
    let is_over = subject.store.peek(&charge).await.expect("peek").allowed;
    if is_over { GoesBy::Server } else { GoesBy::Own }
}

struct History<'a> {
    subject: &'a Subject,
    goes_by: GoesBy,
    clock: ManualClock,
    limit: &'a StoredLimit,
    model: Model,
    random: Random,
    /// The time of the last admitted charge.
    seen: Micros,
    open: Vec<ChargeId>,
    steps_back: usize,
}

impl History<'_> {
    fn now(&self) -> Micros {
        match self.goes_by {
            GoesBy::Own => self.clock.now(),
            GoesBy::Server => self.clock.server_now().max(self.seen),
        }
    }

    async fn call(&mut self) -> Result<(), String> {
        if self.random.one_in(2) {
            self.clock.advance(Micros::new(self.random.below(900_000)));
        }
        // The model may get an earlier time than the last one: nothing was admitted at that time.
        let (now, store) = (self.now(), &self.subject.store);
        let units = 1 + self.random.below(4);
        let charges = [StoredCharge { limit: self.limit, key: "user:42", cost: cost(units), shadow: false }];
        match self.random.below(10) {
            0 | 1 => {
                let expected = self.model.peek(&charges, now);
                self.equal("peek", &expected, &store.peek(&charges).await.expect("peek"))
            }
            2 if !self.open.is_empty() => {
                let id = self.open.swap_remove(0);
                let settlement = match self.random.below(3) {
                    0 => Settlement::Cancel,
                    1 => Settlement::Renew,
                    _ => Settlement::Actual(self.random.below(3)),
                };
                let expected = self.model.settle(id, &settlement, now);
                let got = store.settle(id, &settlement).await.expect("settle");
                match expected == Some(got) {
                    true => Ok(()),
                    false => Err(format!("{settlement:?} should be {expected:?}, and is {got:?}")),
                }
            }
            choice => {
                let hold = (choice < 5).then(|| Hold { id: ChargeId::random(), ttl: FOR_LONG });
                let expected = self.model.charge(&charges, hold, now);
                let got = store.charge(&charges, hold).await.expect("charge");
                self.equal("charge", &expected, &got)?;
                if got.allowed {
                    self.seen = now;
                    self.open.extend(hold.map(|hold| hold.id));
                    if self.random.one_in(3) {
                        self.steps_back += 1;
                        let by_us = *self.random.pick(&[1, 1_000, 50_000, 300_000, 2_600_000]);
                        self.clock.step_server(-by_us);
                    }
                }
                Ok(())
            }
        }
    }

    fn equal(&self, verb: &str, expected: &Charged, got: &Charged) -> Result<(), String> {
        if expected == got {
            return Ok(());
        }
        let behind_us = self.now().saturating_sub(self.clock.server_now());
        Err(format!("{verb}, the clock {behind_us} behind\n expected {expected:?}\n but got  {got:?}"))
    }
}
