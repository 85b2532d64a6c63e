//! Reads the tables of expected answers, the `*.cases` files beside the strategies, into data that can be replayed.
//!
//! A table is made of lines; `#` begins a comment. A `limit` line opens a case on a fresh key, and the `at` lines below it are
//! that key's life:
//!
//! ```text
//! limit token_bucket rate 5/s burst 5
//! at 0ms    take 5   allow  remaining 0  reset 1s
//! at 0ms    take 1   deny   retry 200ms
//! at 200ms  take 1   allow  remaining 0
//! ```
//!
//! A time is an offset from [`ORIGIN`]; one that is smaller than the line before is a clock stepping back. Only what a line
//! names is expected. Reservations outlive their case: none of them runs out. This file knows nothing of stores: it turns
//! text into [`Case`]s, and whoever replays them decides what they are played against.

use std::str::SplitWhitespace;

use tollgate_kernel::{Cost, Limit, Micros, Outcome, Rate};

/// The instant that offsets count from, a whole number of weeks since 1970 (a Thursday, 00:00 UTC), so that windows of the
/// clock up to a week begin at round offsets.
pub const ORIGIN: Micros = Micros::from_secs(2_811 * 7 * 86_400);

/// One key's life under one limit.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// The table it stands in.
    pub file: String,
    /// The line of its `limit`, counted from 1.
    pub line: usize,
    /// The limit; the key is fresh.
    pub limit: Limit,
    /// What happens to the key, in this order.
    pub steps: Vec<Step>,
}

/// One line of a life.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The line, counted from 1.
    pub line: usize,
    /// When, since 1970.
    pub at: Micros,
    /// What is done.
    pub op: Op,
    /// What is answered.
    pub expect: Expect,
}

/// What a line does. An id is any word; it means something within its case only.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// `take N`: a charge.
    Take(Cost),
    /// `peek N`: the answer of a charge, without one.
    Peek(Cost),
    /// `reserve N as ID`: a charge that will be settled.
    Reserve {
        /// What `settle` and `cancel` call it.
        id: String,
        /// The estimate.
        cost: Cost,
    },
    /// `settle ID N`: what the reservation truly cost.
    Settle {
        /// The reservation.
        id: String,
        /// The true cost.
        actual: u64,
    },
    /// `cancel ID`: settle at nothing.
    Cancel {
        /// The reservation.
        id: String,
    },
    /// `refund N`: give back what counts now, the newest first.
    Refund(Cost),
    /// `reset`: forget the key.
    Reset,
    /// `hold ID N`: take a lease (concurrency only).
    Hold {
        /// The holder.
        id: String,
        /// How much it holds.
        cost: Cost,
    },
    /// `release ID`: end a lease (concurrency only).
    Release {
        /// The holder.
        id: String,
    },
    /// `renew ID`: extend a lease (concurrency only).
    Renew {
        /// The holder.
        id: String,
    },
}

/// What a line expects; what it does not name may be anything.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Expect {
    /// `allow` or `deny`: always there for take, peek, reserve and hold, and only for them.
    pub allowed: Option<bool>,
    /// `remaining N`.
    pub remaining: Option<u64>,
    /// `retry TIME`, or `retry never` as `Some(None)`.
    pub retry: Option<Option<Micros>>,
    /// `reset TIME`.
    pub reset: Option<Micros>,
    /// `delay TIME`.
    pub delay: Option<Micros>,
    /// `done`, or `gone` where there was nothing (any more) to settle, cancel, release or renew: always there for those
    /// four, and only for them.
    pub done: Option<bool>,
}

impl Expect {
    /// What in an outcome is not as expected, in words; `None` when all is.
    pub fn mismatch(&self, outcome: &Outcome) -> Option<String> {
        let retry = |retry: Option<Micros>| retry.map_or("never".to_owned(), |wait| wait.to_string());
        let word = |allowed: bool| if allowed { "allow" } else { "deny" }.to_owned();
        let fields = [
            ("", self.allowed.map(word), word(outcome.allowed)),
            ("remaining ", self.remaining.map(|n| n.to_string()), outcome.remaining.to_string()),
            ("retry ", self.retry.map(retry), retry(outcome.retry_after)),
            ("reset ", self.reset.map(|t| t.to_string()), outcome.reset_after.to_string()),
            ("delay ", self.delay.map(|t| t.to_string()), outcome.delay.to_string()),
        ];
        let wrong = fields.into_iter().filter_map(|(field, expected, got)| {
            expected
                .filter(|expected| *expected != got)
                .map(|expected| format!("{field}{expected}, not {got}"))
        });
        let wrong: Vec<String> = wrong.collect();
        (!wrong.is_empty()).then(|| format!("expected {}", wrong.join("; ")))
    }
}

/// Reads the table `text`. The error names `file`, the line and what is wrong with it.
pub fn parse(file: &str, text: &str) -> Result<Vec<Case>, String> {
    let mut cases: Vec<Case> = Vec::new();
    for (line, content) in (1..).zip(text.lines()) {
        let fail = |wrong: String| format!("{file}:{line}: {wrong}");
        let content = content.split_once('#').map_or(content, |(before, _comment)| before);
        let mut words = Words(content.split_whitespace());
        match words.0.next() {
            None => {}
            Some("limit") => {
                let limit = limit(&mut words).map_err(fail)?;
                cases.push(Case { file: file.to_owned(), line, limit, steps: Vec::new() });
            }
            Some("at") => {
                let case =
                    cases.last_mut().ok_or_else(|| fail("there is no `limit` above this line".into()))?;
                let step = step(&mut words, line, &case.limit).map_err(fail)?;
                case.steps.push(step);
            }
            Some(other) => return Err(fail(format!("a line begins with `limit` or `at`, not `{other}`"))),
        }
    }
    match cases.iter().find(|case| case.steps.is_empty()) {
        Some(empty) => Err(format!("{file}:{}: this limit has no `at` lines", empty.line)),
        None if cases.is_empty() => Err(format!("{file}: the table has no `limit` line")),
        None => Ok(cases),
    }
}

/// The words of one line, first to last.
struct Words<'a>(SplitWhitespace<'a>);

impl<'a> Words<'a> {
    /// The next word, which must be there.
    fn word(&mut self, what: &str) -> Result<&'a str, String> {
        self.0.next().ok_or_else(|| format!("the line ends where {what} should be"))
    }

    /// The word `expected` and nothing else.
    fn literal(&mut self, expected: &str) -> Result<(), String> {
        match self.word(&format!("`{expected}`"))? {
            word if word == expected => Ok(()),
            word => Err(format!("expected `{expected}`, not `{word}`")),
        }
    }

    /// A whole number; `_` may part its digits.
    fn number(&mut self, what: &str) -> Result<u64, String> {
        let word = self.word(what)?;
        word.replace('_', "").parse().map_err(|_| format!("expected {what}, a whole number, not `{word}`"))
    }

    fn cost(&mut self) -> Result<Cost, String> {
        Cost::new(self.number("a cost")?).ok_or_else(|| "a cost is at least 1".into())
    }

    fn time(&mut self, what: &str) -> Result<Micros, String> {
        let word = self.word(what)?;
        word.parse().map_err(|error| format!("expected {what}, not `{word}`: {error}"))
    }

    fn id(&mut self) -> Result<String, String> {
        self.word("an id").map(str::to_owned)
    }

    /// `name RATE`.
    fn rate(&mut self) -> Result<Rate, String> {
        self.literal("rate")?;
        let word = self.word("a rate")?;
        word.parse().map_err(|error| format!("expected a rate, not `{word}`: {error}"))
    }

    /// `name N`.
    fn count_of(&mut self, name: &str) -> Result<u64, String> {
        self.literal(name)?;
        self.number(name)
    }

    /// `name TIME`.
    fn time_of(&mut self, name: &str) -> Result<Micros, String> {
        self.literal(name)?;
        self.time(name)
    }

    /// Nothing more on this line.
    fn end(&mut self) -> Result<(), String> {
        self.0.next().map_or(Ok(()), |word| Err(format!("`{word}` is one word too many")))
    }
}

/// What follows `limit`: a strategy and its fields, in the order of the configuration's documentation.
fn limit(words: &mut Words<'_>) -> Result<Limit, String> {
    let strategy = words.word("a strategy")?;
    let limit = match strategy {
        "token_bucket" => Limit::token_bucket(words.rate()?, words.count_of("burst")?),
        "leaky_bucket" => Limit::leaky_bucket(words.rate()?, words.count_of("capacity")?),
        "fixed_window" => {
            let (limit, window) = (words.count_of("limit")?, words.time_of("window")?);
            words.literal("align")?;
            match words.word("`first` or `clock`")? {
                "first" => Limit::fixed_window(limit, window),
                "clock" => Limit::clock_window(limit, window),
                word => return Err(format!("windows align to `first` or `clock`, not `{word}`")),
            }
        }
        "sliding_window" => Limit::sliding_window(words.count_of("limit")?, words.time_of("window")?),
        "sliding_window_counter" => {
            Limit::sliding_window_counter(words.count_of("limit")?, words.time_of("window")?)
        }
        "concurrency" => Limit::concurrency(words.count_of("limit")?, words.time_of("lease")?),
        other => return Err(format!("there is no strategy `{other}`")),
    };
    words.end()?;
    limit.map_err(|error| error.to_string())
}

/// What follows `at`: a time, what is done and what is answered.
fn step(words: &mut Words<'_>, line: usize, limit: &Limit) -> Result<Step, String> {
    let at = ORIGIN.saturating_add(words.time("a time")?);
    let name = words.word("what is done")?;
    let op = match name {
        "take" => Op::Take(words.cost()?),
        "peek" => Op::Peek(words.cost()?),
        "reserve" => {
            let cost = words.cost()?;
            words.literal("as")?;
            Op::Reserve { id: words.id()?, cost }
        }
        "settle" => Op::Settle { id: words.id()?, actual: words.number("the true cost")? },
        "cancel" => Op::Cancel { id: words.id()? },
        "refund" => Op::Refund(words.cost()?),
        "reset" => Op::Reset,
        "hold" => Op::Hold { id: words.id()?, cost: words.cost()? },
        "release" => Op::Release { id: words.id()? },
        "renew" => Op::Renew { id: words.id()? },
        other => return Err(format!("nothing is called `{other}`")),
    };
    if matches!(op, Op::Hold { .. } | Op::Release { .. } | Op::Renew { .. })
        && !matches!(limit, Limit::Concurrency(_))
    {
        return Err(format!("`{name}` needs a concurrency limit"));
    }
    let expect = match op {
        Op::Refund(_) | Op::Reset => Expect::default(),
        Op::Settle { .. } | Op::Cancel { .. } | Op::Release { .. } | Op::Renew { .. } => {
            let done = either(words, "done", "gone")?;
            Expect { done: Some(done), ..Expect::default() }
        }
        Op::Take(_) | Op::Peek(_) | Op::Reserve { .. } | Op::Hold { .. } => outcome(words)?,
    };
    words.end()?;
    Ok(Step { line, at, op, expect })
}

/// One of two words, as whether it was the first.
fn either(words: &mut Words<'_>, yes: &str, no: &str) -> Result<bool, String> {
    match words.word(&format!("`{yes}` or `{no}`"))? {
        word if word == yes => Ok(true),
        word if word == no => Ok(false),
        word => Err(format!("expected `{yes}` or `{no}`, not `{word}`")),
    }
}

/// The answer to a charge: `allow` or `deny`, then fields, each at most once.
fn outcome(words: &mut Words<'_>) -> Result<Expect, String> {
    let mut expect = Expect { allowed: Some(either(words, "allow", "deny")?), ..Expect::default() };
    while let Some(field) = words.0.next() {
        let repeated = match field {
            "remaining" => expect.remaining.replace(words.number(field)?).is_some(),
            "reset" => expect.reset.replace(words.time(field)?).is_some(),
            "delay" => expect.delay.replace(words.time(field)?).is_some(),
            "retry" => {
                let never = words.0.clone().next() == Some("never");
                let retry =
                    if never { words.literal("never").map(|()| None)? } else { Some(words.time(field)?) };
                expect.retry.replace(retry).is_some()
            }
            other => return Err(format!("an answer has no `{other}`")),
        };
        if repeated {
            return Err(format!("`{field}` is there twice"));
        }
    }
    Ok(expect)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(units: u64) -> Cost {
        Cost::new(units).unwrap()
    }

    #[test]
    fn a_table_is_read_as_written() {
        let table = "
            # Everything a line can say.
            limit token_bucket rate 5/s burst 1_000
            at 0ms     take 5             allow  remaining 0  reset 1s  # a comment
            at 1s1us   peek 1             deny   retry 200ms
            at 1s      reserve 6 as a     deny   retry never  delay 0s
            at 1s      settle a 7         done
            at 1s      cancel a           gone
            at 2s      reset

            limit concurrency limit 2 lease 30s
            at 0s      hold a 1           allow
            at 1s      release a          done
            at 1s      renew a            gone
            at 1s      refund 2
        ";
        let cases = parse("some.cases", table).unwrap();
        assert_eq!(cases.iter().map(|case| case.line).collect::<Vec<_>>(), [3, 11]);
        assert_eq!(cases[0].file, "some.cases");
        assert_eq!(cases[0].limit.to_string(), "5/s, bursts of 1000");
        let at = |us: u64| ORIGIN.saturating_add(Micros::new(us));
        let answer = |allowed| Expect { allowed: Some(allowed), ..Expect::default() };
        let receipt = |done| Expect { done: Some(done), ..Expect::default() };
        let (a, second) = (|| "a".to_owned(), Micros::from_secs(1));
        let steps = [
            (4, 0, Op::Take(cost(5)), Expect { remaining: Some(0), reset: Some(second), ..answer(true) }),
            (
                5,
                1_000_001,
                Op::Peek(Cost::ONE),
                Expect { retry: Some(Some(Micros::from_millis(200))), ..answer(false) },
            ),
            (
                6,
                1_000_000,
                Op::Reserve { id: a(), cost: cost(6) },
                Expect { retry: Some(None), delay: Some(Micros::ZERO), ..answer(false) },
            ),
            (7, 1_000_000, Op::Settle { id: a(), actual: 7 }, receipt(true)),
            (8, 1_000_000, Op::Cancel { id: a() }, receipt(false)),
            (9, 2_000_000, Op::Reset, Expect::default()),
        ];
        let steps = steps.map(|(line, us, op, expect)| Step { line, at: at(us), op, expect });
        assert_eq!(cases[0].steps, steps);
        let leases = [
            (12, 0, Op::Hold { id: a(), cost: Cost::ONE }, answer(true)),
            (13, 1_000_000, Op::Release { id: a() }, receipt(true)),
            (14, 1_000_000, Op::Renew { id: a() }, receipt(false)),
            (15, 1_000_000, Op::Refund(cost(2)), Expect::default()),
        ];
        let leases = leases.map(|(line, us, op, expect)| Step { line, at: at(us), op, expect });
        assert_eq!(cases[1].steps, leases);
    }

    #[test]
    fn every_strategy_has_a_limit_line() {
        for (line, words) in [
            ("token_bucket rate 10/s burst 20", "10/s, bursts of 20"),
            ("leaky_bucket rate 10/s capacity 20", "10/s evenly, up to 20 waiting"),
            ("fixed_window limit 5 window 1m align first", "5 per 1m window"),
            ("fixed_window limit 5 window 1m align clock", "5 per 1m window of the clock"),
            ("sliding_window limit 5 window 1m", "5 in any 1m"),
            ("sliding_window_counter limit 5 window 1m", "about 5 in any 1m"),
            ("concurrency limit 5 lease 1m", "5 at once, leases of 1m"),
        ] {
            let cases = parse("x", &format!("limit {line}\nat 0s peek 1 allow")).unwrap();
            assert_eq!(cases[0].limit.to_string(), words);
        }
    }

    #[test]
    fn what_cannot_be_read_is_refused_by_line() {
        let bucket = "limit token_bucket rate 5/s burst 5";
        for (table, error) in [
            ("", "x: the table has no `limit` line"),
            ("# nothing", "x: the table has no `limit` line"),
            (bucket, "x:1: this limit has no `at` lines"),
            ("at 0s take 1 allow", "x:1: there is no `limit` above this line"),
            ("limits", "x:1: a line begins with `limit` or `at`, not `limits`"),
            ("limit", "x:1: the line ends where a strategy should be"),
            ("limit gcra", "x:1: there is no strategy `gcra`"),
            ("limit token_bucket burst 5", "x:1: expected `rate`, not `burst`"),
            ("limit token_bucket rate 5", "x:1: expected a rate, not `5`: rate = "),
            ("limit token_bucket rate 5/s burst", "x:1: the line ends where burst should be"),
            ("limit token_bucket rate 5/s burst x", "x:1: expected burst, a whole number, not `x`"),
            ("limit token_bucket rate 5/s burst 0", "x:1: burst = 0: must be at least 1"),
            ("limit token_bucket rate 5/s burst 5 5", "x:1: `5` is one word too many"),
            (
                "limit fixed_window limit 5 window 1m align day",
                "x:1: windows align to `first` or `clock`, not `day`",
            ),
            ("limit sliding_window limit 5 window 1", "x:1: expected window, not `1`: duration = "),
            ("\n+\nat soon take 1 allow", "x:3: expected a time, not `soon`: duration = "),
            ("\n+\nat 0s", "x:3: the line ends where what is done should be"),
            ("\n+\nat 0s steal 1", "x:3: nothing is called `steal`"),
            ("\n+\nat 0s take 0 allow", "x:3: a cost is at least 1"),
            ("\n+\nat 0s take 1", "x:3: the line ends where `allow` or `deny` should be"),
            ("\n+\nat 0s take 1 perhaps", "x:3: expected `allow` or `deny`, not `perhaps`"),
            ("\n+\nat 0s take 1 allow left 5", "x:3: an answer has no `left`"),
            ("\n+\nat 0s take 1 allow reset 1s reset 1s", "x:3: `reset` is there twice"),
            ("\n+\nat 0s take 1 deny retry", "x:3: the line ends where retry should be"),
            ("\n+\nat 0s reserve 1 a allow", "x:3: expected `as`, not `a`"),
            ("\n+\nat 0s reserve 1 as", "x:3: the line ends where an id should be"),
            ("\n+\nat 0s settle a 1 allow", "x:3: expected `done` or `gone`, not `allow`"),
            ("\n+\nat 0s reset done", "x:3: `done` is one word too many"),
            ("\n+\nat 0s refund", "x:3: the line ends where a cost should be"),
            ("\n+\nat 0s refund 1 done", "x:3: `done` is one word too many"),
            ("\n+\nat 0s hold a 1 allow", "x:3: `hold` needs a concurrency limit"),
        ] {
            let refused = parse("x", &table.replace('+', bucket)).unwrap_err();
            assert!(refused.starts_with(error), "{table:?}: {refused}");
        }
    }

    #[test]
    fn a_mismatch_names_each_wrong_field() {
        let outcome = Outcome { capacity: 5, remaining: 2, ..Outcome::BLOCKED };
        let second = Some(Micros::from_secs(1));
        let right = Expect { allowed: Some(false), retry: Some(None), ..Expect::default() };
        assert_eq!(right.mismatch(&outcome), None);
        let wrong = Expect { remaining: Some(3), retry: Some(second), reset: second, ..Expect::default() };
        assert_eq!(
            wrong.mismatch(&outcome).unwrap(),
            "expected remaining 3, not 2; retry 1s, not never; reset 1s, not 0s"
        );
        let wrong = Expect { allowed: Some(true), delay: second, ..Expect::default() };
        assert_eq!(wrong.mismatch(&outcome).unwrap(), "expected allow, not deny; delay 1s, not 0s");
    }
}
