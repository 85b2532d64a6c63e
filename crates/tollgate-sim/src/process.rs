//! The virtual processes: each has the library, as a program would build it, a clock of its own, and callers.

use std::sync::Arc;

use parking_lot::Mutex;
use tollgate::Clock;
use tollgate::store::StoreHealth;
use tollgate::telemetry::{Event, Observer, Source};
use tollgate::{Charge, Error, ManualClock, Tollgate};
use tollgate_store::simulated::SimulatedStore;

use crate::leased::{LIMIT, LeasedQuota};
use crate::network::{Cloud, Link};
use crate::random::{Random, Zipf};
use crate::scenario::{Layout, Sabotage, Scenario, Traffic};
use crate::server::{key_name, key_number};
use crate::virtual_time::START;

/// One decision, as its caller saw it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decided {
    pub(crate) node: u32,
    pub(crate) key: u32,
    pub(crate) allowed: bool,
    pub(crate) source: &'static str,
    /// When it was there: the true time, and what the process's own clock showed.
    pub(crate) at_us: u64,
    pub(crate) clock_us: u64,
    pub(crate) took_us: u64,
}

/// What all processes did.
#[derive(Default)]
pub(crate) struct Record {
    pub(crate) decided: Mutex<Vec<Decided>>,
    /// How many calls of each key may have been carried out though no answer came.
    pub(crate) ambiguous: Mutex<Vec<u64>>,
    /// Calls that could not be decided, which there should be none of.
    pub(crate) errors: Mutex<Vec<String>>,
    pub(crate) health: Mutex<Health>,
}

/// The health of the store, summed over all processes.
#[derive(Debug, Default)]
pub(crate) struct Health {
    pub(crate) ambiguous: u64,
    pub(crate) outages: u64,
    pub(crate) fallen_back: u64,
}

impl Health {
    pub(crate) fn add(&mut self, health: &StoreHealth) {
        self.ambiguous += health.ambiguous;
        self.outages += health.outages;
        self.fallen_back += health.fallen_back;
    }
}

/// Counts calls whose answers were lost.
struct Ambiguous(Arc<Record>);

impl Observer for Ambiguous {
    fn decided(&self, event: &Event<'_>) {
        if event.is_ambiguous {
            let key =
                usize::try_from(key_number(event.key.reveal().unwrap_or_default())).unwrap_or(usize::MAX);
            if let Some(count) = self.0.ambiguous.lock().get_mut(key) {
                *count += event.cost;
            }
        }
    }
}

/// The library, as a process of a region has it.
pub(crate) fn gate(
    scenario: &Scenario,
    cloud: &Arc<Cloud>,
    record: &Arc<Record>,
    region: usize,
    clock: Clock,
) -> Result<Tollgate, Error> {
    let store = if scenario.layout == Layout::Shares { region } else { 0 };
    let link = Link { cloud: cloud.clone(), region, store };
    let store = SimulatedStore::new(Arc::new(link), clock.clone(), scenario.timeout);
    let instances = if scenario.sabotage == Some(Sabotage::WholeShare) { 1 } else { scenario.instances };
    Tollgate::builder()
        .limit(LIMIT, scenario.store_limit().limit()?)
        .store(store)
        .clock(clock)
        .fallback(scenario.fallback)
        .instances(instances)
        .denial_cache(scenario.denial_cache)
        .sweep_every(None)
        .observer(Arc::new(Ambiguous(record.clone())))
        .build()
}

/// Which keys callers ask for.
#[derive(Clone)]
pub(crate) enum Keys {
    Uniform(u64),
    Zipf(Arc<Zipf>),
}

impl Keys {
    pub(crate) fn of(scenario: &Scenario) -> Keys {
        match scenario.traffic {
            Traffic::Uniform => Keys::Uniform(scenario.keys as u64),
            Traffic::Zipf => Keys::Zipf(Arc::new(Zipf::new(scenario.keys))),
        }
    }

    fn draw(&self, random: &mut Random) -> usize {
        match self {
            Keys::Uniform(count) => usize::try_from(random.below(*count)).unwrap_or(0),
            Keys::Zipf(zipf) => zipf.draw(random),
        }
    }
}

/// Who decides for a process.
#[derive(Clone)]
pub(crate) enum Decider {
    /// The library in the process.
    Gate(Arc<Tollgate>),
    /// The server of its region, which leases quota.
    Region(Arc<LeasedQuota>),
}

/// One process.
pub(crate) struct Process {
    pub(crate) number: usize,
    pub(crate) region: usize,
    pub(crate) decider: Decider,
    pub(crate) clock: Clock,
    pub(crate) random: Random,
}

/// Where a process is: shared by all of them.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) hands: ManualClock,
    pub(crate) cloud: Arc<Cloud>,
    pub(crate) record: Arc<Record>,
    pub(crate) keys: Keys,
    /// The mean time between two requests of a process.
    pub(crate) apart_us: u64,
    pub(crate) end_us: u64,
}

impl Process {
    /// Sends requests until the end.
    pub(crate) async fn run(mut self, world: World) {
        let mut requests = Vec::new();
        let mut next_us = START.get();
        loop {
            next_us += self.random.exponential(world.apart_us).max(1);
            if next_us >= world.end_us {
                break;
            }
            world.hands.clock().alarm(tollgate::store::Micros::new(next_us)).await;
            let key = world.keys.draw(&mut self.random);
            let request = Request { node: self.number, region: self.region, key, clock: self.clock.clone() };
            let (world, decider) = (world.clone(), self.decider.clone());
            requests.push(tokio::spawn(async move { request.decide(&world, &decider).await }));
        }
        for request in requests {
            // A panic is seen in the counts: its decision is missing.
            let _ = request.await;
        }
        if let Decider::Gate(gate) = &self.decider {
            world.record.health.lock().add(&gate.store_health());
        }
    }
}

struct Request {
    node: usize,
    region: usize,
    key: usize,
    clock: Clock,
}

impl Request {
    async fn decide(self, world: &World, decider: &Decider) {
        let start_us = world.hands.now().get();
        world.cloud.traffic.requests.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = key_name(self.key);
        let decided = match decider {
            Decider::Gate(gate) => match gate.charge(&[Charge::new(LIMIT, &*name)]).await {
                Ok(decision) => Ok((decision.is_allowed(), decision.binding().source())),
                Err(error) => Err(error.to_string()),
            },
            Decider::Region(quota) => {
                world.cloud.travel(self.region, self.region).await;
                let decided = quota.take(self.key).await;
                world.cloud.travel(self.region, self.region).await;
                decided
            }
        };
        let (allowed, source) = match decided {
            Ok(decided) => decided,
            Err(error) => {
                world.record.errors.lock().push(error);
                return;
            }
        };
        let at_us = world.hands.now().get();
        let decided = Decided {
            node: u32::try_from(self.node).unwrap_or(u32::MAX),
            key: u32::try_from(self.key).unwrap_or(u32::MAX),
            allowed,
            source: source_name(source),
            at_us,
            clock_us: self.clock.now().get(),
            took_us: at_us - start_us,
        };
        world.cloud.log.write(format_args!(
            "{} node {} key {} {} by {} in {}",
            at_us - START.get(),
            decided.node,
            decided.key,
            if allowed { "allowed" } else { "denied" },
            decided.source,
            decided.took_us
        ));
        world.record.decided.lock().push(decided);
    }
}

/// The name of a source, as metrics have it.
fn source_name(source: Source) -> &'static str {
    match source {
        Source::Store => "store",
        Source::DenialCache => "denial_cache",
        Source::FallbackOpen => "fallback_open",
        Source::FallbackClosed => "fallback_closed",
        Source::FallbackLocal => "fallback_local",
        _ => "other",
    }
}
