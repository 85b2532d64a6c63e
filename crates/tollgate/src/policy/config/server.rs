//! `[server]`: where to listen, and what its operator must show.
//!
//! Addresses are checked for their form and kept as text: a host name is looked up when the server binds, not here.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::connection::{Password, read_password};
use super::reader::{Field, Reader, Section};

/// Where the server listens, and what its operator must show. A face without an address is left to the server's own default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerConfig {
    /// `host:port` of the HTTP API and the dashboard.
    pub http: Option<String>,
    /// `host:port` of the gRPC service that Envoy calls.
    pub grpc: Option<String>,
    /// `host:port` of the face that speaks the Redis protocol.
    pub resp: Option<String>,
    /// What whoever changes limits or forgets keys through the API must show; it is not shown by anything here.
    pub admin_token: Option<Password>,
    /// Whether the page shows keys as they are, to whoever may look at it. Unless said it shows their hashes.
    pub show_keys: bool,
    /// What whoever speaks the Redis protocol must show; anybody may, unless said.
    pub resp_password: Option<Password>,
}

impl ServerConfig {
    pub(super) fn read(reader: &mut Reader<'_>, section: Section<'_>) -> ServerConfig {
        let section = section.showing(&["http", "grpc", "resp", "show_keys"]);
        reader.only(&section, &["http", "grpc", "resp", "admin_token", "resp_password", "show_keys"]);
        let admin_token = section.field("admin_token").and_then(|f| read_password(reader, f, "ADMIN_TOKEN"));
        let resp_password =
            section.field("resp_password").and_then(|f| read_password(reader, f, "RESP_PASSWORD"));
        let show_keys = section.field("show_keys").and_then(|f| reader.truth(f)).unwrap_or_default();
        let mut read = |name, example| read_address(reader, section.field(name)?, example);
        ServerConfig {
            http: read("http", "127.0.0.1:8080"),
            grpc: read("grpc", "127.0.0.1:8081"),
            resp: read("resp", "127.0.0.1:6380"),
            admin_token,
            show_keys,
            resp_password,
        }
    }
}

fn read_address(reader: &mut Reader<'_>, field: &Field<'_>, example: &str) -> Option<String> {
    let text = reader.text(field, example)?;
    match address_fault(text) {
        None => Some(text.to_owned()),
        Some(fix) => {
            reader.mistake(field, format!("{fix}; write host:port, such as \"{example}\""));
            None
        }
    }
}

/// What is wrong with `host:port`.
fn address_fault(text: &str) -> Option<&'static str> {
    let Some((host, port)) = text.rsplit_once(':') else { return Some("has no port") };
    if port.is_empty() || !port.bytes().all(|byte| byte.is_ascii_digit()) || port.parse::<u16>().is_err() {
        return Some("has no port between 0 and 65535 after its last `:`");
    }
    if host.is_empty() {
        return Some("has no host (0.0.0.0 listens everywhere)");
    }
    host_fault(host)
}

/// What is wrong with a host: a name, an IPv4 address, or an IPv6 address in brackets.
pub(super) fn host_fault(host: &str) -> Option<&'static str> {
    let name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    if host.is_empty() {
        Some("has no host")
    } else if let Some(address) = host.strip_prefix('[') {
        let address = address.strip_suffix(']').and_then(|address| address.parse::<Ipv6Addr>().ok());
        address.is_none().then_some("has no IPv6 address between its brackets")
    } else if host.contains(':') {
        Some("has an IPv6 address without its brackets, as in [::1]")
    } else if !host.bytes().all(name) {
        Some("has a host with other characters than letters, digits, `.`, `-` and `_`")
    } else if host.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
        host.parse::<Ipv4Addr>().is_err().then_some("has no valid IPv4 address")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{check, parse};
    use super::super::{Config, Password};

    #[test]
    fn addresses_are_checked() {
        for address in ["localhost:0", "0.0.0.0:65535", "[::1]:8080", "my-host_1.example:80"] {
            assert_eq!(parse(&format!("server.http = '{address}'")).server.http.as_deref(), Some(address));
        }
        for (address, fix) in [
            ("'8080'", "has no port; write host:port, such as \"127.0.0.1:8080\""),
            ("''", "has no port"),
            ("':8080'", "has no host (0.0.0.0 listens everywhere)"),
            ("'localhost:'", "has no port between 0 and 65535"),
            ("'localhost:http'", "has no port between"),
            ("'localhost:65536'", "has no port between"),
            ("'localhost:+80'", "has no port between"),
            ("'::1:8080'", "has an IPv6 address without its brackets"),
            ("'[::1:8080'", "has no IPv6 address between its brackets"),
            ("'[x]:8080'", "has no IPv6 address between its brackets"),
            ("'256.1.1.1:80'", "has no valid IPv4 address"),
            ("'a b:80'", "has a host with other characters"),
            ("'http://a:80'", "has an IPv6 address without its brackets"),
            ("8080", "must be text in quotes, such as \"127.0.0.1:8080\""),
        ] {
            check(&format!("[server]\nhttp = {address}"), &[(2, "server.http", address, fix)]);
        }
        check("[server]\nhtp = 'x'", &[(2, "server.htp", "***", "did you mean `http`?")]);
    }
    #[test]
    fn the_admin_token_is_read_as_passwords_are_and_never_shown() {
        for (text, token) in [
            ("", None),
            ("server.admin_token = 'env:OPS'", Some(Password::Env("OPS".to_owned()))),
            ("server.admin_token = 'open sesame'", Some(Password::Plain("open sesame".to_owned()))),
        ] {
            let server = parse(text).server;
            assert_eq!(server.admin_token, token);
            assert!(!format!("{server:?}").contains("sesame"));
        }
        let password = parse("server.resp_password = 'sesame'").server;
        assert_eq!(password.resp_password, Some(Password::Plain("sesame".to_owned())));
        assert!(!format!("{password:?}").contains("sesame"));
        let by_env = [("TOLLGATE_SERVER_ADMIN_TOKEN".to_owned(), "env:OPS".to_owned())];
        let config = Config::parse_with_env("server.admin_token = 'other'", by_env).unwrap();
        assert_eq!(config.server.admin_token, Some(Password::Env("OPS".to_owned())));
        for (value, fix) in [
            ("''", "is empty; remove it, or write \"env:ADMIN_TOKEN\""),
            ("'env:'", "names no environment variable; write it as in \"env:ADMIN_TOKEN\""),
            ("5", "must be text in quotes, such as \"env:ADMIN_TOKEN\""),
        ] {
            check(&format!("[server]\nadmin_token = {value}"), &[(2, "server.admin_token", "***", fix)]);
        }
        check(
            "[server]\nadmin_tokn = 'x'",
            &[(2, "server.admin_tokn", "***", "did you mean `admin_token`?")],
        );
    }
    #[test]
    fn keys_are_shown_only_where_that_is_said() {
        for (text, shows) in
            [("", false), ("server.show_keys = true", true), ("server.show_keys = false", false)]
        {
            assert_eq!(parse(text).server.show_keys, shows, "{text}");
        }
        let by_env = [("TOLLGATE_SERVER_SHOW_KEYS".to_owned(), "true".to_owned())];
        assert!(Config::parse_with_env("", by_env).unwrap().server.show_keys);
        check("[server]\nshow_keys = 1", &[(2, "server.show_keys", "1", "must be true or false")]);
    }
}
