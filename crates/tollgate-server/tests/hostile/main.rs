//! The server among peers of ill will, under reloads, and its log: a real process, asked over all of its faces.

mod admin;
#[path = "../../../tollgate/tests/telemetry/collector.rs"]
#[allow(dead_code)] // Not all that is received is looked at here.
mod collector;
mod files;
mod log;
mod peers;
mod reload;
// The same server process as in the tests of the API, which use more of it.
#[allow(dead_code)]
#[path = "../api/server.rs"]
mod server;
