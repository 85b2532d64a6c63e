//! Counters in Redis: one server or a cluster, one script for each decision.
//!
//! The walk: a charge becomes parts (`shared.rs`), parts become the arguments of a script (`question.rs`), the script is called
//! on the server that has the slot (`route.rs`, `node.rs`), and what its twins found goes back to the kernel, which answers. On
//! a cluster a charge may be spread over several slots (`spread.rs`). No arithmetic of limits happens in this folder.
//!
//! Every call has a deadline, kept here and carried into the script. Whatever goes wrong, it returns by then, with what is
//! known: that nothing was done, or that it may have been (`failure.rs`).

mod batch;
mod failure;
mod node;
mod options;
mod ping;
mod probe;
mod question;
mod route;
mod script;
mod slot;
mod spread;
mod watch;

use std::sync::Arc;

use redis::{Cmd, Value};
use tokio::time::Instant;

pub use self::options::RedisOptions;
pub use self::probe::RedisReport;
use self::question::Short;
use self::route::{Named, Route};
use self::script::Script;
use self::slot::{Names, slot};
use crate::shared::shares::Shares;
use crate::shared::together::{self, Queue};
use crate::shared::{Part, Parts};
use crate::{
    Charged, Hold, HoldId, Item, NodeId, Nodes, Settled, Settlement, Store, StoreError, StoreFuture,
    StoreTask, StoredLimit,
};
use tollgate_kernel::{MAX_COUNT, MAX_SPAN};

/// Counters in Redis. Cheap to clone; clones share their connections.
///
/// Making one asks nothing of a server: the first call connects. Use it within a tokio runtime.
///
/// ```no_run
/// use tollgate_store::{RedisOptions, RedisStore};
///
/// # async fn run() -> Result<(), tollgate_store::StoreError> {
/// let store = RedisStore::new(RedisOptions::new("redis://127.0.0.1:6379"))?;
/// for warning in store.probe().await?.warnings {
///     eprintln!("{warning}");
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct RedisStore {
    route: Arc<Route>,
    names: Names,
    queue: Arc<Queue<RedisStore>>,
    shares: Arc<Shares>,
}

impl RedisStore {
    /// A store that goes by these options, or what is wrong with them.
    pub fn new(options: RedisOptions) -> Result<RedisStore, StoreError> {
        let names = Names::new(&options.prefix);
        let shares = Shares::new(batch::CAPS);
        Ok(RedisStore { route: Route::new(options)?, names, queue: Arc::default(), shares })
    }

    /// What the names of all our keys begin with.
    pub fn prefix(&self) -> &str {
        &self.route.options().prefix
    }

    /// How often what was counted may have been lost, as far as it was noticed: a server was started anew, was flushed, evicted
    /// keys or took over older data, or another one took slots over. Servers are looked at about once a second while there is
    /// traffic. After f losses a limit may have admitted f + 1 times as much.
    pub fn losses_possible(&self) -> u64 {
        self.route.losses()
    }

    /// Whether all servers have room for keys that they do not know yet: each uses at most 80 % of its `maxmemory` and has fewer
    /// than [`RedisOptions::max_keys`] keys, as far as that was seen in the last second of traffic.
    pub fn takes_new_keys(&self) -> bool {
        self.route.known_nodes().iter().all(|node| node.takes_new_keys())
    }

    /// What the script for the everyday charge is to do. Where the servers are nearly full, it begins no key under numbers that
    /// come with the call: those keys may be made up, and their room is for the keys of others.
    fn operation(&self, short: &Short) -> &'static str {
        if short.keeps_instant() && !self.takes_new_keys() { "each-known" } else { short.operation() }
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.route.options().timeout
    }

    /// Calls a script on the server that has the slot of the first key. `put` adds what follows the operation.
    async fn call(
        &self,
        script: &'static Script,
        operation: &'static str,
        keys: &[String],
        named: Named,
        deadline: Instant,
        put: &(dyn Fn(&mut Cmd) + Send + Sync),
    ) -> Result<Value, StoreError> {
        let build = |not_after: &str| {
            let mut cmd = redis::cmd("EVALSHA");
            cmd.arg(&script.hash).arg(keys.len()).arg(keys).arg(not_after).arg(operation);
            put(&mut cmd);
            cmd
        };
        let slot = keys.first().map_or(0, |key| slot(key));
        self.route.call(slot, named, deadline, &build).await
    }

    /// The short way: a single bucket whose state is whole microseconds, or many that are each charged for themselves and alike.
    async fn charge_short(&self, parts: &Parts<'_>) -> Option<Result<Charged, StoreError>> {
        let (first, others) = parts.parts.split_first()?;
        let clock = self.route.options().clock.as_ref();
        let short = Short::of(first, clock)?;
        let is_alike = |part: &Part<'_>| part.shadow && Short::of(part, clock).as_ref() == Some(&short);
        if !(others.is_empty() || first.shadow && others.iter().all(is_alike)) {
            return None;
        }
        let keys: Vec<String> = parts.parts.iter().map(|part| self.names.part(part)).collect();
        let is_cluster = self.route.is_cluster();
        if is_cluster && keys.iter().any(|key| slot(key) != slot(&keys[0])) {
            return None;
        }
        let deadline = self.deadline();
        let found = match <[String; 1]>::try_from(keys) {
            Ok([key]) if !is_cluster => {
                let check = self.check(first, short, key);
                together::charge(self, check, deadline).await.map(|found| vec![found])
            }
            Ok(keys) => self.charge_each(&parts.parts, &keys, &short, deadline).await,
            Err(keys) => self.charge_each(&parts.parts, &keys, &short, deadline).await,
        };
        Some(found.and_then(|found| {
            let read: Vec<_> = found.iter().map(|found| Short::read(*found)).collect();
            let outcomes = parts.outcomes(read.iter().map(|(reading, _)| *reading), Default::default());
            // What is charged for itself is also checked for itself.
            match outcomes.iter().zip(&read).find(|(outcome, (_, charged))| outcome.allowed != *charged) {
                Some((_, (_, charged))) => Err(parts.disagreement(*charged)),
                None => {
                    let passes = |(part, (_, charged)): (&Part<'_>, &(_, bool))| part.shadow || *charged;
                    parts.conclude(&outcomes, parts.parts.iter().zip(&read).all(passes))
                }
            }
        }))
    }

    /// Keys that are each charged for themselves and alike, in one call.
    async fn charge_each(
        &self,
        parts: &[Part<'_>],
        keys: &[String],
        short: &Short,
        deadline: Instant,
    ) -> Result<Vec<i64>, StoreError> {
        let _share = self.share(parts, deadline).await?;
        let put = |cmd: &mut Cmd| short.put(cmd);
        let answer =
            self.call(&script::BUCKETS, self.operation(short), keys, Named::No, deadline, &put).await?;
        let found = batch::read_each(&answer, keys.len()).ok_or_else(|| question::no_answer("a charge"))?;
        // The others are charged for themselves all the same.
        let is_charged = found.iter().flatten().any(|found| *found >= 0);
        let all = found.into_iter().collect::<Result<Vec<i64>, _>>();
        all.map_err(|unkept| if is_charged { unkept.error().ambiguous() } else { unkept.error() })
    }

    /// Parts that are on one server: one script.
    async fn charge_together(
        &self,
        parts: &[Part<'_>],
        operation: &'static str,
        hold: Option<(&str, Hold, &str)>,
        deadline: Instant,
    ) -> Result<Answer, StoreError> {
        let mut keys: Vec<String> = parts.iter().map(|part| self.names.part(part)).collect();
        let put = |cmd: &mut Cmd| {
            parts.iter().for_each(|part| question::put_part(cmd, part));
            if let Some((_, hold, question)) = hold {
                cmd.arg(hold.id.to_string()).arg(hold.ttl.min(MAX_SPAN).get()).arg(question);
            }
        };
        let named = match hold {
            Some((key, ..)) => {
                keys.push(key.to_owned());
                Named::Yes
            }
            None => Named::No,
        };
        let script = script::charging(parts.iter().map(|part| part.limit.limit.strategy()));
        let answer = self.call(script, operation, &keys, named, deadline, &put).await?;
        if let Some(held) = Held::read(&answer) {
            return Ok(Answer::Held(held));
        }
        question::read_found(&answer, parts).map(Answer::Found).ok_or_else(|| question::no_answer("a charge"))
    }

    async fn charge_all(&self, items: &[Item<'_>], hold: Option<Hold>) -> Result<Charged, StoreError> {
        let parts = Parts::of(items);
        if hold.is_none()
            && let Some(charged) = self.charge_short(&parts).await
        {
            return charged;
        }
        let deadline = self.deadline();
        let _share = self.share(&parts.parts, deadline).await?;
        if self.route.is_cluster() {
            return self.charge_spread(items, &parts, hold, deadline).await;
        }
        let answer = match hold {
            None => self.charge_together(&parts.parts, "charge", None, deadline).await?,
            Some(hold) => {
                let (key, question) = (self.names.hold(hold.id), question::write(items));
                self.charge_together(&parts.parts, "hold", Some((&key, hold, &question)), deadline).await?
            }
        };
        match answer {
            Answer::Found(found) => parts.conclude(&question::outcomes(&parts, &found), found.passed),
            Answer::Held(held) => held.answer(),
        }
    }

    async fn peek_all(&self, items: &[Item<'_>]) -> Result<Charged, StoreError> {
        let parts = Parts::of(items);
        let deadline = self.deadline();
        let _share = self.share(&parts.parts, deadline).await?;
        if self.route.is_cluster() {
            return self.peek_spread(&parts, deadline).await;
        }
        match self.charge_together(&parts.parts, "peek", None, deadline).await? {
            Answer::Found(found) => parts.conclude(&question::outcomes(&parts, &found), found.passed),
            Answer::Held(..) => Err(question::no_answer("a peek")),
        }
    }

    /// Settles what is held under `keys[0]`; on a cluster the keys of its parts follow.
    async fn settle_at(
        &self,
        keys: &[String],
        settlement: &Settlement,
        deadline: Instant,
    ) -> Result<Settled, StoreError> {
        let operation = match settlement {
            Settlement::Actual(_) => "actual",
            Settlement::Each(_) => "each",
            Settlement::Cancel => "cancel",
            Settlement::Renew => "renew",
        };
        let put = |cmd: &mut Cmd| match settlement {
            Settlement::Actual(actual) => {
                cmd.arg((*actual).min(MAX_COUNT));
            }
            Settlement::Each(actuals) => {
                for (name, actual) in actuals {
                    cmd.arg(name).arg((*actual).min(MAX_COUNT));
                }
            }
            Settlement::Cancel | Settlement::Renew => {}
        };
        let answer = self.call(&script::SETTLE, operation, keys, Named::Yes, deadline, &put).await?;
        let words = words(&answer).ok_or_else(|| question::no_answer("a settlement"))?;
        match &words[..] {
            [word] if word == "DONE" => Ok(Settled::Done),
            [word] if word == "ALREADY" => Ok(Settled::Already),
            [word] if word == "UNKNOWN" => Ok(Settled::Unknown),
            [word, reserved @ ..] if word == "DIFFERENT" => Err(different_amounts(reserved)),
            [word, name, names @ ..] if word == "NAMES" => Err(no_such_limit(name, names)),
            _ => Err(question::no_answer("a settlement")),
        }
    }

    async fn settle_one(&self, id: HoldId, settlement: &Settlement) -> Result<Settled, StoreError> {
        let deadline = self.deadline();
        let _share = self.settlement_share(id, deadline).await?;
        if self.route.is_cluster() {
            return self.settle_spread(id, settlement, deadline).await;
        }
        self.settle_at(&[self.names.hold(id)], settlement, deadline).await
    }

    async fn refund_all(&self, items: &[Item<'_>]) -> Result<(), StoreError> {
        let parts = Parts::to_refund(items);
        let deadline = self.deadline();
        let _share = self.share(&parts.parts, deadline).await?;
        match parts.parts.is_empty() {
            true => Ok(()),
            false if self.route.is_cluster() => self.refund_spread(&parts, deadline).await,
            false => self.refund_together(&parts.parts, deadline).await,
        }
    }

    /// Parts that are on one server: one script. Without a name, so that it is never sent again if it may have been done.
    async fn refund_together(&self, parts: &[Part<'_>], deadline: Instant) -> Result<(), StoreError> {
        let keys: Vec<String> = parts.iter().map(|part| self.names.part(part)).collect();
        let put = |cmd: &mut Cmd| parts.iter().for_each(|part| question::put_refund(cmd, part));
        let answer = self.call(&script::REFUND, "refund", &keys, Named::No, deadline, &put).await?;
        match words(&answer).as_deref() {
            Some([word]) if word == "DONE" => Ok(()),
            _ => Err(question::no_answer("a refund")),
        }
    }

    async fn forget_one(&self, limit: &StoredLimit, key: &str) -> Result<bool, StoreError> {
        let part = Part { limit, key, cost: crate::Cost::ONE, shadow: false };
        let (keys, deadline) = ([self.names.part(&part)], self.deadline());
        let _share = self.share(&[part], deadline).await?;
        let answer =
            self.call(&script::SETTLE, "forget", &keys, Named::Yes, deadline, &|_: &mut Cmd| {}).await?;
        match answer {
            Value::Int(forgotten) => Ok(forgotten > 0),
            _ => Err(question::no_answer("a reset")),
        }
    }
}

/// What the charging script says.
#[expect(
    clippy::large_enum_variant,
    reason = "it lives for a moment, and a box would be an allocation for every charge"
)]
enum Answer {
    Found(question::Found),
    /// The charge was made before.
    Held(Held),
}

/// A held charge that was made before: the question that it was made with, and what was found then.
struct Held {
    question: String,
    given: Value,
    is_old: bool,
}

impl Held {
    fn read(answer: &Value) -> Option<Held> {
        let Value::Array(words) = answer else { return None };
        let [Value::BulkString(word), Value::BulkString(question), given] = &words[..] else { return None };
        let is_old = match &word[..] {
            b"HELD" => false,
            b"HELD1" => true,
            _ => return None,
        };
        Some(Held { question: String::from_utf8(question.clone()).ok()?, given: given.clone(), is_old })
    }

    fn found(&self, parts: &[Part<'_>]) -> Option<question::Found> {
        question::read_kept(&self.given, self.is_old, parts)
    }

    /// The answer that was given when the charge was made.
    fn answer(&self) -> Result<Charged, StoreError> {
        let wrong = || question::no_answer("a hold");
        let asked = question::Asked::read(&self.question).ok_or_else(wrong)?;
        let items = asked.items();
        let parts = Parts::of(&items);
        let found = self.found(&parts.parts).ok_or_else(wrong)?;
        parts.conclude(&question::outcomes(&parts, &found), found.passed)
    }
}

/// The texts of an answer that is a list of them.
fn words(answer: &Value) -> Option<Vec<String>> {
    let Value::Array(words) = answer else { return None };
    let word = |word: &Value| match word {
        Value::BulkString(bytes) => String::from_utf8(bytes.clone()).ok(),
        _ => None,
    };
    words.iter().map(word).collect()
}

fn different_amounts(reserved: &[String]) -> StoreError {
    StoreError::invalid(format!(
        "one actual amount cannot settle limits that reserved different amounts ({}); give one for each limit",
        reserved.join(", ")
    ))
}

fn no_such_limit(name: &str, names: &[String]) -> StoreError {
    let names = names.join(", ");
    StoreError::invalid(format!("this reservation holds nothing under the limit `{name}`; it holds {names}"))
}

impl Store for RedisStore {
    fn charge<'a>(&'a self, items: &'a [Item<'a>], hold: Option<Hold>) -> StoreFuture<'a, Charged> {
        Box::pin(self.charge_all(items, hold))
    }

    fn settle<'a>(&'a self, id: HoldId, settlement: &'a Settlement) -> StoreFuture<'a, Settled> {
        Box::pin(self.settle_one(id, settlement))
    }

    fn peek<'a>(&'a self, items: &'a [Item<'a>]) -> StoreFuture<'a, Charged> {
        Box::pin(self.peek_all(items))
    }

    fn refund<'a>(&'a self, items: &'a [Item<'a>]) -> StoreFuture<'a, ()> {
        Box::pin(self.refund_all(items))
    }

    fn forget<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, bool> {
        Box::pin(self.forget_one(limit, key))
    }

    fn mode(&self) -> &'static str {
        "redis"
    }

    fn node_of(&self, item: &Item<'_>) -> NodeId {
        if !self.route.is_cluster() {
            return NodeId::ONLY;
        }
        let Item { limit, key, cost, shadow } = *item;
        self.route.node_of(slot(&self.names.part(&Part { limit, key, cost, shadow })))
    }

    fn node_of_hold(&self, id: HoldId) -> NodeId {
        match self.route.is_cluster() {
            true => self.route.node_of(slot(&self.names.place(id))),
            false => NodeId::ONLY,
        }
    }

    fn nodes(&self) -> Nodes {
        self.route.node_ids()
    }

    fn ping(&self, node: NodeId) -> StoreFuture<'_, ()> {
        Box::pin(self.ping_node(node))
    }

    fn spawn(&self, task: StoreTask) -> Option<StoreTask> {
        crate::spawn_on_tokio(task)
    }

    fn losses_possible(&self) -> u64 {
        RedisStore::losses_possible(self)
    }
}

impl std::fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisStore").field("options", self.route.options()).finish_non_exhaustive()
    }
}
