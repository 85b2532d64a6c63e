//! What tests of the shared stores need: real servers, broken networks, several processes, and a judge of what happened.
//!
//! Nothing here is shipped. [`redis`] and [`postgres`] start real servers on free loopback ports, each in a directory of its
//! own; [`pgbouncer`] stands in front of the latter; [`tollgate`] does so with the binary under test; [`tls`] makes certificates for them; [`prometheus`] starts a server that scrapes what the test serves. [`proxy`] stands
//! between a client and a server and breaks the connection in chosen ways, which is the only precise way to make calls whose
//! fate the client cannot know. [`http`] asks web servers, byte for byte. [`processes`] runs a test in several processes at
//! once. [`provider`] is a provider of language models that answers by a script and judges its limits. [`hostile`] has clients of good and of ill will. [`soak`] runs a server for long under load and faults, and judges its memory and latency. [`history`] takes the record of many concurrent calls and says whether a limiter kept its promises.
//!
//! A server that is not installed fails the test and never skips it. What a test starts is stopped when it is dropped, and
//! also when the test process is killed: see `home.rs`. Failures to start panic, because a test can do nothing else.

mod daemon;
mod home;
mod port;
mod random;

pub mod history;
pub mod hostile;
pub mod http;
pub mod pgbouncer;
pub mod postgres;
pub mod processes;
pub mod prometheus;
pub mod provider;
pub mod proxy;
pub mod redis;
pub mod soak;
pub mod tls;
pub mod tollgate;

pub use port::free_port;
pub use random::Random;
