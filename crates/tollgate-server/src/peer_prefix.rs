//! Which addresses are one peer, for connection limits, calls in flight and wrong tokens.

use std::net::{IpAddr, Ipv6Addr};

/// The prefix that counts as one peer: an IPv4 address, or the 64 bits of an IPv6 network.
pub(crate) fn peer_prefix(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(peer) => IpAddr::V6(Ipv6Addr::from_bits(peer.to_bits() >> 64 << 64)),
        peer => peer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_addresses_of_a_prefix_are_one_peer() {
        let prefix = |text: &str| peer_prefix(text.parse().expect("an address"));
        for (one, other, are_one) in [
            ("192.0.2.1", "192.0.2.1", true),
            ("192.0.2.1", "::ffff:192.0.2.1", true),
            ("192.0.2.1", "192.0.2.2", false),
            ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", true),
            ("2001:db8:0:1::1", "2001:db8:0:2::1", false),
        ] {
            assert_eq!(prefix(one) == prefix(other), are_one, "{one} {other}");
        }
    }
}
