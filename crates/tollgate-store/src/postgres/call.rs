//! One call to the server: a connection, a statement, an answer, all before the deadline.
//!
//! What certainly changed nothing is tried again while there is time. What was sent and not answered may have taken effect, and
//! is sent again only if it carries a name of its own, by which the server knows it again.
//!
//! A call first takes its share of the store (`remote/shares.rs`), so that it waits for calls of its own key and limit before it
//! waits for a connection. Behind a pooler a statement is not prepared but sent whole, in a transaction that has the settings
//! which otherwise the session has; that is one round trip, too.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use smallvec::smallvec;
use tokio::time::{sleep, timeout_at};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Row, Statement};

use super::PostgresStore;
use super::codec::nonsense;
use super::fault::{Fault, Stage};
use super::pool::in_transaction;
use super::statement::Verb;
use crate::remote::shares::{Claim, Claims, Share, latest_start};
use crate::{ChargeId, Failure, StoreError, StoredCharge, StoredLimit};

/// How often a call that changed nothing is tried.
const TRIES: u32 = 3;

/// Whether a call whose answer was lost may be sent again: only if it carries a name of its own, or changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resend {
    Never,
    Once,
}

/// Until when a call may take, and what is called once it may have left.
#[derive(Clone, Copy)]
pub(super) struct Until<'a> {
    pub(super) deadline: Instant,
    pub(super) sent: &'a (dyn Fn() + Send + Sync),
}

/// How a statement is sent.
enum Prepared {
    /// By the name that it was prepared under on this connection.
    Named(Statement),
    /// With its text, the types of its parameters being known.
    Whole(Arc<[Type]>),
}

/// The values of a statement, but for the last of those that change something: the instant after which they may not.
pub(super) type Values<'a> = [&'a (dyn ToSql + Sync)];

impl PostgresStore {
    /// A call that begins now.
    pub(super) fn until(&self) -> Until<'static> {
        Until { deadline: Instant::now() + self.inner.timeout, sent: &|| {} }
    }

    /// The share of a key under a limit.
    pub(super) fn key_claim(&self, limit: &StoredLimit, key: &str) -> Claim {
        Claim::Key(self.inner.shares.hash((&limit.name, key)))
    }

    pub(super) fn limit_claim(&self, limit: &StoredLimit) -> Claim {
        Claim::Limit(self.inner.shares.hash(&limit.name))
    }

    /// The shares of a call of these parts, waited for until the call would be late.
    pub(super) async fn share(
        &self,
        parts: &[StoredCharge<'_>],
        until: &Until<'_>,
    ) -> Result<Share, StoreError> {
        let mut claims: Claims = smallvec![Claim::Server(0)];
        for part in parts {
            claims.push(self.key_claim(part.limit, part.key));
            claims.push(self.limit_claim(part.limit));
        }
        self.inner
            .shares
            .claim(claims, latest_start(tokio::time::Instant::now(), until.deadline.into()))
            .await
    }

    /// The shares of a settlement. Which keys it is about is known to the server alone; all settlements are to others like those
    /// of one limit.
    pub(super) async fn settlement_share(
        &self,
        id: ChargeId,
        until: &Until<'_>,
    ) -> Result<Share, StoreError> {
        let shares = &self.inner.shares;
        let (id, all) = (shares.hash(id), shares.hash(("settle", "")));
        let claims = smallvec![Claim::Key(id), Claim::Limit(all), Claim::Server(0)];
        shares.claim(claims, latest_start(tokio::time::Instant::now(), until.deadline.into())).await
    }

    pub(super) async fn call_one(
        &self,
        verb: Verb,
        resend: Resend,
        values: &Values<'_>,
        until: &Until<'_>,
    ) -> Result<Row, StoreError> {
        let mut rows = self.call(verb, resend, values, until).await?;
        rows.pop().ok_or_else(|| nonsense("no row"))
    }

    /// Sends a statement and waits for its rows, until the deadline. What certainly changed nothing is tried again while there
    /// is time.
    pub(super) async fn call(
        &self,
        verb: Verb,
        resend: Resend,
        values: &Values<'_>,
        until: &Until<'_>,
    ) -> Result<Vec<Row>, StoreError> {
        let deadline = until.deadline;
        let mut resend = resend == Resend::Once;
        let mut may_have_changed = false;
        for attempt in 1.. {
            let fault = match self.attempt(verb, values, until).await {
                Ok(rows) => {
                    self.inner.pool.look_now_and_then();
                    self.inner.room.look_now_and_then(&self.inner.pool);
                    return Ok(rows);
                }
                Err(fault) => fault,
            };
            let again =
                fault.again || (fault.broken && resend && fault.error.failure() != Some(Failure::Timeout));
            if fault.error.failure() == Some(Failure::Late) {
                self.inner.pool.read_server_time();
            }
            // That a later attempt changed nothing does not say what became of an earlier one.
            may_have_changed |= fault.error.is_ambiguous();
            let pause = pause();
            if !again || attempt >= TRIES || Instant::now() + pause >= deadline {
                return Err(if may_have_changed { fault.error.ambiguous() } else { fault.error });
            }
            resend &= fault.again;
            tracing::debug!(error = %fault.error, attempt, "trying again");
            sleep(pause).await;
        }
        Err(nonsense("no attempt"))
    }

    async fn attempt(&self, verb: Verb, values: &Values<'_>, until: &Until<'_>) -> Result<Vec<Row>, Fault> {
        let (pool, doing) = (&self.inner.pool, verb.doing());
        let (deadline, sent) = (until.deadline, until.sent);
        let until = deadline.into();
        let mut borrowed = match timeout_at(until, pool.take()).await {
            Ok(taken) => taken?,
            Err(_) if pool.open_links() == 0 => {
                return Err(Fault::timeout(Stage::Before, "connecting", &pool.place));
            }
            Err(_) => {
                let message =
                    format!("no connection to PostgreSQL at {} was free in time ({doing})", pool.place);
                return Err(Fault::new(Failure::Overloaded, message));
            }
        };
        let late = |stage| Fault::timeout(stage, doing, &pool.place);
        let failed = |stage| {
            move |error| {
                let is_poolers = pool.is_poolers(&error);
                let mut fault = Fault::of(error, stage, doing, &pool.place);
                // It goes without prepared statements from now on.
                fault.again |= is_poolers && stage == Stage::Before;
                fault
            }
        };
        // Until the answer is here, the connection is good for nothing else: who stops waiting leaves it spent.
        borrowed.is_spent = true;
        let result = async {
            let gone = || Fault::new(Failure::Connection, "the connection is gone");
            let link = borrowed.link().ok_or_else(gone)?;
            let prepared = async {
                Ok(match pool.is_pooled() {
                    true => Prepared::Whole(pool.types(verb, &link.client).await?),
                    false => Prepared::Named(link.statement(verb, &pool.prefix).await?),
                })
            };
            let prepared = timeout_at(until, prepared).await;
            let prepared = prepared.map_err(|_| late(Stage::Before))?.map_err(failed(Stage::Before))?;
            let not_after: SystemTime = pool.skew.server_time(deadline);
            let mut values = values.to_vec();
            if verb.is_change() {
                values.push(&not_after);
            }
            let stage = if verb.is_change() { Stage::Changing } else { Stage::Looking };
            sent();
            let answer = match prepared {
                Prepared::Named(statement) => timeout_at(until, link.client.query(&statement, &values)).await,
                Prepared::Whole(types) => {
                    let types = types.iter().cloned();
                    let values: Vec<(&(dyn ToSql + Sync), Type)> = values.into_iter().zip(types).collect();
                    let (begin, text) = (pool.begin(), verb.text(&pool.prefix));
                    timeout_at(until, in_transaction(&link.client, &begin, &text, &values)).await
                }
            };
            answer.map_err(|_| late(stage))?.map_err(failed(stage))
        }
        .await;
        borrowed.is_spent = result.as_ref().is_err_and(|fault| fault.broken);
        result
    }
}

/// From 5 to 30 ms, so that those who failed together do not come back together.
fn pause() -> Duration {
    use std::hash::{BuildHasher, RandomState};
    Duration::from_micros(5_000 + RandomState::new().hash_one(()) % 25_000)
}
