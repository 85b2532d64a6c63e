//! HTTP: a tower layer that stands before a service.

mod client;
mod path;
