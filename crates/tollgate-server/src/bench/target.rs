//! Which store is meant: one that is named by its address, or the one of a config.
//!
//! Either way it becomes a config, so that it is opened as `serve` opens it. An address on the command line goes before what
//! the environment says of the same; how to log in, the deadline and the like are taken from there. An address may hold a
//! password, so none is ever repeated.

use tollgate::config::{Config, Mistake, StoreMode};

use crate::cli::BenchArgs;
use crate::failure::Failure;
use crate::figures::counted;
use crate::validate;

/// A config with the named store.
pub(super) fn config(args: &BenchArgs) -> Result<Config, Failure> {
    match (&args.config, args.store.as_deref()) {
        (Some(file), _) => Ok(validate::load(file)?.gate),
        (None, None | Some("memory")) => Ok(Config::default()),
        (None, Some(store)) => at(store, std::env::vars_os().filter_map(as_text)),
    }
}

/// A variable that is no text is none of ours.
fn as_text((name, value): (std::ffi::OsString, std::ffi::OsString)) -> Option<(String, String)> {
    Some((name.into_string().ok()?, value.into_string().ok()?))
}

/// A config of a shared store at this address.
fn at(store: &str, environment: impl Iterator<Item = (String, String)>) -> Result<Config, Failure> {
    let (mode, field) = match store.split_once("://").map(|(scheme, _)| scheme) {
        Some("redis" | "rediss") => (StoreMode::Redis, "TOLLGATE_STORE_REDIS_URL"),
        Some("postgres" | "postgresql") => (StoreMode::Postgres, "TOLLGATE_STORE_POSTGRES_URL"),
        _ => {
            // Words are shown; what has more in it than letters may hold a password.
            let is_word = store.bytes().all(|byte| byte.is_ascii_alphabetic());
            let named = if is_word { format!("the store {store:?}") } else { "that store".to_owned() };
            return Err(Failure::new(format!(
                "cannot measure {named}: write --store memory, redis://…, rediss://… or postgres://…, or name a config \
                 with --config"
            )));
        }
    };
    // Put as variables because those are laid over everything else and need no quotes.
    let variables = [("TOLLGATE_STORE_MODE", mode.name()), (field, store)];
    let variables = environment
        .filter(|(name, _)| is_heeded(name, mode))
        .chain(variables.map(|(name, value)| (name.to_owned(), value.to_owned())));
    Config::parse_with_env("", variables).map_err(|mistakes| {
        let line = |mistake: &Mistake| match mistake.variable.as_deref() == Some(field) {
            true => format!("--store: {}", mistake.fix),
            false => mistake.to_string(),
        };
        let details: Vec<String> = mistakes.iter().map(line).collect();
        let message = format!("cannot measure {mode}: {}", counted(details.len() as u64, "mistake"));
        Failure::with_details(details, message)
    })
}

/// Whether a variable says something of this store other than which it is and where.
fn is_heeded(name: &str, mode: StoreMode) -> bool {
    match name.strip_prefix("TOLLGATE_STORE_") {
        None => matches!(name, "RL_TIMEOUT" | "RL_POOL_SIZE" | "REDIS_CLUSTER" | "REDIS_PASSWORD"),
        Some("MODE" | "REDIS_URL" | "REDIS_URLS" | "POSTGRES_URL") => false,
        Some(field) if field.starts_with("REDIS_") => mode == StoreMode::Redis,
        Some(field) if field.starts_with("POSTGRES_") => mode == StoreMode::Postgres,
        Some(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn check(store: &str, environment: &[(&str, &str)]) -> Result<Config, Failure> {
        at(store, environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())))
    }

    #[test]
    fn the_address_on_the_command_line_goes_before_the_environment() {
        let environment = [
            ("RL_STORAGE_MODE", "memory"),
            ("TOLLGATE_STORE_MODE", "memory"),
            ("REDIS_ADDR", "a:1,b:2"),
            ("REDIS_TLS", "true"),
            ("REDIS_PASSWORD", "hunter2"),
            ("DATABASE_URL", "postgres://elsewhere/app"),
            ("TOLLGATE_STORE_REDIS_URLS", "redis://c:3,redis://d:4"),
            ("TOLLGATE_STORE_REDIS_PREFIX", "other:"),
            ("TOLLGATE_STORE_POSTGRES_PREFIX", "other_"),
            ("TOLLGATE_STORE_TIMEOUT", "3s"),
            ("TOLLGATE_LIMITS_API_BURST", "50"),
        ];
        let redis = check("redis://here:6379", &environment).unwrap().store;
        assert_eq!((redis.mode, redis.timeout), (StoreMode::Redis, Duration::from_secs(3)));
        let at = redis.redis.unwrap();
        assert_eq!((at.urls, at.prefix.as_deref()), (vec!["redis://here:6379".to_owned()], Some("other:")));
        assert!(at.password.is_some() && !at.cluster);
        let postgres = check("postgresql://here/app", &environment).unwrap().store;
        assert_eq!((postgres.mode, postgres.timeout), (StoreMode::Postgres, Duration::from_secs(3)));
        let at = postgres.postgres.unwrap();
        assert_eq!((at.url.as_str(), at.prefix.as_str()), ("postgresql://here/app", "other_"));
    }

    #[test]
    fn an_unknown_store_is_reported_without_showing_it() {
        for (store, expected) in [
            ("redis", "cannot measure the store \"redis\": write --store memory, redis://"),
            ("http://me:hunter2@there", "cannot measure that store: write --store memory, redis://"),
            ("hunter2", "cannot measure that store: "),
            ("redis://", "cannot measure redis: 1 mistake"),
            ("redis://:hunter2@there:port", "cannot measure redis: 1 mistake"),
            ("rediss://me:hunter2@", "cannot measure redis: 1 mistake"),
        ] {
            let failure = check(store, &[]).unwrap_err();
            assert!(failure.to_string().starts_with(expected), "{store}: {failure}");
            let shown = format!("{failure:?}");
            assert!(!shown.contains("hunter2"), "{store}: {shown}");
            assert!(shown.contains("--store"), "{store}: {shown}");
        }
    }
}
