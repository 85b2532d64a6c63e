//! The layers without a network: ns for one call of a service that only answers.
//!
//! A call is a request made, taken through the layer and dropped with its answer, on thread CPU time. Making it costs the
//! same for all; what the layer adds is the difference to no layer.

use std::convert::Infallible;
use std::hint::black_box;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::body::Body;
use axum::extract::ConnectInfo;
use http::{HeaderValue, Request, Response, StatusCode};
use tower::Service;

use super::contestant::{Contestant, KEY, KEYS};
use super::rounds::{Cell, Plan};
use crate::machine::{Core, pin_to, thread_cpu_time};

/// The values of the header field that has the key.
pub(crate) struct Keys {
    values: Vec<HeaderValue>,
    peer: SocketAddr,
}

impl Keys {
    pub(crate) fn new() -> Result<Keys, String> {
        let values =
            (0..KEYS).map(|number| HeaderValue::try_from(key(number)).map_err(|error| error.to_string()));
        Ok(Keys { values: values.collect::<Result<_, _>>()?, peer: (Ipv4Addr::LOCALHOST, 50_000).into() })
    }

    /// The request of a key. It has the extension that axum gives it.
    fn request(&self, number: usize) -> Request<Body> {
        let mut request = Request::new(Body::empty());
        request.headers_mut().insert(&KEY, self.values[place(number)].clone());
        request.extensions_mut().insert(ConnectInfo(self.peer));
        request
    }
}

/// The text of a key.
pub(crate) fn key(number: usize) -> String {
    format!("user-{number:06}")
}

/// Whose turn it is: all keys alike, and neighbours far from each other.
pub(crate) fn place(number: usize) -> usize {
    const STRIDE: usize = 617;
    number.wrapping_mul(STRIDE) % KEYS
}

/// What a turn used.
pub(crate) struct Slice {
    cpu: Duration,
    astray: u64,
}

/// Measures everybody, in turns.
pub(crate) fn measure(plan: &Plan, cores: &[Core], contestants: &[Contestant]) -> Result<Vec<Cell>, String> {
    let keys = Keys::new()?;
    let mut cells: Vec<Cell> = contestants.iter().map(Cell::new).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            cores.first().copied().into_iter().for_each(pin_to);
            for turn in plan.turns(contestants.len()) {
                let (contestant, cell) = (&contestants[turn], &mut cells[turn]);
                contestant.call(&keys, plan.calls / 8);
                let slice = contestant.call(&keys, plan.calls);
                cell.cpu_ns.push(slice.cpu.as_nanos() as f64 / plan.calls as f64);
                cell.requests += plan.calls as u64;
                cell.astray += slice.astray;
            }
        });
    });
    Ok(cells)
}

/// So many calls of one service.
pub(crate) fn slice<S, R>(mut service: S, keys: &Keys, calls: usize, fields: usize) -> Slice
where
    S: Service<Request<Body>, Response = Response<R>, Error = Infallible>,
{
    let mut context = Context::from_waker(Waker::noop());
    let (mut astray, before) = (0, thread_cpu_time());
    for number in 0..calls {
        let is_ready = service.poll_ready(&mut context).is_ready();
        let answer = pin!(service.call(keys.request(number))).poll(&mut context);
        let is_right = match black_box(answer) {
            // The service itself adds no field.
            Poll::Ready(Ok(answer)) => answer.status() == StatusCode::OK && answer.headers().len() == fields,
            Poll::Pending => false,
        };
        astray += u64::from(!is_ready || !is_right);
    }
    Slice { cpu: thread_cpu_time() - before, astray }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_has_its_turn() {
        let mut places: Vec<usize> = (0..KEYS).map(place).collect();
        places.sort_unstable();
        assert_eq!(places, (0..KEYS).collect::<Vec<_>>());
    }

    #[test]
    fn everybody_answers_as_promised() {
        let keys = Keys::new().unwrap();
        for contestant in super::super::contestant::all().unwrap() {
            assert_eq!(contestant.call(&keys, 2 * KEYS).astray, 0, "{}", contestant.name);
        }
    }
}
