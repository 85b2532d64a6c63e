//! The descriptions of the server's own metrics, for `/metrics`. The library describes its own.

/// Counters, gauges and histograms of the server and of its gateway.
const COUNTERS: [(&str, &str); 11] = [
    ("tollgate_admin_refused_total", "Admin calls that were refused, by why"),
    ("tollgate_connections_refused_total", "Connections that were refused, by face and by why"),
    ("tollgate_envoy_calls_total", "Calls of Envoy, by the code of the answer"),
    (
        "tollgate_envoy_descriptors_unmatched_total",
        "Descriptors of Envoy that no rule matched, and that passed",
    ),
    (
        "tollgate_envoy_refunds_dropped_total",
        "Hits that Envoy gave back and that the store did not take back",
    ),
    ("tollgate_envoy_refunds_total", "Hits that Envoy gave back"),
    ("tollgate_llm_attempts_total", "Attempts at a provider, by model and by what became of them"),
    ("tollgate_llm_requests_total", "Calls of language models, by model and by whether they were answered"),
    ("tollgate_llm_tokens_total", "Tokens, by model and by kind: as reported, else as estimated"),
    ("tollgate_llm_trail_dropped_total", "Lines of the trail that the disk was too slow for or did not take"),
    ("tollgate_log_lines_dropped_total", "Lines of the log that its output did not take"),
];
const RELOADS: (&str, &str) = ("tollgate_reloads_total", "Reloads of the config, by what became of them");
const GAUGES: [(&str, &str); 4] = [
    ("tollgate_config_refused", "1 while the config on disk is refused and an older one holds, else 0"),
    ("tollgate_connections", "Connections that are open, by face"),
    ("tollgate_llm_queue", "Calls of language models that wait in line, by model"),
    ("tollgate_llm_usage", "The share of a model's limit that is in use, of the fullest quota group"),
];
const HISTOGRAMS: [(&str, &str); 1] =
    [("tollgate_llm_wait_seconds", "How long admitted attempts waited in line, by model")];

/// Gives all of them to the recorder that is installed.
pub(super) fn describe() {
    for (name, words) in COUNTERS.into_iter().chain([RELOADS]) {
        metrics::describe_counter!(name, words);
    }
    for (name, words) in GAUGES {
        metrics::describe_gauge!(name, words);
    }
    for (name, words) in HISTOGRAMS {
        metrics::describe_histogram!(name, words);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    /// Names of metrics in the text of the sources: `"tollgate_…"` in a file that counts.
    fn named(folder: &Path, names: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
            let path = entry.path();
            if path.is_dir() {
                named(&path, names);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            if path.ends_with("describe.rs") || !text.contains("metrics::") {
                continue;
            }
            let is_part = |letter: char| letter.is_ascii_lowercase() || letter == '_';
            let words = text.split('"').filter(|word| word.starts_with("tollgate_") && word.len() > 14);
            names.extend(words.filter(|word| word.chars().all(is_part)).map(str::to_owned));
        }
    }

    #[test]
    fn every_metric_that_is_counted_is_described_and_no_other() {
        let mut names = BTreeSet::new();
        named(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut names);
        let described = COUNTERS.iter().chain([&RELOADS]).chain(&GAUGES).chain(&HISTOGRAMS);
        assert_eq!(names, described.map(|(name, _)| (*name).to_owned()).collect());
    }
}
