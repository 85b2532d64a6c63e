//! How long scripts ran inside of a store, as the store itself counts it.
//!
//! A caller measures a round trip, which includes the network and the queue of the server. A store that counts its own time can
//! say how much of that was the script: see [`Store::script_time`](crate::Store::script_time). `redis/commandstats.rs` reads it.

/// Scripts that a store ran, and the time that they took there.
///
/// Counted from when this process first looked, for the scripts of all programs that use the server. Both numbers only grow.
///
/// ```
/// use tollgate_store::ScriptTime;
/// let script_time = ScriptTime { calls: 200, us: 5_000 };
/// assert_eq!(script_time.us / script_time.calls, 25); // the mean, in microseconds
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScriptTime {
    /// How many scripts ran.
    pub calls: u64,
    /// The time of all of them together, in whole microseconds.
    pub us: u64,
}
