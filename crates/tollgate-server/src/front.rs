//! The faces of the server: one folder for each protocol.
//!
//! A face reads what came in, asks the registry through `app.rs`, and answers in its own words. It never counts.

pub(crate) mod json;
pub(crate) mod models;
pub(crate) mod page;
pub(crate) mod peer;
pub(crate) mod resp;
pub(crate) mod rls;
mod undecided;
#[cfg(test)]
mod waiting_store;
