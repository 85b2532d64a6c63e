//! The tower layer before an axum service that really listens, asked over TCP: what a caller sees on the wire, to the letter, on
//! memory, Redis and PostgreSQL. What the layer does without a network is in `http.rs`.
//!
//! All three stores go by a clock that is moved by hand, so every number is exact. Only the races and the environment go by the
//! stores' own clocks, with windows of an hour. Needs `redis-server` and `postgresql`; fails without them.

#[path = "http_servers/scene.rs"]
mod scene;

#[path = "http_servers/axum.rs"]
mod axum_service;
#[path = "http_servers/environment.rs"]
mod environment;
#[path = "http_servers/leases.rs"]
mod leases;
#[path = "http_servers/parity.rs"]
mod parity;
#[path = "http_servers/races.rs"]
mod races;
#[path = "http_servers/steps.rs"]
mod steps;
#[path = "http_servers/waits.rs"]
mod waits;
