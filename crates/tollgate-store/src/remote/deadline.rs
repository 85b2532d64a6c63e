//! A deadline that tells the lateness of a server from our own.
//!
//! A process that is short of CPU time reads answers late, although they came in time. Its timers are late then too. So a
//! deadline that fires late proves nothing about the server, and whoever must not mistake the one for the other waits once more.

use std::future::Future;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

/// How late a timer of a process that is not short of CPU time may be.
const LATE: Duration = Duration::from_millis(20);

/// How often a deadline is set again at most.
const AGAIN: u32 = 3;

/// What a future comes to by `deadline`, which is put off by `more` as long as it fires late; `None` if it comes to nothing.
pub(crate) async fn by<T>(
    mut deadline: Instant,
    more: Duration,
    future: impl Future<Output = T>,
) -> Option<T> {
    tokio::pin!(future);
    for _ in 0..=AGAIN {
        if let Ok(done) = timeout_at(deadline, &mut future).await {
            return Some(done);
        }
        let now = Instant::now();
        if now < deadline + LATE {
            return None;
        }
        deadline = now + more;
    }
    None
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_punctual_deadline_is_the_end() {
        let second = Duration::from_secs(1);
        let start = Instant::now();
        assert_eq!(by(start + second, second, std::future::pending::<()>()).await, None);
        assert!(start.elapsed() < second + LATE);
    }

    /// The thread is busy for longer than the deadline, and the answer is read only afterwards.
    #[tokio::test]
    async fn a_deadline_that_fires_late_is_put_off() {
        let (send, receive) = oneshot::channel();
        let moment = Duration::from_millis(10);
        let asked = tokio::spawn(by(Instant::now() + moment, Duration::from_secs(60), receive));
        tokio::task::yield_now().await;
        std::thread::sleep(moment + 3 * LATE);
        // Behind the one that waits, which has seen by now that its timer is late.
        tokio::time::sleep(moment).await;
        send.send(7).expect("it still waits");
        assert_eq!(asked.await.expect("no panic"), Some(Ok(7)));
    }
}
