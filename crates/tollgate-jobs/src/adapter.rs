//! apalis 1.0 on PostgreSQL.
//!
//! A [`GateLayer`] stands between apalis's ack and its attempt counter: what it answers without calling the handler costs no attempt.
//! Its answer is written by apalis's own ack, and a trigger makes the ack of a delayed job its reschedule: one UPDATE, so that no
//! other worker sees the job in between. [`DuePoll`] polls at the times of delayed jobs and does not lose its timer, and
//! [`supervise`] starts a worker again that an error of the database ended.
//!
//! | decision | status | result | attempts | otherwise |
//! |---|---|---|---|---|
//! | run | `Done`, `Failed`, as apalis has it | the handler's | + 1 | |
//! | delay | `Pending` | `{"Ok":{"tollgate":"delayed",…}}` | as before | `run_at` is its time, unlocked |
//! | reject | `Killed` | `{"Err":"Rate limit exceeded"}` | as before | `done_at` set; never fetched again |
//! | skip | `Killed` | `{"Ok":{"tollgate":"skipped",…}}` | as before | `done_at` set |
//!
//! apalis-redis 1.0 is left out: its ack script decides the time of a job that comes back by itself.

mod ahead;
mod layer;
mod poll;
mod prepare;
mod response;
mod supervise;

pub use layer::{GateLayer, GateService, JobArgs, RateLimited};
pub use poll::DuePoll;
pub use prepare::prepare;
pub use response::{GateResponse, Gated};
pub use supervise::supervise;
