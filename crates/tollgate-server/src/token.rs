//! The admin token: kept as a secret, compared without telling how much of a guess was right, and not open to many guesses.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};

use parking_lot::Mutex;
use subtle::ConstantTimeEq;
use tollgate::store::{Cost, Micros};
use tollgate::{Clock, Limit, Rate};
use tollgate_kernel::State;

use crate::peer_prefix::peer_prefix;

/// What admin calls have to show.
pub(crate) struct Token(String);

impl Token {
    pub(crate) fn new(text: String) -> Token {
        Token(text)
    }

    /// Whether a caller has shown it. Takes as long for every guess of the right length.
    pub(crate) fn is(&self, shown: &[u8]) -> bool {
        bool::from(self.0.as_bytes().ct_eq(shown)) && !self.0.is_empty()
    }
}

/// Never the text.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// How many wrong tokens a peer may show at once; one more every second.
const MOST_GUESSES: u64 = 10;

/// How many peers are remembered. Further peers share one count.
const MOST_PEERS: usize = 4_096;
const ALL_OTHERS: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

/// The wrong tokens that peers have shown: by address, and of IPv6 by the /64. A peer that has shown too many is not listened to,
/// not even with the right token: else the answer would tell which one that is.
pub(crate) struct Guesses {
    limit: Option<Limit>,
    clock: Clock,
    peers: Mutex<HashMap<IpAddr, State>>,
}

impl Guesses {
    pub(crate) fn new() -> Guesses {
        Guesses::by(Clock::system())
    }

    fn by(clock: Clock) -> Guesses {
        let limit = Rate::per_second(1).and_then(|rate| Limit::token_bucket(rate, MOST_GUESSES));
        Guesses { limit: limit.ok(), clock, peers: Mutex::default() }
    }

    /// How long a peer is not listened to, if it is not.
    pub(crate) fn wait(&self, peer: IpAddr) -> Option<Micros> {
        let (limit, peers) = (self.limit.as_ref()?, self.peers.lock());
        let state = peers.get(&peer_prefix(peer)).or_else(|| match peers.len() >= MOST_PEERS {
            true => peers.get(&ALL_OTHERS),
            false => None,
        })?;
        let outcome = limit.peek(state, Cost::ONE, self.clock.now());
        (!outcome.allowed).then(|| outcome.retry_after.unwrap_or_default())
    }

    /// A peer has shown a wrong token. Says how many more it may show at once.
    pub(crate) fn wrong(&self, peer: IpAddr) -> u64 {
        let Some(limit) = &self.limit else { return 0 };
        let (now, mut peers) = (self.clock.now(), self.peers.lock());
        let mut peer = peer_prefix(peer);
        if peers.len() >= MOST_PEERS && !peers.contains_key(&peer) {
            // Who may show as many as a newcomer is no different from one.
            peers.retain(|_, state| limit.peek(state, Cost::ONE, now).remaining + 1 < MOST_GUESSES);
            if peers.len() >= MOST_PEERS {
                peer = ALL_OTHERS;
            }
        }
        limit.charge(peers.entry(peer).or_insert_with(|| limit.fresh()), Cost::ONE, now).remaining
    }
}

#[cfg(test)]
mod tests {
    use tollgate::ManualClock;

    use super::*;

    #[test]
    fn a_peer_that_guesses_is_slowed_down_and_no_other_is() {
        let hands = ManualClock::at(Micros::from_secs(1_000));
        let guesses = Guesses::by(hands.clock());
        let [one, same, other] =
            ["2001:db8::1", "2001:db8::2", "192.0.2.1"].map(|peer| peer.parse().unwrap());
        for more in (0..MOST_GUESSES).rev() {
            assert_eq!(guesses.wait(one), None, "{more}");
            assert_eq!(guesses.wrong(one), more);
        }
        assert_eq!(guesses.wait(one), Some(Micros::from_secs(1)));
        assert_eq!(guesses.wait(same), Some(Micros::from_secs(1)), "all addresses of a /64 are one peer");
        assert_eq!(guesses.wait(other), None);
        hands.advance(Micros::from_secs(1));
        assert_eq!(guesses.wait(one), None);
        guesses.wrong(one);
        assert_eq!(guesses.wait(one), Some(Micros::from_secs(1)));
    }

    #[test]
    fn so_many_peers_are_remembered_and_the_rest_together() {
        let hands = ManualClock::at(Micros::from_secs(1_000));
        let guesses = Guesses::by(hands.clock());
        let peer = |number: u32| IpAddr::from(number.to_be_bytes());
        let most = u32::try_from(MOST_PEERS).unwrap();
        for number in 1..=2 * most {
            guesses.wrong(peer(number));
        }
        assert_eq!(guesses.peers.lock().len(), MOST_PEERS + 1);
        assert_eq!(guesses.wait(peer(1)), None);
        assert!(guesses.wait(peer(3 * most)).is_some(), "all others have shown many");
        // Who has not guessed for a while is forgotten, and there is room again.
        hands.advance(Micros::from_secs(3_600));
        guesses.wrong(peer(4 * most));
        assert_eq!(guesses.peers.lock().len(), 1);
        assert_eq!(guesses.wait(peer(4 * most)), None);
    }

    #[test]
    fn only_the_whole_token_will_do() {
        let token = Token::new("s3cret".to_owned());
        for (shown, is) in
            [("s3cret", true), ("s3cre", false), ("s3crets", false), ("S3cret", false), ("", false)]
        {
            assert_eq!(token.is(shown.as_bytes()), is, "{shown}");
        }
        assert!(!Token::new(String::new()).is(b""));
        assert_eq!(format!("{token:?}"), "Token(..)");
    }
}
