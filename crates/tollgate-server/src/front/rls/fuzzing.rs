//! See `crate::fuzzing`.

use std::sync::OnceLock;

use prost::Message;
use tollgate::{Key, Tollgate};

use super::descriptors::read;
use super::proto::service::RateLimitRequest;
use crate::app::Bounds;
use crate::config::Config;

const RULES: &str = "[limits]\napi = { unlimited = true }\n\
    [[envoy]]\ndomain = 'edge'\nentries = ['path', 'ip']\nlimit = 'api'\n\
    [[envoy]]\ndomain = 'edge'\nentries = ['path=/health']\nunlimited = true\n";

/// A message of Envoy.
pub fn descriptors(bytes: &[u8]) {
    static GATE: OnceLock<(Config, Tollgate)> = OnceLock::new();
    let (config, gate) = GATE.get_or_init(|| {
        let config = Config::parse(RULES).expect("sound");
        let gate = Tollgate::builder().config(&config.gate).build().expect("sound");
        (config, gate)
    });
    let Ok(request) = RateLimitRequest::decode(bytes) else { return };
    let again = RateLimitRequest::decode(request.encode_to_vec().as_slice());
    assert_eq!(again.as_ref(), Ok(&request), "what is written is read");
    match read(gate, Bounds::of(&config.server), &config.envoy, &request) {
        Ok(matched) => {
            assert_eq!(matched.len(), request.descriptors.len(), "an answer for each descriptor");
            for charge in matched.iter().filter_map(|matched| matched.charge()) {
                let text = charge.key.canonical();
                assert_eq!(Key::parse(text).expect("a key of ours").canonical(), text);
            }
        }
        Err(status) => assert!(status.message().len() < 1_024, "{} bytes of words", status.message().len()),
    }
}
