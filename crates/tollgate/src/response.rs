//! What callers see of a decision: header fields, problem details and the gRPC status.
//!
//! Nothing here depends on an HTTP library, so every API renders a decision in the same way.

pub mod grpc;
pub mod headers;
pub mod problem;
