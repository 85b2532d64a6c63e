//! The server with real neighbours: Redis behind it, nginx and HAProxy before it, and schemathesis, which tries to prove its document wrong.
//!
//! `./test` installs them. What is missing fails the test and never skips it.

// The same server process as in the tests of the API, which use more of it.
#[allow(dead_code)]
#[path = "../api/server.rs"]
mod server;

mod bench;
mod document;
mod ending;
mod haproxy;
mod nginx;
mod redis;
