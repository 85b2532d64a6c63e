//! The status of a refused gRPC call.
