//! Free ports of the loopback address.
//!
//! They are taken from below the range from which the kernel draws the ports of outgoing connections. A port from that range,
//! as binding port 0 gives, can be lost while a server restarts on it; and a client that keeps knocking at such a port while
//! nobody listens is, once in some thousands of times, connected to itself.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::SystemTime;

/// Where the search starts and how many ports it covers. Ten thousand above each lies the port of the cluster bus, which must
/// stay below the kernel's own range too.
const FIRST: u16 = 10_100;
const COUNT: u16 = 12_000;

/// How far the bus of a cluster node is from the port that its clients use. Redis fixes this.
pub(crate) const BUS_OFFSET: u16 = 10_000;

/// A port that nobody listens on, and whose bus port nobody listens on. Another process can still take it before the caller
/// does, so the caller tries again then.
pub fn free_port() -> u16 {
    for _ in 0..COUNT {
        let port = candidate();
        if is_free(port) && is_free(port + BUS_OFFSET) {
            return port;
        }
    }
    panic!("no free port on 127.0.0.1 between {FIRST} and {}", FIRST + COUNT);
}

fn is_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
}

/// The next port to try. Each process starts somewhere else, and no two callers in a process get the same one.
fn candidate() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    static START: std::sync::LazyLock<u16> = std::sync::LazyLock::new(|| {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let mix = u64::from(std::process::id()).wrapping_mul(7919) ^ u64::from(now.subsec_nanos());
        u16::try_from(mix % u64::from(COUNT)).unwrap_or(0)
    });
    let step = NEXT.fetch_add(1, Ordering::Relaxed) % COUNT;
    FIRST + (*START + step) % COUNT
}
