//! The one form of an address, wherever it comes from: a socket, a header or the caller.

use std::net::IpAddr;

/// The canonical form of an address: IPv4 mapped into IPv6 (`::ffff:203.0.113.7`) or translated to it (NAT64,
/// `64:ff9b::203.0.113.7`) is IPv4. Otherwise all IPv4 clients would share one group of IPv6.
///
/// ```
/// use tollgate::Key;
/// for text in ["::ffff:cb00:7107", "64:ff9b::203.0.113.7"] {
///     assert_eq!(Key::client(text.parse()?), Key::new("ip", "203.0.113.7")?);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[allow(unreachable_pub)] // `route` exports it, with the features that have routes
pub fn canonical(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(six) => match six.segments() {
            [0, 0, 0, 0, 0, 0xffff, ..] | [0x64, 0xff9b, 0, 0, 0, 0, ..] => {
                let [.., a, b, c, d] = six.octets();
                IpAddr::from([a, b, c, d])
            }
            _ => address,
        },
    }
}
