//! Tollgate's own library in thousands of virtual processes, on a virtual network, in virtual time.
//!
//! Nothing of the library is imitated: each process has a [`Tollgate`](tollgate::Tollgate) with its breaker, denial cache, batches and fallback, over
//! the simulated store of `tollgate-store`, whose servers decide by the kernel. Virtual are the servers' network, their faults, and the time.
//! A run depends on its scenario and its seed alone: the same two give the same events, bit for bit, in the same order.
//!
//! The walk: [`scenario`] says what is simulated; `run` builds the processes and lets them ask (`process`, or `leased` for a region that
//! leases quota), over `network` to `server`, in [`virtual_time`]; `checks` holds what came of it to the bounds of the contract, with the judge of
//! histories that the tests of real stores have; `report` prints it. `tollgate-sim` is the command, and its exit code says whether all bounds were kept.

mod checks;
mod leased;
mod log;
mod network;
mod process;
pub mod random;
mod report;
mod run;
pub mod scenario;
mod server;
pub mod virtual_time;

pub use checks::Finding;
pub use report::Report;
pub use run::simulate;
