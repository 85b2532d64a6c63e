//! The commands of a check and nothing else, in a script that is called as our scripts are: what no script that keeps its state in
//! Redis can be faster than. A goal above such a ceiling cannot be reached, and what lies between is ours.

use redis::Cmd;
use redis::aio::MultiplexedConnection;

use crate::stores::load::{Answer, Caller, Draw, Keys};

/// How many checks are in a call: as many as the store sends together.
const CHECKS: usize = 32;

/// How many calls are made at once: as many checks as in our own cells.
pub(super) const CALLERS: usize = super::CALLERS / CHECKS;

/// A stored window, and the bytes of it that a check changes.
const STATE: [u8; 23] = [1; 23];
const CHANGED: [u8; 7] = [2; 7];

/// How long a key lasts.
const EXPIRES_MS: u64 = 3_600_000;

/// Some commands for each check.
pub(super) struct Ceiling {
    pub(super) name: &'static str,
    pub(super) about: &'static str,
    text: &'static str,
    /// What the keys of a check end with.
    endings: &'static [&'static str],
}

pub(crate) const CHANGE: &str = "ceiling: GET + SETRANGE";
pub(crate) const REPLACE: &str = "ceiling: GET + SET";
pub(crate) const THREE: &str = "ceiling: three GET + SET";

/// The text of a script that reads the keys of each check, and then writes them.
macro_rules! script {
    ($width:literal, $write:literal) => {
        concat!(
            "local each, answers = redis.pcall, {}
for first = 1, #KEYS, ",
            $width,
            " do
for index = first, first + ",
            $width,
            " - 1 do answers[index] = each('GET', KEYS[index]) end
for index = first, first + ",
            $width,
            " - 1 do each(",
            $write,
            ") end
end
return answers"
        )
    };
}

pub(super) const ALL: [Ceiling; 3] = [
    Ceiling {
        name: CHANGE,
        about: "a window or counter whose count changes, with no arithmetic, 32 checks a call",
        text: script!(1, "'SETRANGE', KEYS[index], '9', ARGV[2]"),
        endings: &["w"],
    },
    Ceiling {
        name: REPLACE,
        about: "a state that is replaced with its expiry, with no arithmetic, 32 checks a call",
        text: script!(1, "'SET', KEYS[index], ARGV[1], 'PX', ARGV[3]"),
        endings: &["w"],
    },
    Ceiling {
        name: THREE,
        about: "three states of a key, with no arithmetic, 32 checks a call",
        text: script!(3, "'SET', KEYS[index], ARGV[1], 'PX', ARGV[3]"),
        endings: &["a", "b", "c"],
    },
];

/// Calls a script of commands alone.
#[derive(Clone)]
pub(super) struct Commands {
    connection: MultiplexedConnection,
    hash: String,
    ceiling: &'static Ceiling,
}

impl Commands {
    /// Loads the script, and writes all keys.
    pub(super) async fn load(
        mut connection: MultiplexedConnection,
        ceiling: &'static Ceiling,
        keys: &Keys,
    ) -> Result<Commands, String> {
        let loaded = redis::cmd("SCRIPT").arg("LOAD").arg(ceiling.text).query_async(&mut connection).await;
        let hash = loaded.map_err(|error| format!("loading the script of {}: {error}", ceiling.name))?;
        for some in keys.chunks(1_000) {
            let mut pipe = redis::pipe();
            for name in some.iter().flat_map(|key| names(ceiling, key)) {
                pipe.cmd("SET").arg(name).arg(&STATE[..]).arg("PX").arg(EXPIRES_MS).ignore();
            }
            let filled = pipe.query_async::<()>(&mut connection).await;
            filled.map_err(|error| format!("filling {}: {error}", ceiling.name))?;
        }
        Ok(Commands { connection, hash, ceiling })
    }

    fn call_for(&self, keys: &[&str]) -> Cmd {
        let names: Vec<String> = keys.iter().flat_map(|key| names(self.ceiling, key)).collect();
        let mut cmd = redis::cmd("EVALSHA");
        cmd.arg(&self.hash).arg(names.len()).arg(&names);
        cmd.arg(&STATE[..]).arg(&CHANGED[..]).arg(EXPIRES_MS);
        cmd
    }
}

/// The names of the keys of a check, as long as ours are.
fn names(ceiling: &Ceiling, key: &str) -> Vec<String> {
    ceiling.endings.iter().map(|ending| format!("ceiling:1:{{{key}}}:{ending}:ceiling")).collect()
}

impl Caller for Commands {
    async fn call(&mut self, draw: &mut Draw) -> Result<Answer, String> {
        let cmd = self.call_for(&draw.several::<CHECKS>());
        let found: Vec<Option<Vec<u8>>> =
            cmd.query_async(&mut self.connection).await.map_err(|error| error.to_string())?;
        let lost = found.iter().filter(|state| state.as_ref().is_none_or(|state| state.len() != STATE.len()));
        Ok(Answer { checks: CHECKS as u64, astray: lost.count() as u64 })
    }
}
