//! The service that Envoy asks, as a gRPC client sees it: a real `tollgate serve`, and calls over the wire.

mod bad_input;
mod calls;
mod client;
mod seats;
mod server;
mod services;
