//! Starts a worker again that ended with an error or a panic: apalis ends one at the first error of the database, and at the first panic of a
//! handler.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use apalis::prelude::WorkerError;
use futures_util::FutureExt;
use tollgate::ChargeId;

/// The shortest and the longest pause before a worker is started again.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// A worker that ran so long was well, and the next pause is the shortest again.
const WELL_AFTER: Duration = Duration::from_secs(10);

/// Runs a worker, and again whenever an error or a panic ends it, until it ends without one. `build` makes and runs the worker under the name that it
/// is given.
///
/// Each start has a name of its own: what the worker before left claimed is only given back once *its* name has not been heard of
/// for apalis's orphan time.
pub async fn supervise<F, Fut>(name: &str, mut build: F)
where
    F: FnMut(String) -> Fut,
    Fut: Future<Output = Result<(), WorkerError>>,
{
    let process = ChargeId::random().get() >> 96;
    let mut pause = PAUSES.0;
    for start in 1_u64.. {
        let started = Instant::now();
        // A handler that panics takes its worker with it, unless a layer catches that.
        let run = AssertUnwindSafe(build(format!("{name}-{process:08x}-{start}"))).catch_unwind();
        match run.await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => {
                tracing::warn!(worker = name, %error, pause_ms = pause.as_millis(), "worker ended; it is started again")
            }
            Err(_) => {
                tracing::error!(
                    worker = name,
                    pause_ms = pause.as_millis(),
                    "worker panicked; it is started again"
                )
            }
        }
        if started.elapsed() > WELL_AFTER {
            pause = PAUSES.0;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSES.1);
    }
}
