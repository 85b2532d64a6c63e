//! What callers see of a decision: header fields, problem details and the status of a gRPC call.
//!
//! Nothing here knows an HTTP library, so that every face says the same in the same words.

pub mod grpc;
pub mod headers;
pub mod problem;
