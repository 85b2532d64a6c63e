//! `[requests]`: how route limits read a request, in the tower layer and at the server's gate.

use http::HeaderName;
use ipnet::IpNet;

use super::reader::{Field, Reader, Section};
use super::routes::read_networks;
use crate::route::{ClientAddress, EncodedSeparators, RequestReader};

pub(super) const FIELDS: [&str; 6] =
    ["trusted_proxies", "client_header", "ipv4_prefix", "ipv6_prefix", "encoded_separators", "user_header"];

/// How requests are read: which proxies are trusted, and how wide a network is one client.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RequestsConfig {
    /// The proxies whose description of a request is trusted. Without any, the client is the peer.
    pub trusted_proxies: Vec<IpNet>,
    /// Whether they send `Forwarded` (RFC 7239); if not, `X-Forwarded-For`.
    pub forwarded: bool,
    /// How many bits of an IPv4 address make one client.
    pub ipv4_prefix: u8,
    /// How many bits of an IPv6 address make one client.
    pub ipv6_prefix: u8,
    /// What encoded slashes and backslashes in paths are.
    pub encoded_separators: EncodedSeparators,
    /// The header in which trusted proxies name the authenticated user.
    pub user_header: Option<String>,
}

impl Default for RequestsConfig {
    fn default() -> RequestsConfig {
        RequestsConfig {
            trusted_proxies: Vec::new(),
            forwarded: false,
            ipv4_prefix: 32,
            ipv6_prefix: 64,
            encoded_separators: EncodedSeparators::default(),
            user_header: None,
        }
    }
}

impl RequestsConfig {
    /// What reads requests so.
    pub fn reader(&self) -> RequestReader {
        let client = match self.trusted_proxies.is_empty() {
            true => ClientAddress::peer(),
            false => ClientAddress::behind(self.trusted_proxies.iter().copied()),
        };
        let client = if self.forwarded { client.forwarded() } else { client };
        // The bounds were checked when the file was read; a value that code has set wrongly is as good as none.
        let client = client.clone().ipv4_prefix(self.ipv4_prefix).unwrap_or(client);
        let client = client.clone().ipv6_prefix(self.ipv6_prefix).unwrap_or(client);
        let reader = RequestReader::new().client(client).encoded_separators(self.encoded_separators);
        match self.user_header.as_ref().and_then(|name| HeaderName::try_from(name).ok()) {
            Some(name) => reader.user_header(name),
            None => reader,
        }
    }

    pub(super) fn read(reader: &mut Reader<'_>, section: Section<'_>) -> RequestsConfig {
        let section = section.showing_all();
        reader.only(&section, &FIELDS);
        let default = RequestsConfig::default();
        let proxies = section.field("trusted_proxies");
        let proxies =
            proxies.and_then(|field| read_networks(reader, field, "[\"127.0.0.1\", \"10.0.0.0/8\"]"));
        let header = [("x-forwarded-for", false), ("forwarded", true)];
        let forwarded = section.field("client_header").and_then(|field| reader.choice(field, &header));
        let separators = [("refuse", EncodedSeparators::Refuse), ("keep", EncodedSeparators::Keep)];
        let separators = section.field("encoded_separators").and_then(|f| reader.choice(f, &separators));
        let mut prefix = |name, check: fn(u8) -> Result<ClientAddress, crate::error::Error>| {
            section.field(name).and_then(|field| read_prefix(reader, field, check))
        };
        let ipv4_prefix = prefix("ipv4_prefix", |bits| ClientAddress::peer().ipv4_prefix(bits));
        let ipv6_prefix = prefix("ipv6_prefix", |bits| ClientAddress::peer().ipv6_prefix(bits));
        let user_header = section.field("user_header").and_then(|field| read_header(reader, field));
        RequestsConfig {
            trusted_proxies: proxies.unwrap_or_default(),
            forwarded: forwarded.unwrap_or_default(),
            ipv4_prefix: ipv4_prefix.unwrap_or(default.ipv4_prefix),
            ipv6_prefix: ipv6_prefix.unwrap_or(default.ipv6_prefix),
            encoded_separators: separators.unwrap_or_default(),
            user_header,
        }
    }
}

fn read_prefix(
    reader: &mut Reader<'_>,
    field: &Field<'_>,
    check: fn(u8) -> Result<ClientAddress, crate::error::Error>,
) -> Option<u8> {
    let bits = u8::try_from(reader.whole(field, 64, "")?).unwrap_or(u8::MAX);
    match check(bits) {
        Ok(_) => Some(bits),
        Err(error) => {
            reader.mistake(field, error);
            None
        }
    }
}

fn read_header(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<String> {
    let name = reader.text(field, "x-authenticated-user")?;
    if HeaderName::try_from(name).is_err() {
        reader.mistake(field, "is not the name of a header; write such as \"x-authenticated-user\"");
        return None;
    }
    Some(name.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::super::tests::{check, parse};
    use crate::route::EncodedSeparators;

    #[test]
    fn every_field_is_read() {
        let requests = parse(
            "[requests]\ntrusted_proxies = ['127.0.0.1', 'fd00::/8']\nclient_header = 'forwarded'\nipv4_prefix = 24\n\
             ipv6_prefix = 48\nencoded_separators = 'keep'\nuser_header = 'X-User'",
        )
        .requests;
        assert_eq!(
            requests.trusted_proxies.iter().map(ToString::to_string).collect::<Vec<_>>(),
            ["127.0.0.1/32", "fd00::/8"]
        );
        assert!(requests.forwarded);
        assert_eq!((requests.ipv4_prefix, requests.ipv6_prefix), (24, 48));
        assert_eq!(requests.encoded_separators, EncodedSeparators::Keep);
        assert_eq!(requests.user_header.as_deref(), Some("x-user"));
        let reader = requests.reader();
        assert!(reader.trusts("127.0.0.1".parse().unwrap()) && !reader.trusts("127.0.0.2".parse().unwrap()));
        assert!(
            !parse("").requests.reader().trusts("127.0.0.1".parse().unwrap()),
            "nobody is trusted by default"
        );
        let by_env = [("TOLLGATE_REQUESTS_TRUSTED_PROXIES".to_owned(), "10.0.0.0/8,::1".to_owned())];
        assert_eq!(Config::parse_with_env("", by_env).unwrap().requests.trusted_proxies.len(), 2);
    }

    #[test]
    fn mistakes_are_reported() {
        for (field, value, shown, fix) in [
            ("trusted_proxies", "['proxy']", "[…]", "`proxy` is no address or network"),
            ("trusted_proxies", "[]", "[…]", "must be a list of texts"),
            ("client_header", "'x-real-ip'", "'x-real-ip'", "must be one of x-forwarded-for, forwarded"),
            ("ipv4_prefix", "33", "33", "give 8 to 32"),
            ("ipv6_prefix", "300", "300", "give 32 to 128"),
            ("encoded_separators", "'allow'", "'allow'", "must be one of refuse, keep"),
            ("user_header", "'x user'", "'x user'", "is not the name of a header"),
            ("trusted_proxy", "['::1']", "[…]", "did you mean `trusted_proxies`?"),
        ] {
            check(
                &format!("[requests]\n{field} = {value}"),
                &[(2, &format!("requests.{field}"), shown, fix)],
            );
        }
    }
}
