//! Peers of ill will, and clients of good will beside them, for tests and measurements of the server.
//!
//! `attack.rs` has what is done to it, `honest.rs` a client of each face, `frames.rs` as much of HTTP/2 as both need.

mod attack;
pub(crate) mod frames;
pub(crate) mod honest;

pub use attack::{ATTACKS, Attack};
pub use honest::{Answered, CLIENTS, Client, Faces, Make};
