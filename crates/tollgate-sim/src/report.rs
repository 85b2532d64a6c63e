//! What a run came to: for people, for programs, and as a row of docs/scale.md.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::Ordering;

use hdrhistogram::Histogram;
use serde_json::{Value, json};

use crate::checks::{self, Finding};
use crate::network::Cloud;
use crate::process::Record;
use crate::scenario::Scenario;

/// What a run came to.
#[derive(Debug)]
pub struct Report {
    /// The scenario's name, what it shows, and the limit of each key.
    pub scenario: &'static str,
    about: &'static str,
    limit: String,
    nodes: usize,
    regions: usize,
    seconds: u64,
    /// The seed.
    pub seed: u64,
    /// How many decisions there were.
    pub decisions: u64,
    /// How many of them admitted.
    pub allowed: u64,
    /// Decisions by source.
    pub sources: BTreeMap<&'static str, u64>,
    /// Calls that charge, the charges in them, and other calls.
    pub charge_calls: u64,
    charges: u64,
    other_calls: u64,
    resent: u64,
    lost: u64,
    /// Calls that may have been carried out though no answer came.
    pub ambiguous: u64,
    outages: u64,
    latency_us: [(&'static str, u64); 4],
    /// How many events there were.
    pub events: u64,
    /// The SHA-256 of all of them.
    pub hash: String,
    /// The promises.
    pub findings: Vec<Finding>,
}

impl Report {
    pub(crate) fn new(
        scenario: &Scenario,
        seed: u64,
        cloud: &Cloud,
        record: &Record,
        events: u64,
        hash: String,
    ) -> Report {
        let findings = checks::check(scenario, cloud, record);
        let decided = record.decided.lock();
        let mut sources: BTreeMap<&'static str, u64> = BTreeMap::new();
        let mut histogram = Histogram::<u64>::new(3).expect("three digits are few");
        for decided in decided.iter() {
            *sources.entry(decided.source).or_default() += 1;
            histogram.record(decided.took_us.max(1)).expect("it grows with what is recorded");
        }
        let at = |name, quantile| (name, histogram.value_at_quantile(quantile));
        let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let health = record.health.lock();
        Report {
            scenario: scenario.name,
            about: scenario.about,
            limit: scenario.limit.to_string(),
            nodes: scenario.nodes,
            regions: scenario.regions,
            seconds: scenario.seconds,
            seed,
            decisions: decided.len() as u64,
            allowed: decided.iter().filter(|decided| decided.allowed).count() as u64,
            sources,
            charge_calls: load(&cloud.traffic.charge_calls),
            charges: load(&cloud.traffic.charges),
            other_calls: load(&cloud.traffic.other_calls),
            resent: load(&cloud.traffic.resent),
            lost: cloud.servers().map(|(_, _, server)| server.lock().lost).sum(),
            ambiguous: health.ambiguous,
            outages: health.outages,
            latency_us: [at("p50", 0.5), at("p95", 0.95), at("p99", 0.99), ("max", histogram.max())],
            events,
            hash,
            findings,
        }
    }

    /// Whether all promises were kept.
    pub fn is_clean(&self) -> bool {
        self.findings.iter().all(|finding| finding.is_kept)
    }

    /// The promises that were broken.
    pub fn broken(&self) -> Vec<&'static str> {
        self.findings.iter().filter(|finding| !finding.is_kept).map(|finding| finding.promise).collect()
    }

    /// Calls to the store for each decision.
    pub fn calls_per_decision(&self) -> f64 {
        ratio(self.charge_calls, self.decisions)
    }

    /// Charges in each of them: more than one where charges go in batches.
    pub fn charges_per_call(&self) -> f64 {
        ratio(self.charges, self.charge_calls)
    }

    /// Everything, for programs.
    pub fn json(&self) -> Value {
        let finding = |finding: &Finding| {
            json!({
                "promise": finding.promise,
                "measured": finding.measured,
                "limit_alone": finding.alone,
                "bound": finding.bound,
                "formula": finding.formula,
                "kept": finding.is_kept,
            })
        };
        json!({
            "scenario": self.scenario,
            "seed": self.seed,
            "nodes": self.nodes,
            "regions": self.regions,
            "seconds": self.seconds,
            "limit": self.limit,
            "decisions": self.decisions,
            "allowed": self.allowed,
            "sources": self.sources,
            "store_calls": self.charge_calls,
            "charges_sent": self.charges,
            "other_calls": self.other_calls,
            "calls_per_decision": self.calls_per_decision(),
            "packets_resent": self.resent,
            "admissions_lost": self.lost,
            "ambiguous": self.ambiguous,
            "outages": self.outages,
            "latency_us": self.latency_us.iter().copied().collect::<BTreeMap<_, _>>(),
            "events": self.events,
            "sha256": self.hash,
            "findings": self.findings.iter().map(finding).collect::<Vec<_>>(),
            "kept": self.is_clean(),
        })
    }

    /// The rows of a table of bounds, in Markdown.
    pub fn rows(&self) -> String {
        let mut rows = String::new();
        for Finding { promise, measured, alone, bound, formula, .. } in &self.findings {
            if let Some(alone) = alone {
                rows += &format!(
                    "| `{}` | {promise} | {measured} | {alone} | {bound} | {formula} |\n",
                    self.scenario
                );
            }
        }
        rows
    }
}

#[expect(clippy::cast_precision_loss, reason = "for people, to two digits")]
fn ratio(part: u64, of: u64) -> f64 {
    part as f64 / of.max(1) as f64
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.scenario, self.about)?;
        writeln!(
            f,
            "{} processes in {} regions for {} s, seed {}; {}",
            self.nodes, self.regions, self.seconds, self.seed, self.limit
        )?;
        let percent = 100.0 * ratio(self.allowed, self.decisions);
        writeln!(f, "  {} decisions, {} allowed ({percent:.1} %)", self.decisions, self.allowed)?;
        let sources: Vec<String> =
            self.sources.iter().map(|(source, count)| format!("{source} {count}")).collect();
        writeln!(f, "  by source: {}", sources.join(", "))?;
        let batch = self.charges_per_call();
        writeln!(
            f,
            "  store calls: {} ({:.3} a decision, {batch:.2} charges each), {} others; {} packets sent again",
            self.charge_calls,
            self.calls_per_decision(),
            self.other_calls,
            self.resent
        )?;
        writeln!(
            f,
            "  ambiguous {}, outages seen {}, admissions lost with a server {}",
            self.ambiguous, self.outages, self.lost
        )?;
        let latencies: Vec<String> =
            self.latency_us.iter().map(|(name, us)| format!("{name} {:.2} ms", ratio(*us, 1_000))).collect();
        writeln!(f, "  latency: {}", latencies.join(", "))?;
        for finding in &self.findings {
            writeln!(f, "  {finding}")?;
        }
        write!(f, "  {} events, sha256 {}", self.events, self.hash)
    }
}
