//! The APIs of the server: one folder for each protocol.
//!
//! An API parses a request, charges through `app.rs`, and renders the response in its own format. It never counts.

pub(crate) mod json;
pub(crate) mod models;
pub(crate) mod page;
pub(crate) mod peer;
pub(crate) mod resp;
pub(crate) mod rls;
mod undecided;
#[cfg(test)]
mod waiting_store;
