//! The future of every async call. It does nothing until it is polled. With local counters it is ready at its first poll.

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tollgate_store::ChargeId;

use crate::decision::Decision;
use crate::engine::{Answer, Engine, Request, Step};
use crate::error::Error;
use crate::outcome::Outcome;

/// A call that has not run yet: `.await` it. A call that is never polled charges nothing.
#[must_use = "a call does nothing until it is awaited"]
pub struct Call<'a, T> {
    engine: &'a Arc<Engine>,
    state: State<'a>,
    answers: PhantomData<fn() -> T>,
}

enum State<'a> {
    New(Request<'a>),
    Waits(Pin<Box<dyn Future<Output = Result<Answer, Error>> + Send + 'a>>),
    Done,
}

impl<'a, T> Call<'a, T> {
    #[inline]
    pub(crate) fn new(engine: &'a Arc<Engine>, request: Request<'a>) -> Call<'a, T> {
        Call { engine, state: State::New(request), answers: PhantomData }
    }

    /// Sets the id of the charge, for example the id of an order. A call that is sent again with the same id and the same charges
    /// gets the same answer and is charged once. The store remembers plain charges for ten minutes and reservations for their
    /// time to live. With other charges (another limit, key or cost) it is an error, and charges nothing. `charge_each` and `refund`
    /// take no id and are an error with one.
    ///
    /// A caller that sets an id owns it: a call that is dropped before its answer may have been charged, and it is not cancelled.
    /// [`Tollgate::settle`](crate::Tollgate::settle) settles or cancels it. A cancelled id stays cancelled for its time to live.
    ///
    /// ```
    /// # async fn run() -> Result<(), tollgate::Error> {
    /// use std::time::Duration;
    /// use tollgate::{Charge, ChargeId, Limit, Tollgate};
    ///
    /// let gate = Tollgate::builder().limit("e-mails", Limit::fixed_window(100, Duration::from_secs(3_600))?).build()?;
    /// let order = ChargeId::from(0x1234_u128);
    /// let charges = [Charge::new("e-mails", "customer:7").cost(3)];
    /// assert!(gate.charge(&charges).id(order).await?.is_allowed());
    /// assert!(gate.charge(&charges).id(order).await?.is_allowed());
    /// assert_eq!(gate.status("e-mails", "customer:7").await?.used(), 3);
    /// # Ok(())
    /// # }
    /// # use std::future::Future;
    /// # let done = std::pin::pin!(run()).as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
    /// # assert!(matches!(done, std::task::Poll::Ready(Ok(()))));
    /// ```
    pub fn id(mut self, id: ChargeId) -> Call<'a, T> {
        if let State::New(request) = &mut self.state {
            request.id = Some(id);
        }
        self
    }
}

/// The result type of a call.
pub(crate) trait Output: Sized {
    fn of(engine: &Arc<Engine>, answer: Answer) -> Self;
}

impl Output for Decision {
    #[inline]
    fn of(_engine: &Arc<Engine>, answer: Answer) -> Decision {
        answer.decision
    }
}

impl Output for Vec<Result<Outcome, Error>> {
    fn of(_engine: &Arc<Engine>, answer: Answer) -> Vec<Result<Outcome, Error>> {
        answer.each
    }
}

impl Output for () {
    fn of(_engine: &Arc<Engine>, _answer: Answer) {}
}

impl<T: Output> Future for Call<'_, T> {
    type Output = Result<T, Error>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T, Error>> {
        let call = &mut *self;
        if let State::New(request) = &mut call.state {
            match call.engine.charge(request) {
                Step::Done(answer) => {
                    call.state = State::Done;
                    return Poll::Ready(answer.map(|answer| T::of(call.engine, answer)));
                }
                Step::Waits(future) => call.state = State::Waits(future),
            }
        }
        let State::Waits(future) = &mut call.state else {
            panic!("a future is not polled again after it was ready")
        };
        let answer = std::task::ready!(future.as_mut().poll(context));
        call.state = State::Done;
        Poll::Ready(answer.map(|answer| T::of(call.engine, answer)))
    }
}

impl<T> fmt::Debug for Call<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call").finish_non_exhaustive()
    }
}
