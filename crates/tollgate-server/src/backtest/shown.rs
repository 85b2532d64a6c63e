//! How keys are shown: as the log has them, or as the hashes by which logs and pages of servers name them.

use std::borrow::Cow;

use tollgate::telemetry::Telemetry;

use super::intake::NO_KEY;
use crate::failure::print_line;

/// How keys are shown.
pub(super) enum ShownKeys {
    AsWritten,
    /// By the salt of the environment, so boxed: it is a keyed hash.
    Hashed(Box<Telemetry>),
}

impl ShownKeys {
    /// As asked. Without a salt the hashes are of this run alone, and that is reported.
    pub(super) fn hashed(is_asked: bool) -> ShownKeys {
        if !is_asked {
            return ShownKeys::AsWritten;
        }
        if std::env::var_os("RL_LOG_SALT").is_none_or(|salt| salt.is_empty()) {
            print_line(format_args!(
                "tollgate: note: RL_LOG_SALT is not set, so these hashes are of this run alone, and not those of a server's log"
            ));
        }
        ShownKeys::Hashed(Box::new(Telemetry::new()))
    }

    /// Whether keys are hidden.
    pub(super) fn are_hashed(&self) -> bool {
        matches!(self, ShownKeys::Hashed(_))
    }

    /// A key, by its text and its canonical text.
    pub(super) fn show<'a>(&self, text: &'a str, canonical: &str) -> Cow<'a, str> {
        match self {
            _ if text == NO_KEY => Cow::Borrowed(NO_KEY),
            ShownKeys::AsWritten => Cow::Borrowed(text),
            ShownKeys::Hashed(telemetry) => Cow::Owned(telemetry.key_hash(canonical)),
        }
    }
}
