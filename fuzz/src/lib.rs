//! What strangers send, and what must hold of it. Each function takes bytes that a fuzzer made up, and panics where a promise is broken:
//! what was read is written as it was read, what was refused is refused in few words, what came in pieces means what it means whole.
//!
//! `fuzz_targets/` hands them to libFuzzer, `tests/corpus.rs` replays what is in `corpus/`. What the server alone reads is checked in its own
//! modules (`fuzzing.rs` of each), as nothing there is public.

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use http::{HeaderMap, HeaderName, HeaderValue};
use tollgate::Key;
use tollgate::route::{
    BadPath, ClientAddress, EncodedSeparators, IpNet, address, canonical, decoded, normalized,
};
use tollgate_llm::count::Encoding;
use tollgate_llm::provider::{Hints, MOST_WAIT, ServerTime, classify, parse_reset, parse_retry_after};
use tollgate_llm::{Api, EventReader, of_answer};

pub use tollgate_server::fuzzing::{config, descriptors, import, json, log, resp};

/// A target.
pub type Target = fn(&[u8]);

/// Every target by name: the names of files in `fuzz_targets/` and of folders in `corpus/`.
pub const TARGETS: [(&str, Target); 10] = [
    ("config", config),
    ("descriptors", descriptors),
    ("headers", headers),
    ("import", import),
    ("json", json),
    ("keys", keys),
    ("log", log),
    ("paths", paths),
    ("resp", resp),
    ("stream", stream),
];

/// The text of a key, and its parts, which any characters may be in.
pub fn keys(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    match Key::parse(&text) {
        Ok(key) => {
            let version = key.version();
            let again = match &version {
                Some(version) => Key::with_version(&key.namespace(), &key.key(), version),
                None => Key::new(&key.namespace(), &key.key()),
            };
            assert_eq!(again.expect("its own parts").canonical(), key.canonical(), "parts make the same key");
            let reread = Key::parse(key.canonical()).expect("canonical");
            assert_eq!(
                (reread.namespace(), reread.key(), reread.version()),
                (key.namespace(), key.key(), version)
            );
        }
        Err(error) => {
            assert!(error.to_string().len() < 1_024, "{} bytes of words", error.to_string().len());
            if let Some(suggestion) = error.suggestion() {
                assert!(Key::parse(suggestion).is_ok(), "{suggestion:?} is no key either");
            }
        }
    }
    let mut parts = text.splitn(3, '\n');
    let (namespace, key) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    if let Ok(made) = Key::new(namespace, key) {
        let read = Key::parse(made.canonical()).expect("canonical");
        assert_eq!(
            (&*read.namespace(), &*read.key(), read.version()),
            (namespace, key, None),
            "{}",
            made.canonical()
        );
        // A version is never taken for a part of the key.
        if let Some(version) = parts.next()
            && let Ok(versioned) = Key::with_version(namespace, key, version)
        {
            assert_ne!(versioned.canonical(), made.canonical());
            assert_eq!(
                Key::parse(versioned.canonical()).expect("canonical").version().as_deref(),
                Some(version)
            );
        }
    }
}

/// The path of a request.
pub fn paths(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    for separators in [EncodedSeparators::Refuse, EncodedSeparators::Keep] {
        match normalized(&text, separators) {
            Ok(path) => {
                assert!(path.starts_with('/') || path == "*", "{path:?}");
                assert!(path.len() <= 3 * text.len() + 1, "{} bytes of {}", path.len(), text.len());
                assert!(
                    !path.contains("//") && !path.split('/').any(|part| part == "." || part == ".."),
                    "{path:?}"
                );
                let again = normalized(&path, separators);
                assert_eq!(again.as_deref(), Ok(&*path), "one spelling, however often: {text:?}");
            }
            Err(BadPath::Separator) => assert_eq!(separators, EncodedSeparators::Refuse),
            Err(_) => {}
        }
    }
    assert!(
        decoded(&text).len() <= 3 * text.len(),
        "what is decoded does not grow, but by marks for what is no text"
    );
}

const HEADERS: [&str; 12] = [
    "x-forwarded-for",
    "forwarded",
    "x-real-ip",
    "retry-after",
    "retry-after-ms",
    "date",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-reset-tokens",
    "anthropic-ratelimit-tokens-remaining",
    "anthropic-ratelimit-tokens-reset",
];

/// Fields of a request behind proxies, and of a provider's answer. A line is a field; its first byte chooses the name.
pub fn headers(bytes: &[u8]) {
    let mut headers = HeaderMap::new();
    for line in bytes.split(|byte| *byte == b'\n').take(64) {
        let Some((which, value)) = line.split_first() else { continue };
        let name = HEADERS[usize::from(*which) % HEADERS.len()];
        if let Ok(value) = HeaderValue::from_bytes(value) {
            headers.append(HeaderName::from_static(name), value);
        }
        if let Some(found) = address(value) {
            assert_eq!(
                address(found.to_string().as_bytes()),
                Some(found),
                "an address is read as it is written"
            );
        }
    }
    let proxies: IpNet = "10.0.0.0/8".parse().expect("a network");
    let [stranger, proxy]: [IpAddr; 2] =
        ["203.0.113.7", "10.1.2.3"].map(|text| text.parse().expect("an address"));
    for client in [ClientAddress::behind([proxies]), ClientAddress::behind([proxies]).forwarded()] {
        assert_eq!(client.resolve(Some(stranger), &headers), Some(stranger), "nobody believes a stranger");
        if let Some(found) = client.resolve(Some(proxy), &headers) {
            assert_eq!(canonical(found), found, "one spelling");
            assert!(!client.group(found).is_empty());
        }
    }
    assert_eq!(ClientAddress::peer().resolve(Some(stranger), &headers), Some(stranger));

    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    let hints = Hints::read(&headers, now);
    assert!(hints.wait().is_none_or(|wait| wait <= MOST_WAIT), "{:?}", hints.wait());
    let at = ServerTime::of(&headers, now);
    for value in headers.values().filter_map(|value| value.to_str().ok()) {
        for wait in [parse_retry_after(value, at), parse_reset(value, at)].into_iter().flatten() {
            assert!(wait <= MOST_WAIT, "{value:?} is {wait:?}");
        }
        if value.bytes().all(|byte| byte.is_ascii_digit())
            && let Ok(seconds @ 0..=86_400) = value.parse::<u64>()
        {
            assert_eq!(parse_retry_after(value, at), Some(Duration::from_secs(seconds)), "{value:?}");
        }
    }
}

/// The events of a model that streams, whole and in pieces as a network cuts them; and the body of an answer or an error.
pub fn stream(bytes: &[u8]) {
    let mut whole = EventReader::new(Encoding::O200k);
    let mut events = whole.feed(bytes);
    events.extend(whole.rest());
    let joined: Vec<u8> = events.iter().flat_map(|event| event.bytes.iter().copied()).collect();
    assert_eq!(joined, bytes, "what came is passed on, byte for byte");

    let piece = 1 + usize::from(bytes.first().copied().unwrap_or_default()) % 64;
    let mut cut = EventReader::new(Encoding::O200k);
    let mut pieces: Vec<_> = bytes.chunks(piece).flat_map(|piece| cut.feed(piece)).collect();
    pieces.extend(cut.rest());
    assert!(
        pieces.iter().map(|event| &event.bytes).eq(events.iter().map(|event| &event.bytes)),
        "pieces of {piece}"
    );
    let seen = |reader: &EventReader| {
        let streamed = reader.streamed();
        (
            streamed.has_content(),
            streamed.has_unread(),
            streamed.reported(),
            streamed.input(),
            streamed.output(),
        )
    };
    assert_eq!(seen(&cut), seen(&whole), "pieces of {piece}");

    for api in [Api::ChatCompletions, Api::Messages] {
        let _ = of_answer(api, bytes, Encoding::O200k);
    }
    for status in [200, 400, 429, 500, 529] {
        let _ = classify(status, bytes);
    }
}
