//! Admin calls that change nothing, for the log: each is a line there with who asked for what, but the page asks again every two seconds. What the same
//! peer asks for again within a minute has no other line. This file holds which lines were written lately; the calls write them.

use std::collections::HashMap;
use std::net::IpAddr;

use parking_lot::Mutex;
use tollgate::Clock;
use tollgate::store::Micros;

/// How often a look that repeats is logged.
const EVERY: Micros = Micros::from_secs(60);

/// How many looks are remembered. Of what is beyond that, each is logged.
const MOST: usize = 1_024;

/// A call, who made it, and about what: the hash of a key, or nothing.
type Look = (&'static str, IpAddr, String);

/// When looks were logged.
pub(crate) struct Looks {
    clock: Clock,
    logged: Mutex<HashMap<Look, Micros>>,
}

impl Looks {
    pub(crate) fn new() -> Looks {
        Looks::by(Clock::system())
    }

    fn by(clock: Clock) -> Looks {
        Looks { clock, logged: Mutex::default() }
    }

    /// Whether a look is to be logged.
    pub(super) fn are_logged(&self, call: &'static str, peer: IpAddr, of: &str) -> bool {
        let (now, mut logged) = (self.clock.now(), self.logged.lock());
        let is_recent = |at: &Micros| now.saturating_sub(*at) < EVERY;
        let look = (call, peer, of.to_owned());
        if logged.get(&look).is_some_and(is_recent) {
            return false;
        }
        if logged.len() >= MOST {
            logged.retain(|_, at| is_recent(at));
        }
        if logged.len() < MOST {
            logged.insert(look, now);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use tollgate::ManualClock;

    use super::*;

    #[test]
    fn a_look_that_repeats_is_logged_once_a_minute_and_others_each() {
        let hands = ManualClock::at(Micros::from_secs(1_000));
        let looks = Looks::by(hands.clock());
        let [one, other] = ["192.0.2.1", "192.0.2.2"].map(|peer| peer.parse().unwrap());
        for (call, peer, of) in [
            ("key", one, "aa"),
            ("key", one, "bb"),
            ("key", other, "aa"),
            ("llm", one, ""),
            ("jobs", one, ""),
        ] {
            let is = || looks.are_logged(call, peer, of);
            assert_eq!([is(), is()], [true, false], "{call} {peer} {of}");
        }
        hands.advance(Micros::from_secs(59));
        assert!(!looks.are_logged("key", one, "aa"));
        hands.advance(Micros::from_secs(1));
        assert!(looks.are_logged("key", one, "aa"));
        assert!(!looks.are_logged("key", one, "aa"));
    }

    #[test]
    fn as_many_are_remembered_and_nothing_beyond_is_left_out() {
        let hands = ManualClock::at(Micros::from_secs(1_000));
        let looks = Looks::by(hands.clock());
        let peer = "192.0.2.1".parse().unwrap();
        for number in 0..2 * MOST {
            assert!(looks.are_logged("key", peer, &number.to_string()));
        }
        assert_eq!(looks.logged.lock().len(), MOST);
        assert!(!looks.are_logged("key", peer, "0"));
        assert!(
            looks.are_logged("key", peer, &MOST.to_string())
                && looks.are_logged("key", peer, &MOST.to_string())
        );
        hands.advance(EVERY);
        assert!(looks.are_logged("key", peer, "other"));
        assert_eq!(looks.logged.lock().len(), 1);
    }
}
