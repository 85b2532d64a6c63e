//! `tollgate suggest`: the smallest limits under which only so many keys, or requests, of recorded traffic would have been denied.
//!
//! For each limit and each strategy the kernel says what every key needs (`peaks.rs`): the smallest number under which none of its requests is
//! denied. Sorted, these numbers are the answer for shares of keys. For shares of requests the number is halved towards, and only the keys
//! that need more are charged again. The denied requests can only become fewer with a larger limit where every request costs 1; with other
//! costs the answer holds, and the number below it does not, though a still smaller one might.
//!
//! A bucket has two numbers, a rate and a size. It is given both by one: so many in a window, with bursts of as many. Where the config's limit is a bucket, its
//! rate is kept as well, and the burst is looked for. Buckets that delay admit what token buckets admit, so both are one row. Where the config's limit is a
//! window by the clock, the fixed window is one too. Keys with an override have numbers of their own and are left out, as of the peaks.

use std::collections::{BTreeMap, HashSet};
use std::io::{self, Write};

use serde::Serialize;
use tollgate::{Allowance, Limit, Rule};
use tollgate_kernel::{Align, FixedWindow, Micros, Rate};

use super::peaks::{Group, Groups, outcomes, peak, widest, with_capacity};
use crate::cli::SuggestArgs;
use crate::failure::Failure;
use crate::figures::{counted, grouped, share};
use crate::screen::{Ink, Tone};
use crate::source;
use crate::table::{Cell, Side, Table};
use crate::validate;

/// The shares of the trade-off curve, in thousandths of a per cent.
const CURVE: [u64; 8] = [0, 100, 500, 1_000, 2_000, 5_000, 10_000, 25_000];

/// A whole, in thousandths of a per cent.
const WHOLE: u64 = 100_000;

/// The default share: 1 %.
const DEFAULT: u64 = 1_000;

/// What may be denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Of {
    Keys,
    Requests,
}

/// What is found for one limit.
#[derive(Debug, Serialize)]
struct Suggested {
    limit: String,
    requests: u64,
    keys: u64,
    /// Keys with an override, which are not among `keys`.
    with_override: u64,
    window: String,
    strategies: Vec<ForStrategy>,
}

/// What is found for one strategy.
#[derive(Debug, Serialize)]
struct ForStrategy {
    strategy: &'static str,
    /// The rate of a bucket that was kept, and of which the burst was looked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    rate: Option<String>,
    /// The limit in words; `null` where none is found that the strategy can count exactly.
    rule: Option<String>,
    /// The number: the limit of a window, the burst of a bucket.
    number: Option<u64>,
    denied_keys: u64,
    denied_requests: u64,
    curve: Vec<Point>,
}

/// What another share would cost.
#[derive(Debug, Serialize)]
struct Point {
    per_cent: String,
    number: Option<u64>,
}

/// Runs the command.
pub(crate) fn run(args: &SuggestArgs) -> Result<(), Failure> {
    let (of, target) = match (&args.keys, &args.requests) {
        (_, Some(text)) => (Of::Requests, per_cent(text)?),
        (Some(text), None) => (Of::Keys, per_cent(text)?),
        (None, None) => (Of::Keys, DEFAULT),
    };
    let window = args.window.as_deref().map(window).transpose()?;
    let crate::config::Config { gate: config, llm, .. } = validate::load(&args.config)?;
    let rules: Vec<Rule> = config.policy.rules().to_vec();
    let known = |name: &&String| !rules.iter().any(|rule| rule.name() == **name);
    if let Some(unknown) = args.limits.iter().find(known) {
        let names: Vec<&str> = rules.iter().map(Rule::name).collect();
        return Err(Failure::new(format!(
            "there is no limit {unknown:?}; the config has {}",
            names.join(", ")
        )));
    }
    let (harvest, ..) = super::read(&args.log, &source::name(&args.config), config, llm)?;
    let groups = Groups::of(&harvest.traffic);
    let is_asked = |rule: &Rule| args.limits.is_empty() || args.limits.iter().any(|name| name == rule.name());
    let found: Vec<Suggested> = (0u16..)
        .zip(&rules)
        .filter(|(_, rule)| is_asked(rule))
        .filter_map(|(index, rule)| suggest(rule, index, &groups, window, of, target))
        .collect();
    if found.is_empty() {
        return Err(Failure::new(
            "no request of the log meets one of these limits with a key that has no override; there is nothing to suggest",
        ));
    }
    let out = &mut io::BufWriter::new(io::stdout().lock());
    let printed = match args.json {
        true => serde_json::to_writer(
            &mut *out,
            &serde_json::json!({ "denied": of, "per_cent": shown(target), "limits": found }),
        )
        .map_err(io::Error::from)
        .and_then(|()| writeln!(out)),
        false => print(&found, of, target, out, Ink::of(&io::stdout())),
    };
    printed.and_then(|()| out.flush()).map_err(Failure::answering)
}

/// A share such as `0.5`, in thousandths of a per cent.
fn per_cent(text: &str) -> Result<u64, Failure> {
    let wrong = || {
        Failure::new(format!(
            "{text:?} is no share; write per cent from 0 to 100 with up to three decimals, such as 0.5"
        ))
    };
    let plain = text.trim_end_matches('%').trim_end();
    let (whole, decimals) = plain.split_once('.').unwrap_or((plain, "0"));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || !digits(decimals) || decimals.len() > 3 || whole.len() > 3 {
        return Err(wrong());
    }
    let thousandths = format!("{whole}{decimals:0<3}").parse::<u64>().map_err(|_| wrong())?;
    if thousandths <= WHOLE { Ok(thousandths) } else { Err(wrong()) }
}

/// The same as text.
fn shown(thousandths: u64) -> String {
    let (whole, rest) = (thousandths / 1_000, thousandths % 1_000);
    let text = format!("{whole}.{rest:03}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn window(text: &str) -> Result<Micros, Failure> {
    let window: Micros = text.parse().map_err(|error| Failure::new(format!("--window {text}: {error}")))?;
    match window {
        Micros::ZERO => Err(Failure::new("--window 0: a window has a length")),
        window => Ok(window),
    }
}

/// A way to make a limit of a number.
type Make<'a> = Box<dyn Fn(u64) -> Option<Limit> + 'a>;

/// What is found for a limit; `None` where nobody met it.
fn suggest(
    rule: &Rule,
    index: u16,
    groups: &Groups<'_>,
    window: Option<Micros>,
    of: Of,
    target: u64,
) -> Option<Suggested> {
    let overrides: HashSet<&str> = rule.overrides().iter().map(|(key, _)| key.canonical()).collect();
    let (overridden, keys): (Vec<Group<'_>>, Vec<Group<'_>>) =
        groups.of_limit(index).partition(|key| overrides.contains(key.canonical()));
    let requests = keys.iter().map(|key| key.len()).sum();
    if keys.is_empty() {
        return None;
    }
    let configured = match rule.allowance() {
        Allowance::Limited(limit) => Some(*limit),
        _ => None,
    };
    let bucket = configured.filter(|limit| matches!(limit, Limit::TokenBucket(_) | Limit::LeakyBucket(_)));
    let own = configured.filter(|limit| bucket.is_none() && !matches!(limit, Limit::Concurrency(_)));
    let align = match configured {
        Some(Limit::FixedWindow(window)) => window.align(),
        _ => Align::First,
    };
    let fixed = move |number, window| FixedWindow::new(number, window, align).map(Limit::FixedWindow).ok();
    let window = window.or(own.map(|limit| limit.window_us())).unwrap_or(Micros::from_secs(60));
    let mut ways: Vec<(&'static str, Option<Rate>, Make<'_>)> = vec![
        ("fixed_window", None, Box::new(move |number| fixed(number, window))),
        ("sliding_window", None, Box::new(move |number| Limit::sliding_window(number, window).ok())),
        (
            "sliding_window_counter",
            None,
            Box::new(move |number| Limit::sliding_window_counter(number, window).ok()),
        ),
        (
            "token_bucket",
            None,
            Box::new(move |number| Limit::token_bucket(Rate::new(number, window).ok()?, number).ok()),
        ),
    ];
    if let Some(bucket) = bucket {
        let rate = match &bucket {
            Limit::TokenBucket(bucket) => Some(bucket.rate()),
            Limit::LeakyBucket(bucket) => Some(bucket.rate()),
            _ => None,
        };
        ways.push((bucket.strategy().name(), rate, Box::new(move |number| with_capacity(&bucket, number))));
    }
    let strategies = ways
        .iter()
        .map(|(strategy, rate, make)| Search::new(&keys, make).answer(strategy, *rate, of, target))
        .collect();
    Some(Suggested {
        limit: rule.name().to_owned(),
        requests,
        keys: keys.len() as u64,
        with_override: overridden.len() as u64,
        window: window.to_string(),
        strategies,
    })
}

/// The search for one number of one strategy.
struct Search<'a> {
    make: &'a Make<'a>,
    /// What each key needs, the most first.
    needs: Vec<(u64, Group<'a>)>,
    requests: u64,
    /// Denied requests by number, of those that were tried.
    denied: BTreeMap<u64, u64>,
}

impl<'a> Search<'a> {
    fn new(keys: &[Group<'a>], make: &'a Make<'a>) -> Search<'a> {
        let mut needs: Vec<(u64, Group<'a>)> = keys.iter().map(|&key| (needed(make, key), key)).collect();
        needs.sort_by_key(|(needed, _)| std::cmp::Reverse(*needed));
        let requests = keys.iter().map(|key| key.len()).sum();
        Search { make, needs, requests, denied: BTreeMap::new() }
    }

    fn answer(mut self, strategy: &'static str, rate: Option<Rate>, of: Of, target: u64) -> ForStrategy {
        let number = self.smallest(of, target);
        let limit = number.and_then(|number| (self.make)(number));
        let (denied_keys, denied_requests) =
            number.map_or((0, 0), |number| (self.denied_keys(number), self.denied_requests(number)));
        let curve = CURVE
            .iter()
            .map(|&share| Point { per_cent: shown(share), number: self.smallest(of, share) })
            .collect();
        ForStrategy {
            strategy,
            rate: rate.map(|rate| rate.to_string()),
            rule: limit.map(|limit| limit.to_string()),
            number,
            denied_keys,
            denied_requests,
            curve,
        }
    }

    /// The smallest number under which at most this share is denied; `None` if the strategy has none so large.
    fn smallest(&mut self, of: Of, target: u64) -> Option<u64> {
        let number = match of {
            Of::Keys => {
                // So many keys may be denied; the next one may not.
                let spared = portion(self.needs.len() as u64, target);
                self.needs.get(usize::try_from(spared).ok()?).map_or(1, |(needed, _)| *needed)
            }
            Of::Requests => {
                let spared = portion(self.requests, target);
                let (mut low, mut high) = (0, self.needs.first().map_or(1, |(needed, _)| *needed).max(1));
                // `high` holds, `low` does not; nothing is denied where everybody has what is needed.
                while high - low > 1 {
                    let middle = low + (high - low) / 2;
                    match self.denied_requests(middle) <= spared {
                        true => high = middle,
                        false => low = middle,
                    }
                }
                high
            }
        };
        (self.make)(number).map(|_| number)
    }

    /// Keys that need more.
    fn denied_keys(&self, number: u64) -> u64 {
        self.needs.partition_point(|(needed, _)| *needed > number) as u64
    }

    /// Requests of those keys that are denied.
    fn denied_requests(&mut self, number: u64) -> u64 {
        if let Some(known) = self.denied.get(&number) {
            return *known;
        }
        let denied = match (self.make)(number) {
            None => self.requests,
            Some(limit) => {
                let needy = self.needs.iter().take_while(|(needed, _)| *needed > number);
                needy
                    .map(|(_, key)| outcomes(&limit, *key).filter(|outcome| !outcome.allowed).count() as u64)
                    .sum()
            }
        };
        self.denied.insert(number, denied);
        denied
    }
}

/// So many of a whole, rounded down.
fn portion(whole: u64, thousandths: u64) -> u64 {
    u64::try_from(u128::from(whole) * u128::from(thousandths) / u128::from(WHOLE)).unwrap_or(u64::MAX)
}

/// The smallest number under which nothing of a key is denied; `u64::MAX` if there is none.
fn needed(make: &Make<'_>, key: Group<'_>) -> u64 {
    let Some(wide) = widest(make, key.total()) else { return u64::MAX };
    let peak = peak(&wide, key);
    // Where the number is the rate too, a wider limit also fills faster, so the peak is only a floor.
    let is_enough =
        |number: u64| make(number).is_some_and(|limit| outcomes(&limit, key).all(|outcome| outcome.allowed));
    if peak == u64::MAX || is_enough(peak) {
        return peak;
    }
    let (mut low, mut high) = (peak, wide.capacity());
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        match is_enough(middle) {
            true => high = middle,
            false => low = middle,
        }
    }
    high
}

impl ForStrategy {
    fn name(&self) -> String {
        match &self.rate {
            None => self.strategy.to_owned(),
            Some(rate) => format!("{} at {rate}", self.strategy),
        }
    }
}

fn print(found: &[Suggested], of: Of, target: u64, out: &mut impl Write, ink: Ink) -> io::Result<()> {
    let what = match of {
        Of::Keys => "keys are denied anything",
        Of::Requests => "requests are denied",
    };
    for (number, limit) in found.iter().enumerate() {
        if number > 0 {
            writeln!(out)?;
        }
        writeln!(
            out,
            "{}: {} of {}{}; at most {} % of {what}, counted in {}",
            ink.paint(Tone::Strong, &limit.limit),
            counted(limit.requests, "request"),
            counted(limit.keys, "key"),
            match limit.with_override {
                0 => String::new(),
                keys => format!(" ({} with an override not counted)", counted(keys, "key")),
            },
            shown(target),
            limit.window,
        )?;
        let mut table = Table::new(&[
            ("STRATEGY", Side::Left),
            ("SMALLEST", Side::Left),
            ("KEYS DENIED", Side::Right),
            ("REQUESTS DENIED", Side::Right),
        ]);
        let part = |part: u64, whole: u64| format!("{} ({})", grouped(part), share(part, whole));
        for strategy in &limit.strategies {
            table.row([
                Cell::toned(Tone::Strong, strategy.name()),
                strategy.rule.clone().unwrap_or_else(|| "none that can be counted exactly".to_owned()).into(),
                part(strategy.denied_keys, limit.keys).into(),
                part(strategy.denied_requests, limit.requests).into(),
            ]);
        }
        table.print(out, ink, 0)?;
        let heading = match of {
            Of::Keys => "The number for other shares of keys",
            Of::Requests => "The number for other shares of requests",
        };
        writeln!(out, "{}", ink.paint(Tone::Faint, heading))?;
        let shares: Vec<String> = CURVE.iter().map(|share| format!("{} %", shown(*share))).collect();
        let columns: Vec<(&str, Side)> = std::iter::once(("", Side::Left))
            .chain(shares.iter().map(|share| (share.as_str(), Side::Right)))
            .collect();
        let mut table = Table::new(&columns);
        for strategy in &limit.strategies {
            let number = |point: &Point| point.number.map_or("-".to_owned(), grouped).into();
            table.row(std::iter::once(Cell::from(strategy.name())).chain(strategy.curve.iter().map(number)));
        }
        table.print(out, ink, 2)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::traffic::{Keys, Request, Traffic};
    use super::*;

    #[test]
    fn shares_are_whole_numbers() {
        for (text, thousandths) in [
            ("0", 0),
            ("1", 1_000),
            ("0.5", 500),
            ("0.001", 1),
            ("12.345", 12_345),
            ("100", 100_000),
            ("2%", 2_000),
            ("2 %", 2_000),
        ] {
            assert_eq!(per_cent(text).unwrap(), thousandths, "{text}");
        }
        for text in ["", "-1", "101", "100.001", "1.2345", "1e1", ".5", "5.", "x", "1000", "%"] {
            assert!(per_cent(text).is_err(), "{text}");
        }
        assert_eq!([0, 1, 500, 1_000, 12_340].map(shown), ["0", "0.001", "0.5", "1", "12.34"]);
        assert!(window("0s").is_err() && window("x").is_err() && window("90s").is_ok());
    }

    fn traffic(charges: &[(u8, u64, u64)]) -> Traffic {
        let mut keys = Keys::default();
        let requests = charges
            .iter()
            .zip(1..)
            .map(|(&(key, at, cost), line)| {
                let text = format!("user:{key}");
                let key = keys.enter(&text, &text).unwrap();
                Request { time_us: at * 1_000, cost, line, key, limit: 0, file: 0 }
            })
            .collect();
        let mut traffic = Traffic { requests, keys, ..Traffic::default() };
        traffic.order();
        traffic
    }

    proptest! {
        /// Compared with trying every number from 1 on.
        #[test]
        fn the_number_is_the_smallest_that_holds(
            charges in proptest::collection::vec((0u8..12, 0u64..4_000), 1..120),
            target in prop::sample::select(vec![0u64, 1_000, 5_000, 10_000, 30_000, 100_000]),
        ) {
            let charges: Vec<_> = charges.into_iter().map(|(key, at)| (key, at, 1)).collect();
            let traffic = traffic(&charges);
            let groups = Groups::of(&traffic);
            let keys: Vec<Group<'_>> = groups.of_limit(0).collect();
            let second = Micros::from_secs(1);
            let ways: [Make<'_>; 5] = [
                Box::new(|number| Limit::fixed_window(number, second).ok()),
                Box::new(|number| Limit::sliding_window(number, second).ok()),
                Box::new(|number| Limit::sliding_window_counter(number, second).ok()),
                Box::new(|number| Limit::token_bucket(Rate::new(number, second).ok()?, number).ok()),
                Box::new(|number| Limit::token_bucket("2/s", number).ok()),
            ];
            for make in &ways {
                for of in [Of::Keys, Of::Requests] {
                    let found = Search::new(&keys, make).smallest(of, target);
                    let tried = (1..).find(|&number| {
                        let limit = make(number).unwrap();
                        let denied = keys.iter().map(|key| outcomes(&limit, *key).filter(|outcome| !outcome.allowed).count() as u64);
                        let (part, whole) = match of {
                            Of::Keys => (denied.filter(|&denied| denied > 0).count() as u64, keys.len() as u64),
                            Of::Requests => (denied.sum(), charges.len() as u64),
                        };
                        part * WHOLE <= whole * target
                    });
                    prop_assert_eq!(found, tried, "{:?} {}", of, make(1).unwrap());
                }
            }
        }

        /// With any costs the number holds and the one below it does not.
        #[test]
        fn with_costs_the_number_holds(
            charges in proptest::collection::vec((0u8..5, 0u64..4_000, 1u64..9), 1..60),
        ) {
            let traffic = traffic(&charges);
            let groups = Groups::of(&traffic);
            let keys: Vec<Group<'_>> = groups.of_limit(0).collect();
            let make: Make<'_> = Box::new(|number| Limit::token_bucket(Rate::new(number, Micros::from_secs(1)).ok()?, number).ok());
            let mut search = Search::new(&keys, &make);
            let number = search.smallest(Of::Requests, 10_000).unwrap();
            let spared = portion(charges.len() as u64, 10_000);
            prop_assert!(search.denied_requests(number) <= spared);
            prop_assert!(number == 1 || search.denied_requests(number - 1) > spared);
        }
    }
}
