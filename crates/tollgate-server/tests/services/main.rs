//! The server with real neighbours: Redis and PostgreSQL behind it, nginx, Caddy and HAProxy before it, and schemathesis, which tries to prove its document wrong.
//!
//! `./test` installs them. What is missing fails the test and never skips it.

// The same server process as in the tests of the API, which use more of it.
#[allow(dead_code)]
#[path = "../api/server.rs"]
mod server;

mod bench;
mod caddy;
#[path = "../rls/client.rs"]
#[allow(dead_code)] // It serves another test too.
mod client;
mod document;
mod ending;
mod faces;
mod fleet;
mod haproxy;
mod jobs;
mod nginx;
mod overrides;
mod redis;
