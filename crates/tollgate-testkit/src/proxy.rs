//! A TCP proxy that breaks connections in chosen ways.
//!
//! It stands between a client and a server on the loopback address and forwards bytes unchanged by default; what it
//! does can be switched at any time and holds at once for open connections and new ones. Swallowed and cut replies are the
//! only precise way to make *ambiguous* calls: the server has carried them out, and the client cannot know.
//!
//! One rule keeps the faults honest. TCP never delivers a later byte in place of a lost one, so a connection that has lost
//! bytes in one direction stays silent in that direction for the rest of its life, whatever the mode becomes. Otherwise a
//! client that sends several requests over one connection would take one request's reply for another's, which no real
//! network does to it. Such a client must give the connection up, or wait for ever.
//!
//! The proxy runs on a thread of its own, so tests may be blocking or asynchronous. `proxy/connection.rs` is one connection.

mod connection;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use socket2::{Domain, Socket, Type};
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};

use crate::Random;
use crate::port::free_port;

/// What a [`FaultProxy`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Forwards everything at once.
    Pass,
    /// Forwards everything, each way this much later.
    Latency(Duration),
    /// Reads nothing. What is sent meanwhile arrives when the mode changes, as after a partition that heals.
    Stall,
    /// Accepts and reads, and forwards nothing; connections stay open.
    Blackhole,
    /// Resets open connections, and new ones as soon as they are accepted.
    Reset,
    /// Requests reach the server; replies are dropped, and connections stay open.
    SwallowReplies,
    /// Closes each connection once this many more bytes of replies have been forwarded; for 0, when the next reply comes.
    CutReply {
        /// How many bytes still get through.
        after_bytes: usize,
    },
    /// As if the server's process were gone: new connections are refused, open ones reset.
    Refuse,
    /// Each piece of a reply, as it is read, is swallowed or delayed at random. A swallowed one silences its connection.
    Faulty {
        /// How many pieces in a thousand are swallowed.
        swallow_per_mille: u16,
        /// How many pieces in a thousand are delayed.
        delay_per_mille: u16,
        /// By how much.
        delay: Duration,
    },
}

impl Mode {
    fn cuts(self) -> bool {
        matches!(self, Mode::Reset | Mode::Refuse)
    }
}

/// A running proxy. Dropping it closes its port and all its connections.
pub struct FaultProxy {
    port: u16,
    /// The listening socket, held a second time: so it can stop listening and start again without ever losing its port.
    listening: Socket,
    switching: Mutex<()>,
    shared: Arc<Shared>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// What holds now.
#[derive(Clone, Copy, Debug)]
struct Orders {
    mode: Mode,
    /// How often the mode has been set.
    serial: u64,
    /// How often open connections have been cut. A connection that began under a lower number must end, even if it learns of
    /// the cut only when the mode has changed again.
    cuts: u64,
}

struct Shared {
    upstream: SocketAddr,
    exempt: Option<IpAddr>,
    orders: watch::Sender<Orders>,
    random: Mutex<Random>,
    /// How many more pieces of replies to swallow, whatever the mode.
    swallow_next: AtomicUsize,
    swallowed: AtomicUsize,
    accepted: AtomicUsize,
    census: Mutex<Census>,
    census_changed: Condvar,
}

struct Census {
    /// Open connections by the number of cuts when they began.
    open: BTreeMap<u64, usize>,
    /// Whether the proxy's thread holds the listening socket.
    accepting: bool,
}

impl Shared {
    /// Waits until the proxy's thread has done its part.
    fn wait_until(&self, what: &str, condition: impl Fn(&Census) -> bool) {
        let mut census = self.census.lock();
        while !condition(&census) {
            let waited = self.census_changed.wait_for(&mut census, Duration::from_secs(10));
            assert!(!waited.timed_out(), "waited in vain: {what}");
        }
    }

    fn set_accepting(&self, accepting: bool) {
        self.census.lock().accepting = accepting;
        self.census_changed.notify_all();
    }
}

impl FaultProxy {
    /// A proxy before a server on the loopback address.
    pub fn start(upstream_port: u16) -> FaultProxy {
        FaultProxy::start_with(upstream_port, None, 1)
    }

    /// The same, with a seed for [`Mode::Faulty`].
    pub fn start_seeded(upstream_port: u16, seed: u64) -> FaultProxy {
        FaultProxy::start_with(upstream_port, None, seed)
    }

    /// The same, but connections from this address are not disturbed and not counted; refused they are like everybody.
    pub fn start_exempting(upstream_port: u16, address: IpAddr) -> FaultProxy {
        FaultProxy::start_with(upstream_port, Some(address), 1)
    }

    fn start_with(upstream_port: u16, exempt: Option<IpAddr>, seed: u64) -> FaultProxy {
        let (port, listening) = listen().unwrap_or_else(|error| panic!("the proxy cannot listen: {error}"));
        let (orders, _) = watch::channel(Orders { mode: Mode::Pass, serial: 0, cuts: 0 });
        let shared = Arc::new(Shared {
            upstream: SocketAddr::from((Ipv4Addr::LOCALHOST, upstream_port)),
            exempt,
            orders,
            random: Mutex::new(Random::seeded(seed)),
            swallow_next: AtomicUsize::new(0),
            swallowed: AtomicUsize::new(0),
            accepted: AtomicUsize::new(0),
            census: Mutex::new(Census { open: BTreeMap::new(), accepting: true }),
            census_changed: Condvar::new(),
        });
        let (stop, stopped) = oneshot::channel();
        let second = listening.try_clone().unwrap_or_else(|error| panic!("the proxy cannot listen: {error}"));
        let for_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name(format!("proxy-{port}")).spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.unwrap_or_else(|error| panic!("no runtime for the proxy: {error}"));
            runtime.block_on(async {
                tokio::select! {
                    () = accept(second, for_thread) => {}
                    _ = stopped => {}
                }
            });
        });
        let thread = thread.unwrap_or_else(|error| panic!("no thread for the proxy: {error}"));
        FaultProxy {
            port,
            listening,
            switching: Mutex::new(()),
            shared,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    /// The port that clients connect to.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// What the proxy does now.
    pub fn mode(&self) -> Mode {
        self.shared.orders.borrow().mode
    }

    /// Switches the mode. When this returns, it holds for every connection; those that it cuts are gone.
    pub fn set(&self, mode: Mode) {
        let _one_at_a_time = self.switching.lock();
        let (refused, refuses) = (self.mode() == Mode::Refuse, mode == Mode::Refuse);
        if refused && !refuses {
            self.listen_again();
        }
        self.shared.orders.send_modify(|orders| {
            orders.mode = mode;
            orders.serial += 1;
            orders.cuts += u64::from(mode.cuts());
        });
        if refused && !refuses {
            self.shared.wait_until("the proxy accepts again", |census| census.accepting);
        }
        if refuses && !refused {
            self.stop_listening();
        }
        if mode.cuts() {
            self.wait_for_cut();
        }
    }

    /// Resets all open connections, once; the mode stays.
    pub fn reset_connections(&self) {
        self.shared.orders.send_modify(|orders| orders.cuts += 1);
        self.wait_for_cut();
    }

    /// Swallows the next `count` pieces of replies, whatever the mode; each silences its connection.
    pub fn swallow_next(&self, count: usize) {
        self.shared.swallow_next.store(count, Ordering::SeqCst);
    }

    /// How many pieces of replies have been swallowed so far, in any mode. What reaches a connection that was silenced
    /// earlier is not counted again.
    pub fn swallowed(&self) -> usize {
        self.shared.swallowed.load(Ordering::SeqCst)
    }

    /// How many connections are open now.
    pub fn connections(&self) -> usize {
        self.shared.census.lock().open.values().sum()
    }

    /// How many connections have been accepted so far.
    pub fn accepted(&self) -> usize {
        self.shared.accepted.load(Ordering::SeqCst)
    }

    /// Linux refuses connections to a socket that has been shut down while listening, and keeps its port for it. The thread
    /// lets go of it first: to tokio, a socket once seen closed is closed for ever.
    fn stop_listening(&self) {
        self.shared.wait_until("the proxy stops accepting", |census| !census.accepting);
        let stopped = self.listening.shutdown(Shutdown::Both);
        stopped.unwrap_or_else(|error| panic!("the proxy cannot stop listening: {error}"));
        // Nobody may share the port meanwhile.
        let _ = self.listening.set_reuse_address(false);
    }

    fn listen_again(&self) {
        let _ = self.listening.set_reuse_address(true);
        let listens = self.listening.listen(BACKLOG);
        listens.unwrap_or_else(|error| panic!("the proxy cannot listen on {} again: {error}", self.port));
    }

    fn wait_for_cut(&self) {
        let now = self.shared.orders.borrow().cuts;
        self.shared.wait_until("connections are cut", |census| census.open.range(..now).next().is_none());
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

const BACKLOG: i32 = 1024;

fn listen() -> std::io::Result<(u16, Socket)> {
    let mut tries = 0;
    loop {
        let port = free_port();
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.set_nonblocking(true)?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        match socket.bind(&address.into()).and_then(|()| socket.listen(BACKLOG)) {
            Ok(()) => return Ok((port, socket)),
            Err(error) if tries == 10 => return Err(error),
            Err(_) => tries += 1,
        }
    }
}

async fn accept(listening: Socket, shared: Arc<Shared>) {
    let mut orders = shared.orders.subscribe();
    loop {
        let listener = listening.try_clone().and_then(|socket| TcpListener::from_std(socket.into()));
        let listener = listener.unwrap_or_else(|error| panic!("the proxy cannot accept: {error}"));
        shared.set_accepting(true);
        tokio::select! {
            () = accept_all(&listener, &shared) => {}
            _ = orders.wait_for(|orders| orders.mode == Mode::Refuse) => {}
        }
        drop(listener);
        shared.set_accepting(false);
        let _ = orders.wait_for(|orders| orders.mode != Mode::Refuse).await;
    }
}

async fn accept_all(listener: &TcpListener, shared: &Arc<Shared>) {
    loop {
        match listener.accept().await {
            Ok((client, from)) => {
                let exempt = shared.exempt == Some(from.ip());
                tokio::spawn(connection::serve(client, exempt, Arc::clone(shared)));
            }
            // A client that gave up while it waited, or no more file descriptors: the next may fare better.
            Err(_) => tokio::time::sleep(Duration::from_millis(1)).await,
        }
    }
}
