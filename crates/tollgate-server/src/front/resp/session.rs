//! What a connection has said of itself, and the commands that ask for no decision: enough for clients to connect, to show a
//! password, to look around, and to send a transaction (`queue.rs`).

use std::sync::Arc;

use super::parse::{Command, integer};
use super::queue::Queue;
use super::reply::{Reply, shown};
use crate::token::Token;

/// How many wrong passwords a connection may show.
const MOST_WRONG: u32 = 8;

/// The commands there are: name, how many arguments with the name (at least, if negative), and where their key is.
const COMMANDS: [(&str, i64, i64); 16] = [
    ("auth", -2, 0),
    ("cl.throttle", -5, 1),
    ("client", -2, 0),
    ("command", -1, 0),
    ("discard", 1, 0),
    ("echo", 2, 0),
    ("exec", 1, 0),
    ("hello", -1, 0),
    ("info", -1, 0),
    ("multi", 1, 0),
    ("ping", -1, 0),
    ("quit", -1, 0),
    ("select", 2, 0),
    ("tollgate.check", -3, 2),
    ("unwatch", 1, 0),
    ("watch", -2, 1),
];

/// One connection.
pub(super) struct Session {
    id: u64,
    password: Option<Arc<Token>>,
    is_known: bool,
    wrong: u32,
    /// The commands since `MULTI`, if there was one.
    queue: Option<Box<Queue>>,
    /// Whether a command that asks for a decision is answered with one, and not refused or queued.
    decides: bool,
}

/// What becomes of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    GoesOn,
    Ends,
    /// The queued commands are answered next.
    Executes,
}

impl Session {
    pub(super) fn new(id: u64, password: Option<Arc<Token>>) -> Session {
        let is_known = password.is_none();
        Session { id, password, is_known, wrong: 0, queue: None, decides: is_known }
    }

    /// Whether decisions may be asked for, now.
    #[inline]
    pub(super) fn decides(&self) -> bool {
        self.decides
    }

    /// The commands of a transaction that is to be answered, in their bytes.
    pub(super) fn take_queue(&mut self) -> Vec<u8> {
        self.decides = self.is_known;
        self.queue.take().map(|queue| queue.into_bytes()).unwrap_or_default()
    }

    /// Answers a command that asks for no decision, or queues any. A client without the password gets no further.
    pub(super) fn answer(&mut self, command: &Command<'_, '_>, reply: &mut Reply) -> Then {
        let then = match self.queue.is_some() {
            true => self.queued(command, reply),
            false => self.answer_now(command, reply),
        };
        self.decides = self.is_known && self.queue.is_none();
        then
    }

    /// Within a transaction: what is no part of it is answered, all else is checked and kept.
    fn queued(&mut self, command: &Command<'_, '_>, reply: &mut Reply) -> Then {
        let Some(queue) = &mut self.queue else { return Then::GoesOn };
        let is = |name: &[u8]| command.name().eq_ignore_ascii_case(name);
        if is(b"EXEC") && command.count() == 0 {
            return match queue.count() {
                Ok(count) => {
                    reply.array(count);
                    Then::Executes
                }
                Err(()) => {
                    self.queue = None;
                    reply.error("EXECABORT Transaction discarded because of previous errors.");
                    Then::GoesOn
                }
            };
        }
        match (is(b"DISCARD"), command.count()) {
            (true, 0) => {
                self.queue = None;
                reply.simple("OK");
            }
            _ if is(b"QUIT") => {
                reply.simple("OK");
                return Then::Ends;
            }
            _ if is(b"MULTI") => reply.error("ERR MULTI calls can not be nested"),
            _ if is(b"WATCH") => reply.error("ERR WATCH inside MULTI is not allowed"),
            _ => match queue.add(command) {
                Ok(()) => reply.simple("QUEUED"),
                Err(mistake) => reply.error(mistake),
            },
        }
        Then::GoesOn
    }

    fn answer_now(&mut self, command: &Command<'_, '_>, reply: &mut Reply) -> Then {
        let mut name = [0; 8];
        let name = match name.get_mut(..command.name().len()) {
            Some(lower) => {
                lower.copy_from_slice(command.name());
                lower.make_ascii_lowercase();
                &*lower
            }
            None => b"",
        };
        match (name, command.count()) {
            (b"quit", _) => {
                reply.simple("OK");
                return Then::Ends;
            }
            (b"auth", 1) => self.auth(b"default", command.get(0), reply),
            (b"auth", 2) => self.auth(command.get(0).unwrap_or_default(), command.get(1), reply),
            (b"hello", _) => self.hello(command, reply),
            _ if !self.is_known => reply.error("NOAUTH Authentication required."),
            (b"ping", 0) => reply.simple("PONG"),
            (b"ping" | b"echo", 1) => reply.bulk(command.get(0).unwrap_or_default()),
            (b"select", 1) => match command.get(0).and_then(integer) {
                Some(0) => reply.simple("OK"),
                Some(_) => reply.error("ERR DB index is out of range"),
                None => reply.error("ERR value is not an integer or out of range"),
            },
            (b"client", 1..) => self.client(command, reply),
            (b"multi", 0) => {
                self.queue = Some(Box::default());
                reply.simple("OK");
            }
            (b"exec", 0) => reply.error("ERR EXEC without MULTI"),
            (b"discard", 0) => reply.error("ERR DISCARD without MULTI"),
            // Nothing here is kept that could change between a look and a charge.
            (b"watch", 1..) | (b"unwatch", 0) => reply.simple("OK"),
            (b"command", _) => describe(command, reply),
            (b"info", _) => reply.bulk(
                concat!(
                    "# Server\r\nserver_name:tollgate\r\ntollgate_version:",
                    env!("CARGO_PKG_VERSION"),
                    "\r\nredis_mode:standalone\r\n"
                )
                .as_bytes(),
            ),
            _ if is_command(name) => reply.error(wrong_count(command)),
            _ => reply.error(format_args!("ERR unknown command '{}'", shown(command.name()))),
        }
        if self.wrong >= MOST_WRONG { Then::Ends } else { Then::GoesOn }
    }

    fn auth(&mut self, user: &[u8], password: Option<&[u8]>, reply: &mut Reply) {
        if self.shows(user, password, reply) {
            reply.simple("OK");
        }
    }

    /// Whether the password is right. If not, that is answered.
    fn shows(&mut self, user: &[u8], shown: Option<&[u8]>, reply: &mut Reply) -> bool {
        let Some(password) = &self.password else {
            reply.error(
                "ERR AUTH <password> called without any password configured for the default user. Are you sure your configuration \
                 is correct?",
            );
            return false;
        };
        let is_right = password.is(shown.unwrap_or_default()) && user == b"default";
        if is_right {
            self.is_known = true;
        } else {
            self.wrong += 1;
            reply.error("WRONGPASS invalid username-password pair or user is disabled.");
        }
        is_right
    }

    /// `HELLO [version [AUTH user password] [SETNAME name]]`.
    fn hello(&mut self, command: &Command<'_, '_>, reply: &mut Reply) {
        let is_resp3 = match command.get(0).map(integer) {
            None => reply.is_resp3,
            Some(Some(version @ 2..=3)) => version == 3,
            Some(Some(_)) => return reply.error("NOPROTO unsupported protocol version"),
            Some(None) => return reply.error("ERR Protocol version is not an integer or out of range"),
        };
        let mut at = 1;
        while let Some(option) = command.get(at) {
            match (option.to_ascii_lowercase().as_slice(), command.get(at + 1), command.get(at + 2)) {
                (b"auth", Some(user), password @ Some(_)) => {
                    if !self.shows(user, password, reply) {
                        return;
                    }
                    at += 3;
                }
                (b"setname", Some(_), _) => at += 2,
                _ => {
                    return reply.error(format_args!("ERR Syntax error in HELLO option '{}'", shown(option)));
                }
            }
        }
        if !self.is_known {
            return reply.error(
                "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH <user> <pass> \
                 option can be used to authenticate the client and select the RESP protocol version at the same time",
            );
        }
        reply.is_resp3 = is_resp3;
        reply.map(7);
        for (name, value) in [("server", "tollgate"), ("version", env!("CARGO_PKG_VERSION"))] {
            reply.bulk(name.as_bytes());
            reply.bulk(value.as_bytes());
        }
        reply.bulk(b"proto");
        reply.integer(if is_resp3 { 3 } else { 2 });
        reply.bulk(b"id");
        reply.integer(i64::try_from(self.id).unwrap_or(i64::MAX));
        for (name, value) in [("mode", "standalone"), ("role", "master")] {
            reply.bulk(name.as_bytes());
            reply.bulk(value.as_bytes());
        }
        reply.bulk(b"modules");
        reply.array(0);
    }

    /// What clients say of themselves is not kept.
    fn client(&self, command: &Command<'_, '_>, reply: &mut Reply) {
        let word = command.get(0).unwrap_or_default();
        match (word.to_ascii_lowercase().as_slice(), command.count()) {
            (b"setinfo", 3) | (b"setname", 2) => reply.simple("OK"),
            (b"id", 1) => reply.integer(i64::try_from(self.id).unwrap_or(i64::MAX)),
            (b"getname", 1) => reply.nothing(),
            _ => reply.error(format_args!("ERR unknown subcommand '{}' of 'client'", shown(word))),
        }
    }
}

/// Whether there is a command of this name, which is in small letters.
fn is_command(name: &[u8]) -> bool {
    COMMANDS.iter().any(|(known, ..)| name == known.as_bytes())
}

fn wrong_count(command: &Command<'_, '_>) -> String {
    let name = shown(command.name()).to_lowercase();
    format!("ERR wrong number of arguments for '{name}' command")
}

/// What is wrong with a command that is to be queued: there is none of its name, or with so many arguments.
pub(super) fn fault(command: &Command<'_, '_>) -> Option<String> {
    let name = command.name().to_ascii_lowercase();
    let Some((_, arity, _)) = COMMANDS.iter().find(|(known, ..)| name == known.as_bytes()) else {
        return Some(format!("ERR unknown command '{}'", shown(command.name())));
    };
    let count = i64::try_from(command.count() + 1).unwrap_or(i64::MAX);
    let fits = if *arity < 0 { count >= -arity } else { count == *arity };
    (!fits).then(|| wrong_count(command))
}

/// `COMMAND` and what stands below it.
fn describe(command: &Command<'_, '_>, reply: &mut Reply) {
    let word = command.get(0).unwrap_or(b"info");
    match word.to_ascii_lowercase().as_slice() {
        b"count" => reply.integer(i64::try_from(COMMANDS.len()).unwrap_or_default()),
        b"docs" => reply.map(0),
        b"list" => {
            reply.array(COMMANDS.len());
            COMMANDS.iter().for_each(|(name, ..)| reply.bulk(name.as_bytes()));
        }
        b"info" if command.count() <= 1 => {
            reply.array(COMMANDS.len());
            COMMANDS.iter().for_each(|about| describe_one(about, reply));
        }
        b"info" => {
            reply.array(command.count() - 1);
            for name in (1..command.count()).filter_map(|index| command.get(index)) {
                let about = COMMANDS.iter().find(|(known, ..)| name.eq_ignore_ascii_case(known.as_bytes()));
                match about {
                    Some(about) => describe_one(about, reply),
                    None => reply.nothing(),
                }
            }
        }
        _ => reply.error(format_args!("ERR unknown subcommand '{}' of 'command'", shown(word))),
    }
}

fn describe_one((name, arity, key): &(&str, i64, i64), reply: &mut Reply) {
    reply.array(6);
    reply.bulk(name.as_bytes());
    reply.integer(*arity);
    reply.array(1);
    reply.simple("fast");
    reply.integer(*key);
    reply.integer(*key);
    reply.integer(i64::from(*key > 0));
}
