//! Reads a policy and a store from one TOML file.
//!
//! [`Config::parse`] is a pure function from text to a valid configuration or to all its mistakes; [`Config::parse_with_env`]
//! does the same with environment variables over the text. They read no file, no environment and no clock: the caller does that.
//! `reader.rs` reads single fields, `environment.rs` knows which variable sets which field, and each section of the library has a
//! file here. An [`Extension`] reads a section of another crate. The result goes to `open.rs` or the builder.

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
mod numbers;
mod reader;
#[cfg(feature = "http")]
mod requests;
#[cfg(feature = "http")]
mod routes;
mod store;
mod stored_override;

use toml::de::DeTable;

pub use self::connection::{Password, PostgresConfig, RedisConfig, host_fault, url_fault};
use self::environment::Environment;
pub use self::environment::{VariableKind, is_service_link};
pub use self::extension::{Extension, Limits};
pub use self::file_watch::{FileChange, FileWatch};
pub use self::limits::limit_fields;
pub use self::mistake::{Mistake, Mistakes};
pub use self::numbers::{OverrideNumbers, WrongNumber};
pub use self::reader::{Field, Reader, Section};
#[cfg(feature = "http")]
pub use self::requests::RequestsConfig;
pub use self::store::{ClockMode, StoreConfig, StoreMode};
pub use self::stored_override::{OverrideFields, StoredOverride, with_overrides};
use crate::policy::Policy;

/// The sections that a file may have, in this crate and in others of this repository.
const SECTIONS: [&str; 9] =
    ["server", "store", "limits", "jobs", "llm", "requests", "routes", "envoy", "rules"];

/// A configuration file: limits, store and routes.
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
/// A window shorter than a second also needs `subsecond = true`. Instead of a strategy a limit may have `unlimited = true` or
/// `blocked = true`. An override has the fields that differ for one key and inherits the others. A rule may also set `shadow`,
/// `fallback` and `subject` (`key` or `namespace`: what is placed on one server of a cluster).
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
/// | `clock` | what checks of token buckets in memory go by: `exact`, or `coarse` for a reading that may be 1 ms old | `exact` |
/// | `redis` | `url` or `urls`, `cluster`, `username`, `password`, `ca_file`, `cert_file`, `key_file`, `prefix` | |
/// | `postgres` | `url`, `prefix`, `password`, `ca_file`, `cert_file`, `key_file`, `connections` | |
///
/// `[[routes]]` has the limits of requests, read with the feature `http`: by the tower layer, the server's gate and backtest.
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
/// Each route that a request matches charges its limit, as one charge: all or none. `[[rules]]` is the older name of
/// `[[routes]]`.
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
    /// `[[routes]]`: which requests are charged under which limit, by which key.
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

    /// Reads a whole file with environment variables over it, or finds all mistakes in both. The environment may supply what the
    /// file lacks, so a file that [`parse`](Self::parse) refuses may be valid here. The file may be empty.
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
        let (whole, offsets) = environment.laid_under(text);
        let mut reader = Reader::new(&whole, offsets.clone());
        let mut table = DeTable::parse_recoverable(&whole[..text.len()]).0.into_inner();
        environment.lay_over(&mut table, &whole, &offsets);
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

/// The known word nearest to an unknown one, if it is near enough for a "did you mean …?".
///
/// ```
/// assert_eq!(tollgate::config::nearest("limts", ["limits", "store"]), Some("limits"));
/// ```
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    crate::policy::nearest::nearest(word, known)
}

/// The start of a text, on one line and without control characters, for messages that repeat untrusted text.
///
/// ```
/// assert_eq!(tollgate::config::excerpt("a\nb").to_string(), "a\\nb");
/// ```
pub fn excerpt(text: &str) -> impl std::fmt::Display + '_ {
    crate::policy::Excerpt(text)
}

#[cfg(test)]
mod tests;
