//! The virtual network: how long packets take, which are lost, who does not reach whom, and what becomes of calls meanwhile.
//!
//! A packet takes a base time and a random one on top. One that is lost, or meets a partition, is sent again after 200 ms, then after
//! twice as long and so on, as TCP does: so it arrives late rather than never. A server that is down refuses connections, and breaks those
//! that it had.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tollgate::Clock;
use tollgate::ManualClock;
use tollgate::store::Micros;
use tollgate_store::simulated::{Answer, Broken, Call, Network, Operation, Replied, Reply};

use crate::log::EventLog;
use crate::random::Random;
use crate::scenario::{Fault, Sabotage, Scenario};
use crate::server::{Server, key_number};
use crate::virtual_time::START;

/// How long a packet takes within a region: at least, and on average on top.
const LOCAL_US: (u64, u64) = (120, 40);
/// The same between regions, and for each further one.
const REMOTE_US: (u64, u64) = (20_000, 1_000);
const FURTHER_US: u64 = 8_000;
/// When a lost packet is sent again: first, and at most.
const RESEND_US: u64 = 200_000;
const RESEND_AT_MOST_US: u64 = 3_000_000;
/// When a client that sends calls again takes a connection for broken.
const BROKEN_AFTER_US: u64 = 10_000;

/// What went over the network.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    /// Calls that charge.
    pub(crate) charge_calls: AtomicU64,
    /// Charges in them.
    pub(crate) charges: AtomicU64,
    /// Other calls: pings, measurements, settlements.
    pub(crate) other_calls: AtomicU64,
    /// Requests of callers.
    pub(crate) requests: AtomicU64,
    /// Calls that were carried out after their deadline.
    pub(crate) late: AtomicU64,
    /// Packets that were lost or held up.
    pub(crate) resent: AtomicU64,
}

/// All servers, and what is between them and the processes.
pub(crate) struct Cloud {
    hands: ManualClock,
    clock: Clock,
    random: Mutex<Random>,
    loss_ppm: u64,
    timeout_us: u64,
    sabotage: Option<Sabotage>,
    /// Stores, and their servers.
    stores: Vec<Vec<Mutex<Server>>>,
    /// Regions that are cut off.
    cut_off: Mutex<Vec<usize>>,
    pub(crate) traffic: Traffic,
    pub(crate) log: Arc<EventLog>,
}

impl Cloud {
    pub(crate) fn new(
        scenario: &Scenario,
        hands: ManualClock,
        random: Random,
        log: Arc<EventLog>,
    ) -> Arc<Cloud> {
        let servers =
            |store: usize| (0..scenario.primaries).map(move |_| Mutex::new(Server::new(store))).collect();
        Arc::new(Cloud {
            clock: hands.clock(),
            hands,
            random: Mutex::new(random),
            loss_ppm: scenario.loss_ppm,
            timeout_us: Micros::from(scenario.timeout).get(),
            sabotage: scenario.sabotage,
            stores: (0..scenario.stores()).map(servers).collect(),
            cut_off: Mutex::default(),
            traffic: Traffic::default(),
            log,
        })
    }

    pub(crate) fn servers(&self) -> impl Iterator<Item = (usize, usize, &Mutex<Server>)> {
        self.stores.iter().enumerate().flat_map(|(store, servers)| {
            servers.iter().enumerate().map(move |(number, server)| (store, number, server))
        })
    }

    /// How many requests callers have made.
    pub(crate) fn requests(&self) -> u64 {
        self.traffic.requests.load(Ordering::Relaxed)
    }

    fn now_us(&self) -> u64 {
        self.hands.now().get()
    }

    pub(crate) async fn sleep(&self, span_us: u64) {
        self.clock.alarm(Micros::new(self.now_us() + span_us)).await;
    }

    fn is_cut(&self, from: usize, to: usize) -> bool {
        from != to && self.cut_off.lock().iter().any(|region| *region == from || *region == to)
    }

    /// How long a packet takes that is sent now; `None` if it is lost.
    fn packet(&self, from: usize, to: usize) -> Option<u64> {
        let mut random = self.random.lock();
        let (least, more) = match from.abs_diff(to) {
            0 => LOCAL_US,
            apart => (REMOTE_US.0 + FURTHER_US * (apart as u64 - 1), REMOTE_US.1),
        };
        let (is_lost, takes_us) = (random.happens(self.loss_ppm), least + random.exponential(more));
        (!is_lost && !self.is_cut(from, to)).then_some(takes_us)
    }

    /// A packet on its way, sent again until it arrives.
    pub(crate) async fn travel(&self, from: usize, to: usize) {
        let mut resend_us = RESEND_US;
        loop {
            if let Some(takes_us) = self.packet(from, to) {
                return self.sleep(takes_us).await;
            }
            self.traffic.resent.fetch_add(1, Ordering::Relaxed);
            self.sleep(resend_us).await;
            resend_us = (resend_us * 2).min(RESEND_AT_MOST_US);
        }
    }

    /// A call from a region to a server, and its reply.
    async fn exchange(
        &self,
        from: usize,
        (store, number): (usize, usize),
        mut call: Call,
    ) -> Result<Reply, Broken> {
        let server = &self.stores[store][number];
        let deadline_us = self.now_us() + self.timeout_us;
        if self.sabotage == Some(Sabotage::LateCalls) {
            call.not_after = Micros::new(u64::MAX);
        }
        let to = server.lock().region;
        self.travel(from, to).await;
        let accepted = {
            let mut server = server.lock();
            (!server.is_down).then(|| (server.epoch, server.enqueue(&call, self.now_us())))
        };
        let Some((epoch, done_us)) = accepted else {
            self.travel(to, from).await;
            return Err(Broken::Refused);
        };
        self.clock.alarm(Micros::new(done_us)).await;
        let carried_out = || {
            let mut server = server.lock();
            if server.epoch != epoch {
                return None;
            }
            let reply = server.carry_out(from, &call, self.now_us());
            let is_done = !matches!(reply.answer, Ok(Answer::Late | Answer::Time));
            if is_done && self.now_us() > deadline_us {
                self.traffic.late.fetch_add(1, Ordering::Relaxed);
            }
            Some(reply)
        };
        let Some(mut reply) = carried_out() else {
            self.travel(to, from).await;
            return Err(Broken::Reset);
        };
        if self.sabotage == Some(Sabotage::Resend) {
            // A client that takes the connection for broken, makes another and sends the call again.
            while self.packet(to, from).is_none() {
                self.sleep(BROKEN_AFTER_US).await;
                let Some(second) = carried_out() else { return Err(Broken::Reset) };
                reply = second;
            }
        }
        self.travel(to, from).await;
        match server.lock().epoch == epoch {
            true => Ok(reply),
            false => Err(Broken::Reset),
        }
    }

    /// Makes the faults of a scenario happen.
    pub(crate) fn start_faults(self: &Arc<Cloud>, scenario: &Scenario) {
        for (at, fault) in scenario.faults.clone() {
            let cloud = self.clone();
            tokio::spawn(async move { cloud.fault(at, fault).await });
        }
        if scenario.sabotage == Some(Sabotage::SilentLoss) {
            let (cloud, half) = (self.clone(), Duration::from_secs(scenario.seconds) / 2);
            tokio::spawn(async move {
                cloud.sleep(Micros::from(half).get()).await;
                cloud.servers().for_each(|(_, _, server)| server.lock().forget());
            });
        }
    }

    async fn fault(&self, at: Duration, fault: Fault) {
        let us = |span: Duration| Micros::from(span).get();
        self.sleep(us(at)).await;
        self.note(format_args!("begins: {fault:?}"));
        let server = |number: usize| self.stores[0][number % self.stores[0].len()].lock();
        match fault {
            Fault::Partition { region, lasts } => {
                self.cut_off.lock().push(region);
                self.sleep(us(lasts)).await;
                self.cut_off.lock().retain(|cut_off| *cut_off != region);
            }
            Fault::Down { server: number, lasts } => {
                server(number).die();
                self.sleep(us(lasts)).await;
                server(number).recover(self.now_us());
            }
            Fault::FailOver { server: number, takes, lag, ahead_us } => {
                let known_us = self.now_us().saturating_sub(us(lag));
                server(number).die();
                self.sleep(us(takes)).await;
                server(number).fail_over(known_us, ahead_us, self.now_us());
            }
            Fault::Split { server: number, region, lasts } => {
                server(number).split(region, self.now_us());
                self.sleep(us(lasts)).await;
                server(number).join();
            }
            Fault::StepClock { server: number, by_us } => server(number).step_clock(by_us),
        }
        self.note(format_args!("over: {fault:?}"));
    }

    fn note(&self, what: std::fmt::Arguments<'_>) {
        self.log.write(format_args!("{} {what}", self.now_us() - START.get()));
    }
}

/// The way of one process to its store.
pub(crate) struct Link {
    pub(crate) cloud: Arc<Cloud>,
    pub(crate) region: usize,
    pub(crate) store: usize,
}

impl Network for Link {
    fn send(&self, server: usize, call: Call) -> Replied {
        let traffic = &self.cloud.traffic;
        let charges = match &call.operation {
            Operation::Each { keys, .. } => keys.len() as u64,
            Operation::Charge { charges, .. } => charges.len() as u64,
            _ => 0,
        };
        let counter = if charges > 0 { &traffic.charge_calls } else { &traffic.other_calls };
        counter.fetch_add(1, Ordering::Relaxed);
        traffic.charges.fetch_add(charges, Ordering::Relaxed);
        let (replied, reply) = oneshot::channel();
        let (cloud, region, store) = (self.cloud.clone(), self.region, self.store);
        // A caller that stops waiting does not call its packets back.
        tokio::spawn(async move {
            let answer = cloud.exchange(region, (store, server), call).await;
            let _ = replied.send(answer);
        });
        Box::pin(async move { reply.await.unwrap_or(Err(Broken::Reset)) })
    }

    fn servers(&self) -> usize {
        self.cloud.stores[self.store].len()
    }

    fn server_of(&self, key: &str) -> usize {
        let servers = self.servers();
        usize::try_from(Random::new(key_number(key)).draw() % servers as u64).unwrap_or(0)
    }
}
