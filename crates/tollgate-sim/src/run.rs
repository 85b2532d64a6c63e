//! One run of a scenario: builds the world, lets it run, and has it judged.

use std::io;
use std::path::Path;
use std::sync::Arc;

use tollgate::store::Micros;
use tollgate::{Error, ManualClock};

use crate::leased::LeasedQuota;
use crate::log::EventLog;
use crate::network::Cloud;
use crate::process::{Decider, Keys, Process, Record, World, gate};
use crate::random::Random;
use crate::report::Report;
use crate::scenario::{Layout, Scenario};
use crate::virtual_time::{self, START};

/// Runs a scenario with a seed, and writes what happened to a file if one is named.
///
/// # Errors
/// If the library refuses the limit, or the file cannot be written.
pub fn simulate(scenario: &Scenario, seed: u64, log: Option<&Path>) -> io::Result<Report> {
    let log = Arc::new(EventLog::new(log)?);
    let record = Arc::new(Record::default());
    record.ambiguous.lock().resize(scenario.keys, 0);
    let run = {
        let (scenario, log, record) = (scenario.clone(), log.clone(), record.clone());
        async move |hands: ManualClock| in_world(&scenario, seed, hands, log, &record).await
    };
    let cloud = virtual_time::run(seed, run).map_err(|error| io::Error::other(error.to_string()))?;
    let (events, hash) = log.finish()?;
    Ok(Report::new(scenario, seed, &cloud, &record, events, hash))
}

async fn in_world(
    scenario: &Scenario,
    seed: u64,
    hands: ManualClock,
    log: Arc<EventLog>,
    record: &Arc<Record>,
) -> Result<Arc<Cloud>, Error> {
    let mut random = Random::new(seed);
    let cloud = Cloud::new(scenario, hands.clone(), random.fork(0), log);
    cloud.start_faults(scenario);
    let world = World {
        hands: hands.clone(),
        cloud: cloud.clone(),
        record: record.clone(),
        keys: Keys::of(scenario),
        apart_us: 1_000_000_000 / scenario.requests_per_1000s.max(1),
        end_us: START.saturating_add(Micros::from_secs(scenario.seconds)).get(),
    };
    let skew_us = Micros::from(scenario.node_skew).get();
    let mut quotas: Vec<Arc<LeasedQuota>> = Vec::new();
    if let Layout::Leased { units, ttl } = scenario.layout {
        for region in 0..scenario.regions {
            let gate = Arc::new(gate(scenario, &cloud, record, region, hands.clock())?);
            quotas.push(Arc::new(LeasedQuota::new(gate, hands.clock(), units, ttl, scenario.keys)));
        }
    }
    let mut processes = Vec::with_capacity(scenario.nodes);
    for number in 0..scenario.nodes {
        let region = scenario.region_of(number);
        let drift_ppm = i32::try_from(random.around_zero(scenario.node_drift_ppm)).unwrap_or(0);
        let clock = hands.skewed(random.around_zero(skew_us), drift_ppm);
        let decider = match quotas.get(region) {
            Some(quota) => Decider::Region(quota.clone()),
            None => Decider::Gate(Arc::new(gate(scenario, &cloud, record, region, clock.clone())?)),
        };
        let random = random.fork(number as u64 + 1);
        let process = Process { number, region, decider, clock, random };
        processes.push(tokio::spawn(process.run(world.clone())));
    }
    for process in processes {
        // A process that panics is missed in the counts.
        let _ = process.await;
    }
    for quota in &quotas {
        record.health.lock().add(&quota.health());
    }
    // What is still on its way arrives: the last deadlines, and packets that are sent again.
    cloud.sleep(10_000_000).await;
    Ok(cloud)
}
