//! A policy and a store from one TOML file.
//!
//! [`Config::parse`] is a pure function from text to a sound configuration or to every mistake in it, and
//! [`Config::parse_with_env`] the same with the environment laid over the text. They read no file, no environment and no
//! clock: the caller does that. `reader.rs` reads single fields, `environment.rs` knows which variable sets which of them, and each
//! section of the library has a file here that knows what its fields mean. Sections of other crates are read by an [`Extension`].

/// The fields in which two values of a type differ, by name. All fields of the type must be listed.
macro_rules! changed_fields {
    ($one:expr, $other:expr, $type:ident { $($field:ident),* $(,)? }) => {{
        let $type { $($field),* } = $one;
        let mut names = Vec::new();
        $(if *$field != $other.$field { names.push(stringify!($field)); })*
        names
    }};
}

mod connection;
mod environment;
mod extension;
mod file_watch;
mod limits;
mod mistake;
mod named;
mod reader;
#[cfg(feature = "http")]
mod requests;
#[cfg(feature = "http")]
mod routes;
mod store;

use toml::de::DeTable;

pub use self::connection::{Password, PostgresConfig, RedisConfig, host_fault, url_fault};
use self::environment::Environment;
pub use self::environment::{VariableKind, is_service_link};
pub use self::extension::{Extension, Limits};
pub use self::file_watch::{FileChange, FileWatch};
pub use self::limits::limit_fields;
pub use self::mistake::{Mistake, Mistakes};
pub use self::reader::{Field, Reader, Section};
#[cfg(feature = "http")]
pub use self::requests::RequestsConfig;
pub use self::store::{StoreConfig, StoreMode};
use crate::policy::Policy;

/// The sections that a file may have, in this crate and in others of this repository.
const SECTIONS: [&str; 9] =
    ["server", "store", "limits", "jobs", "llm", "requests", "routes", "envoy", "rules"];

/// What a configuration file says of limits, of the store and of routes.
///
/// ```
/// use tollgate::config::Config;
///
/// let config = Config::parse(r#"
///     [store]
///     mode = "memory"          # memory | redis | postgres
///     fallback = "local"       # open | closed | local, when the store fails; a limit may have its own
///
///     [limits.api]
///     strategy = "token_bucket"
///     rate = "10/s"
///     burst = 20
///
///     [limits.login]
///     strategy = "fixed_window"
///     limit = 5
///     window = "1m"
///     shadow = true            # decide and count, but never deny
///     overrides = { "user:42" = { limit = 1000 }, "user:1" = { unlimited = true } }
/// "#)?;
/// assert_eq!(config.policy.find("api")?.allowance().to_string(), "10/s, bursts of 20");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// | strategy | its fields |
/// |---|---|
/// | `token_bucket` | `rate`, `burst` |
/// | `leaky_bucket` | `rate`, `capacity` |
/// | `fixed_window` | `limit`, `window`, `align` (`first` or `clock`) |
/// | `sliding_window`, `sliding_window_counter` | `limit`, `window` |
/// | `concurrency` | `limit`, `lease` |
///
/// A window shorter than a second also needs `subsecond = true`. Instead of a strategy a limit may say `unlimited = true`
/// or `blocked = true`. An override says what differs for one key and has the rest from its limit. How a limit is applied:
/// `shadow`, `fallback` and `subject` (`key` or `namespace`: what is kept together in a cluster).
///
/// | of `[store]` | says | by default |
/// |---|---|---|
/// | `mode` | `memory`, `redis` or `postgres` | `memory` |
/// | `fallback` | `open`, `closed` or `local`, when the store fails | `local` |
/// | `fallback_instances` | among how many a limit is divided while each counts locally | 1 |
/// | `timeout` | the deadline of one call, up to `10s` | `100ms` |
/// | `denial_cache` | how long a denial is believed without asking again; `0s` for never | `100ms` |
/// | `connections` | how many to each server | the store's own |
/// | `max_keys`, `when_full` | how many keys the memory store holds, and what happens then (`share`, `deny`); from how many keys on a shared store begins none under numbers that come with the call | 10,000,000, `share` |
/// | `redis` | `url` or `urls`, `cluster`, `username`, `password`, `ca_file`, `cert_file`, `key_file`, `prefix` | |
/// | `postgres` | `url`, `prefix`, `password`, `ca_file`, `cert_file`, `key_file`, `connections` | |
///
/// Which requests meet which limit is in `[[routes]]`, read with the feature `http`: by the tower layer, the server's gate and backtest.
///
/// | of `[[routes]]` | says | by default |
/// |---|---|---|
/// | `limit` | the limit that applies; the only field that must be there | |
/// | `path` | one path, `/api/*` for it and all below, or a template such as `/users/{id}` | any |
/// | `except` | paths that are left out, written in the same way | none |
/// | `method` | such as `"POST"` or `["GET", "POST"]`; GET covers HEAD | any |
/// | `host` | such as `"api.example.com"` or `"*.example.com"` | any |
/// | `clients` | addresses and networks | any |
/// | `users` | authenticated users: a name, `prefix*`, or `*` for anybody who is authenticated | any |
/// | `headers` | what header fields are, written as `users` are: `{ user-agent = "curl/*" }` | any |
/// | `key` | `ip`, `user`, `all` (one key for all), `bearer`, `peer`, `header:x-api-key`, `{id}` (a part of the path) | `ip` |
/// | `namespace` | the namespace of the key | the key's own |
/// | `folded` | whether `Alice` and `alice` are one key | `false` |
/// | `if_missing` | what happens to a request without the key: `deny`, `ip`, `shared`, `skip` | `deny` |
/// | `cost` | a number, or `"bytes"` for the bytes of the response | 1 |
/// | `count_if_status` | counts only responses of these statuses, such as `[401, 403]` | all |
///
/// Each route whose conditions a request meets charges its limit, and all of them together are one charge: all or none.
/// `[[rules]]` is the older name of `[[routes]]`.
///
/// | of `[requests]` | says | by default |
/// |---|---|---|
/// | `trusted_proxies` | the proxies whose description of a request is believed | none |
/// | `client_header` | where they write the client's address: `x-forwarded-for` or `forwarded` | `x-forwarded-for` |
/// | `ipv4_prefix`, `ipv6_prefix` | how many bits of an address make one client | 32, 64 |
/// | `encoded_separators` | what `%2F` and `\` in a path are: `refuse` such requests, or `keep` them as data | `refuse` |
/// | `user_header` | the header in which trusted proxies say which user they authenticated | none |
///
/// `[jobs]` is read by `tollgate-jobs`, `[llm]` by `tollgate-llm`, `[server]` and `[[envoy]]` by the server, through
/// [`parse_with`](Self::parse_with); a program that does not use them skips these sections. Any other section is a mistake.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Config {
    /// `[store]`: where state lives.
    pub store: StoreConfig,
    /// `[limits]`: which limits there are.
    pub policy: Policy,
    /// `[requests]`: how route limits read a request.
    #[cfg(feature = "http")]
    pub requests: RequestsConfig,
    /// `[[routes]]`: which requests meet which limit, by which key.
    #[cfg(feature = "http")]
    pub routes: Vec<crate::route::RouteLimit>,
}

impl Config {
    /// Reads a whole file, or finds every mistake in it.
    ///
    /// ```
    /// let mistakes = tollgate::config::Config::parse("[limits.api]\nunlimitd = true\nblocked = 1\n").unwrap_err();
    /// assert_eq!(
    ///     mistakes.to_string(),
    ///     "line 2, limits.api.unlimitd = true: unknown field; did you mean `unlimited`?\n\
    ///      line 3, limits.api.blocked = 1: must be true or false, without quotes",
    /// );
    /// ```
    pub fn parse(text: &str) -> Result<Config, Mistakes> {
        Config::parse_with_env(text, [])
    }

    /// The namespaces of keys that route limits name, which metrics may show.
    pub fn namespaces(&self) -> impl Iterator<Item = &str> {
        #[cfg(feature = "http")]
        let named = self.routes.iter().flat_map(crate::route::RouteLimit::namespaces);
        #[cfg(not(feature = "http"))]
        let named = std::iter::empty();
        named
    }

    /// The environment variables that set fields of `[store]` and `[requests]`, by their full names.
    pub fn variables() -> impl Iterator<Item = String> {
        environment::variables()
    }

    /// Reads a whole file with the environment laid over it, or finds every mistake in both. What the file lacks the
    /// environment may supply, so a file that [`parse`](Self::parse) refuses may do here, and there need not be one at all.
    ///
    /// ```
    /// use tollgate::config::{Config, StoreMode};
    ///
    /// let file = "[limits.api]\nstrategy = \"token_bucket\"\nrate = \"10/s\"\nburst = 20\n";
    /// let environment = [
    ///     ("RL_STORAGE_MODE", "redis"),
    ///     ("REDIS_ADDR", "cache:6379"),
    ///     ("TOLLGATE_LIMITS_API_BURST", "50"),
    /// ];
    /// let config = Config::parse_with_env(file, environment.map(|(name, value)| (name.into(), value.into())))?;
    /// assert_eq!(config.store.mode, StoreMode::Redis);
    /// assert_eq!(config.store.redis.as_ref().unwrap().urls, ["redis://cache:6379"]);
    /// assert_eq!(config.policy.find("api")?.allowance().to_string(), "10/s, bursts of 50");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// A program hands over [`std::env::vars`], or what of it is text. Which variable sets what:
    ///
    /// | variable | sets |
    /// |---|---|
    /// | `RL_STORAGE_MODE` | `store.mode` |
    /// | `RL_TIMEOUT` | `store.timeout` |
    /// | `RL_POOL_SIZE` | `store.connections` |
    /// | `REDIS_ADDR` | `store.redis.url` (`host:port` or a URL); several, with commas between, are servers of a cluster |
    /// | `REDIS_TLS` | `true` turns the Redis addresses of `REDIS_ADDR` or the file to `rediss://` |
    /// | `REDIS_CLUSTER` | `store.redis.cluster` |
    /// | `REDIS_PASSWORD` | `store.redis.password`, which then is `env:REDIS_PASSWORD` |
    /// | `DATABASE_URL` | `store.postgres.url` |
    /// | `TOLLGATE_STORE_…`, `TOLLGATE_REQUESTS_…` | every field of these sections, such as `TOLLGATE_STORE_REDIS_URL` |
    /// | `TOLLGATE_LIMITS_<NAME>_<FIELD>` | a field of a limit in the file; `-` and `.` in its name are written `_` |
    ///
    /// The variables of Redis count only in the mode `redis`, and `DATABASE_URL` only in the mode `postgres`: others use them
    /// too. `TOLLGATE_…` wins over the rest, and both over the file. A variable that is set to nothing is as good as not set.
    pub fn parse_with_env(
        text: &str,
        environment: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Config, Mistakes> {
        Config::parse_with(text, environment, &mut [])
    }

    /// Reads a whole file with the environment laid over it and with sections of other crates, each by its [`Extension`]. Every
    /// mistake is found, in whichever section it is.
    pub fn parse_with(
        text: &str,
        environment: impl IntoIterator<Item = (String, String)>,
        extensions: &mut [&mut dyn Extension],
    ) -> Result<Config, Mistakes> {
        let (table, errors) = DeTable::parse_recoverable(text);
        if !errors.is_empty() {
            // What such a file means is a guess, and mistakes found in a guess would mislead.
            let mut reader = Reader::new(text, Vec::new());
            reader.not_toml(&errors);
            return reader.finish(Config::default());
        }
        let declared: Vec<_> =
            extensions.iter().map(|extension| (extension.name(), extension.variables())).collect();
        let environment = Environment::of(environment, table.get_ref(), &declared);
        let (whole, places) = environment.laid_under(text);
        let mut reader = Reader::new(&whole, places.clone());
        let mut table = DeTable::parse_recoverable(&whole[..text.len()]).0.into_inner();
        environment.lay_over(&mut table, &whole, &places);
        environment.note_strays(&mut reader);
        let root = Section::root(&table);
        let of_extensions = declared.iter().map(|(name, _)| *name).filter(|name| !SECTIONS.contains(name));
        let known: Vec<&str> = SECTIONS.into_iter().chain(of_extensions).collect();
        reader.only(&root, &known);
        let mut section = |name| root.field(name).and_then(|field: &Field<'_>| reader.section(field));
        let (store, limits) = (section("store"), section("limits"));
        let store = store.map(|section| StoreConfig::read(&mut reader, section)).unwrap_or_default();
        let limits = limits.map(Section::showing_all);
        let mut rules = limits.as_ref().map(|section| limits::read(&mut reader, section)).unwrap_or_default();
        #[cfg(feature = "http")]
        let (requests, routes) = {
            if let (Some(_), Some(old)) = (root.field("routes"), root.field("rules")) {
                reader.misnamed(
                    old,
                    "is the older name of [[routes]], and both are there; write all of them as [[routes]]",
                );
            }
            let requests = root.field("requests").and_then(|field| reader.section(field));
            let requests = requests.map(|section| RequestsConfig::read(&mut reader, section));
            let field = root.field("routes").or(root.field("rules"));
            let routes = field.map(|field| routes::read(&mut reader, field, limits.as_ref(), &rules));
            (requests.unwrap_or_default(), routes.unwrap_or_default())
        };
        let names: Vec<&str> = limits.iter().flat_map(Section::fields).map(|field| field.name).collect();
        for extension in extensions {
            let mut limits = Limits { names: names.clone(), rules: &mut rules };
            if let Some(field) = root.field(extension.name()) {
                extension.read(&mut reader, field, &mut limits);
            }
        }
        // The names are distinct: they are the keys of one table, and extensions add none that is taken.
        let policy = Policy { rules };
        reader.finish(Config {
            store,
            policy,
            #[cfg(feature = "http")]
            requests,
            #[cfg(feature = "http")]
            routes,
        })
    }
}

/// The known word nearest to one that is not known, if it is near enough for a "did you mean …?".
///
/// ```
/// assert_eq!(tollgate::config::nearest("limts", ["limits", "store"]), Some("limits"));
/// ```
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    crate::policy::nearest::nearest(word, known)
}

/// The beginning of a text, on one line and without control characters, for messages that repeat what a stranger wrote.
///
/// ```
/// assert_eq!(tollgate::config::excerpt("a\nb").to_string(), "a\\nb");
/// ```
pub fn excerpt(text: &str) -> impl std::fmt::Display + '_ {
    crate::policy::Excerpt(text)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tollgate_kernel::Micros;
    use tollgate_store::{MemoryOptions, WhenFull};

    use super::*;
    use crate::key::Key;
    use crate::policy::{Allowance, Fallback};

    /// Every section, and every field of the library's own.
    const EXAMPLE: &str = r#"
[server]                         # read by the server
http = "127.0.0.1:8080"

[store]
mode = "memory"                  # memory | redis | postgres
fallback = "local"               # open | closed | local; a limit may override it
timeout = "100ms"
max_keys = 10_000_000
redis = { url = "redis://127.0.0.1:6379", cluster = false }   # rediss:// for TLS; password = "env:REDIS_PASSWORD"
postgres = { url = "postgres://localhost/app", prefix = "tollgate_" }

[limits.api]
strategy = "token_bucket"
rate = "10/s"                    # count/period: 10/s, 100/m, 5000/h, 1000000/d, 3/250ms
burst = 20

[limits.login]
strategy = "fixed_window"
limit = 5
window = "1m"
shadow = true                    # decide, count, but never deny

[limits.per-user]
strategy = "sliding_window"
limit = 100
window = "1m"
overrides = { "user:42" = { limit = 1000 } }

[jobs]                           # read by tollgate-jobs
[llm]                            # read by tollgate-llm
"#;

    pub(super) fn parse(text: &str) -> Config {
        Config::parse(text).unwrap_or_else(|mistakes| panic!("{mistakes}\nin\n{text}"))
    }

    #[test]
    fn the_documented_example_is_read_in_full() {
        let config = parse(EXAMPLE);
        assert_eq!((config.store.mode, config.store.fallback), (StoreMode::Memory, Fallback::Local));
        assert_eq!((config.store.timeout, config.store.max_keys), (Micros::from_millis(100), 10_000_000));
        let redis = config.store.redis.as_ref().unwrap();
        assert_eq!(
            (&*redis.urls[0], redis.cluster, &redis.password),
            ("redis://127.0.0.1:6379", false, &None)
        );
        let postgres = config.store.postgres.as_ref().unwrap();
        assert_eq!((&*postgres.url, &*postgres.prefix), ("postgres://localhost/app", "tollgate_"));
        let rules: Vec<_> = config
            .policy
            .rules()
            .iter()
            .map(|rule| (rule.name(), rule.allowance().to_string(), rule.is_shadow()))
            .collect();
        assert_eq!(
            rules,
            [
                ("api", "10/s, bursts of 20".to_owned(), false),
                ("login", "5 per 1m window".to_owned(), true),
                ("per-user", "100 in any 1m".to_owned(), false),
            ]
        );
        let user = config.policy.find("per-user").unwrap().allowance_for(&Key::parse("user:42").unwrap());
        assert_eq!(user.to_string(), "1000 in any 1m");
    }

    #[test]
    fn what_is_left_out_has_a_default() {
        assert_eq!(parse(""), Config::default());
        assert_eq!(
            parse("rules = []\n[requests]\n[jobs]\n[llm]\n[limits]\n[store]\n[server]"),
            Config::default()
        );
        let store = StoreConfig::default();
        assert_eq!((store.mode, store.fallback), (StoreMode::Memory, Fallback::Local));
        assert_eq!((store.when_full, store.max_keys), (WhenFull::Share, 10_000_000));
        assert_eq!(store.timeout, Micros::from_millis(100));
        let memory = MemoryOptions::default();
        assert_eq!((store.when_full, store.max_keys), (memory.when_full, memory.max_keys));
        let store = parse("store.mode = 'postgres'\nstore.postgres.url = 'postgresql:///app'").store;
        assert_eq!(store.postgres.unwrap().prefix, "tollgate_");
        for mode in StoreMode::ALL {
            assert_eq!(mode.to_string(), mode.name());
        }
    }

    #[test]
    fn every_field_is_read() {
        let store = parse(
            "[store]\nmode = 'redis'\nfallback = 'local'\ntimeout = '1s'\nmax_keys = 1\nwhen_full = 'deny'\n\
             redis = { url = 'rediss://u:p@[::1]:6380/1?x=y', cluster = true, password = 'env:REDIS_PASSWORD' }",
        )
        .store;
        assert_eq!((store.mode, store.fallback), (StoreMode::Redis, Fallback::Local));
        assert_eq!((store.timeout, store.max_keys), (Micros::from_secs(1), 1));
        assert_eq!(store.when_full, WhenFull::Deny);
        let redis = store.redis.unwrap();
        assert!(redis.cluster);
        assert_eq!(redis.password, Some(Password::Env("REDIS_PASSWORD".to_owned())));

        for (fields, words) in [
            ("strategy = 'token_bucket'\nrate = '3/250ms'\nburst = 1", "3/250ms, bursts of 1"),
            ("strategy = 'leaky_bucket'\nrate = '100/m'\ncapacity = 0x10", "100/m evenly, up to 16 waiting"),
            ("strategy = 'fixed_window'\nlimit = +5\nwindow = '1d'", "5 per 1d window"),
            ("strategy = 'fixed_window'\nlimit = 5\nwindow = '1d'\nalign = 'first'", "5 per 1d window"),
            (
                "strategy = 'fixed_window'\nlimit = 5\nwindow = '1d'\nalign = 'clock'",
                "5 per 1d window of the clock",
            ),
            ("strategy = 'sliding_window'\nlimit = 1_000\nwindow = '1s'", "1000 in any 1s"),
            ("strategy = 'sliding_window_counter'\nlimit = 5\nwindow = '1h30m'", "about 5 in any 1h30m"),
            ("strategy = 'concurrency'\nlimit = 5\nlease = '100ms'", "5 at once, leases of 100ms"),
            ("strategy = 'sliding_window'\nlimit = 5\nwindow = '250ms'\nsubsecond = true", "5 in any 250ms"),
            (
                "unlimited = false\nblocked = false\nstrategy = 'concurrency'\nlimit = 5\nlease = '1s'",
                "5 at once, leases of 1s",
            ),
        ] {
            let policy = parse(&format!("[limits.a]\n{fields}\n")).policy;
            assert_eq!(policy.find("a").unwrap().allowance().to_string(), words);
        }

        let policy = parse(
            "limits.'a.b' = { unlimited = true, fallback = 'closed' }\nlimits._-9 = { blocked = true }",
        )
        .policy;
        assert_eq!(policy.find("a.b").unwrap().allowance(), &Allowance::Unlimited);
        assert_eq!(policy.find("a.b").unwrap().own_fallback(), Some(Fallback::Closed));
        assert_eq!(policy.find("_-9").unwrap().allowance(), &Allowance::Blocked);
    }

    /// All mistakes of a file, each by line, field, value and a part of the fix.
    pub(super) fn check(text: &str, expected: &[(usize, &str, &str, &str)]) {
        let mistakes = Config::parse(text).expect_err(text);
        for (mistake, (line, field, value, fix)) in mistakes.iter().zip(expected) {
            let found = (mistake.line, mistake.field.as_str(), mistake.value.as_str());
            assert_eq!(found, (*line, *field, *value), "{mistakes}\nin\n{text}");
            assert!(mistake.fix.contains(fix), "{mistake}\nlacks\n{fix}");
            assert!(mistake.to_string().contains(&mistake.fix));
        }
        assert_eq!(mistakes.iter().count(), expected.len(), "{mistakes}\nin\n{text}");
    }

    /// The same for a limit whose fields start in line 3.
    pub(super) fn check_limit(strategy: &str, fields: &str, expected: &[(usize, &str, &str, &str)]) {
        check(&format!("[limits.a]\nstrategy = '{strategy}'\n{fields}"), expected);
    }

    #[test]
    fn what_is_missing_is_named_with_an_example() {
        check(
            "\n[limits.a]",
            &[(
                2,
                "limits.a.strategy",
                "",
                "is missing; write strategy = \"token_bucket\" (or leaky_bucket, fixed_window",
            )],
        );
        check("[limits.a]\nblocked = false", &[(1, "limits.a.strategy", "", "is missing")]);
        for (strategy, missing) in [
            ("token_bucket", [("rate", "rate = \"10/s\""), ("burst", "burst = 20")]),
            ("leaky_bucket", [("rate", "rate = \"10/s\""), ("capacity", "capacity = 20")]),
            ("fixed_window", [("limit", "limit = 100"), ("window", "window = \"1m\"")]),
            ("sliding_window", [("limit", "limit = 100"), ("window", "window = \"1m\"")]),
            ("sliding_window_counter", [("limit", "limit = 100"), ("window", "window = \"1m\"")]),
            ("concurrency", [("limit", "limit = 100"), ("lease", "lease = \"30s\"")]),
        ] {
            let fields = missing.map(|(name, _)| format!("limits.a.{name}"));
            let [one, other] = [0, 1].map(|n| (1, fields[n].as_str(), "", missing[n].1));
            check_limit(strategy, "", &[one, other]);
        }
        check(
            "[store]\nmode = 'redis'",
            &[(1, "store.redis", "", "is missing; write redis = { url = \"redis://127.0.0.1:6379\" }")],
        );
        check(
            "[store]\nmode = 'postgres'\nredis = {}",
            &[
                (1, "store.postgres", "", "is missing; write postgres = { url"),
                (3, "store.redis.url", "", "is missing; write url = \"redis://127.0.0.1:6379\""),
            ],
        );
    }

    #[test]
    fn unknown_names_are_refused_with_the_nearest_known() {
        check_limit(
            "token_bucket",
            "rte = '10/s'\nrate = '10/s'\nbrust = 1\nburst = 2\ncolour = 'red'",
            &[
                (3, "limits.a.rte", "'10/s'", "unknown field; did you mean `rate`?"),
                (5, "limits.a.brust", "1", "unknown field; did you mean `burst`?"),
                (
                    7,
                    "limits.a.colour",
                    "'red'",
                    "unknown field; known here: strategy, subsecond, rate, burst",
                ),
            ],
        );
        check_limit(
            "tokenbucket",
            "",
            &[(2, "limits.a.strategy", "'tokenbucket'", "did you mean \"token_bucket\"?")],
        );
        check_limit(
            "gcra",
            "",
            &[(2, "limits.a.strategy", "'gcra'", "must be one of token_bucket, leaky_bucket")],
        );
        check(
            "[limits.a]\nstrategy = 1",
            &[(2, "limits.a.strategy", "1", "must be text in quotes, such as \"token_bucket\"")],
        );
        check(
            "[limits.a.b]\nunlimited = true",
            &[
                (1, "limits.a.strategy", "", "is missing"),
                (1, "limits.a.b", "{…}", "(a name with a dot in it is written in quotes)"),
            ],
        );
        check(
            "[limit.a]\n[sever]\n[colour]",
            &[
                (1, "limit", "{…}", "unknown field; did you mean `limits`?"),
                (2, "sever", "{…}", "did you mean `server`?"),
                (
                    3,
                    "colour",
                    "{…}",
                    "unknown field; known here: server, store, limits, jobs, llm, requests, routes",
                ),
            ],
        );
        let long = "x".repeat(65);
        for (name, path, fix) in [
            ("API", "limits.API", "a name has only the characters a-z, 0-9, `_`, `.` and `-`"),
            ("'ap i'", "limits.\"ap i\"", "a name has only"),
            ("\"a\\u0000\"", "limits.\"a\\0\"", "a name has only"),
            ("''", "limits.\"\"", "a name has 1 to 64 characters"),
            (&long, &format!("limits.{}…", &long[1..]), "a name has at most 64 characters"),
        ] {
            check(&format!("[limits.{name}]\nblocked = true"), &[(1, path, "", fix)]);
        }
        check("limits = 5", &[(1, "limits", "***", "must be a table: write [limits]")]);
        check("[[limits.a]]\nblocked = true", &[(1, "limits.a", "[…]", "must be a table: write [limits.a]")]);
    }

    #[test]
    fn a_file_that_is_no_toml_is_told_by_line() {
        for (text, line, fix) in [
            ("[limits.a]\nrate = \n", 2, "not valid TOML: string values must be quoted"),
            ("[limits.a]\r\nrate = 10/s\r\n", 2, "not valid TOML"),
            ("a = 1\na = 2\n", 2, "not valid TOML: duplicate key"),
            ("[limits.a\n", 1, "not valid TOML: unclosed table"),
            ("\n\nx = \"abc\n", 3, "not valid TOML: invalid basic string"),
            ("= 3", 1, "not valid TOML"),
            ("\u{0}", 1, "not valid TOML"),
        ] {
            check(text, &[(line, "", "", fix)]);
        }
        // Every line of it, once.
        check("a = \nb = 1\nc = \n", &[(1, "", "", "quoted"), (3, "", "", "quoted")]);
        let mistakes = Config::parse("é = \"x").unwrap_err();
        assert!(mistakes.to_string().starts_with("line 1, column "), "{mistakes}");
    }

    #[test]
    fn columns_count_characters_and_mistakes_keep_the_order_of_the_file() {
        let mistakes =
            Config::parse("limits.z = 1\nlimits.'é'.overrides = { 'ü' = { limit = 0 } }\nlimits.a = 2")
                .unwrap_err();
        let places: Vec<_> = (&mistakes).into_iter().map(|mistake| (mistake.line, mistake.column)).collect();
        assert_eq!(places, [(1, 8), (2, 8), (2, 8), (2, 34), (3, 8)]);
        assert_eq!(mistakes.to_string().lines().count(), 5);
        assert!(std::error::Error::source(&mistakes).is_none());
    }

    #[test]
    fn a_long_or_broken_value_is_cut_to_one_line() {
        let text = format!("[limits.a]\nstrategy = \"\"\"\n{}\"\"\"", "x".repeat(1000));
        let shown = Config::parse(&text).unwrap_err().to_string();
        assert!(shown.starts_with("line 2, limits.a.strategy = \"\"\"\\nxxx"), "{shown}");
        assert!(shown.contains("xxx…: must be one of") && shown.lines().count() == 1, "{shown}");
    }

    #[test]
    fn keys_of_overrides_stay_out_of_debug() {
        let config = parse("limits.a = { blocked = true, overrides.alice.unlimited = true }");
        assert!(!format!("{config:?}").contains("alice"));
    }

    /// As many random files as asked for by `PROPTEST_CASES`, else 10,000.
    fn cases() -> ProptestConfig {
        let cases = std::env::var("PROPTEST_CASES").unwrap_or_default().parse().unwrap_or(10_000);
        ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
    }

    /// One careless edit: where, how much is removed, what is put in.
    fn edit() -> impl Strategy<Value = (prop::sample::Index, usize, String)> {
        let inserted = prop_oneof![
            3 => proptest::sample::select(vec![
                "", "=", "[", "]", "{", "}", "\"", "'", "\"\"\"", "\n", "\r", "#", ".", ",", "-", "0", "99999999999999999999", "%", "é",
                "\0", "true", "nan", "1979-05-27", "limits.", "overrides.", "strategy = ", "unlimited = true\n", "[limits.x]\n",
            ])
            .prop_map(str::to_owned),
            1 => any::<char>().prop_map(String::from),
        ];
        (any::<prop::sample::Index>(), prop_oneof![3 => Just(0), 3 => 0..4usize, 1 => 0..200usize], inserted)
    }

    proptest! {
        #![proptest_config(cases())]

        /// Any edits of a sound file give a sound configuration or mistakes that lie in the file, and never a panic.
        #[test]
        fn a_damaged_file_is_read_or_refused(edits in prop::collection::vec(edit(), 1..6), keep in any::<prop::sample::Index>(), truncate: bool) {
            let mut text: Vec<char> = EXAMPLE.chars().collect();
            for (at, removed, inserted) in edits {
                let at = at.index(text.len() + 1);
                let end = (at + removed).min(text.len());
                text.splice(at..end, inserted.chars());
            }
            if truncate {
                text.truncate(keep.index(text.len() + 1));
            }
            let text: String = text.into_iter().collect();
            if let Err(mistakes) = Config::parse(&text) {
                let lines = text.matches('\n').count() + 1;
                prop_assert!(mistakes.iter().count() > 0);
                prop_assert_eq!(mistakes.to_string().lines().count(), mistakes.iter().count());
                for mistake in &mistakes {
                    prop_assert!((1..=lines).contains(&mistake.line) && mistake.column >= 1, "{}", mistake);
                    prop_assert!(!mistake.fix.is_empty());
                }
            }
        }
    }
}
