//! How the operator is told: an event for every limit of every decision.
//!
//! An [`Observer`] sees them all, in the thread that decided, after the decision is made: it cannot change it. Events carry no
//! key, only its namespace; whoever turns them into labels must still bound how many of those there are.

use std::time::Duration;

use tollgate_kernel::{Outcome, Strategy};

/// Why a limit answered as it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The store counted.
    Store,
    /// The limit is set to let everything through.
    Unlimited,
    /// The limit is set to let nothing through.
    Blocked,
    /// The key was empty or malformed, and nothing was asked.
    Malformed,
}

/// One limit's part in one decision.
#[derive(Clone, Copy, Debug)]
pub struct Event<'a> {
    /// What was done: `charge`, `peek`, `reserve` or `wait`.
    pub operation: &'static str,
    /// The limit's name.
    pub limiter: &'a str,
    /// Its strategy; `None` for a limit that is unlimited or blocked.
    pub strategy: Option<Strategy>,
    /// The key's namespace; empty when the key is malformed.
    pub namespace: &'a str,
    /// What was asked for.
    pub cost: u64,
    /// Whether this limit let it pass; a limit that only watches always does.
    pub allowed: bool,
    /// Whether the limit only watches.
    pub shadow: bool,
    /// What the limit said.
    pub outcome: Outcome,
    /// Where the answer came from.
    pub source: Source,
    /// How long the whole decision took.
    pub duration: Duration,
}

/// Sees every decision.
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use tollgate::{Event, Limit, Observer, Tollgate};
///
/// #[derive(Default)]
/// struct Denials(AtomicU64);
///
/// impl Observer for Denials {
///     fn decided(&self, event: &Event<'_>) {
///         self.0.fetch_add(u64::from(!event.allowed), Ordering::Relaxed);
///     }
/// }
///
/// let denials = Arc::new(Denials::default());
/// let limit = Limit::token_bucket("1/h".parse()?, 1)?;
/// let gate = Tollgate::builder().limit("api", limit).observer(denials.clone()).build()?;
/// let api = gate.limiter("api")?;
/// api.check("user:42");
/// api.check("user:42");
/// assert_eq!(denials.0.load(Ordering::Relaxed), 1);
/// # Ok::<(), tollgate::Error>(())
/// ```
pub trait Observer: Send + Sync + 'static {
    /// Called once for each limit of each decision.
    fn decided(&self, event: &Event<'_>);
}
