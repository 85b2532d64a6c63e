//! What strangers send, read as the server reads it, for `fuzz/` at the root of the repository. Each function panics where a promise is
//! broken, and is silent otherwise.
//!
//! The checks stand beside what they check (`fuzzing.rs` of each module), so that nothing is public for their sake.

pub use crate::backtest::fuzzing::log;
pub use crate::front::json::fuzzing::json;
pub use crate::front::resp::fuzzing::resp;
pub use crate::front::rls::fuzzing::descriptors;
pub use crate::import::fuzzing::import;

use crate::config::Config;

/// A config, and the environment that is laid over it: the variables of its lines `#env NAME=value`.
pub fn config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    check(text, &[]);
    let variables = text.lines().filter_map(|line| line.strip_prefix("#env ")?.split_once('='));
    let variables: Vec<(String, String)> =
        variables.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    if !variables.is_empty() {
        check(text, &variables);
    }
}

fn check(text: &str, variables: &[(String, String)]) {
    let read = || Config::parse_with_env(text, variables.iter().cloned());
    match read() {
        Ok(config) => {
            // What is valid is so again, to the same limits.
            let again = read().expect("it was valid a moment ago");
            let names = |config: &Config| {
                config.gate.policy.rules().iter().map(|rule| rule.name().to_owned()).collect::<Vec<_>>()
            };
            assert_eq!(names(&config), names(&again));
        }
        Err(mistakes) => {
            assert!(mistakes.iter().len() > 0, "refused without a reason");
            let lines = text.lines().count() + 1;
            for mistake in mistakes.iter() {
                // A mistake of a variable is in no line.
                let first = usize::from(mistake.variable.is_none());
                assert!((first..=lines).contains(&mistake.line), "line {} of {lines}", mistake.line);
                assert!(mistake.message().len() < 4_096, "a message that nobody reads");
            }
        }
    }
}
