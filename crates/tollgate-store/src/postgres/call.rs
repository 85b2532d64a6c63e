//! One call to the server: a connection, a statement, an answer, all before the deadline.
//!
//! A call that surely changed nothing is tried again while there is time. A call that was sent and not answered may have taken
//! effect; it is sent again only if it is idempotent: it has an id that the server recognises.
//!
//! A call first takes its share of the store (`remote/shares.rs`), so that it waits for calls of its own key and limit before it
//! waits for a connection (`pool.rs`). Behind a pooler a statement is not prepared but sent as text, in a transaction that sets
//! what a session would have set; that is one round trip too. Errors are classified in `fault.rs`.

use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};

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
use crate::{Failure, StoreError, StoredCharge, StoredLimit, random};

/// The most attempts of a call that changed nothing.
const TRIES: u32 = 3;

/// Whether a call without an answer may be sent again: only if it has an id, or changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resend {
    Never,
    Once,
}

/// The deadline of a call, and a function to call once it may have been sent.
#[derive(Clone, Copy)]
pub(super) struct Until<'a> {
    pub(super) deadline: Instant,
    pub(super) sent: &'a (dyn Fn() + Send + Sync),
}

/// How a statement is sent.
enum Prepared {
    /// Prepared on this connection.
    Named(Statement),
    /// As text, with the known types of its parameters.
    Whole(Arc<[Type]>),
}

/// The values of a statement. A statement that changes something has one more: the instant after which it must not.
pub(super) type Values<'a> = [&'a (dyn ToSql + Sync)];

impl PostgresStore {
    /// A call that starts now.
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

    /// Takes the shares of a call with these parts, and waits for them until the call would be late.
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

    /// Sends a statement and waits for its rows until the deadline. Tries again while there is time if an attempt surely changed
    /// nothing.
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
            // If an earlier attempt may have taken effect, the error stays ambiguous even if a later attempt surely did not.
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
                // From now on, statements are not prepared.
                fault.again |= is_poolers && stage == Stage::Before;
                fault
            }
        };
        // Until the answer is here, the connection cannot be used: a caller that stops waiting leaves it broken.
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
            let left = deadline.saturating_duration_since(Instant::now());
            let not_after = UNIX_EPOCH + Duration::from_micros(pool.skew.not_after_us(left));
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

/// From 5 to 30 ms, so that calls that failed at the same time do not return at the same time.
fn pause() -> Duration {
    Duration::from_micros(5_000 + u64::from_le_bytes(random::bytes()) % 25_000)
}
