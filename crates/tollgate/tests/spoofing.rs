//! Who pays for a request that lies about where it comes from, and which path it asked for.
//!
//! Each case is a request as a stranger could send it: through proxies or around them, with whatever headers he likes. The
//! key must be the one that the last honest machine saw.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::num::NonZeroUsize;

use http::{HeaderMap, HeaderName, HeaderValue};
use proptest::prelude::*;
use tollgate::route::{BadPath, ClientAddress, EncodedSeparators, IpNet, canonical, normalized};

/// A proxy of ours, and a stranger's machine.
const PROXY: &str = "10.0.0.1";
const STRANGER: &str = "198.51.100.9";

/// Every way to be configured, by the name it has in the tables.
fn clients(how: &str) -> ClientAddress {
    let proxies = ["10.0.0.0/8", "192.168.7.7/32", "fd00::/8"].map(|network| network.parse().unwrap());
    let hops = |n| ClientAddress::behind_hops(NonZeroUsize::new(n).unwrap());
    match how {
        "peer" => ClientAddress::default(),
        "peer, forwarded" => ClientAddress::peer().forwarded(),
        "proxies" => ClientAddress::behind(proxies),
        "proxies, forwarded" => ClientAddress::behind(proxies).forwarded(),
        "proxies, /48" => ClientAddress::behind(proxies).ipv6_prefix(48).unwrap(),
        "mapped proxies" => ClientAddress::behind(["::ffff:10.0.0.0/104".parse().unwrap()]),
        "no proxies" => ClientAddress::behind([]),
        "1 hop" => hops(1),
        "2 hops" => hops(2),
        "2 hops, forwarded" => hops(2).forwarded(),
        _ => panic!("nobody knows the configuration {how}"),
    }
}

fn headers(lines: &[(&str, &[u8])]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in lines {
        // As a server does, whose parser takes names in any case.
        let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
        headers.append(name, HeaderValue::from_bytes(value).unwrap());
    }
    headers
}

/// One request: lines are `name: value`, and the key is `none` if the request has no key.
fn check(how: &str, peer: &str, lines: &[&str], key: &str) {
    let lines: Vec<(&str, &[u8])> = lines
        .iter()
        .map(|line| line.split_once(": ").unwrap())
        .map(|(name, value)| (name, value.as_bytes()))
        .collect();
    let peer = (peer != "none").then(|| peer.parse().unwrap());
    let clients = clients(how);
    let found = clients.resolve(peer, &headers(&lines)).map(|address| clients.group(address));
    assert_eq!(found.as_deref().unwrap_or("none"), key, "{how}, from {peer:?}: {lines:?}");
}

#[test]
fn nobody_is_believed_unless_asked_for() {
    for how in ["peer", "peer, forwarded", "no proxies"] {
        for lines in [
            &[][..],
            &["X-Forwarded-For: 1.2.3.4"],
            &["Forwarded: for=1.2.3.4"],
            &["X-Real-IP: 1.2.3.4", "Client-IP: 1.2.3.4", "True-Client-IP: 1.2.3.4"],
        ] {
            check(how, STRANGER, lines, STRANGER);
            check(how, PROXY, lines, PROXY);
            check(how, "none", lines, "none");
        }
    }
}

#[test]
fn a_forged_x_forwarded_for_changes_nothing() {
    for (peer, lines, key) in [
        // What honest requests look like.
        (PROXY, &["X-Forwarded-For: 203.0.113.7"][..], "203.0.113.7"),
        (PROXY, &["X-Forwarded-For: 203.0.113.7, 10.9.9.9"], "203.0.113.7"),
        (PROXY, &["X-Forwarded-For: 203.0.113.7, 192.168.7.7, 10.9.9.9"], "203.0.113.7"),
        (PROXY, &["X-Forwarded-For: 10.1.1.1, 10.2.2.2"], "10.1.1.1"),
        (PROXY, &[], PROXY),
        ("fd00::1", &["X-Forwarded-For: 203.0.113.7"], "203.0.113.7"),
        ("::ffff:10.0.0.1", &["X-Forwarded-For: 203.0.113.7"], "203.0.113.7"),
        ("64:ff9b::10.0.0.1", &["X-Forwarded-For: 203.0.113.7"], "203.0.113.7"),
        // From a peer that is no proxy.
        (STRANGER, &["X-Forwarded-For: 203.0.113.7"], STRANGER),
        (STRANGER, &["X-Forwarded-For: 10.0.0.1"], STRANGER),
        (STRANGER, &["X-Forwarded-For: 203.0.113.7, 10.0.0.1"], STRANGER),
        ("192.168.7.8", &["X-Forwarded-For: 203.0.113.7"], "192.168.7.8"),
        ("::ffff:198.51.100.9", &["X-Forwarded-For: 203.0.113.7"], STRANGER),
        ("2001:db8:1:2::9", &["X-Forwarded-For: 203.0.113.7"], "2001:db8:1:2::/64"),
        ("none", &["X-Forwarded-For: 203.0.113.7"], "none"),
        // The left of the header is the stranger's.
        (PROXY, &["X-Forwarded-For: 1.2.3.4, 198.51.100.9"], STRANGER),
        (PROXY, &["X-Forwarded-For: 1.2.3.4,5.6.7.8,198.51.100.9,10.9.9.9"], STRANGER),
        (PROXY, &["X-Forwarded-For: 10.1.1.1, 198.51.100.9"], STRANGER),
        (PROXY, &["X-Forwarded-For: 10.1.1.1, 198.51.100.9, 10.2.2.2"], STRANGER),
        (PROXY, &["X-Forwarded-For: 127.0.0.1, 198.51.100.9"], STRANGER),
        (PROXY, &["X-Forwarded-For: 198.51.100.9, 198.51.100.9"], STRANGER),
        (PROXY, &["X-Forwarded-For: garbage, unknown, , 198.51.100.9"], STRANGER),
        (PROXY, &["X-Forwarded-For: \"1.2.3.4, 198.51.100.9"], STRANGER),
        (PROXY, &["X-Forwarded-For: \u{ff0c}1.2.3.4, 198.51.100.9"], STRANGER),
        // Lines are one list, whatever the case of their names.
        (PROXY, &["X-Forwarded-For: 1.2.3.4", "X-Forwarded-For: 198.51.100.9"], STRANGER),
        (PROXY, &["X-FORWARDED-FOR: 1.2.3.4", "x-forwarded-for: 198.51.100.9"], STRANGER),
        (PROXY, &["x-ForWarded-fOR: 198.51.100.9", "X-Forwarded-For: 10.2.2.2"], STRANGER),
        (PROXY, &["X-Forwarded-For: 1.2.3.4, 5.6.7.8", "X-Forwarded-For: 198.51.100.9, 10.2.2.2"], STRANGER),
        (PROXY, &["X-Forwarded-For: ,", "X-Forwarded-For: 198.51.100.9"], STRANGER),
        // The header that is not read.
        (PROXY, &["Forwarded: for=1.2.3.4"], PROXY),
        (PROXY, &["Forwarded: for=1.2.3.4", "X-Forwarded-For: 198.51.100.9"], STRANGER),
        (PROXY, &["X-Forwarded-For: 198.51.100.9", "Forwarded: for=1.2.3.4"], STRANGER),
        (PROXY, &["X-Real-IP: 1.2.3.4", "X-Forwarded-Host: 1.2.3.4"], PROXY),
        (PROXY, &["X_Forwarded_For: 1.2.3.4", "X-Forwarded-For-: 1.2.3.4"], PROXY),
        // What is no address stops the walk at the peer.
        (PROXY, &["X-Forwarded-For: unknown"], PROXY),
        (PROXY, &["X-Forwarded-For: _hidden"], PROXY),
        (PROXY, &["X-Forwarded-For: 1.2.3.4, unknown"], PROXY),
        (PROXY, &["X-Forwarded-For: 1.2.3.4, unknown, 10.2.2.2"], PROXY),
        (PROXY, &["X-Forwarded-For: 1.2.3.4,"], PROXY),
        (PROXY, &["X-Forwarded-For: 1.2.3.4, ,10.2.2.2"], PROXY),
        (PROXY, &["X-Forwarded-For: 1.2.3.4", "X-Forwarded-For: "], PROXY),
        (PROXY, &["X-Forwarded-For: "], PROXY),
        (PROXY, &["X-Forwarded-For: ,,,"], PROXY),
        (PROXY, &["X-Forwarded-For: 1.2.3.4; 5.6.7.8"], PROXY),
        (PROXY, &["X-Forwarded-For: for=1.2.3.4"], PROXY),
        (PROXY, &["X-Forwarded-For: localhost"], PROXY),
        (PROXY, &["X-Forwarded-For: 0300.0.2.1"], PROXY),
        (PROXY, &["X-Forwarded-For: 1.2.3.4:99999"], PROXY),
        (PROXY, &["X-Forwarded-For: http://1.2.3.4/"], PROXY),
        (PROXY, &["X-Forwarded-For: 1.2.3.4\u{200b}"], PROXY),
    ] {
        check("proxies", peer, lines, key);
    }
    // The same peer and network, each in the other's clothes.
    check("mapped proxies", PROXY, &["X-Forwarded-For: 203.0.113.7"], "203.0.113.7");
    check("mapped proxies", "::ffff:a00:1", &["X-Forwarded-For: 203.0.113.7, 10.2.2.2"], "203.0.113.7");
    check("mapped proxies", STRANGER, &["X-Forwarded-For: 203.0.113.7"], STRANGER);
}

#[test]
fn an_address_is_one_key_in_every_spelling() {
    for (entry, key) in [
        ("203.0.113.7:1", "203.0.113.7"),
        ("203.0.113.7:65535", "203.0.113.7"),
        ("\t203.0.113.7\t", "203.0.113.7"),
        ("::ffff:203.0.113.7", "203.0.113.7"),
        ("::FFFF:cb00:7107", "203.0.113.7"),
        ("0:0:0:0:0:ffff:203.0.113.7", "203.0.113.7"),
        ("[::ffff:203.0.113.7]", "203.0.113.7"),
        ("[::ffff:203.0.113.7]:443", "203.0.113.7"),
        ("64:ff9b::203.0.113.7", "203.0.113.7"),
        ("64:ff9b::cb00:7107", "203.0.113.7"),
        ("[0064:ff9b:0:0:0:0:cb00:7107]:80", "203.0.113.7"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff:ffff:ffff:ffff", "2001:db8:1:2::/64"),
        ("2001:0DB8:0001:0002:0:0:0:9", "2001:db8:1:2::/64"),
        ("[2001:db8:1:2::1]:443", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1%eth0", "2001:db8:1:2::/64"),
        ("[2001:db8:1:2::1%25lo]:1", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::1", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
    ] {
        check("proxies", PROXY, &[&format!("X-Forwarded-For: {entry}")], key);
        check("proxies, forwarded", PROXY, &[&format!("Forwarded: for=\"{}\"", entry.trim())], key);
        check("1 hop", STRANGER, &[&format!("X-Forwarded-For: 1.2.3.4,{entry}")], key);
    }
    check("proxies, /48", PROXY, &["X-Forwarded-For: 2001:db8:1:2::1"], "2001:db8:1::/48");
    check("proxies, /48", PROXY, &["X-Forwarded-For: 2001:db8:1:ffff::1"], "2001:db8:1::/48");
    check("proxies, /48", PROXY, &["X-Forwarded-For: ::ffff:203.0.113.7"], "203.0.113.7");
}

#[test]
fn a_forged_forwarded_changes_nothing() {
    for (peer, lines, key) in [
        (PROXY, &["Forwarded: for=203.0.113.7"][..], "203.0.113.7"),
        (PROXY, &["Forwarded: For=203.0.113.7;proto=https;by=10.0.0.1"], "203.0.113.7"),
        (PROXY, &["Forwarded: by=10.0.0.1; host=\"a,b;for=1.2.3.4\"; for=203.0.113.7"], "203.0.113.7"),
        (PROXY, &["Forwarded: for=\"[2001:db8:1:2::1]:443\""], "2001:db8:1:2::/64"),
        (PROXY, &["Forwarded: for=\"\\2\\03.0.113.7:_x\""], "203.0.113.7"),
        (PROXY, &["Forwarded: for=203.0.113.7, for=10.2.2.2;by=10.0.0.1"], "203.0.113.7"),
        (PROXY, &["fORWARDED: for=1.2.3.4", "FORWARDED: for=198.51.100.9"], STRANGER),
        (STRANGER, &["Forwarded: for=203.0.113.7"], STRANGER),
        ("none", &["Forwarded: for=203.0.113.7"], "none"),
        (PROXY, &["Forwarded: for=1.2.3.4, for=198.51.100.9"], STRANGER),
        (PROXY, &["X-Forwarded-For: 1.2.3.4"], PROXY),
        (PROXY, &["X-Forwarded-For: 1.2.3.4", "Forwarded: for=198.51.100.9"], STRANGER),
        // A quote that the stranger left open swallows nothing.
        (PROXY, &["Forwarded: for=\"1.2.3.4, for=198.51.100.9"], STRANGER),
        (PROXY, &["Forwarded: for=1.2.3.4;x=\", for=\"198.51.100.9\""], STRANGER),
        (PROXY, &["Forwarded: for=1.2.3.4;x=\"\\, for=198.51.100.9;host=\"a\""], STRANGER),
        (PROXY, &["Forwarded: for=1.2.3.4;x=\"", "Forwarded: for=198.51.100.9"], STRANGER),
        // Nor does one in a value that the proxy passed on, escaped.
        (PROXY, &["Forwarded: for=198.51.100.9;host=\"x\\\", for=1.2.3.4;y=\\\"\""], STRANGER),
        // Malformed or hidden: the peer.
        (PROXY, &["Forwarded: for=unknown"], PROXY),
        (PROXY, &["Forwarded: for=_hidden"], PROXY),
        (PROXY, &["Forwarded: for=\"_gazonk\""], PROXY),
        (PROXY, &["Forwarded: 1.2.3.4"], PROXY),
        (PROXY, &["Forwarded: by=1.2.3.4"], PROXY),
        (PROXY, &["Forwarded: for=1.2.3.4;for=5.6.7.8"], PROXY),
        (PROXY, &["Forwarded: for=1.2.3.4;FOR=1.2.3.4"], PROXY),
        (PROXY, &["Forwarded: for=1.2.3.4,"], PROXY),
        (PROXY, &["Forwarded: for=\"1.2.3.4"], PROXY),
        (PROXY, &["Forwarded: for=\"1.2.3.4\"x"], PROXY),
        (PROXY, &["Forwarded: for = 1.2.3.4"], PROXY),
        (PROXY, &["Forwarded: for=1.2.3.4 for=5.6.7.8"], PROXY),
        (PROXY, &["Forwarded: "], PROXY),
    ] {
        check("proxies, forwarded", peer, lines, key);
    }
}

#[test]
fn hops_are_counted_from_the_right() {
    for (how, peer, lines, key) in [
        ("1 hop", PROXY, &["X-Forwarded-For: 1.2.3.4, 203.0.113.7"][..], "203.0.113.7"),
        ("1 hop", STRANGER, &["X-Forwarded-For: 203.0.113.7"], "203.0.113.7"),
        ("1 hop", "none", &["X-Forwarded-For: 203.0.113.7"], "203.0.113.7"),
        ("1 hop", PROXY, &["X-Forwarded-For: 10.2.2.2"], "10.2.2.2"),
        ("1 hop", PROXY, &[], PROXY),
        ("1 hop", PROXY, &["X-Forwarded-For: 1.2.3.4, unknown"], PROXY),
        ("1 hop", "none", &["X-Forwarded-For: 1.2.3.4, unknown"], "none"),
        ("2 hops", PROXY, &["X-Forwarded-For: 1.2.3.4, 203.0.113.7, 5.6.7.8"], "203.0.113.7"),
        ("2 hops", PROXY, &["X-Forwarded-For: 1.2.3.4, 203.0.113.7, _hidden"], "203.0.113.7"),
        (
            "2 hops",
            PROXY,
            &["X-Forwarded-For: 1.2.3.4", "X-Forwarded-For: 203.0.113.7", "X-Forwarded-For: x"],
            "203.0.113.7",
        ),
        ("2 hops", PROXY, &["X-Forwarded-For: 5.6.7.8"], PROXY),
        ("2 hops", PROXY, &["Forwarded: for=1.2.3.4, for=5.6.7.8"], PROXY),
        ("2 hops, forwarded", PROXY, &["Forwarded: for=\"1.2.3.4, for=203.0.113.7, for=_x"], "203.0.113.7"),
        ("2 hops, forwarded", PROXY, &["X-Forwarded-For: 1.2.3.4, 5.6.7.8"], PROXY),
    ] {
        check(how, peer, lines, key);
    }
}

/// Long headers: a defined answer after at most 32 entries, or one look at all bytes.
#[test]
fn a_long_header_is_no_way_around() {
    let chain =
        |client: &str, proxies: usize| format!("X-Forwarded-For: {client}{}", ", 10.1.1.1".repeat(proxies));
    for (line, key) in [
        (chain("203.0.113.7", 31), "203.0.113.7"),
        (chain("203.0.113.7", 32), PROXY),
        (chain("203.0.113.7", 1_000), PROXY),
        (chain("10.7.7.7", 31), "10.7.7.7"),
        (chain("10.7.7.7", 32), PROXY),
        (format!("X-Forwarded-For: {}198.51.100.9", "1.2.3.4,".repeat(8_000)), STRANGER),
        (format!("X-Forwarded-For: {}198.51.100.9", ",".repeat(65_000)), STRANGER),
        (format!("X-Forwarded-For: {}", ",".repeat(65_536)), PROXY),
        (format!("X-Forwarded-For: {}", "1".repeat(65_536)), PROXY),
        (format!("X-Forwarded-For: fe80::1%{}", "z".repeat(65_536)), "fe80::/64"),
    ] {
        check("proxies", PROXY, &[&line], key);
    }
    for (line, key) in [
        (format!("Forwarded: {}, for=198.51.100.9", "\"".repeat(65_000)), STRANGER),
        (format!("Forwarded: {}\", for=198.51.100.9", "\\".repeat(65_000)), STRANGER),
        (format!("Forwarded: for=\"{}\"", "\\\"".repeat(32_000)), PROXY),
        (format!("Forwarded: for=\"{}", "\\".repeat(65_000)), PROXY),
        (format!("Forwarded: for=203.0.113.7{}", ";".repeat(65_000)), "203.0.113.7"),
        (format!("Forwarded: for=203.0.113.7{}", ";a=b".repeat(16_000)), "203.0.113.7"),
        (format!("Forwarded: {}", "for=10.1.1.1,".repeat(1_000)), PROXY),
    ] {
        check("proxies, forwarded", PROXY, &[&line], key);
    }
    let lines = vec!["X-Forwarded-For: 10.1.1.1"; 1_000];
    check("proxies", PROXY, &lines, PROXY);
}

/// What a path is to the rules `/login` (0), `/users/{id}` (1) and `/` (2): its rule, no rule, or why it has no spelling.
fn check_path(raw: &str, expected: Result<Option<usize>, BadPath>) {
    let rule = |path: &str| match path.strip_prefix("/users/") {
        Some(id) if !id.is_empty() && !id.contains('/') => Some(1),
        _ => ["/login", "", "/"].iter().position(|rule| *rule == path),
    };
    let found = normalized(raw, EncodedSeparators::default()).map(|path| rule(&path));
    assert_eq!(found, expected, "{raw:?}");
}

#[test]
fn a_path_meets_its_rule_in_every_spelling() {
    for (raw, expected) in [
        ("/login", Ok(Some(0))),
        ("//login", Ok(Some(0))),
        ("/./login", Ok(Some(0))),
        ("/x/../login", Ok(Some(0))),
        ("/../login", Ok(Some(0))),
        ("/x/%2e%2e/login", Ok(Some(0))),
        ("/x/%2E./login", Ok(Some(0))),
        ("/%6c%6F%67in", Ok(Some(0))),
        ("/%6C%6f%67in", Ok(Some(0))),
        ("///.//x/..//./login", Ok(Some(0))),
        ("/users//42", Ok(Some(1))),
        ("/users/42/../43", Ok(Some(1))),
        ("/users/%34%32", Ok(Some(1))),
        ("/users/caf%C3%A9", Ok(Some(1))),
        ("/users/caf\u{e9}", Ok(Some(1))),
        // Data, since decoding is done once.
        ("/users/%252f", Ok(Some(1))),
        ("/users/%252e%252e", Ok(Some(1))),
        ("", Ok(Some(2))),
        ("/", Ok(Some(2))),
        ("/users/..", Ok(Some(2))),
        // Other paths, to routers too.
        ("/login/", Ok(None)),
        ("/LOGIN", Ok(None)),
        ("/login;x", Ok(None)),
        ("/login%20", Ok(None)),
        ("/login%3F", Ok(None)),
        ("/%256cogin", Ok(None)),
        ("/\u{ff4c}ogin", Ok(None)),
        ("*", Ok(None)),
        // No path at all.
        ("/x%2f..%2flogin", Err(BadPath::Separator)),
        ("/%2Flogin", Err(BadPath::Separator)),
        ("/x%5c..%5Clogin", Err(BadPath::Separator)),
        ("/x\\..\\login", Err(BadPath::Separator)),
        ("/login%00", Err(BadPath::Nul)),
        ("/login%zz", Err(BadPath::Percent)),
        ("/login%", Err(BadPath::Percent)),
        ("/login%u002e", Err(BadPath::Percent)),
        ("/%c0%af", Err(BadPath::Utf8)),
        ("/%c0%ae%c0%ae/login", Err(BadPath::Utf8)),
        ("/login?x", Err(BadPath::Query)),
        ("login", Err(BadPath::Relative)),
        ("http://host/login", Err(BadPath::Relative)),
    ] {
        check_path(raw, expected);
    }
}

fn any_configuration() -> impl Strategy<Value = ClientAddress> {
    let names =
        ["peer", "proxies", "proxies, forwarded", "proxies, /48", "1 hop", "2 hops", "2 hops, forwarded"];
    prop::sample::select(names.to_vec()).prop_map(clients)
}

/// Lines that are nearly right, and lines of any bytes that a server lets through.
fn any_headers() -> impl Strategy<Value = HeaderMap> {
    let pieces = prop::sample::select(
        &[
            "10.1.1.1",
            "1.2.3.4",
            "2001:db8::1",
            "::ffff:1.2.3.4",
            "for=",
            "For=\"",
            "by=",
            "\"",
            "\\",
            ",",
            ", ",
            ";",
            ":",
            "[",
            "]",
            "%",
            "_",
            "unknown",
            " ",
            "\t",
            "80",
        ][..],
    );
    let near = prop::collection::vec(pieces, 0..12).prop_map(|pieces| pieces.concat().into_bytes());
    let byte = prop_oneof![Just(b'\t'), 0x20..=0x7eu8, 0x80..=0xffu8];
    let wild = prop::collection::vec(byte, 0..40);
    let name = prop::sample::select(&["X-Forwarded-For", "Forwarded"][..]);
    prop::collection::vec((name, prop_oneof![3 => near, 1 => wild]), 0..5).prop_map(|lines| {
        let lines: Vec<(&str, &[u8])> = lines.iter().map(|(name, value)| (*name, &value[..])).collect();
        headers(&lines)
    })
}

fn any_address() -> impl Strategy<Value = IpAddr> {
    let four = any::<u32>().prop_map(Ipv4Addr::from_bits);
    let disguised =
        |prefix: u128| move |bits: u32| IpAddr::V6(Ipv6Addr::from_bits(prefix | u128::from(bits)));
    prop_oneof![
        four.prop_map(IpAddr::V4),
        any::<u128>().prop_map(|bits| IpAddr::V6(Ipv6Addr::from_bits(bits))),
        any::<u32>().prop_map(disguised(0xffff << 32)),
        any::<u32>().prop_map(disguised(0x64_ff9b << 96)),
    ]
}

proptest! {
    /// Whatever the headers are, there is an answer if there is a peer, and it is canonical.
    #[test]
    fn every_request_has_somebody_who_pays(
        clients in any_configuration(),
        peer in any_address(),
        headers in any_headers(),
    ) {
        for peer in [peer, PROXY.parse().unwrap()] {
            let found = clients.resolve(Some(peer), &headers);
            prop_assert!(found.is_some());
            prop_assert_eq!(found, found.map(canonical));
        }
        clients.resolve(None, &headers);
    }

    #[test]
    fn the_headers_of_a_stranger_change_nothing(peer in any_address(), headers in any_headers()) {
        let proxies: [IpNet; 2] = ["10.0.0.0/8", "fd00::/8"].map(|network| network.parse().unwrap());
        let peer = canonical(peer);
        if proxies.iter().any(|network| network.contains(&peer)) {
            return Ok(());
        }
        let behind = ClientAddress::behind(proxies);
        for clients in [behind.clone(), behind.forwarded(), ClientAddress::peer()] {
            prop_assert_eq!(clients.resolve(Some(peer), &headers), Some(peer));
        }
    }

    /// What a client sends before the proxy's own entry, in the same line or another, is never seen.
    #[test]
    fn nothing_before_the_proxys_entry_is_seen(prefix in any_headers(), same_line: bool) {
        for (how, name, entry) in [
            ("proxies", "x-forwarded-for", "198.51.100.9"),
            ("proxies, forwarded", "forwarded", "for=198.51.100.9;host=\"a\\\"b,c\";proto=https"),
        ] {
            let mut lines: Vec<Vec<u8>> =
                prefix.get_all(name).iter().map(|line| line.as_bytes().to_vec()).collect();
            match lines.last_mut().filter(|_| same_line) {
                Some(line) => line.extend([b", ", entry.as_bytes()].concat()),
                None => lines.push(entry.as_bytes().to_vec()),
            }
            let lines: Vec<(&str, &[u8])> = lines.iter().map(|line| (name, &line[..])).collect();
            let found = clients(how).resolve(Some(PROXY.parse().unwrap()), &headers(&lines));
            prop_assert_eq!(found, Some(STRANGER.parse().unwrap()));
        }
    }

    /// However wide the groups of IPv6 are, IPv4 clients stay apart in every disguise.
    #[test]
    fn two_ipv4_clients_are_never_one(one: u32, flipped in 1..=u32::MAX, bits in 32..=128u8) {
        let clients = ClientAddress::peer().ipv6_prefix(bits).unwrap();
        let groups = |four: u32| [0, 0xffff << 32, 0x64_ff9b << 96].map(|prefix: u128| match prefix {
            0 => clients.group(Ipv4Addr::from_bits(four).into()),
            _ => clients.group(Ipv6Addr::from_bits(prefix | u128::from(four)).into()),
        });
        let (one, other) = (groups(one), groups(one ^ flipped));
        prop_assert!(one.iter().all(|group| *group == one[0]));
        prop_assert!(other.iter().all(|group| *group != one[0]));
    }
}
