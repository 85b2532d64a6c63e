//! The check at the start of a service: whether the servers can be used, and which settings are dangerous.
//!
//! `connect.rs` of the library calls [`RedisStore::probe`] once and logs the warnings. Checks during operation are in
//! `watch.rs` (lost state, memory) and `ping.rs` (reachability).

use std::time::Duration;

use redis::Value;
use tokio::time::Instant;
use tollgate_kernel::Rate;

use super::RedisStore;
use super::node::Node;
use super::shape::Operation;
use crate::{ChargeId, Cost, Failure, Hold, Limit, Micros, StoreError, StoredCharge, StoredLimit};

/// The oldest version that has all commands of the scripts.
const OLDEST: (u32, u32) = (6, 2);

/// The result of a probe.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RedisReport {
    /// The version of the server, or of the first of a cluster.
    pub version: String,
    /// Dangerous settings: what they are, what they can cause, and what to set instead.
    pub warnings: Vec<String>,
}

impl RedisStore {
    /// Connects, and checks whether the servers can be used and are configured well. An error says what to fix; the error for an
    /// unreachable server is transient ([`Failure::Connection`], [`Failure::Timeout`]).
    pub async fn probe(&self) -> Result<RedisReport, StoreError> {
        let mut report = RedisReport::default();
        // Longer than the deadline of a call: at the start there is no request to delay.
        let deadline = Instant::now() + self.route.options().timeout.max(Duration::from_secs(2));
        if let Err(error) = self.try_everything(deadline).await {
            // The server's own information may give a better reason.
            for node in self.route.known_nodes() {
                self.look_at(&node, deadline, &mut report).await?;
            }
            return Err(error);
        }
        for node in self.route.primaries() {
            self.look_at(&node, deadline, &mut report).await?;
        }
        Ok(report)
    }

    /// Charges a random key under every strategy and gives it back: this uses every command that charges need. If the privilege
    /// to set an expiry were missed only in the middle of a charge, a key would stay for ever.
    async fn try_everything(&self, deadline: Instant) -> Result<(), StoreError> {
        let hold = Hold { id: ChargeId::random(), ttl: Micros::from_secs(1) };
        let second = Micros::from_secs(1);
        let limits = [
            Rate::per_second(1).and_then(|rate| Limit::token_bucket(rate, 2)),
            Limit::fixed_window(2, second),
            Limit::sliding_window(2, second),
            Limit::sliding_window_counter(2, second),
            Limit::concurrency(2, second),
        ];
        // These limits are valid.
        let limits: Vec<StoredLimit> =
            limits.into_iter().flatten().map(|limit| StoredLimit::new("probe", limit)).collect();
        let key = hold.id.to_string();
        let parts: Vec<StoredCharge<'_>> = limits
            .iter()
            .map(|limit| StoredCharge { limit, key: &key, cost: Cost::ONE, shadow: false })
            .collect();
        let held = self.names.hold_beside(&self.names.part(&parts[0]), hold.id);
        self.charge_batched(&parts, Operation::Hold, Some((&held, hold, "")), deadline).await?;
        let mut keys = vec![held];
        keys.extend(parts.iter().map(|part| self.names.part(part)));
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        self.send_hold("undo", &keys, hold.id, deadline).await?;
        // Units that were refilled meanwhile are not given back, so some keys have a small rest.
        for key in &keys[1..] {
            self.send_hold("forget", &[key], hold.id, deadline).await?;
        }
        Ok(())
    }

    async fn look_at(
        &self,
        node: &std::sync::Arc<Node>,
        deadline: Instant,
        report: &mut RedisReport,
    ) -> Result<(), StoreError> {
        let at = &node.address;
        let Some(info) = text(node, deadline, &["INFO"]).await else {
            report.warnings.push(format!(
                "{at}: this user may not ask INFO, so neither version nor settings could be looked at"
            ));
            return Ok(());
        };
        let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        if let Some(version) = field("redis_version") {
            if report.version.is_empty() {
                report.version = version.to_owned();
            }
            if is_older(version) {
                return Err(StoreError::failed(
                    Failure::Refused,
                    format!(
                        "Redis {version} at {at} is too old: version {}.{} is needed",
                        OLDEST.0, OLDEST.1
                    ),
                ));
            }
        }
        let is_cluster = field("cluster_enabled") == Some("1");
        if is_cluster != self.route.is_cluster() {
            let (is, configured) = if is_cluster { ("is", "not to be one") } else { ("is not", "to be one") };
            return Err(StoreError::failed(
                Failure::Refused,
                format!("{at} {is} a cluster's server and was said {configured}; set `cluster` accordingly"),
            ));
        }
        let mut warn = |warning: String| report.warnings.push(format!("{at}: {warning}"));
        match field("maxmemory_policy") {
            None | Some("noeviction") => {}
            Some(policy) => warn(format!(
                "maxmemory-policy is {policy}: under pressure Redis throws live counters away, and a caller that was denied is \
                 admitted; set noeviction, on a server of its own"
            )),
        }
        let replicas: u32 = field("connected_slaves").and_then(|count| count.parse().ok()).unwrap_or(0);
        let setting = async |name| config(node, deadline, name).await;
        if replicas > 0 && setting("min-replicas-to-write").await.is_some_and(|replicas| replicas == "0") {
            warn(
                "min-replicas-to-write is 0: a primary that is cut off goes on admitting, and all of that is forgotten when \
                 another takes over; set 1, and min-replicas-max-lag 1"
                    .to_owned(),
            );
        }
        if field("role").is_some_and(|role| role == "slave") && !is_cluster {
            return Err(StoreError::failed(
                Failure::NotReady,
                format!(
                    "{at} is a replica, and decisions are made on primaries only; give the primary's address"
                ),
            ));
        }
        Ok(())
    }
}

/// The text of a command's answer, if it has one.
async fn text(node: &std::sync::Arc<Node>, deadline: Instant, words: &[&str]) -> Option<String> {
    let build = |_: &str| {
        let mut cmd = redis::cmd(words[0]);
        cmd.arg(&words[1..]);
        cmd
    };
    match node.call(deadline, false, &build).await.ok()? {
        Value::BulkString(text) => String::from_utf8(text).ok(),
        Value::Array(words) => match words.last()? {
            Value::BulkString(text) => String::from_utf8(text.clone()).ok(),
            _ => None,
        },
        _ => None,
    }
}

/// A setting, if this user may read it.
async fn config(node: &std::sync::Arc<Node>, deadline: Instant, name: &str) -> Option<String> {
    text(node, deadline, &["CONFIG", "GET", name]).await
}

fn is_older(version: &str) -> bool {
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) < OLDEST
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        for (version, expected) in [
            ("6.0.20", true),
            ("6.2.14", false),
            ("7.0.15", false),
            ("10.0", false),
            ("5", true),
            ("x", true),
        ] {
            assert_eq!(is_older(version), expected, "{version}");
        }
    }
}
