//! See `crate::fuzzing`.

use super::{envoy, kong, limitador, litellm, nginx};
use crate::config::Config;

/// A file of another rate limiter, as each of them is read.
pub fn import(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let lines = text.lines().count() + 1;
    for read in [envoy::import, kong::import, limitador::import, litellm::import, nginx::import] {
        let Ok(imported) = read(text) else { continue };
        // What a few bytes unfold to has a bound; the command refuses what is not valid, in words of lines that are there.
        assert!(
            imported.toml.len() < 64 * 1024 + 4_096 * text.len(),
            "{} bytes of config",
            imported.toml.len()
        );
        if let Err(mistakes) = Config::parse(&imported.toml) {
            for line in mistakes.iter().filter_map(|mistake| imported.line_of(&mistake.field)) {
                assert!((1..=lines).contains(&line), "line {line} of {lines}");
            }
        }
    }
}
