//! The texts that are sent to the server, and nothing that callers send: values travel as parameters.

use tollgate_kernel::{SQL, Strategy};

/// What a connection has prepared: one statement of each, made when first needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Verb {
    /// One statement for one key, or for many, under a strategy that keeps its state in one row.
    Upsert(Plain, Keys),
    Charge,
    Settle,
    Peek,
    Refund,
    Forget,
    /// Which of some keys are known.
    Known,
}

/// A strategy that keeps all its state in one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Plain {
    TokenBucket,
    LeakyBucket,
    FixedWindow,
    SlidingWindowCounter,
}

/// How many keys a statement takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Keys {
    One,
    Many,
}

impl Plain {
    /// The strategy, if one row keeps all its state.
    pub(super) fn of(strategy: Strategy) -> Option<Plain> {
        match strategy {
            Strategy::TokenBucket => Some(Plain::TokenBucket),
            Strategy::LeakyBucket => Some(Plain::LeakyBucket),
            Strategy::FixedWindow => Some(Plain::FixedWindow),
            Strategy::SlidingWindowCounter => Some(Plain::SlidingWindowCounter),
            Strategy::SlidingWindow | Strategy::Concurrency => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Plain::TokenBucket => Strategy::TokenBucket.name(),
            Plain::LeakyBucket => Strategy::LeakyBucket.name(),
            Plain::FixedWindow => Strategy::FixedWindow.name(),
            Plain::SlidingWindowCounter => Strategy::SlidingWindowCounter.name(),
        }
    }
}

impl Verb {
    /// What is being done, for messages.
    pub(super) fn doing(self) -> &'static str {
        match self {
            Verb::Upsert(..) | Verb::Charge => "charging",
            Verb::Settle => "settling",
            Verb::Peek | Verb::Known => "peeking",
            Verb::Refund => "refunding",
            Verb::Forget => "forgetting",
        }
    }

    /// Whether it changes something; the last parameter is then the instant after which it may not.
    pub(super) fn is_change(self) -> bool {
        !matches!(self, Verb::Peek | Verb::Known)
    }

    /// The statement, for tables of a prefix.
    pub(super) fn text(self, prefix: &str) -> String {
        let text = match self {
            Verb::Upsert(strategy, keys) => {
                let text = match strategy {
                    Plain::TokenBucket | Plain::LeakyBucket => include_str!("upsert/bucket.sql"),
                    Plain::FixedWindow => include_str!("upsert/fixed_window.sql"),
                    Plain::SlidingWindowCounter => include_str!("upsert/sliding_window_counter.sql"),
                };
                let charged = match keys {
                    Keys::One => "(select $1::uuid as key) as charged",
                    Keys::Many => "unnest($1::uuid[]) as charged (key)",
                };
                text.replace("{strategy}", strategy.name()).replace("{charged}", charged)
            }
            Verb::Charge => {
                "select * from {prefix}charge($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)".into()
            }
            Verb::Settle => "select * from {prefix}settle($1, $2, $3, $4, $5, $6, $7)".into(),
            Verb::Peek => "select * from {prefix}peek($1, $2, $3, $4, $5, $6)".into(),
            Verb::Refund => "select * from {prefix}refund($1, $2, $3, $4, $5, $6)".into(),
            Verb::Known => "select s.key from {prefix}state as s where s.key = any ($1::uuid[])".into(),
            Verb::Forget => "select * from {prefix}forget($1, $2)".into(),
        };
        with_prefix(&text, prefix)
    }
}

/// The tables, one text for each version, the first first.
pub(super) const MIGRATIONS: [&str; 3] =
    [include_str!("migrations/1.sql"), include_str!("migrations/2.sql"), include_str!("migrations/3.sql")];

/// All functions, in an order in which each finds what it calls.
pub(super) fn functions(prefix: &str) -> String {
    let twins = SQL.iter().map(|(_, text)| *text);
    let own = [
        include_str!("entries.sql"),
        include_str!("charge.sql"),
        include_str!("settle.sql"),
        include_str!("refund.sql"),
        include_str!("cleanup.sql"),
    ];
    with_prefix(&twins.chain(own).collect::<Vec<_>>().join("\n"), prefix)
}

/// A text for tables of a prefix. The prefix has been checked to be harmless.
pub(super) fn with_prefix(text: &str, prefix: &str) -> String {
    text.replace("{prefix}", prefix)
}
