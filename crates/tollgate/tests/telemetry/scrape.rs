//! Metrics as Prometheus would scrape them.

use std::sync::Arc;

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use tollgate::telemetry::Telemetry;

pub(crate) struct Scrape {
    recorder: Arc<PrometheusRecorder>,
    handle: PrometheusHandle,
}

impl Scrape {
    pub(crate) fn new() -> Scrape {
        let recorder = PrometheusBuilder::new().build_recorder();
        let handle = recorder.handle();
        Scrape { recorder: Arc::new(recorder), handle }
    }

    pub(crate) fn telemetry(&self) -> Telemetry {
        let numbered = (0..20).flat_map(|number| [format!("n{number}"), format!("n0-{number}")]);
        let names = ["user", "a", "b", "x"].map(str::to_owned).into_iter().chain(numbered);
        Telemetry::new().salt("salt").metrics_to(self.recorder.clone()).namespaces(names)
    }

    /// All that is scraped.
    pub(crate) fn text(&self) -> String {
        self.handle.render()
    }

    /// The samples of one name, each as the values of its labels and its value: `allowed store api … 3`.
    pub(crate) fn samples(&self, name: &str) -> Vec<String> {
        let mut samples: Vec<String> = self.text().lines().filter_map(|line| sample(line, name)).collect();
        samples.sort();
        samples
    }
}

fn sample(line: &str, name: &str) -> Option<String> {
    let rest = line.strip_prefix(name)?;
    let (labels, value) = match rest.strip_prefix('{') {
        Some(rest) => rest.rsplit_once("} ")?,
        None => ("", rest.strip_prefix(' ')?),
    };
    let values = labels.split(',').filter_map(|label| label.split_once('=')).map(|(_, value)| value);
    let words: Vec<&str> = values.map(|value| value.trim_matches('"')).chain([value]).collect();
    Some(words.join(" "))
}
