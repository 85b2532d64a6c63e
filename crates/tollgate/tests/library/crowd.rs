//! Futures by hand: no runtime, no sleeping, and nobody is polled who was not woken.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;

/// The answer of a future that has nothing to wait for.
pub(crate) fn ready<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(answer) => answer,
        Poll::Pending => panic!("has to wait"),
    }
}

/// The answer of a future, with this thread parked until it comes: all the runtime that waiting needs.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(answer) => return answer,
            Poll::Pending => thread::park(),
        }
    }
}

/// Futures that are polled when they were woken and only then, as by a runtime; the last to come is polled first.
pub(crate) struct Crowd<'a, T> {
    members: Vec<Option<Member<'a, T>>>,
}

struct Member<'a, T> {
    future: Pin<Box<dyn Future<Output = T> + 'a>>,
    woken: Arc<Woken>,
}

struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl<'a, T> Crowd<'a, T> {
    pub(crate) fn new() -> Self {
        Crowd { members: Vec::new() }
    }

    /// Adds a future that has to wait, and polls it once, so that it takes its place.
    pub(crate) fn join(&mut self, future: impl Future<Output = T> + 'a) -> usize {
        let mut member = Member { future: Box::pin(future), woken: Arc::new(Woken(AtomicBool::new(true))) };
        assert!(member.poll().is_none(), "has nothing to wait for");
        self.members.push(Some(member));
        self.members.len() - 1
    }

    /// Drops a future.
    pub(crate) fn leave(&mut self, member: usize) {
        self.members[member] = None;
    }

    /// Polls woken tasks until none is left. Returns the finished ones with their results, in order.
    pub(crate) fn run(&mut self) -> Vec<(usize, T)> {
        let mut done = Vec::new();
        for _ in 0..=self.members.len() {
            let before = done.len();
            for (number, member) in self.members.iter_mut().enumerate().rev() {
                if let Some(answer) = member.as_mut().and_then(Member::poll) {
                    *member = None;
                    done.push((number, answer));
                }
            }
            if done.len() == before {
                break;
            }
        }
        done
    }

    /// The same, without the answers.
    pub(crate) fn run_to_see_who_is_done(&mut self) -> Vec<usize> {
        self.run().into_iter().map(|(number, _)| number).collect()
    }
}

impl<T> Member<'_, T> {
    /// The answer, if the future was woken and has one.
    fn poll(&mut self) -> Option<T> {
        if !self.woken.0.swap(false, Ordering::SeqCst) {
            return None;
        }
        let waker = Waker::from(self.woken.clone());
        match self.future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(answer) => Some(answer),
            Poll::Pending => None,
        }
    }
}
