//! The limits of LiteLLM's `config.yaml` as ours: a model of `[llm.models]` for each name of `model_list`, and an upstream for each provider.
//!
//! Only what limits is carried over: `rpm`, `tpm` and `max_parallel_requests` of a deployment. Keys of providers stay in the environment.

use std::collections::{HashMap, HashSet};

use super::name;
use super::written::{Imported, Written, quoted};
use super::yaml::{self, Node};

/// The providers that the gateway speaks to, with the addresses that their SDKs have.
const PROVIDERS: [(&str, &str); 2] =
    [("openai", "https://api.openai.com/v1"), ("anthropic", "https://api.anthropic.com")];

/// Carries a file over, or says why it cannot be read at all.
pub(super) fn import(text: &str) -> Result<Imported, String> {
    let documents = yaml::read(text)?;
    let Some(document) = documents.first() else { return Err("it is empty".to_owned()) };
    let Some(models) = document.field("model_list").and_then(Node::list) else {
        return Err(format!("line {}: there is no `model_list`", document.line));
    };
    let mut import = Import::default();
    for model in models {
        import.model(model);
    }
    import.settings(document);
    Ok(import.written.finish())
}

#[derive(Default)]
struct Import {
    written: Written,
    /// The names of upstreams, by kind, address and key.
    upstreams: HashMap<(String, String, String), String>,
    upstream_names: HashSet<String>,
    models: HashSet<String>,
}

fn text_of<'a>(node: &'a Node, field: &str) -> Option<&'a str> {
    node.field(field).and_then(Node::text).filter(|text| !matches!(*text, "" | "null" | "~"))
}

impl Import {
    fn model(&mut self, node: &Node) {
        let (Some(name), Some(params)) = (text_of(node, "model_name"), node.field("litellm_params")) else {
            return self
                .written
                .note(node.line, "an entry without `model_name` and `litellm_params` was left out");
        };
        let Some(model) = text_of(params, "model") else {
            return self.written.note(params.line, format!("`{name}` names no `model` and was left out"));
        };
        let (provider, plain) = match model.split_once('/') {
            Some((provider, plain)) => (provider, plain),
            None if model.starts_with("claude") => ("anthropic", model),
            None => ("openai", model),
        };
        let Some((kind, address)) = PROVIDERS.iter().find(|(kind, _)| *kind == provider) else {
            return self.written.note(
                params.line,
                format!(
                    "`{name}` was left out: the gateway speaks to openai and anthropic, not to `{provider}`"
                ),
            );
        };
        if name.contains('*') {
            return self
                .written
                .note(node.line, format!("`{name}` was left out: a model is named whole here"));
        }
        if !self.models.insert(name.to_owned()) {
            return self.written.note(
                node.line,
                format!(
                    "a second deployment of `{name}` was left out: give the upstream several `keys` instead"
                ),
            );
        }
        if plain != name {
            self.written.note(
                params.line,
                format!(
                    "`{name}` is sent as it is; there it becomes `{plain}`, so callers have to name that"
                ),
            );
        }
        let mut fields = Vec::new();
        for (theirs, ours) in [("rpm", "rpm"), ("tpm", "tpm"), ("max_parallel_requests", "concurrency")] {
            // Newer versions have them in either place.
            let Some(field) = params.field(theirs).or_else(|| node.field(theirs)) else { continue };
            match field.text().and_then(|text| text.parse::<u64>().ok()).filter(|&number| number > 0) {
                Some(number) => fields.push((ours, number.to_string())),
                None => self
                    .written
                    .note(field.line, format!("`{theirs}` is no whole number above 0 and was left out")),
            }
        }
        let address = text_of(params, "api_base").unwrap_or(address).to_owned();
        let key = self.key(params, kind);
        let upstream = self.upstream(kind, &address, &key);
        self.written.count_limits(fields.len());
        fields.insert(0, ("upstream", quoted(&upstream)));
        self.written.table(&format!("llm.models.{}", quoted(name)), &fields);
    }

    /// The key as our config names it.
    fn key(&mut self, params: &Node, kind: &str) -> String {
        let usual = || format!("env:{}_API_KEY", kind.to_ascii_uppercase());
        match params.field("api_key").and_then(|field| Some((field.line, field.text()?))) {
            None => usual(),
            Some((_, text)) if text.starts_with("os.environ/") => {
                format!("env:{}", &text["os.environ/".len()..])
            }
            Some((line, _)) => {
                self.written.note(
                    line,
                    format!(
                        "`api_key` was left out, because a key belongs into the environment: set {}",
                        usual()
                    ),
                );
                usual()
            }
        }
    }

    fn upstream(&mut self, kind: &str, address: &str, key: &str) -> String {
        let id = (kind.to_owned(), address.to_owned(), key.to_owned());
        if let Some(name) = self.upstreams.get(&id) {
            return name.clone();
        }
        let name = name::given(kind, &mut self.upstream_names);
        self.written.table(
            &format!("llm.upstreams.{}", quoted(&name)),
            &[("kind", quoted(kind)), ("base_url", quoted(address)), ("api_key", quoted(key))],
        );
        self.upstreams.insert(id, name.clone());
        name
    }

    /// Limits that are set in other places.
    fn settings(&mut self, document: &Node) {
        for section in ["litellm_settings", "general_settings", "router_settings"] {
            for (name, field) in document.field(section).and_then(Node::map).unwrap_or_default() {
                let limits =
                    ["limit", "max_parallel", "budget", "rpm", "tpm"].iter().any(|word| name.contains(word));
                if limits {
                    self.written.note(
                        field.line,
                        format!(
                            "`{section}.{name}` was left out; write clients and their limits in [llm.clients]"
                        ),
                    );
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn models_and_their_limits_are_carried_over() {
        let text = "model_list:\n- model_name: gpt-4o\n  litellm_params: {model: openai/gpt-4o, api_key: os.environ/KEY_1, rpm: 500, tpm: 30000}\n\
                    - model_name: gpt-4o-mini\n  litellm_params: {model: gpt-4o-mini, api_key: os.environ/KEY_1, max_parallel_requests: 4}\n\
                    - {model_name: claude-sonnet-4-5, litellm_params: {model: anthropic/claude-sonnet-4-5, api_base: 'http://localhost:9'}}\n";
        let imported = import(text).unwrap();
        let config = Config::parse(&imported.toml).unwrap_or_else(|why| panic!("{why}\n{}", imported.toml));
        let names: Vec<&str> = config.gate.policy.rules().iter().map(tollgate::Rule::name).collect();
        assert_eq!(
            names,
            ["llm.gpt-4o.rpm", "llm.gpt-4o.tpm", "llm.gpt-4o-mini.concurrency"],
            "{}",
            imported.toml
        );
        assert_eq!((imported.limits, imported.notes.len()), (3, 0), "{:?}", imported.notes);
        let llm = config.llm.expect("a section");
        assert_eq!(llm.upstreams.len(), 2);
        assert_eq!(llm.model("claude-sonnet-4-5").map(|model| model.upstream.as_str()), Some("anthropic"));
        assert!(imported.toml.contains("api_key = \"env:KEY_1\""), "{}", imported.toml);
    }

    #[test]
    fn what_cannot_be_carried_over_is_noted_and_no_key_is_written() {
        let text = "model_list:\n- {model_name: a, litellm_params: {model: azure/a}}\n- {model_name: b, litellm_params: {model: openai/gpt-4o, api_key: sk-secret, rpm: 0}}\n\
                    - {model_name: b, litellm_params: {model: openai/b}}\n- {model_name: 'openai/*', litellm_params: {model: 'openai/*'}}\n- {model_name: c}\n- {model_name: d, litellm_params: {}}\n\
                    general_settings:\n  max_parallel_requests: 5\n  master_key: x\n";
        let imported = import(text).unwrap();
        assert!(Config::parse(&imported.toml).is_ok(), "{}", imported.toml);
        assert!(!imported.toml.contains("secret"), "{}", imported.toml);
        let expected = [
            "2: `a` was left out",
            "3: `b` is sent as it is",
            "3: `rpm` is no whole number",
            "3: `api_key` was left out",
            "4: a second deployment",
            "5: `openai/*` was left out",
            "6: an entry without",
            "7: `d` names no `model`",
            "9: `general_settings.max_parallel_requests`",
        ];
        assert_eq!(imported.notes.len(), expected.len(), "{:?}", imported.notes);
        for (note, expected) in imported.notes.iter().zip(expected) {
            assert!(note.starts_with(expected), "{note}");
        }
        for text in ["", "a: 1", "{"] {
            assert!(import(text).is_err(), "{text}");
        }
    }
}
