//! `tollgate demo`: the server, and callers who are made up, so that the page has something to show.
//!
//! The callers call the same gate as every face does, and are counted like everybody. What they do follows from the number
//! of the step alone: the same demo every time. The environment is not looked at, lest they be counted in somebody's real store.

use std::sync::Arc;
use std::time::Duration;

use tollgate::Charge;

use crate::app::App;
use crate::cli::{DemoArgs, ServeArgs};
use crate::config::Config;
use crate::failure::Failure;
use crate::serve;

/// The example policy, and what else a demo wants: its callers are made up, so their names may be shown, and they are denied all the time.
const POLICY: &str = concat!(
    "[server]\nshow_keys = true\nlog = \"warn\"\n\n",
    include_str!("../../../examples/tollgate.toml")
);

/// How often callers call, and how many such steps a second has.
const STEP: Duration = Duration::from_millis(50);
const STEPS_A_SECOND: u64 = 20;

/// Somebody who calls.
struct Caller {
    limit: &'static str,
    key: &'static str,
    /// How many calls in ten seconds, on a quiet day.
    in_ten_seconds: u64,
    /// Burst: period in s, length in s, rate factor.
    burst: Option<(u64, u64, u64)>,
}

const fn steady(limit: &'static str, key: &'static str, in_ten_seconds: u64) -> Caller {
    Caller { limit, key, in_ten_seconds, burst: None }
}

const CALLERS: [Caller; 19] = [
    steady("api", "tenant:acme", 60),
    steady("api", "tenant:globex", 85),
    Caller { burst: Some((40, 9, 6)), ..steady("api", "tenant:initech", 40) },
    Caller { burst: Some((75, 5, 9)), ..steady("api", "tenant:umbrella", 20) },
    steady("login", "ip:203.0.113.7", 7),
    Caller { burst: Some((50, 12, 8)), ..steady("login", "ip:198.51.100.23", 1) },
    // A key with markup: checks that the page escapes it.
    steady("login", "<img src=x onerror=alert(1)>", 3),
    steady("login", "user:ada", 1),
    steady("per-user", "user:ada", 12),
    // The one with an override.
    steady("per-user", "user:42", 90),
    Caller { burst: Some((60, 15, 4)), ..steady("per-user", "user:grace", 14) },
    steady("search", "tenant:acme", 4),
    Caller { burst: Some((60, 20, 4)), ..steady("search", "crawler:nightly", 4) },
    steady("mail", "campaign:spring", 21),
    steady("mail", "campaign:receipts", 14),
    Caller { burst: Some((80, 10, 6)), ..steady("mail", "campaign:autumn", 6) },
    steady("uploads", "tenant:acme", 1),
    steady("uploads", "tenant:globex", 2),
    Caller { burst: Some((30, 8, 4)), ..steady("uploads", "tenant:initech", 1) },
];

/// Runs the command.
pub(crate) fn run(args: &DemoArgs) -> Result<(), Failure> {
    let config = Config::parse(POLICY).map_err(|mistakes| Failure::new(mistakes.to_string()))?;
    let serve = ServeArgs {
        config: None,
        listen: Some(args.listen.clone()),
        grpc: args.grpc.clone(),
        resp: args.resp.clone(),
        without_token: args.without_token,
        is_demo: true,
    };
    serve::start(&serve, config, |app| {
        tokio::spawn(traffic(app.clone()));
    })
}

/// Calls until the server ends.
async fn traffic(app: Arc<App>) {
    let mut every = tokio::time::interval(STEP);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    for step in 0.. {
        every.tick().await;
        if app.is_draining() {
            return;
        }
        play(&app, step).await;
    }
}

/// What all callers do in one step.
async fn play(app: &App, step: u64) {
    let state = app.state();
    for (number, caller) in CALLERS.iter().enumerate() {
        for _ in 0..caller.calls(number as u64, step) {
            // The answers are for the page.
            match caller.limit {
                "uploads" => {
                    let charge = [Charge::new(caller.limit, caller.key)];
                    let _ = state.gate.reserve(&charge, Duration::ZERO).await;
                }
                limit => {
                    let _ = state.gate.check(limit, caller.key).await;
                }
            }
        }
    }
}

impl Caller {
    /// How many calls it makes in a step: its share of ten seconds, more and less in slow waves, spread at random.
    fn calls(&self, number: u64, step: u64) -> u64 {
        let second = step / STEPS_A_SECOND;
        let eager = match self.burst {
            Some((every, lasts, times)) if (second + 13 * number) % every < lasts => times,
            _ => 1,
        };
        // A wave of 80 s between 60 and 140 in a hundred: a triangle, which is as good as a sine here.
        let wave = 60 + (second + 17 * number).rem_euclid(80).abs_diff(40) * 2;
        let share = self.in_ten_seconds * eager * wave;
        let whole = 10 * STEPS_A_SECOND * 100;
        let chance = random(number << 40 | step) % whole;
        (share + chance) / whole
    }
}

/// A number that looks drawn, and is the same for the same seed (SplitMix64).
fn random(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use tollgate::ManualClock;
    use tollgate::store::Micros;

    use super::*;
    use crate::app::tests::app_of;

    #[tokio::test]
    async fn within_two_minutes_every_limit_has_something_to_show() {
        let hands = ManualClock::at(Micros::from_secs(1_700_000_000));
        let app = app_of(POLICY, hands.clock());
        let start = app.stats.second();
        for step in 0..120 * STEPS_A_SECOND {
            hands.advance(Micros::from_millis(50));
            app.stats.tick(start + step / STEPS_A_SECOND);
            play(&app, step).await;
        }
        for rule in app.state().gate.policy().rules() {
            let seen = app.stats.series(rule.name(), start + 120, 300);
            let [allowed, denied, would_deny] =
                [seen.allowed, seen.denied, seen.would_deny].map(|counts| counts.iter().sum::<u64>());
            assert!(allowed > 20, "{}: {allowed} allowed", rule.name());
            assert_eq!(denied > 0, !rule.is_shadow(), "{}: {denied} denied", rule.name());
            assert_eq!(would_deny > 0, rule.is_shadow(), "{}: {would_deny} would be", rule.name());
            assert!(denied + would_deny < allowed * 4, "{}: {allowed} {denied} {would_deny}", rule.name());
        }
        let hostile = app.stats.offenders("login", 10).into_iter().filter_map(|one| one.who.key);
        assert!(hostile.into_iter().any(|key| key.starts_with("<img")));
    }
}
