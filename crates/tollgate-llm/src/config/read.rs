//! Reads `[llm]`, and names every mistake with its field.

use std::collections::BTreeMap;
use std::path::PathBuf;

use tollgate::config::{Field, Limits, Reader, Section, nearest};
use tollgate::{Allowance, Key, Limit, Rule};

use super::compiled::{Applied, Compiled, DIMENSIONS, Numbers, Quota, number_names};
use super::{
    ClientConfig, LlmConfig, MAX_WAITING, MEMORY_MIB, ModelConfig, Oversize, Priority, ROOT, SharedLimits,
    TIMEOUT, UnknownModel, UpstreamConfig, UpstreamKey, UpstreamKind, mebibytes,
};

/// Reads the section, and adds its limits to the others.
pub(super) fn read(reader: &mut Reader<'_>, field: &Field<'_>, limits: &mut Limits<'_>) -> Option<LlmConfig> {
    // All but upstreams and clients, which have keys.
    let section = reader.section(field)?.showing(&ROOT[..10]);
    if section.is_empty() {
        return None;
    }
    reader.only(&section, &ROOT);
    let mut config = LlmConfig::default();
    let text = section.field("log_dir").and_then(|field| reader.text(field, "logs"));
    config.log_dir = text.map(PathBuf::from);
    if let Some(window) = section.field("window").and_then(|field| reader.span(field, "60s")) {
        config.window = window;
    }
    if let Some(wait) = section.field("max_wait").and_then(|field| reader.span_or_zero(field, "60s")) {
        config.max_wait = wait;
    }
    config.margin = section.field("margin").and_then(|field| reader.span_or_zero(field, "250ms"));
    let mut whole = |name, example| section.field(name).and_then(|field| reader.whole(field, example, ""));
    if let Some(tokens) = whole("default_output_tokens", 1_000) {
        config.default_output_tokens = tokens;
    }
    if let Some(waiting) = whole("max_waiting", MAX_WAITING) {
        config.max_waiting = usize::try_from(waiting).unwrap_or(usize::MAX);
    }
    if let Some(memory) = whole("memory_mib", MEMORY_MIB) {
        config.memory = mebibytes(memory);
    }
    let unknown = [("pass", UnknownModel::Pass), ("refuse", UnknownModel::Refuse)];
    let choice = section.field("unknown_model").and_then(|field| reader.choice(field, &unknown));
    config.unknown_model = choice.unwrap_or_default();
    let oversize = [("reject", Oversize::Reject), ("alone", Oversize::Alone)];
    let choice = section.field("on_oversize").and_then(|field| reader.choice(field, &oversize));
    config.on_oversize = choice.unwrap_or_default();
    for field in tables(reader, &section, "upstreams") {
        config.upstreams.extend(read_upstream(reader, &field));
    }
    let mut compiled = Compiled::of(&config, limits.rules());
    let mut models = Vec::new();
    for field in tables(reader, &section, "models") {
        models.extend(read_model(reader, &field, &config.upstreams, &mut compiled, limits));
    }
    for (mut model, applied) in models {
        if let Some(quota) = compiled.quotas.get(&model.quota) {
            check_applied(reader, &section, &model.name, applied, quota);
            // The numbers may come after a model that leaves them out.
            model.limits.clone_from(&quota.limits);
        }
        config.models.push(model);
    }
    let clients = tables(reader, &section, "clients");
    for field in &clients {
        let Some(client) = read_client(reader, field, &config.models, &mut compiled, limits) else {
            continue;
        };
        if let Some(other) = config.clients.iter().find(|other| other.key == client.key) {
            let fix =
                format!("has the key of {}, so nobody could tell the two apart; give it its own", other.name);
            reader.misnamed(field, fix);
        }
        config.clients.push(client);
    }
    for upstream in config.upstreams.iter().filter(|upstream| upstream.keys.is_empty()) {
        if let Some(field) = clients.first() {
            let fix = format!(
                "callers show keys of the gateway, and upstream {} has none of its own to show: give it an api_key",
                upstream.name
            );
            reader.misnamed(field, fix);
        }
    }
    limits.add(compiled.rules);
    Some(config)
}

/// The tables below a field, each a field of its own.
fn tables<'d>(reader: &mut Reader<'_>, section: &Section<'d>, name: &str) -> Vec<Field<'d>> {
    let below = section.field(name).and_then(|field| reader.section(field));
    below.map(|section| section.fields().cloned().collect()).unwrap_or_default()
}

fn read_upstream(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<UpstreamConfig> {
    sound_name(reader, field)?;
    let section = reader.section(field)?.showing(&["kind", "base_url", "ca_file", "timeout"]);
    reader.only(&section, &["kind", "base_url", "ca_file", "timeout", "api_key", "keys"]);
    let kinds = [("openai", UpstreamKind::OpenAi), ("anthropic", UpstreamKind::Anthropic)];
    let kind = match section.field("kind") {
        Some(field) => reader.choice(field, &kinds),
        None => {
            reader.missing(&section, "kind", "\"openai\"");
            None
        }
    };
    let base_url = match section.field("base_url") {
        Some(field) => read_url(reader, field),
        None => {
            reader.missing(&section, "base_url", "\"https://api.openai.com/v1\"");
            None
        }
    };
    let ca_file = section.field("ca_file").and_then(|field| reader.text(field, "ca.pem")).map(PathBuf::from);
    let timeout = section.field("timeout").and_then(|field| reader.span(field, "600s"));
    let timeout = timeout.unwrap_or(TIMEOUT);
    let name = field.name.to_owned();
    let mut keys = Vec::new();
    match (section.field("api_key"), section.field("keys")) {
        (Some(_), Some(keys)) => reader.misnamed(keys, "stands beside api_key; keep one of the two"),
        (Some(field), None) => {
            let key = reader.password(field, "OPENAI_API_KEY")?;
            keys.push(UpstreamKey { key, group: name.clone() });
        }
        (None, Some(field)) => {
            for section in reader.sections(field) {
                reader.only(&section, &["key", "group"]);
                let Some(field) = section.field("key") else {
                    reader.missing(&section, "key", "\"env:OPENAI_API_KEY\"");
                    continue;
                };
                let key = reader.password(field, "OPENAI_API_KEY");
                let group = section.field("group").and_then(|field| read_group(reader, field));
                keys.extend(key.map(|key| UpstreamKey { key, group: group.unwrap_or_else(|| name.clone()) }));
            }
        }
        (None, None) => {}
    }
    Some(UpstreamConfig { name, kind: kind?, base_url: base_url?, ca_file, timeout, keys })
}

fn read_group(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<String> {
    let group = reader.text(field, "org-1")?;
    match Rule::name_fault(group) {
        None => Some(group.to_owned()),
        Some(fix) => {
            reader.misnamed(field, fix);
            None
        }
    }
}

fn read_url(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<String> {
    let example = "https://api.openai.com/v1";
    let text = reader.text(field, example)?;
    let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    let is_sound = rest.is_some_and(|rest| {
        !rest.is_empty()
            && !rest.starts_with('/')
            && rest.bytes().all(|byte| byte.is_ascii_graphic())
            && !rest.contains(['@', '?', '#', '"', '<', '>', '\\'])
    });
    if !is_sound {
        reader
            .mistake(field, format!("must be an address such as \"{example}\", without a login or a query"));
        return None;
    }
    Some(text.trim_end_matches('/').to_owned())
}

fn read_numbers(reader: &mut Reader<'_>, section: &Section<'_>) -> Numbers {
    let mut numbers = Numbers::default();
    for (dimension, count) in DIMENSIONS.iter().zip(&mut numbers.counts) {
        let field = section.field(dimension.field);
        *count = field.and_then(|field| reader.whole(field, 500, "; leave it out for no such limit"));
    }
    numbers.slice = section.field("slice").and_then(|field| reader.span(field, "1s")).map(Into::into);
    if let (Some(field), None) = (section.field("slice"), numbers.counts[0]) {
        reader.misnamed(field, "divides rpm, which is missing");
    }
    numbers
}

fn read_model(
    reader: &mut Reader<'_>,
    field: &Field<'_>,
    upstreams: &[UpstreamConfig],
    compiled: &mut Compiled,
    all: &Limits<'_>,
) -> Option<(ModelConfig, Applied)> {
    let section = reader.section(field)?;
    let own = ["upstream", "quota", "limits", "limit_key", "count_cache_reads", "shadow", "fallback"];
    reader.only(&section, &own.into_iter().chain(number_names()).collect::<Vec<_>>());
    let upstream = match (section.field("upstream"), upstreams) {
        (Some(field), _) => read_named(reader, field, upstreams),
        // With one upstream there is nothing to choose.
        (None, [only]) => Some(only.name.clone()),
        (None, _) => {
            reader.missing(&section, "upstream", "\"openai\"");
            None
        }
    };
    let numbers = read_numbers(reader, &section);
    let quota = match section.field("quota") {
        Some(field) => Some((read_group(reader, field)?, true)),
        None => Some((slug(field.name), false)),
    };
    let (quota, is_shared) = quota?;
    let shadow = section.field("shadow").and_then(|field| reader.truth(field));
    let fallback = section.field("fallback").and_then(|field| reader.fallback(field));
    let cache = section.field("count_cache_reads").and_then(|field| reader.truth(field)).unwrap_or(false);
    let shared = read_shared(reader, &section, all);
    let applied = Applied { shadow, fallback };
    let is_first = match compiled.quotas.get(&quota) {
        None => true,
        Some(Quota { model, is_shared: false, .. }) => {
            let fix = format!(
                "shares the limit {quota} with {model} by its name; say so with quota = \"{quota}\" in both"
            );
            reader.misnamed(field, fix);
            return None;
        }
        Some(Quota { model, .. }) if !is_shared => {
            let fix = format!("has the name of the quota of {model}; say quota = \"{quota}\" to share it");
            reader.misnamed(field, fix);
            return None;
        }
        // One model of a quota gives the numbers, and others may leave them out.
        Some(known) if known.numbers == Numbers::default() => numbers != Numbers::default(),
        Some(known) if numbers != Numbers::default() && known.numbers != numbers => {
            let fix = format!("has other numbers than {} of the same quota; write them once", known.model);
            reader.misnamed(field, fix);
            return None;
        }
        Some(_) => false,
    };
    if is_first {
        let model = field.name.to_owned();
        let table = format!("llm.models.{model}");
        let limits = compiled.add(reader, (field, &table), &quota, numbers, applied);
        compiled.quotas.insert(quota.clone(), Quota { model, numbers, applied, is_shared, limits });
    }
    let name = field.name.to_owned();
    let limits = Vec::new();
    let model = ModelConfig { name, upstream: upstream?, quota, limits, shared, count_cache_reads: cache };
    Some((model, applied))
}

/// Complains about what a model says of the limits of its quota and another model decides.
fn check_applied(
    reader: &mut Reader<'_>,
    section: &Section<'_>,
    model: &str,
    applied: Applied,
    quota: &Quota,
) {
    let has_other_shadow =
        applied.shadow.is_some_and(|shadow| shadow != quota.applied.shadow.unwrap_or(false));
    let has_other_fallback = applied.fallback.is_some() && applied.fallback != quota.applied.fallback;
    for (name, is_other) in [("shadow", has_other_shadow), ("fallback", has_other_fallback)] {
        let table = section.field("models").filter(|_| is_other).and_then(|field| reader.section(field));
        let table = table.and_then(|models| reader.section(models.field(model)?));
        if let Some(field) = table.and_then(|table| table.field(name).cloned()) {
            let fix = format!(
                "is decided by {}, which gives the numbers of this quota; write it there",
                quota.model
            );
            reader.mistake(&field, fix);
        }
    }
}

fn read_named(reader: &mut Reader<'_>, field: &Field<'_>, upstreams: &[UpstreamConfig]) -> Option<String> {
    let name = reader.text(field, "openai")?;
    if upstreams.iter().any(|upstream| upstream.name == name) {
        return Some(name.to_owned());
    }
    let known: Vec<&str> = upstreams.iter().map(|upstream| upstream.name.as_str()).collect();
    let known = if known.is_empty() { "none without a mistake".to_owned() } else { known.join(", ") };
    reader.mistake(field, format!("there is no such upstream under [llm.upstreams]; known: {known}"));
    None
}

fn read_client(
    reader: &mut Reader<'_>,
    field: &Field<'_>,
    models: &[ModelConfig],
    compiled: &mut Compiled,
    all: &Limits<'_>,
) -> Option<ClientConfig> {
    sound_name(reader, field)?;
    let fields = ["weight", "priority", "models", "limits", "limit_key"];
    let section = reader.section(field)?.showing(&fields);
    reader.only(&section, &fields.into_iter().chain(["key"]).collect::<Vec<_>>());
    let key = match section.field("key") {
        Some(field) => reader.password(field, "SEARCH_KEY"),
        None => {
            reader.missing(&section, "key", "\"env:SEARCH_KEY\"");
            None
        }
    };
    let weight = section.field("weight").and_then(|field| reader.whole(field, 1, ""));
    if let (Some(field), Some(1_001..)) = (section.field("weight"), weight) {
        reader.mistake(field, "is too large; at most 1000");
    }
    let priorities = [Priority::Interactive, Priority::Batch].map(|priority| (priority.name(), priority));
    let priority = section.field("priority").and_then(|field| reader.choice(field, &priorities));
    let shared = read_shared(reader, &section, all);
    let mut limits = BTreeMap::new();
    for model in tables(reader, &section, "models") {
        let Some(known) = models.iter().find(|known| known.name == model.name) else {
            reader.misnamed(&model, "there is no such model under [llm.models]");
            continue;
        };
        let Some(section) = reader.section(&model) else { continue };
        reader.only(&section, &number_names().collect::<Vec<_>>());
        let numbers = read_numbers(reader, &section);
        let stem = format!("client.{}.{}", field.name, known.quota);
        let table = format!("llm.clients.{}.models.{}", field.name, model.name);
        let made = compiled.add(reader, (&model, &table), &stem, numbers, Applied::default());
        limits.insert(model.name.to_owned(), made);
    }
    Some(ClientConfig {
        name: field.name.to_owned(),
        key: key?,
        weight: weight.unwrap_or(1),
        priority: priority.unwrap_or_default(),
        limits,
        shared,
    })
}

/// `limits` and `limit_key`: limits of `[limits]`, each of which must be there.
fn read_shared(reader: &mut Reader<'_>, section: &Section<'_>, all: &Limits<'_>) -> SharedLimits {
    let mut shared = SharedLimits::default();
    if let Some(field) = section.field("limits") {
        shared.limits = reader.texts(field, "[\"company\"]").unwrap_or_default();
        for name in &shared.limits {
            if !all.names().contains(&name.as_str()) {
                let known = || all.names().iter().copied();
                let fix = match nearest(name, known()) {
                    Some(guess) => format!("there is no limit `{name}`; did you mean \"{guess}\"?"),
                    None if known().next().is_none() => {
                        format!("there is no limit `{name}`; write [limits.{name}]")
                    }
                    None => format!("there is no limit `{name}`; known: {}", all.names().join(", ")),
                };
                reader.mistake(field, fix);
            }
            let rule = all.rules().iter().find(|rule| rule.name() == name);
            if let Some(Allowance::Limited(Limit::Concurrency(_))) = rule.map(Rule::allowance) {
                let fix = format!(
                    "`{name}` counts what runs at once, and a call charges one request; write concurrency here"
                );
                reader.mistake(field, fix);
            }
        }
    }
    if let Some(field) = section.field("limit_key") {
        shared.key = reader.text(field, "global").map(str::to_owned);
        if section.field("limits").is_none() {
            reader.misnamed(field, "names the key of `limits`, and there are none");
        } else if shared.key.is_some() && Key::parse(shared.key("m", None).as_str()).is_err() {
            reader.mistake(field, "is no key; write one such as \"team:{client}\"");
        } else if shared.key("m", None).contains(['{', '}']) {
            reader.mistake(field, "may hold {client} and {model}, and no other field");
        }
    }
    shared
}

/// The name of an upstream or a client, which becomes a part of names of limits and of keys.
fn sound_name(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<()> {
    match Rule::name_fault(field.name) {
        None => Some(()),
        Some(fix) => {
            reader.misnamed(field, fix);
            None
        }
    }
}

/// A model's name as the names of limits can have it.
fn slug(model: &str) -> String {
    let sound = |character: char| match character.to_ascii_lowercase() {
        lower @ ('a'..='z' | '0'..='9' | '_' | '.' | '-') => lower,
        _ => '-',
    };
    model.chars().map(sound).collect()
}
