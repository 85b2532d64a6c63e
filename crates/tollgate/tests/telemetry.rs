//! What an operator sees of the library: metrics as they are scraped, lines as they are logged, spans as a collector receives
//! them; and that no key is in any of it.

#[path = "telemetry/canary.rs"]
mod canary;
#[path = "telemetry/collector.rs"]
mod collector;
#[path = "telemetry/counts.rs"]
mod counts;
#[allow(dead_code, reason = "shared with the tests of the library, which use all of it")]
#[path = "library/crowd.rs"]
mod crowd;
#[allow(dead_code, reason = "shared with the tests of the library, which use all of it")]
#[path = "library/faulty_store.rs"]
mod faulty_store;
#[path = "telemetry/log.rs"]
mod log;
#[path = "telemetry/metrics.rs"]
mod metrics;
#[path = "telemetry/operations.rs"]
mod operations;
#[path = "telemetry/page.rs"]
mod page;
#[allow(dead_code, reason = "shared with the tests of the library, which use all of it")]
#[path = "library/scene.rs"]
mod scene;
#[path = "telemetry/scrape.rs"]
mod scrape;
#[path = "telemetry/script_time.rs"]
mod script_time;
#[path = "telemetry/spans.rs"]
mod spans;
