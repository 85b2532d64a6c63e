//! What came in, and what does it cost? One folder for each way in.
//!
//! A front translates: it finds out who pays, which limits apply and what the charge costs, hands that to the registry, and
//! turns the decision into an answer of its own protocol. It never counts.

pub mod http;
