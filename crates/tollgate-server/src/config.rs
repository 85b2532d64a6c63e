//! The whole configuration file of a server.
//!
//! `[store]`, `[limits]`, `[requests]` and `[[routes]]` are read by the library, `[jobs]` and `[llm]` by their crates, and what only a
//! server configures is read here: `[server]` (`server.rs`) and `[[envoy]]` (`envoy.rs`). All commands read a file through
//! [`Config::parse_with_env`], so that every section is checked, whichever of them a command needs.

pub(crate) mod envoy;
mod server;
pub(crate) mod warnings;

use tollgate::config::Mistakes;
use tollgate_jobs::JobsConfig;
use tollgate_llm::{LlmConfig, LlmSection};

pub(crate) use self::envoy::EnvoyRules;
pub(crate) use self::server::{LogLevel, LogTarget, ServerConfig, address_fix};

/// All that a configuration file says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Config {
    /// `[store]`, `[limits]`, `[requests]` and `[[routes]]`, and the limits of all other sections.
    pub(crate) gate: tollgate::config::Config,
    /// `[server]`: where to listen.
    pub(crate) server: ServerConfig,
    /// `[[envoy]]`: which descriptors of Envoy meet which limit.
    pub(crate) envoy: EnvoyRules,
    /// `[jobs]`: limits of background jobs. They are in the policy of `gate` too.
    pub(crate) jobs: JobsConfig,
    /// `[llm]`: language models, their limits and clients. The limits are in the policy of `gate` too.
    pub(crate) llm: Option<LlmConfig>,
}

impl Config {
    /// Reads a whole file, or finds every mistake in it.
    pub(crate) fn parse(text: &str) -> Result<Config, Mistakes> {
        Config::parse_with_env(text, [])
    }

    /// Reads a whole file with the environment laid over it, or finds every mistake in both.
    pub(crate) fn parse_with_env(
        text: &str,
        environment: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Config, Mistakes> {
        let (mut server, mut envoy) = (ServerConfig::default(), EnvoyRules::default());
        let (mut jobs, mut llm) = (JobsConfig::default(), LlmSection::default());
        let gate = tollgate::config::Config::parse_with(
            text,
            environment,
            &mut [&mut server, &mut envoy, &mut jobs, &mut llm],
        )?;
        Ok(Config { gate, server, envoy, jobs, llm: llm.config })
    }

    /// The namespaces of keys that the config names, which metrics may show: those of `[server]`, the domains of Envoy and the
    /// namespaces of route limits.
    pub(crate) fn namespaces(&self) -> impl Iterator<Item = &str> {
        let domains = self.envoy.rules().iter().map(|rule| rule.domain.as_str());
        self.server.namespaces.iter().map(String::as_str).chain(domains).chain(self.gate.namespaces())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn parse(text: &str) -> Config {
        Config::parse(text).unwrap_or_else(|mistakes| panic!("{mistakes}\nin\n{text}"))
    }

    /// All mistakes of a file, each by line, field, value and a part of the fix.
    pub(crate) fn check(text: &str, expected: &[(usize, &str, &str, &str)]) {
        let mistakes = Config::parse(text).expect_err(text);
        for (mistake, (line, field, value, fix)) in mistakes.iter().zip(expected) {
            let found = (mistake.line, mistake.field.as_str(), mistake.value.as_str());
            assert_eq!(found, (*line, *field, *value), "{mistakes}\nin\n{text}");
            assert!(mistake.fix.contains(fix), "{mistake}\nlacks\n{fix}");
        }
        assert_eq!(mistakes.iter().count(), expected.len(), "{mistakes}\nin\n{text}");
    }

    /// Empty sections are as good as none.
    #[test]
    fn what_is_left_out_has_a_default() {
        assert_eq!(parse(""), Config::default());
        let empty = "rules = []\nenvoy = []\n[requests]\n[jobs]\n[llm]\n[limits]\n[store]\n[server]";
        assert_eq!(parse(empty), Config::default());
    }

    /// A mistake is found in whichever section it is, and all are reported in the order of the file.
    #[test]
    fn every_section_is_checked_in_one_run() {
        check(
            "[sever]\n[server]\nhtp = 'x'\n[jobs.types.a]\nlimt = 5\nconcurrency = 1\n[llm]\nwindw = '1s'\n[[envoy]]\nentries = ['a']\nunlimited = true",
            &[
                (1, "sever", "{…}", "did you mean `server`?"),
                (3, "server.htp", "***", "did you mean `http`?"),
                (5, "jobs.types.a.limt", "5", "did you mean `limit`?"),
                (8, "llm.windw", "***", "did you mean `window`?"),
                (9, "envoy[1].domain", "", "is missing"),
            ],
        );
    }

    #[test]
    fn limits_of_all_sections_are_one_policy() {
        let config = parse(
            "[limits.api]\nblocked = true\n[jobs.types.mail]\nlimit = 2\nwindow = '1s'\n\
             [llm.upstreams.a]\nkind = 'openai'\nbase_url = 'http://localhost/v1'\n[llm.models.x]\nrpm = 5\n",
        );
        let names: Vec<&str> = config.gate.policy.rules().iter().map(tollgate::Rule::name).collect();
        assert_eq!(names, ["api", "jobs.type.mail", "llm.x.rpm"]);
    }

    #[test]
    fn a_variable_of_the_server_that_sets_nothing_is_a_mistake() {
        for (variable, fix) in [
            ("TOLLGATE_SERVER_HTPT", "did you mean `TOLLGATE_SERVER_HTTP`?"),
            ("TOLLGATE_SERVER_COLOUR_OF_THE_SKY", "sets nothing; its section has no such field"),
            ("TOLLGATE_LLM_COLOUR_OF_THE_SKY", "sets nothing; its section has no such field"),
        ] {
            let read = Config::parse_with_env("", [(variable.to_owned(), "?".to_owned())]);
            let mistakes = read.expect_err(variable).to_string();
            assert!(mistakes.contains(fix), "{mistakes}");
        }
    }

    /// `docs/config.md` has every field of the sections that are read here, and no other. The library's own test has the same of
    /// its sections.
    #[test]
    fn every_field_of_the_server_is_documented_and_nothing_else() {
        const PAGE: &str = include_str!("../../../docs/config.md");
        const STRANGE: &str = "zzzzzzzzzzzzzzzzzzzzzzzzzzz";
        let envoy = "[limits.api]\nblocked = true\n[[envoy]]\ndomain = 'a'\nentries = ['b']\nlimit = 'api'\n";
        let up = "[llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://a/v1'\napi_key = 'b'\n";
        let model = format!("{up}[llm.models.c]\n");
        let client = format!("{up}[llm.clients.d]\nkey = 'e'\n");
        for (heading, file, variables) in [
            ("## `[server]`", "[server]\n", "TOLLGATE_SERVER_"),
            ("## `[[envoy]]`", envoy, ""),
            ("## `[llm]`", "[llm]\n", "TOLLGATE_LLM_"),
            ("## `[llm.upstreams.NAME]`", up, "TOLLGATE_LLM_UPSTREAMS_UP_"),
            ("## `[llm.models.NAME]`", &model, "TOLLGATE_LLM_MODELS_C_"),
            ("## `[llm.clients.NAME]`", &client, "TOLLGATE_LLM_CLIENTS_D_"),
        ] {
            let mistakes = Config::parse(&format!("{file}{STRANGE} = 1")).expect_err(heading).to_string();
            let (_, known) = mistakes.split_once("known here: ").unwrap_or_else(|| panic!("{mistakes}"));
            let mut known: Vec<&str> = known.split(", ").collect();
            let section =
                PAGE.split(heading).nth(1).expect(heading).split("\n## ").next().unwrap_or_default();
            let rows = section.lines().filter_map(|line| line.strip_prefix("| `"));
            let mut documented = Vec::new();
            for row in rows {
                let cells: Vec<&str> = row.trim_end_matches(" |").split(" | ").collect();
                assert_eq!(cells.len(), 6, "{heading}: {row}");
                assert!(["yes", "restart"].contains(&cells[4]), "{heading}: {row}");
                assert!(cells.iter().all(|cell| !cell.trim().is_empty()), "{heading}: {row}");
                let field = cells[0].trim_end_matches('`');
                let variable = format!("{variables}{}", field.to_uppercase());
                let read = Config::parse_with_env(file, [(variable.clone(), "?".to_owned())]);
                let sets_nothing = read.is_err_and(|mistakes| mistakes.to_string().contains("sets nothing"));
                match cells[3] {
                    "–" => assert!(heading.contains("[[") || sets_nothing, "{variable} is not documented"),
                    shown => {
                        assert_eq!(shown.trim_matches('`'), variable, "{heading}");
                        assert!(!sets_nothing, "{variable} sets nothing");
                    }
                }
                documented.push(field);
            }
            known.sort_unstable();
            documented.sort_unstable();
            assert_eq!(documented, known, "{heading}");
        }
    }
}
