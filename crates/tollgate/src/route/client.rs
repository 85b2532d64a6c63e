//! The client's address, protected from what a request claims.
//!
//! Any client can send `X-Forwarded-For`. So headers are trusted only where trusted proxies are configured, and only the part
//! that those proxies wrote: from the right, past the proxies, to the first address that is not a proxy's. If an entry cannot be
//! read, the peer's address is used: never a key that many clients share by accident, and never no key at all.
//!
//! Addresses are compared as bits, not as text. IPv4 mapped into IPv6 is unmapped before anything is masked; without that all
//! IPv4 clients would be one IPv6 network. `forwarded.rs` parses the one header with a grammar.

mod forwarded;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::num::NonZeroUsize;
use std::sync::Arc;

use http::HeaderMap;
use http::header::FORWARDED;
use ipnet::IpNet;

use crate::error::Error;
pub use crate::key::address::canonical;

const X_FORWARDED_FOR: &str = "x-forwarded-for";

/// How many entries of the header are read at most. No real chain of proxies is as long.
const MAX_ENTRIES: usize = 32;

/// The longest text of a group: an IPv6 address written out, and its prefix.
const LONGEST_GROUP: usize = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff/127".len();

/// How the client's address is found, and how wide a network counts as one client.
///
/// ```
/// use tollgate::route::ClientAddress;
///
/// let clients = ClientAddress::behind(["10.0.0.0/8".parse()?]);
/// let mut headers = http::HeaderMap::new();
/// // The client wrote the first entry, the proxy the second.
/// headers.insert("x-forwarded-for", "192.0.2.1, 203.0.113.7".parse()?);
///
/// let client = clients.resolve(Some("10.0.0.1".parse()?), &headers);
/// assert_eq!(client, Some("203.0.113.7".parse()?));
///
/// // The header of any other peer is ignored.
/// let client = clients.resolve(Some("198.51.100.9".parse()?), &headers);
/// assert_eq!(client, Some("198.51.100.9".parse()?));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientAddress {
    trusted: Trusted,
    header: Header,
    ipv4_prefix: u8,
    ipv6_prefix: u8,
}

/// Which headers are trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Trusted {
    Nobody,
    /// Canonical, as the addresses are that they are compared with.
    Networks(Arc<[IpNet]>),
    Hops(NonZeroUsize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Header {
    XForwardedFor,
    Forwarded,
}

impl ClientAddress {
    /// The socket's address, whatever the headers say. This is the default.
    pub fn peer() -> ClientAddress {
        ClientAddress::new(Trusted::Nobody)
    }

    /// Behind proxies of these networks: for a request from one of them the client is taken from `X-Forwarded-For`; for any
    /// other it is the peer.
    ///
    /// Name the proxies, not their whole network: a client with an address in `proxies` can pose as any client.
    pub fn behind(proxies: impl IntoIterator<Item = IpNet>) -> ClientAddress {
        ClientAddress::new(Trusted::Networks(proxies.into_iter().map(canonical_network).collect()))
    }

    /// Behind exactly `n` proxies, at any address: the client is the `n`-th entry from the right, or the peer if there are fewer.
    ///
    /// Only for services that can be reached only through all of them: the peer's address is not checked.
    ///
    /// ```
    /// use std::num::NonZeroUsize;
    /// use tollgate::route::ClientAddress;
    ///
    /// let clients = ClientAddress::behind_hops(NonZeroUsize::MIN);
    /// let mut headers = http::HeaderMap::new();
    /// headers.insert("x-forwarded-for", "192.0.2.1, 203.0.113.7".parse()?);
    /// assert_eq!(clients.resolve(None, &headers), Some("203.0.113.7".parse()?));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn behind_hops(n: NonZeroUsize) -> ClientAddress {
        ClientAddress::new(Trusted::Hops(n))
    }

    fn new(trusted: Trusted) -> ClientAddress {
        ClientAddress { trusted, header: Header::XForwardedFor, ipv4_prefix: 32, ipv6_prefix: 64 }
    }

    /// Reads `Forwarded` (RFC 7239) instead of `X-Forwarded-For`.
    ///
    /// Only one of them is ever read, because a proxy that writes one passes the other on as the client sent it.
    pub fn forwarded(mut self) -> ClientAddress {
        self.header = Header::Forwarded;
        self
    }

    /// How many bits of an IPv6 address make one client: 32 to 128, 64 by default, because a client with one address has the
    /// whole /64 to choose from.
    ///
    /// ```
    /// use tollgate::route::ClientAddress;
    /// let clients = ClientAddress::peer().ipv6_prefix(48)?;
    /// assert_eq!(clients.group("2001:db8:1:2::3".parse().unwrap()), "2001:db8:1::/48");
    /// # Ok::<(), tollgate::Error>(())
    /// ```
    pub fn ipv6_prefix(mut self, bits: u8) -> Result<ClientAddress, Error> {
        self.ipv6_prefix = prefix("IPv6", bits, 32, 128)?;
        Ok(self)
    }

    /// How many bits of an IPv4 address make one client: 8 to 32, 32 by default.
    pub fn ipv4_prefix(mut self, bits: u8) -> Result<ClientAddress, Error> {
        self.ipv4_prefix = prefix("IPv4", bits, 8, 32)?;
        Ok(self)
    }

    /// The client's address, [canonical], before it is grouped; `None` if not even the peer is known.
    pub fn resolve(&self, peer: Option<IpAddr>, headers: &HeaderMap) -> Option<IpAddr> {
        let peer = peer.map(canonical);
        if self.trusts(peer) { self.claimed(headers).or(peer) } else { peer }
    }

    /// Whether a peer is a proxy whose headers are trusted.
    pub(crate) fn trusts(&self, peer: Option<IpAddr>) -> bool {
        match &self.trusted {
            Trusted::Nobody => false,
            Trusted::Networks(proxies) => peer.is_some_and(|peer| is_in(proxies, canonical(peer))),
            Trusted::Hops(_) => true,
        }
    }

    /// The client according to the lines of the header, read from the right.
    fn claimed(&self, headers: &HeaderMap) -> Option<IpAddr> {
        match self.header {
            Header::XForwardedFor => {
                let lines = headers.get_all(X_FORWARDED_FOR).into_iter().rev();
                self.pick(lines.flat_map(|line| line.as_bytes().rsplit(|&byte| byte == b',')).map(address))
            }
            Header::Forwarded => {
                let lines = headers.get_all(FORWARDED).into_iter().rev();
                let elements = lines.flat_map(|line| forwarded::elements(line.as_bytes()));
                self.pick(elements.map(|element| address(&forwarded::node(element)?)))
            }
        }
    }

    /// The client among the entries; `None` is an entry that is no address.
    fn pick(&self, mut entries: impl Iterator<Item = Option<IpAddr>>) -> Option<IpAddr> {
        match &self.trusted {
            Trusted::Nobody => None,
            Trusted::Networks(proxies) => past(proxies, entries),
            Trusted::Hops(n) => entries.nth(n.get() - 1).flatten(),
        }
    }

    /// The text of the client that this address belongs to, for a key.
    ///
    /// ```
    /// use tollgate::route::ClientAddress;
    /// let clients = ClientAddress::peer();
    /// assert_eq!(clients.group("203.0.113.7".parse()?), "203.0.113.7");
    /// assert_eq!(clients.group("::ffff:203.0.113.7".parse()?), "203.0.113.7");
    /// assert_eq!(clients.group("2001:db8:1:2:3:4:5:6".parse()?), "2001:db8:1:2::/64");
    /// # Ok::<(), std::net::AddrParseError>(())
    /// ```
    pub fn group(&self, address: IpAddr) -> String {
        let mut text = String::with_capacity(LONGEST_GROUP);
        // Writing to a string cannot fail.
        let _ = self.write_group(address, &mut text);
        text
    }

    /// Writes [`group`](ClientAddress::group) where there is already room for it.
    pub fn write_group(&self, address: IpAddr, to: &mut impl fmt::Write) -> fmt::Result {
        // The prefixes are at least 8 and 32, so no shift overflows.
        match canonical(address) {
            IpAddr::V4(address) => {
                let network = Ipv4Addr::from_bits(address.to_bits() & (u32::MAX << (32 - self.ipv4_prefix)));
                if self.ipv4_prefix == 32 {
                    write_ipv4(to, network)
                } else {
                    write!(to, "{network}/{}", self.ipv4_prefix)
                }
            }
            IpAddr::V6(address) => {
                let network =
                    Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << (128 - self.ipv6_prefix)));
                if self.ipv6_prefix == 128 {
                    write!(to, "{network}")
                } else {
                    write!(to, "{network}/{}", self.ipv6_prefix)
                }
            }
        }
    }
}

/// The peer's address, as [`ClientAddress::peer`].
impl Default for ClientAddress {
    fn default() -> ClientAddress {
        ClientAddress::peer()
    }
}

/// A network in the canonical form of its addresses.
pub(crate) fn canonical_network(network: IpNet) -> IpNet {
    match (network, canonical(network.addr())) {
        // Where the prefix reaches into the mapped part, all of the network is IPv4.
        (IpNet::V6(six), address @ IpAddr::V4(_)) if six.prefix_len() >= 96 => {
            IpNet::new(address, six.prefix_len() - 96).unwrap_or(network)
        }
        _ => network,
    }
}

fn is_in(networks: &[IpNet], address: IpAddr) -> bool {
    networks.iter().any(|network| network.contains(&address))
}

/// The first address from the right that is not a proxy's; the leftmost if all are proxies. `None` if an entry on the way is no
/// address or there are too many entries: then the rest cannot be trusted.
fn past(proxies: &[IpNet], entries: impl Iterator<Item = Option<IpAddr>>) -> Option<IpAddr> {
    let mut leftmost = None;
    for (seen, entry) in entries.enumerate() {
        if seen == MAX_ENTRIES {
            return None;
        }
        let address = entry?;
        leftmost = Some(address);
        if !is_in(proxies, address) {
            break;
        }
    }
    leftmost
}

/// Reads an address as proxies write it: with or without a port, brackets and a zone. It is [canonical].
///
/// ```
/// use tollgate::route::address;
/// assert_eq!(address(b"[2001:DB8::1]:443"), Some("2001:db8::1".parse()?));
/// assert_eq!(address(b"::ffff:203.0.113.7"), Some("203.0.113.7".parse()?));
/// assert_eq!(address(b"unknown"), None);
/// # Ok::<(), std::net::AddrParseError>(())
/// ```
pub fn address(entry: &[u8]) -> Option<IpAddr> {
    let text = str::from_utf8(entry).ok()?.trim_matches([' ', '\t']);
    let address = if let Some(inside) = text.strip_prefix('[') {
        let (inside, after) = inside.split_once(']')?;
        if !after.is_empty() && !after.strip_prefix(':').is_some_and(is_port) {
            return None;
        }
        IpAddr::V6(ipv6(inside)?)
    } else {
        match text.split_once(':') {
            None => IpAddr::V4(text.parse().ok()?),
            Some((_, rest)) if rest.contains(':') => IpAddr::V6(ipv6(text)?),
            Some((host, port)) if is_port(port) => IpAddr::V4(host.parse().ok()?),
            Some(_) => return None,
        }
    };
    Some(canonical(address))
}

/// An IPv6 address. Its zone (`fe80::1%eth0`) is ignored: it names an interface of another machine.
fn ipv6(text: &str) -> Option<Ipv6Addr> {
    match text.split_once('%') {
        Some((_, "")) => None,
        Some((address, _)) => address.parse().ok(),
        None => text.parse().ok(),
    }
}

/// A number, or the made-up name that RFC 7239 allows in its index.
fn is_port(text: &str) -> bool {
    match text.strip_prefix('_') {
        Some(name) => {
            !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
        }
        None => text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u16>().is_ok(),
    }
}

fn prefix(family: &str, bits: u8, least: u8, most: u8) -> Result<u8, Error> {
    if (least..=most).contains(&bits) {
        return Ok(bits);
    }
    Err(Error::call(format!("a client cannot be {bits} bits of an {family} address; give {least} to {most}")))
}

/// The text of a group, where it takes no allocation.
pub(crate) struct ClientGroup {
    text: [u8; LONGEST_GROUP],
    len: usize,
}

impl Default for ClientGroup {
    fn default() -> ClientGroup {
        ClientGroup { text: [0; LONGEST_GROUP], len: 0 }
    }
}

impl ClientGroup {
    pub(crate) fn as_str(&self) -> &str {
        str::from_utf8(&self.text[..self.len]).unwrap_or_default()
    }
}

impl fmt::Write for ClientGroup {
    fn write_str(&mut self, more: &str) -> fmt::Result {
        let end = self.len + more.len();
        self.text.get_mut(self.len..end).ok_or(fmt::Error)?.copy_from_slice(more.as_bytes());
        self.len = end;
        Ok(())
    }
}

/// The four numbers, by hand: nearly every request has one, and formatting takes as long as counting.
fn write_ipv4(to: &mut impl fmt::Write, address: Ipv4Addr) -> fmt::Result {
    let mut text = [0; "255.255.255.255".len()];
    let mut len = 0;
    let mut push = |byte: u8| {
        text[len] = byte;
        len += 1;
    };
    for (index, octet) in address.octets().into_iter().enumerate() {
        if index > 0 {
            push(b'.');
        }
        if octet >= 100 {
            push(b'0' + octet / 100);
        }
        if octet >= 10 {
            push(b'0' + octet / 10 % 10);
        }
        push(b'0' + octet % 10);
    }
    to.write_str(str::from_utf8(&text[..len]).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_read_in_every_spelling() {
        for (entry, expected) in [
            ("1.2.3.4", Some("1.2.3.4")),
            (" \t1.2.3.4\t ", Some("1.2.3.4")),
            ("1.2.3.4:5678", Some("1.2.3.4")),
            ("1.2.3.4:_port-1", Some("1.2.3.4")),
            ("2001:db8::1", Some("2001:db8::1")),
            ("2001:DB8:0:0::1", Some("2001:db8::1")),
            ("[2001:db8::1]", Some("2001:db8::1")),
            ("[2001:db8::1]:443", Some("2001:db8::1")),
            ("fe80::1%eth0", Some("fe80::1")),
            ("[fe80::1%25eth0]:443", Some("fe80::1")),
            ("::ffff:1.2.3.4", Some("1.2.3.4")),
            ("[::ffff:102:304]:80", Some("1.2.3.4")),
            ("64:ff9b::1.2.3.4", Some("1.2.3.4")),
            ("::1.2.3.4", Some("::102:304")),
            ("", None),
            (" ", None),
            ("unknown", None),
            ("_hidden", None),
            ("localhost", None),
            ("1.2.3", None),
            ("1.2.3.4.5", None),
            ("1.2.3.256", None),
            ("01.2.3.4", None),
            ("0x7f.0.0.1", None),
            ("16909060", None),
            ("1.2.3.4:", None),
            ("1.2.3.4:+80", None),
            ("1.2.3.4:65536", None),
            ("1.2.3.4:_", None),
            ("1.2.3.4%eth0", None),
            ("[1.2.3.4]", None),
            ("[2001:db8::1", None),
            ("[2001:db8::1]443", None),
            ("[2001:db8::1]:", None),
            ("2001:db8::1]", None),
            ("fe80::1%", None),
            ("[]", None),
            ("\"1.2.3.4\"", None),
            ("1.2.3.4 5.6.7.8", None),
            ("\u{661}.2.3.4", None),
        ] {
            let expected = expected.map(|text| text.parse().unwrap());
            assert_eq!(address(entry.as_bytes()), expected, "{entry:?}");
        }
        assert_eq!(address(b"1.2.3.4\xff"), None);
    }

    #[test]
    fn a_client_has_the_configured_prefix() {
        for (four, six, address, expected) in [
            (32, 64, "203.0.113.7", Some("203.0.113.7")),
            (24, 64, "203.0.113.7", Some("203.0.113.0/24")),
            (8, 64, "::ffff:203.0.113.7", Some("203.0.0.0/8")),
            (32, 64, "2001:db8:1:2:3:4:5:6", Some("2001:db8:1:2::/64")),
            (32, 56, "2001:db8:1:2ff:3::", Some("2001:db8:1:200::/56")),
            (32, 32, "2001:db8:1::", Some("2001:db8::/32")),
            (32, 128, "2001:db8::1", Some("2001:db8::1")),
            (7, 64, "203.0.113.7", None),
            (33, 64, "203.0.113.7", None),
            (32, 31, "203.0.113.7", None),
            (32, 129, "203.0.113.7", None),
        ] {
            let clients = ClientAddress::peer().ipv4_prefix(four).and_then(|c| c.ipv6_prefix(six));
            let group = clients.map(|clients| clients.group(address.parse().unwrap()));
            assert_eq!(group.as_deref().ok(), expected, "{four} {six} {address}");
        }
        let error = ClientAddress::peer().ipv6_prefix(129).unwrap_err();
        assert_eq!(error.to_string(), "a client cannot be 129 bits of an IPv6 address; give 32 to 128");
    }

    #[test]
    fn ipv4_is_written_as_it_is_shown() {
        for number in (0..=255_u8).chain([0, 9, 10, 99, 100]) {
            let address = Ipv4Addr::new(number, 255 - number, number / 2, 0);
            assert_eq!(ClientAddress::peer().group(address.into()), address.to_string());
        }
    }

    /// A group that outgrew its text would be moved, which is a second allocation on every request.
    #[test]
    fn the_longest_group_fits() {
        let clients = ClientAddress::peer().ipv6_prefix(127).unwrap();
        let group = clients.group("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff".parse().unwrap());
        assert_eq!((group.len(), group.capacity()), (LONGEST_GROUP, LONGEST_GROUP));
        let mut on_the_stack = ClientGroup::default();
        clients
            .write_group("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff".parse().unwrap(), &mut on_the_stack)
            .unwrap();
        assert_eq!(on_the_stack.as_str(), group);
    }
}
