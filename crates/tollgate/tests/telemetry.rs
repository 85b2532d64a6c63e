//! What an operator sees of the library: metrics as they are scraped, lines as they are logged, spans as a collector receives
//! them; and that no key is in any of it.

#[allow(dead_code)]
#[path = "library/crowd.rs"]
mod crowd;
#[allow(dead_code)]
#[path = "library/elsewhere.rs"]
mod elsewhere;
#[path = "telemetry/metrics.rs"]
mod metrics;
#[allow(dead_code)]
#[path = "library/scene.rs"]
mod scene;
#[path = "telemetry/scrape.rs"]
mod scrape;
