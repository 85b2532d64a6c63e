//! A deadline that distinguishes a late server from a late client.
//!
//! A process without enough CPU time reads answers late, although they came in time. Its timers are late then too. So a deadline
//! that fires late proves nothing about the server, and a caller that must not confuse the two waits once more.

use std::future::Future;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

/// How late a timer of a process that is not short of CPU time may be.
const LATE: Duration = Duration::from_millis(20);

/// How often a deadline is set again at most.
const AGAIN: u32 = 3;

/// The result of a future by `deadline`, which is extended by `more` as long as it fires late; `None` if there is none.
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
        let answer = tokio::spawn(by(Instant::now() + moment, Duration::from_secs(60), receive));
        tokio::task::yield_now().await;
        std::thread::sleep(moment + 3 * LATE);
        // After the waiting task, which has noticed by now that its timer is late.
        tokio::time::sleep(moment).await;
        send.send(7).expect("it still waits");
        assert_eq!(answer.await.expect("no panic"), Some(Ok(7)));
    }
}
