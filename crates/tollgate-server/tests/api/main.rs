//! The HTTP API and the commands that ask it, against a real server process.

mod commands;
mod compose;
mod decide;
mod document;
mod fault;
mod gate;
mod gate_routes;
mod lifetime;
mod look;
mod overrides;
mod packaging;
mod readme;
mod reserve;
mod server;
mod wire;
mod yaml;
