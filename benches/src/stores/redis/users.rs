//! What users of Redis write themselves for strategies other than the bucket: one call of a text-book script for each check. Beside
//! each stands whether it may admit more than its limit: tests/redis/textbook.rs of the store asks them all.

use redis::aio::MultiplexedConnection;
use tollgate_store::ChargeId;

use super::full_logs;
use crate::stores::load::{Answer, Caller, Draw};

/// A text-book script, and what it is asked.
pub(super) struct UserScript {
    pub(super) name: &'static str,
    pub(super) about: &'static str,
    text: &'static str,
    /// What the keys of a check end with.
    endings: &'static [&'static str],
    arguments: &'static [&'static str],
    /// Whether each check has a name of its own.
    is_named: bool,
    /// Whether what was taken is released again.
    is_released: bool,
}

pub(crate) const WINDOW: &str = "text-book INCR + EXPIRE";
pub(crate) const COUNTER: &str = "text-book hash counter";
pub(crate) const LOG: &str = "text-book sorted-set log (100 entries)";
pub(crate) const SEMAPHORE: &str = "text-book semaphore";
pub(crate) const THREE: &str = "text-book three limits";

/// What the key of a log ends with.
pub(super) const LOG_ENDING: &str = ":l";

/// All of them, with the numbers of our own cells.
pub(super) const ALL: [UserScript; 5] = [
    UserScript {
        name: WINDOW,
        about: "never above its limit; a window lasts up to a ms too long; refused calls count too",
        text: include_str!("textbook/window.lua"),
        endings: &[":w"],
        arguments: &["1000000", "600"],
        is_named: false,
        is_released: false,
    },
    UserScript {
        name: COUNTER,
        about: "exact in a race; its fractions round, and refuse at the instant at which there is room",
        text: include_str!("textbook/counter.lua"),
        endings: &[":c"],
        arguments: &["1000000", "600"],
        is_named: false,
        is_released: false,
    },
    UserScript {
        name: LOG,
        about: "exact while no two calls have one name (in a race and at every instant that was tried)",
        text: include_str!("textbook/log.lua"),
        endings: &[LOG_ENDING],
        arguments: &[full_logs::LIMIT_TEXT, full_logs::WINDOW_TEXT],
        is_named: true,
        is_released: false,
    },
    UserScript {
        name: SEMAPHORE,
        about: "exact while no two leases have one name; two calls for one check",
        text: include_str!("textbook/semaphore.lua"),
        endings: &[":h"],
        arguments: &["1000", "10"],
        is_named: true,
        is_released: true,
    },
    UserScript {
        name: THREE,
        about: "bucket, window and counter; exact in a race; refuses at the instant at which there is room, as these alone do",
        text: include_str!("textbook/three.lua"),
        endings: &[":3b", ":3w", ":3c"],
        arguments: &["1000000", "600", "4", "2400"],
        is_named: false,
        is_released: false,
    },
];

/// Asks a text-book script.
#[derive(Clone)]
pub(super) struct User {
    connection: MultiplexedConnection,
    hash: String,
    script: &'static UserScript,
}

impl User {
    pub(super) async fn load(
        mut connection: MultiplexedConnection,
        script: &'static UserScript,
    ) -> Result<User, String> {
        let loaded = redis::cmd("SCRIPT").arg("LOAD").arg(script.text).query_async(&mut connection).await;
        let hash = loaded.map_err(|error| format!("loading the script of {}: {error}", script.name))?;
        Ok(User { connection, hash, script })
    }
}

impl Caller for User {
    async fn call(&mut self, draw: &mut Draw) -> Result<Answer, String> {
        let (script, key) = (self.script, draw.one());
        let keys: Vec<String> = script.endings.iter().map(|ending| format!("{key}{ending}")).collect();
        let mut cmd = redis::cmd("EVALSHA");
        cmd.arg(&self.hash).arg(keys.len()).arg(&keys).arg(script.arguments);
        let name = ChargeId::random().to_string();
        if script.is_named {
            cmd.arg(&name);
        }
        let allowed: i64 = cmd.query_async(&mut self.connection).await.map_err(|error| error.to_string())?;
        if script.is_released {
            let mut release = redis::cmd("ZREM");
            release.arg(&keys[0]).arg(&name);
            let released: i64 =
                release.query_async(&mut self.connection).await.map_err(|error| error.to_string())?;
            return Ok(Answer::one(allowed == 1 && released == 1));
        }
        Ok(Answer::one(allowed == 1))
    }
}
