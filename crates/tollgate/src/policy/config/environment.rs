//! Environment variables over the file: which variable sets which field.
//!
//! A variable's value becomes a TOML value in the table of the file, so the same code reads and refuses it. Its text is appended
//! to the text of the file, so that a mistake has a position. This module does not read the environment: the caller passes names
//! and values.
//!
//! `TOLLGATE_…` has a variable for each scalar of `[store]`, `[requests]`, of every limit in the file, and for those that an
//! extension declares. The short names of other tools (`REDIS_ADDR`, `DATABASE_URL`) are used only with the store mode they
//! belong to. An unknown name in one of these sections, or one that is close to a known name, is a mistake; other `TOLLGATE_`
//! names belong to other programs.

mod names;
mod toml_text;

use std::collections::BTreeMap;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

pub(super) use self::names::{Declared, variables};
use self::names::{SECTIONS, SHORT, known_names, unknown};
pub use self::names::{VariableKind, is_service_link};
use self::toml_text::{set_at, text_at, toml_of, urls_of};
use super::extension::OWNED_BY_OTHERS;
use super::reader::Reader;
use crate::policy::nearest::nearest;

/// The values that the environment sets, and its invalid names.
#[derive(Default)]
pub(super) struct Environment {
    settings: Vec<Setting>,
    strays: Vec<(String, String)>,
}

/// One field, set by one variable.
struct Setting {
    variable: String,
    path: Vec<String>,
    /// The value, as TOML.
    toml: String,
}

impl Environment {
    /// What these variables set over a file. Later settings win over earlier ones.
    pub(super) fn of(
        variables: impl IntoIterator<Item = (String, String)>,
        file: &DeTable<'_>,
        declared: &[Declared],
    ) -> Environment {
        let variables: BTreeMap<String, String> =
            variables.into_iter().filter(|(_, value)| !value.is_empty()).collect();
        let mut environment = Environment::default();
        environment.read_short(&variables, file);
        environment.read_long(&variables, file, declared);
        environment
    }

    fn set(&mut self, variable: &str, path: &[&str], toml: String) {
        let path = path.iter().map(|name| (*name).to_owned()).collect();
        self.settings.push(Setting { variable: variable.to_owned(), path, toml });
    }

    /// Reads the names that other tools have too.
    fn read_short(&mut self, variables: &BTreeMap<String, String>, file: &DeTable<'_>) {
        let mode = variables.get("TOLLGATE_STORE_MODE").or_else(|| variables.get("RL_STORAGE_MODE"));
        let mode = mode.map(String::as_str).or_else(|| text_at(file, &["store", "mode"])).unwrap_or_default();
        for (name, path, kind, of_mode) in SHORT {
            if let Some(value) = variables.get(name).filter(|_| of_mode.is_none_or(|of_mode| of_mode == mode))
            {
                self.set(name, &path.split('.').collect::<Vec<_>>(), toml_of(value, kind));
            }
        }
        if mode != "redis" {
            return;
        }
        if variables.contains_key("REDIS_PASSWORD") {
            let toml = toml_of("env:REDIS_PASSWORD", VariableKind::Text);
            self.set("REDIS_PASSWORD", &["store", "redis", "password"], toml);
        }
        self.read_redis_addresses(variables, file);
    }

    /// Reads `REDIS_ADDR` and `REDIS_TLS`, which also turns addresses of the file.
    fn read_redis_addresses(&mut self, variables: &BTreeMap<String, String>, file: &DeTable<'_>) {
        let tls = match variables.get("REDIS_TLS").map(String::as_str) {
            None => None,
            Some("true" | "1") => Some(true),
            Some("false" | "0") => Some(false),
            Some(_) => {
                // The address is read all the same: that it is missing would be another mistake, and not a true one.
                self.stray("REDIS_TLS", "must be true or false".to_owned());
                None
            }
        };
        let (variable, urls) = match (variables.get("REDIS_ADDR"), tls) {
            (Some(addresses), _) => {
                let with_scheme = |address: &str| match address.trim() {
                    url if url.contains("://") => url.to_owned(),
                    address => format!("redis://{address}"),
                };
                ("REDIS_ADDR", addresses.split(',').map(with_scheme).collect())
            }
            (None, Some(_)) => ("REDIS_TLS", urls_of(file)),
            (None, None) => return,
        };
        if tls == Some(false) && urls.iter().any(|url| url.starts_with("rediss://")) {
            let fix = "is false, but an address begins with rediss://; change one of the two".to_owned();
            self.stray("REDIS_TLS", fix);
        }
        let turned = |url: String| match url.strip_prefix("redis://") {
            Some(rest) if tls == Some(true) => format!("rediss://{rest}"),
            _ => url,
        };
        let urls: Vec<String> = urls.into_iter().map(turned).collect();
        match &urls[..] {
            [] => {}
            [url] => self.set(variable, &["store", "redis", "url"], toml_of(url, VariableKind::Text)),
            _ => {
                self.set(variable, &["store", "redis", "urls"], toml_of(&urls.join(","), VariableKind::Texts))
            }
        }
    }

    /// Reads the long names, and records unknown ones.
    fn read_long(&mut self, variables: &BTreeMap<String, String>, file: &DeTable<'_>, declared: &[Declared]) {
        let known = known_names(file, declared);
        let is_in = |section: &str, name: &str| {
            name.strip_prefix(&*section.to_uppercase()).is_some_and(|rest| rest.starts_with('_'))
        };
        for (variable, value) in variables {
            let Some(name) = variable.strip_prefix("TOLLGATE_") else { continue };
            let is_skipped = OWNED_BY_OTHERS
                .iter()
                .any(|section| is_in(section, name) && declared.iter().all(|(other, _)| other != section));
            if is_skipped {
                continue;
            }
            match known.get(name).map(Vec::as_slice) {
                Some([(path, kind)]) => {
                    let path: Vec<&str> = path.iter().map(String::as_str).collect();
                    self.set(variable, &path, toml_of(value, *kind));
                }
                Some(several) => {
                    let fields: Vec<String> = several.iter().map(|(path, _)| path.join(".")).collect();
                    let fix = "change it in the file, or rename one of the limits";
                    self.stray(variable, format!("may mean {}; {fix}", fields.join(" or ")));
                }
                None if is_service_link(variable, value) => {}
                None => {
                    let lower = name.to_lowercase();
                    let names: Vec<String> = known.keys().map(|name| name.to_lowercase()).collect();
                    let mut with_variables = declared.iter().filter(|(_, fields)| !fields.is_empty());
                    let is_ours = SECTIONS.iter().any(|section| name.starts_with(section))
                        || with_variables.any(|(section, _)| is_in(section, name));
                    // A single word names no field of a section.
                    let may_be_ours = is_ours || name.contains('_');
                    let guess = nearest(&lower, names.iter().map(String::as_str)).filter(|_| may_be_ours);
                    match guess {
                        Some(guess) => {
                            let guess = guess.to_uppercase();
                            self.stray(variable, format!("sets nothing; did you mean `TOLLGATE_{guess}`?"));
                        }
                        None if is_ours => self.stray(variable, unknown(name)),
                        None => {}
                    }
                }
            }
        }
    }

    fn stray(&mut self, variable: &str, fix: String) {
        self.strays.push((variable.to_owned(), fix));
    }

    /// The text with the environment's values appended, and the position of each variable's value.
    pub(super) fn laid_under(&self, text: &str) -> (String, Vec<(usize, String)>) {
        let mut whole = text.to_owned();
        let mut offsets = Vec::new();
        for setting in &self.settings {
            whole.push('\n');
            offsets.push((whole.len(), setting.variable.clone()));
            whole.push_str(&setting.toml);
        }
        (whole, offsets)
    }

    /// Puts the environment's values into the table of the file.
    pub(super) fn lay_over<'t>(&self, table: &mut DeTable<'t>, whole: &'t str, offsets: &[(usize, String)]) {
        for (setting, (offset, _)) in self.settings.iter().zip(offsets) {
            let end = offset + setting.toml.len();
            let Ok(value) = DeValue::parse(&whole[*offset..end]) else { continue };
            set_at(table, &setting.path, Spanned::new(*offset..end, value.into_inner()));
        }
    }

    /// Notes the names that make no sense.
    pub(super) fn note_strays(&self, reader: &mut Reader<'_>) {
        for (variable, fix) in &self.strays {
            reader.variable(variable, fix);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use std::time::Duration;
    use tollgate_store::{Subject, WhenFull};

    use super::super::limits;
    use super::super::{ClockMode, Config, Mistakes, Password, StoreMode};
    use super::names::FIELDS;
    use super::*;
    use crate::policy::Fallback;

    const FILE: &str = r#"
[store]
mode = "memory"
timeout = "50ms"

[limits.api]
strategy = "token_bucket"
rate = "10/s"
burst = 20
overrides = { "user:42" = { burst = 40 } }

[limits."web.site-a"]
strategy = "fixed_window"
limit = 5
window = "1m"

[limits.pool]
strategy = "concurrency"
limit = 5
lease = "1m"
"#;

    fn read(file: &str, variables: &[(&str, &str)]) -> Result<Config, Mistakes> {
        let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Config::parse_with_env(file, variables)
    }

    fn sound(variables: &[(&str, &str)]) -> Config {
        read(FILE, variables).unwrap_or_else(|mistakes| panic!("{mistakes}"))
    }

    /// The mistakes of an environment over the file above.
    fn check(variables: &[(&str, &str)], expected: &[&str]) {
        let mistakes = read(FILE, variables).expect_err(&format!("{variables:?}"));
        let shown: Vec<String> = mistakes.iter().map(ToString::to_string).collect();
        assert_eq!(shown.len(), expected.len(), "{mistakes}");
        for (shown, expected) in shown.iter().zip(expected) {
            assert!(shown.contains(expected), "{shown}\nlacks\n{expected}");
        }
    }

    #[test]
    fn an_empty_environment_changes_nothing() {
        assert_eq!(sound(&[]), Config::parse(FILE).unwrap());
        let others =
            [("PATH", "/bin"), ("RL_LOG_SALT", "x"), ("TOLLGATE_CONFIG", "x"), ("TOLLGATE_STORE_MODE", "")];
        assert_eq!(sound(&others), Config::parse(FILE).unwrap());
        let theirs =
            [("TOLLGATE_REDIS_SERVER", "/bin/redis"), ("TOLLGATE_SERVER", "http://a"), ("TOLLGATE_LOG", "1")];
        assert_eq!(sound(&theirs), Config::parse(FILE).unwrap());
        // The variables of sections that this program does not read belong to other programs.
        let of_others =
            [("TOLLGATE_SERVER_HTTP", "?"), ("TOLLGATE_LLM_WINDW", "?"), ("TOLLGATE_SERVER_MODE", "?")];
        assert_eq!(sound(&of_others), Config::parse(FILE).unwrap());
        // Variables of unused stores are ignored.
        let unused = [("REDIS_ADDR", "no address"), ("REDIS_TLS", "maybe"), ("DATABASE_URL", "mysql://a")];
        assert_eq!(sound(&unused), Config::parse(FILE).unwrap());
    }

    /// Regression: a service called tollgate-server in Kubernetes kept the server in it from starting.
    #[test]
    fn addresses_of_services_are_not_ours() {
        let mut own = Own;
        let links = [
            ("TOLLGATE_STORE_SERVICE_HOST", "10.0.0.1"),
            ("TOLLGATE_STORE_SERVICE_PORT", "6379"),
            ("TOLLGATE_STORE_SERVICE_PORT_REDIS", "6379"),
            ("TOLLGATE_STORE_PORT", "tcp://10.0.0.1:6379"),
            ("TOLLGATE_STORE_PORT_6379_TCP", "tcp://10.0.0.1:6379"),
            ("TOLLGATE_STORE_PORT_6379_TCP_ADDR", "10.0.0.1"),
            ("TOLLGATE_OWN_PORT_6379_UDP_PROTO", "udp"),
        ];
        let owned = links.map(|(name, value)| (name.to_owned(), value.to_owned()));
        Config::parse_with(FILE, owned, &mut [&mut own]).unwrap_or_else(|mistakes| panic!("{mistakes}"));
        for (name, value) in [
            ("TOLLGATE_STORE_PORT", "6379"),
            ("TOLLGATE_STORE_PORT_A_TCP", "x"),
            ("TOLLGATE_STORE_PORT_6379", "x"),
        ] {
            assert!(read(FILE, &[(name, value)]).is_err(), "{name}");
        }
    }

    /// A section of another crate with a variable.
    struct Own;

    impl super::super::Extension for Own {
        fn name(&self) -> &'static str {
            "own"
        }

        fn variables(&self) -> &'static [(&'static str, VariableKind)] {
            &[("field", VariableKind::Text)]
        }

        fn read(
            &mut self,
            _: &mut Reader<'_>,
            _: &super::super::Field<'_>,
            _: &mut super::super::Limits<'_>,
        ) {
        }
    }

    #[test]
    fn the_short_names_set_the_store() {
        let config = sound(&[
            ("RL_STORAGE_MODE", "redis"),
            ("REDIS_ADDR", "cache:6379"),
            ("REDIS_PASSWORD", "env:hunter2"),
            ("REDIS_TLS", "true"),
            ("REDIS_CLUSTER", "true"),
            ("RL_POOL_SIZE", "8"),
            ("RL_TIMEOUT", "80ms"),
        ]);
        assert_eq!((config.store.mode, config.store.connections), (StoreMode::Redis, Some(8)));
        assert_eq!(config.store.timeout, Duration::from_millis(80));
        let redis = config.store.redis.unwrap();
        assert_eq!((&redis.urls[..], redis.cluster), (&["rediss://cache:6379".to_owned()][..], true));
        let password = redis.password.unwrap();
        assert_eq!(password, Password::Env("REDIS_PASSWORD".to_owned()), "whatever it begins with");

        for (address, tls, urls) in [
            ("a:1,b:2, rediss://c", "", &["redis://a:1", "redis://b:2", "rediss://c"][..]),
            ("a:1,redis://b", "1", &["rediss://a:1", "rediss://b"]),
            ("redis://u:p@a/1", "false", &["redis://u:p@a/1"]),
            ("rediss://a", "true", &["rediss://a"]),
        ] {
            let variables = [("RL_STORAGE_MODE", "redis"), ("REDIS_ADDR", address), ("REDIS_TLS", tls)];
            let redis = sound(&variables).store.redis.unwrap();
            assert_eq!(
                (&redis.urls[..], redis.cluster),
                (&urls.iter().map(|url| (*url).to_owned()).collect::<Vec<_>>()[..], urls.len() > 1)
            );
        }
        // An address of the file is turned, or replaced.
        for (fields, urls) in [
            ("url = 'redis://a'", &["rediss://a"][..]),
            ("urls = ['redis://a', 'redis://b']", &["rediss://a", "rediss://b"]),
        ] {
            let file = format!("store.mode = 'redis'\nstore.redis.{fields}");
            assert_eq!(read(&file, &[("REDIS_TLS", "true")]).unwrap().store.redis.unwrap().urls, urls);
            let replaced = read(&file, &[("REDIS_ADDR", "c"), ("REDIS_TLS", "false")]).unwrap();
            assert_eq!(replaced.store.redis.unwrap().urls, ["redis://c"]);
        }

        let postgres = [("RL_STORAGE_MODE", "postgres"), ("DATABASE_URL", "postgres://u:p@db/app")];
        assert_eq!(sound(&postgres).store.postgres.unwrap().url, "postgres://u:p@db/app");
        let over = [postgres[0], postgres[1], ("TOLLGATE_STORE_POSTGRES_URL", "postgres://ours/app")];
        assert_eq!(sound(&over).store.postgres.unwrap().url, "postgres://ours/app", "our own name wins");
    }

    #[test]
    fn every_field_of_store_and_requests_has_a_variable() {
        let variables = [
            ("TOLLGATE_STORE_MODE", "redis"),
            ("TOLLGATE_STORE_FALLBACK", "local"),
            ("TOLLGATE_STORE_FALLBACK_INSTANCES", "3"),
            ("TOLLGATE_STORE_TIMEOUT", "1s"),
            ("TOLLGATE_STORE_DENIAL_CACHE", "0s"),
            ("TOLLGATE_STORE_CONNECTIONS", "7"),
            ("TOLLGATE_STORE_MAX_KEYS", "1_000"),
            ("TOLLGATE_STORE_WHEN_FULL", "deny"),
            ("TOLLGATE_STORE_CLOCK", "coarse"),
            ("TOLLGATE_STORE_REDIS_URLS", "redis://a,redis://b"),
            ("TOLLGATE_STORE_REDIS_CLUSTER", "true"),
            ("TOLLGATE_STORE_REDIS_USERNAME", "u"),
            ("TOLLGATE_STORE_REDIS_PASSWORD", "p\"\\\u{7}"),
            ("TOLLGATE_STORE_REDIS_CA_FILE", "r-ca"),
            ("TOLLGATE_STORE_REDIS_CERT_FILE", "r-cert"),
            ("TOLLGATE_STORE_REDIS_KEY_FILE", "r-key"),
            ("TOLLGATE_STORE_REDIS_PREFIX", "app:"),
            ("TOLLGATE_STORE_POSTGRES_URL", "postgres://a"),
            ("TOLLGATE_STORE_POSTGRES_PREFIX", "app_"),
            ("TOLLGATE_STORE_POSTGRES_PASSWORD", "env:PGPASSWORD"),
            ("TOLLGATE_STORE_POSTGRES_CA_FILE", "p-ca"),
            ("TOLLGATE_STORE_POSTGRES_CERT_FILE", "p-cert"),
            ("TOLLGATE_STORE_POSTGRES_KEY_FILE", "p-key"),
            ("TOLLGATE_STORE_POSTGRES_CONNECTIONS", "9"),
            ("TOLLGATE_REQUESTS_TRUSTED_PROXIES", "10.0.0.0/8,::1"),
            ("TOLLGATE_REQUESTS_CLIENT_HEADER", "forwarded"),
            ("TOLLGATE_REQUESTS_IPV4_PREFIX", "24"),
            ("TOLLGATE_REQUESTS_IPV6_PREFIX", "48"),
            ("TOLLGATE_REQUESTS_ENCODED_SEPARATORS", "keep"),
            ("TOLLGATE_REQUESTS_USER_HEADER", "x-user"),
        ];
        // All fields except `url`, which is an alternative to `urls`.
        let names: BTreeSet<String> = FIELDS
            .iter()
            .map(|(path, _)| format!("TOLLGATE_{}", path.replace('.', "_").to_uppercase()))
            .filter(|name| name != "TOLLGATE_STORE_REDIS_URL")
            .collect();
        assert_eq!(variables.iter().map(|(name, _)| (*name).to_owned()).collect::<BTreeSet<_>>(), names);
        let store = sound(&variables).store;
        assert_eq!(
            (store.mode, store.fallback, store.fallback_instances),
            (StoreMode::Redis, Fallback::Local, 3)
        );
        assert_eq!((store.timeout, store.denial_cache), (Duration::from_secs(1), Duration::ZERO));
        assert_eq!((store.connections, store.max_keys, store.when_full), (Some(7), 1_000, WhenFull::Deny));
        assert_eq!(store.clock, ClockMode::Coarse);
        let (redis, postgres) = (store.redis.unwrap(), store.postgres.unwrap());
        assert_eq!((redis.urls.len(), redis.cluster, redis.username.as_deref()), (2, true, Some("u")));
        assert_eq!(redis.password.unwrap().resolve(|_| None).as_deref(), Ok("p\"\\\u{7}"));
        assert_eq!((redis.prefix.as_deref(), postgres.prefix.as_str()), (Some("app:"), "app_"));
        assert_eq!((postgres.url.as_str(), postgres.connections), ("postgres://a", Some(9)));
        assert_eq!(postgres.password, Some(Password::Env("PGPASSWORD".to_owned())));
        let files = [redis.ca_file, redis.cert_file, redis.key_file];
        assert_eq!(files.map(|file| file.unwrap().display().to_string()), ["r-ca", "r-cert", "r-key"]);
        let files = [postgres.ca_file, postgres.cert_file, postgres.key_file];
        assert_eq!(files.map(|file| file.unwrap().display().to_string()), ["p-ca", "p-cert", "p-key"]);
        let one = [("TOLLGATE_STORE_MODE", "redis"), ("TOLLGATE_STORE_REDIS_URL", "redis://a")];
        assert_eq!(sound(&one).store.redis.unwrap().urls, ["redis://a"]);
    }

    #[test]
    fn limits_of_the_file_can_be_changed() {
        let config = sound(&[
            ("TOLLGATE_LIMITS_API_RATE", "7/s"),
            ("TOLLGATE_LIMITS_API_FALLBACK", "closed"),
            ("TOLLGATE_LIMITS_API_SUBJECT", "namespace"),
            ("TOLLGATE_LIMITS_WEB_SITE_A_LIMIT", "9"),
            ("TOLLGATE_LIMITS_WEB_SITE_A_ALIGN", "clock"),
            ("TOLLGATE_LIMITS_WEB_SITE_A_SHADOW", "1"),
            ("TOLLGATE_LIMITS_POOL_LEASE", "2m"),
        ]);
        let api = config.policy.find("api").unwrap();
        assert_eq!(api.allowance().to_string(), "7/s, bursts of 20");
        assert_eq!(
            api.overrides()[0].1.to_string(),
            "7/s, bursts of 40",
            "an override has the rest from its limit"
        );
        assert_eq!((api.own_fallback(), api.subject()), (Some(Fallback::Closed), Subject::Namespace));
        let web = config.policy.find("web.site-a").unwrap();
        assert_eq!(
            (web.allowance().to_string().as_str(), web.is_shadow()),
            ("9 per 1m window of the clock", true)
        );
        assert_eq!(config.policy.find("pool").unwrap().allowance().to_string(), "5 at once, leases of 2m");
        // The order of the limits is the file's still.
        let names: Vec<&str> = config.policy.rules().iter().map(crate::Rule::name).collect();
        assert_eq!(names, ["api", "web.site-a", "pool"]);
        for (field, _) in limits::scalars() {
            let variable = format!("TOLLGATE_LIMITS_API_{}", field.to_uppercase());
            let mistakes = read(FILE, &[(&variable, "?")]).unwrap_err().to_string();
            assert!(
                mistakes.contains(&format!("environment {variable}, limits.api.{field} = \"?\": ")),
                "{mistakes}"
            );
        }
    }

    #[test]
    fn mistakes_name_the_variable_and_the_field() {
        check(
            &[("RL_STORAGE_MODE", "redsi")],
            &["environment RL_STORAGE_MODE, store.mode = \"redsi\": must be one of memory, redis"],
        );
        check(
            &[("RL_TIMEOUT", "100")],
            &["environment RL_TIMEOUT, store.timeout = \"100\": use one of the units"],
        );
        check(&[("RL_TIMEOUT", "11s")], &["store.timeout = \"11s\": must be from 1ms to 10s"]);
        check(
            &[("RL_POOL_SIZE", "many")],
            &["environment RL_POOL_SIZE, store.connections = \"many\": must be a whole number"],
        );
        check(&[("RL_POOL_SIZE", "0")], &["store.connections = 0: must be at least 1"]);
        check(&[("RL_POOL_SIZE", "1__0")], &["store.connections = \"1__0\": must be a whole number"]);
        check(
            &[("TOLLGATE_LIMITS_API_BURST", "0")],
            &["environment TOLLGATE_LIMITS_API_BURST, limits.api.burst = 0: must be at least 1"],
        );
        check(
            &[("TOLLGATE_LIMITS_API_WINDOW", "1m")],
            &["limits.api.window = \"1m\": `window` does not belong to token_bucket"],
        );
        check(
            &[("TOLLGATE_STORE_MDOE", "redis")],
            &["environment TOLLGATE_STORE_MDOE: sets nothing; did you mean `TOLLGATE_STORE_MODE`?"],
        );
        check(&[("TOLLGATE_STOER_MODE", "redis")], &["did you mean `TOLLGATE_STORE_MODE`?"]);
        check(&[("TOLLGATE_STORE_COLOUR_OF_THE_SKY", "x")], &["sets nothing; its section has no such field"]);
        check(&[("TOLLGATE_LIMITS_LOGINS_OF_PEOPLE_RATE", "x")], &["of a limit that the file has"]);
        check(
            &[("RL_STORAGE_MODE", "redis")],
            &["line 2, store.redis: is missing; write redis = { url = \"redis://127.0.0.1:6379\" }"],
        );
        check(
            &[("RL_STORAGE_MODE", "redis"), ("REDIS_PASSWORD", "x")],
            &["environment REDIS_PASSWORD, store.redis.url: is missing"],
        );
        let redis = ("RL_STORAGE_MODE", "redis");
        check(
            &[redis, ("REDIS_ADDR", "a b")],
            &["environment REDIS_ADDR, store.redis.url = ***: has a space"],
        );
        check(
            &[redis, ("REDIS_ADDR", "a,b:x")],
            &["environment REDIS_ADDR, store.redis.urls = […]: address 2 has no port"],
        );
        check(
            &[redis, ("REDIS_ADDR", "a"), ("REDIS_CLUSTER", "perhaps")],
            &["environment REDIS_CLUSTER, store.redis.cluster = \"perhaps\": must be true or false"],
        );
        check(
            &[redis, ("REDIS_ADDR", "a,b"), ("REDIS_CLUSTER", "false")],
            &["environment REDIS_CLUSTER, store.redis.cluster = false: several addresses are of one cluster"],
        );
        check(
            &[
                redis,
                ("REDIS_ADDR", "rediss://a"),
                ("REDIS_TLS", "false"),
                ("TOLLGATE_STORE_REDIS_URL", "redis://a"),
            ],
            &["environment REDIS_TLS: is false, but an address begins with rediss://"],
        );
        check(
            &[redis, ("REDIS_TLS", "on"), ("TOLLGATE_STORE_REDIS_URL", "redis://a")],
            &["environment REDIS_TLS: must be true or false"],
        );
        // A mistake in one of two leaves the other in offset.
        check(
            &[redis, ("REDIS_ADDR", "a:1"), ("REDIS_TLS", "on")],
            &["environment REDIS_TLS: must be true or false"],
        );
        check(
            &[redis, ("REDIS_ADDR", "rediss://a"), ("REDIS_TLS", "false")],
            &["environment REDIS_TLS: is false, but an address begins with rediss://"],
        );
        // Mistakes of the file come first. If the file is not TOML, they come alone.
        let both = read("[limits.a]\nblocked = 1", &[("RL_TIMEOUT", "x")]).unwrap_err().to_string();
        assert!(
            both.starts_with("line 2, limits.a.blocked = 1") && both.contains("\nenvironment RL_TIMEOUT"),
            "{both}"
        );
        assert_eq!(read("= 3", &[("RL_TIMEOUT", "x")]).unwrap_err().iter().count(), 1);
        // Where the file has no section but a value, that is the mistake.
        let clash = read("store = 5", &[("RL_TIMEOUT", "1s")]).unwrap_err();
        assert_eq!(clash.iter().map(|mistake| mistake.field.as_str()).collect::<Vec<_>>(), ["store"]);
    }

    #[test]
    fn a_name_that_may_mean_two_fields_is_refused() {
        let limit = |name: &str| format!("[limits.{name}]\nunlimited = true\n");
        let file = [limit("a-b"), limit("a_b"), limit("'a.b'")].concat();
        let mistakes = read(&file, &[("TOLLGATE_LIMITS_A_B_SHADOW", "true")]).unwrap_err().to_string();
        assert_eq!(
            mistakes,
            "environment TOLLGATE_LIMITS_A_B_SHADOW: may mean limits.a-b.shadow or limits.a.b.shadow or limits.a_b.shadow; \
             change it in the file, or rename one of the limits"
        );
    }

    /// Wherever a secret comes from, no message and no `Debug` shows it.
    #[test]
    fn secrets_are_never_shown() {
        let redis = ("RL_STORAGE_MODE", "redis");
        for variables in [
            &[redis, ("REDIS_ADDR", "redis://:hunter2@a b")][..],
            &[redis, ("REDIS_ADDR", "redis://:hunter2@a,hunter2:x")],
            &[redis, ("REDIS_ADDR", "a"), ("REDIS_PASSWORD", "hunter2"), ("RL_TIMEOUT", "x")],
            &[redis, ("TOLLGATE_STORE_REDIS_URL", "hunter2")],
            &[redis, ("TOLLGATE_STORE_REDIS_PASWORD", "hunter2"), ("REDIS_ADDR", "a")],
            &[redis, ("TOLLGATE_STORE_REDIS_PASSWORD", "env:hunter2!"), ("REDIS_ADDR", "a")],
            &[("RL_STORAGE_MODE", "postgres"), ("DATABASE_URL", "mysql://u:hunter2@a")],
        ] {
            let mistakes = read(FILE, variables).unwrap_err();
            assert!(!format!("{mistakes} {mistakes:?}").contains("hunter2"), "{mistakes}");
        }
        let config = sound(&[
            redis,
            ("REDIS_ADDR", "redis://:hunter2@a"),
            ("REDIS_PASSWORD", "hunter2"),
            ("TOLLGATE_STORE_REDIS_USERNAME", "hunter2"),
            ("TOLLGATE_STORE_POSTGRES_URL", "postgres://u:hunter2@a"),
            ("TOLLGATE_STORE_POSTGRES_PASSWORD", "hunter2"),
        ]);
        assert!(!format!("{config:?}").contains("hunter2"), "{config:?}");
    }
}
