//! A Redis Cluster of six real processes: three primaries, three replicas.
//!
//! Nodes notice a dead neighbour after one second, replicas are filled at once, and a cluster that has lost some of its slots
//! goes on serving the others. With proxies, each node tells clients to come through a [`FaultProxy`] that stands before it;
//! the nodes' own talk goes past the proxies, so that a broken proxy breaks the clients' connections and nothing else.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use super::{RedisBuilder, RedisServer, version_of};
use crate::daemon::poll;
use crate::port::{BUS_OFFSET, free_port};
use crate::proxy::FaultProxy;

const SLOTS: u16 = 16_384;
const PRIMARIES: usize = 3;
const NODES: usize = 6;

/// How long the cluster may take to agree on something.
const LIMIT: Duration = Duration::from_secs(30);

/// From where replicas of a cluster with proxies connect to their primaries, so that the proxies can tell them from clients.
const REPLICAS_COME_FROM: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// The slot of a key: CRC16 (XMODEM) of the part in braces if there is one, else of the whole, modulo 16384.
///
/// ```
/// use tollgate_testkit::redis::slot_of;
/// assert_eq!(slot_of("123456789"), 0x31c3);
/// assert_eq!(slot_of("{user}.following"), slot_of("{user}.followers"));
/// ```
pub fn slot_of(key: &str) -> u16 {
    let braced = key.split_once('{').and_then(|(_, rest)| Some(rest.split_once('}')?.0));
    let hashed = braced.filter(|tag| !tag.is_empty()).unwrap_or(key);
    let mut crc = 0u16;
    for byte in hashed.bytes() {
        crc ^= u16::from(byte) << 8;
        for _ in 0..8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
        }
    }
    crc % SLOTS
}

/// A running cluster. Nodes are known by their place in [`nodes`](Self::nodes): 0 to 2 start as primaries, 3 to 5 as their
/// replicas. Dropping it ends all processes.
pub struct RedisCluster {
    nodes: Vec<RedisServer>,
    ids: Vec<String>,
    proxies: Vec<FaultProxy>,
}

/// What one node says about another.
struct Seen {
    is_primary: bool,
    primary: String,
    slots: Vec<(u16, u16)>,
}

impl RedisCluster {
    /// Starts six nodes and waits until all agree and the replicas are in sync.
    pub fn start() -> RedisCluster {
        RedisCluster::start_from(RedisServer::builder(), false)
    }

    /// The same, with a proxy before each node, through which clients are sent. Replicas pass the proxies unharmed
    /// from Redis 7.0 on; before, a fault hits them too.
    pub fn start_with_proxies() -> RedisCluster {
        RedisCluster::start_from(RedisServer::builder(), true)
    }

    /// Starts six nodes with the settings of `builder`, with or without proxies. With [`RedisBuilder::tls`] nodes talk to each other by
    /// TLS and tell clients of their TLS ports; with [`RedisBuilder::password`] replicas give it to their primaries.
    pub fn start_from(builder: RedisBuilder, with_proxies: bool) -> RedisCluster {
        let version = version_of(&builder);
        let mut proxies = Vec::new();
        let mut nodes = Vec::new();
        while nodes.len() < NODES {
            let port = free_port();
            let mut builder = builder.clone().arguments(["--cluster-enabled", "yes"]);
            builder =
                builder.arguments(["--cluster-node-timeout", "1000", "--cluster-config-file", "nodes.conf"]);
            builder = builder.arguments(["--cluster-require-full-coverage", "no"]);
            builder = builder.arguments(["--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0"]);
            if with_proxies {
                let proxy = FaultProxy::start_exempting(port, IpAddr::V4(REPLICAS_COME_FROM));
                builder = builder
                    .arguments(["--cluster-announce-ip", "127.0.0.1", "--cluster-announce-port"])
                    .arguments([proxy.port().to_string()])
                    .arguments(["--cluster-announce-bus-port".to_owned(), (port + BUS_OFFSET).to_string()]);
                if version >= (7, 0, 0) {
                    builder = builder.arguments(["--bind-source-addr", &REPLICAS_COME_FROM.to_string()]);
                }
                proxies.push(proxy);
            }
            if builder.tls {
                builder = builder.arguments(["--tls-cluster", "yes", "--tls-replication", "yes"]);
            }
            if let [password] = &builder.credentials[..] {
                let password = password.clone();
                builder = builder.arguments(["--masterauth".to_owned(), password]);
            }
            let tls_port = builder.tls.then(free_port);
            nodes.push(RedisServer::spawn(builder, version, port, tls_port));
        }
        // All six start side by side; one that lost its port is worth a fresh start of all, so rare is it.
        if !nodes.iter().all(RedisServer::wait_for_start) {
            drop(nodes);
            return RedisCluster::start_from(builder, with_proxies);
        }
        let ids = nodes.iter().map(|node| ask(node, &["CLUSTER", "MYID"])).collect();
        let cluster = RedisCluster { nodes, ids, proxies };
        cluster.join();
        cluster
    }

    /// Makes one cluster of six nodes that do not know each other.
    fn join(&self) {
        let share = SLOTS / 3 + 1;
        for (index, node) in self.nodes.iter().enumerate() {
            // Without epochs of their own the nodes would first have to fight them out.
            ask(node, &["CLUSTER", "SET-CONFIG-EPOCH", &(index + 1).to_string()]);
        }
        for (node, first) in self.nodes.iter().take(PRIMARIES).zip((0..SLOTS).step_by(usize::from(share))) {
            let slots: Vec<String> = (first..SLOTS.min(first + share)).map(|slot| slot.to_string()).collect();
            let mut command = vec!["CLUSTER", "ADDSLOTS"];
            command.extend(slots.iter().map(String::as_str));
            ask(node, &command);
        }
        // Everybody meets everybody: waiting for gossip to spread would take seconds.
        for node in &self.nodes {
            for other in self.nodes.iter().filter(|other| other.port() != node.port()) {
                // A node that speaks TLS has its bus beside its TLS port.
                let port = other.tls_port().unwrap_or(other.port());
                let bus = (port + BUS_OFFSET).to_string();
                ask(node, &["CLUSTER", "MEET", "127.0.0.1", &port.to_string(), &bus]);
            }
        }
        self.wait_for("the nodes to know each other", |cluster| {
            cluster.nodes.iter().all(|node| {
                let seen = view(node);
                seen.len() == NODES && cluster.ids.iter().all(|id| seen.contains_key(id))
            })
        });
        for (replica, id) in self.nodes.iter().skip(PRIMARIES).zip(&self.ids) {
            ask(replica, &["CLUSTER", "REPLICATE", id]);
        }
        self.wait_until_ok();
    }

    /// Waits until every running node says that the cluster is well, knows every primary and replica, and every replica is
    /// in sync with its primary. Nodes that were killed or frozen are the caller's affair: resume or restart them before.
    pub fn wait_until_ok(&self) {
        self.wait_for("the cluster to be well", RedisCluster::is_ok);
    }

    /// Waits until a node is a primary that serves slots, as after a fail-over, and all running nodes know it.
    pub fn wait_until_primary(&self, index: usize) {
        self.wait_for("a replica to become primary", |cluster| {
            cluster.running().all(|(_, node)| {
                view(node)
                    .get(&cluster.ids[index])
                    .is_some_and(|seen| seen.is_primary && !seen.slots.is_empty())
            })
        });
    }

    fn is_ok(&self) -> bool {
        self.running().all(|(_, node)| {
            let state = node.command(&["CLUSTER", "INFO"]).map(|info| info.text()).unwrap_or_default();
            let seen = view(node);
            let served: u32 =
                seen.values().flat_map(|seen| &seen.slots).map(|(a, b)| u32::from(b - a) + 1).sum();
            let is_primary = node.info("replication", "role").as_deref() == Some("master");
            state.contains("cluster_state:ok")
                && served == u32::from(SLOTS)
                && seen.values().filter(|seen| seen.is_primary && !seen.slots.is_empty()).count() == PRIMARIES
                && (is_primary || node.info("replication", "master_link_status").as_deref() == Some("up"))
        })
    }

    fn running(&self) -> impl Iterator<Item = (usize, &RedisServer)> {
        self.nodes.iter().enumerate().filter(|(_, node)| node.pid().is_some())
    }

    fn wait_for(&self, what: &str, condition: impl Fn(&RedisCluster) -> bool) {
        if poll(LIMIT, || condition(self).then_some(())).is_none() {
            let state = |node: &RedisServer| node.command(&["CLUSTER", "NODES"]).map(|value| value.text());
            let states: Vec<_> = self.running().map(|(_, node)| state(node)).collect();
            panic!("waited {LIMIT:?} for {what}; the nodes say: {states:#?}");
        }
    }

    /// The nodes' own addresses, or those of their proxies if there are any: what a client is given.
    pub fn urls(&self) -> Vec<String> {
        if self.proxies.is_empty() {
            self.nodes.iter().map(RedisServer::url).collect()
        } else {
            self.proxies.iter().map(|proxy| format!("redis://127.0.0.1:{}", proxy.port())).collect()
        }
    }

    /// The nodes' TLS addresses, by number: that is how nodes name each other, and what a client is sent on to.
    pub fn tls_urls(&self) -> Vec<String> {
        self.nodes.iter().map(|node| node.tls_url().replace("localhost", "127.0.0.1")).collect()
    }

    /// The six nodes.
    pub fn nodes(&self) -> &[RedisServer] {
        &self.nodes
    }

    /// One proxy for each node, in the same order; empty if started without.
    pub fn proxies(&self) -> &[FaultProxy] {
        &self.proxies
    }

    /// Which node is now the primary of a slot, if any is known: as the majority of running nodes see it.
    pub fn primary_of(&self, slot: u16) -> Option<usize> {
        let serves =
            |seen: &Seen| seen.is_primary && seen.slots.iter().any(|&(a, b)| (a..=b).contains(&slot));
        self.majority(|node| view(node).into_iter().find(|(_, seen)| serves(seen)).map(|(id, _)| id))
    }

    /// Which node is now a replica of this one, if any is known: as the majority of running nodes see it.
    pub fn replica_of(&self, primary: usize) -> Option<usize> {
        let id = &self.ids[primary];
        self.majority(|node| view(node).into_iter().find(|(_, seen)| seen.primary == *id).map(|(id, _)| id))
    }

    fn majority(&self, opinion: impl Fn(&RedisServer) -> Option<String>) -> Option<usize> {
        let mut votes = HashMap::new();
        for id in self.running().filter_map(|(_, node)| opinion(node)) {
            *votes.entry(id).or_insert(0) += 1;
        }
        let (winner, _) = votes.into_iter().max_by_key(|(_, count)| *count)?;
        self.ids.iter().position(|id| *id == winner)
    }

    /// Makes a replica the primary of its slots, in agreement with its present primary, and waits until that is so.
    pub fn failover(&self, replica: usize) {
        let node = &self.nodes[replica];
        // A fail-over that begins just after another is given up silently, so it is asked for until it has happened.
        self.wait_for("a manual fail-over", |_| {
            let _ = node.command(&["CLUSTER", "FAILOVER"]);
            poll(Duration::from_secs(2), || (node.info("replication", "role")? == "master").then_some(()))
                .is_some()
        });
        self.wait_until_primary(replica);
    }
}

/// What `CLUSTER NODES` says: `id address flags primary ping pong epoch link slots…`, by id.
fn view(node: &RedisServer) -> HashMap<String, Seen> {
    let text = node.command(&["CLUSTER", "NODES"]).map(|value| value.text()).unwrap_or_default();
    text.lines().filter_map(parse_node).collect()
}

fn parse_node(line: &str) -> Option<(String, Seen)> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let flags = fields.get(2)?;
    if flags.contains("handshake") || flags.contains("noaddr") {
        return None;
    }
    let slots = fields.iter().skip(8).filter(|field| !field.starts_with('[')).filter_map(|field| {
        let (first, last) = field.split_once('-').unwrap_or((field, field));
        Some((first.parse().ok()?, last.parse().ok()?))
    });
    let dead = flags.split(',').any(|flag| flag == "fail");
    let is_primary = flags.contains("master") && !dead;
    let seen = Seen { is_primary, primary: (*fields.get(3)?).to_owned(), slots: slots.collect() };
    Some(((*fields.first()?).to_owned(), seen))
}

fn ask(node: &RedisServer, command: &[&str]) -> String {
    match node.command(command) {
        Ok(value) => value.text(),
        Err(error) => panic!("{}: {error}", command.join(" ")),
    }
}
