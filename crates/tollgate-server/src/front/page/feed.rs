//! A snapshot a second for all viewers: written once, sent to all.
//!
//! The first message to a viewer has the last five minutes, the later ones only the last seconds, most of which the page has
//! already: a viewer that misses a few loses nothing. A slow viewer gets the newest snapshot when it is ready for it, so nothing
//! is queued. The number of viewers is bounded, and all are closed when the server ends.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt as _;
use http_body_util::Either;
use http_body_util::combinators::BoxBody;
use hyper::body::Frame;
use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tollgate::Clock;
use tollgate::store::StoreState;

use super::super::json::Body;
use super::jobs::JobsView;
use super::snapshot::snapshot;
use crate::app::App;
use crate::stats::ring::SECONDS;

/// How many may look at once.
const VIEWERS: usize = 100;

/// How many seconds a later message has: more than one, for late viewers.
const LATEST: u64 = 10;

/// How often what was timed is put into its histograms, in seconds: until then it takes memory, and nobody may ever scrape.
const UPKEEP: u64 = 5;

/// What is sent, and to how many.
pub(crate) struct Feed {
    /// What comes each second; nothing more when the server ends.
    ticks: Mutex<Option<watch::Sender<Bytes>>>,
    seats: Arc<Semaphore>,
    /// When the store was not up, newest last.
    troubles: Mutex<VecDeque<Trouble>>,
    /// The last five minutes, as they were written last, and when.
    whole: Mutex<(u64, Bytes)>,
}

impl Default for Feed {
    fn default() -> Feed {
        Feed {
            ticks: Mutex::new(Some(watch::Sender::new(Bytes::new()))),
            seats: Arc::new(Semaphore::new(VIEWERS)),
            troubles: Mutex::default(),
            whole: Mutex::new((0, Bytes::new())),
        }
    }
}

/// How many times of trouble are remembered.
const TROUBLES: usize = 50;

/// A time in which the store was not up, in seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Trouble {
    from: u64,
    /// None while it lasts.
    to: Option<u64>,
}

impl Feed {
    /// All viewers are sent away, and no more come.
    pub(crate) fn close(&self) {
        *self.ticks.lock() = None;
    }

    pub(crate) fn is_open(&self) -> bool {
        self.ticks.lock().is_some()
    }

    /// Whether anybody looks.
    pub(crate) fn has_viewers(&self) -> bool {
        self.ticks.lock().as_ref().is_some_and(|ticks| ticks.receiver_count() > 0)
    }

    /// Notes whether the store is up in this second.
    fn note_store(&self, second: u64, is_up: bool) {
        let mut troubles = self.troubles.lock();
        let lasting = troubles.back_mut().filter(|trouble| trouble.to.is_none());
        match (lasting, is_up) {
            (Some(trouble), true) => trouble.to = Some(second),
            (None, false) => {
                if troubles.len() == TROUBLES {
                    troubles.pop_front();
                }
                troubles.push_back(Trouble { from: second, to: None });
            }
            _ => {}
        }
    }

    /// When the store was not up.
    pub(super) fn troubles(&self) -> Vec<Trouble> {
        self.troubles.lock().iter().copied().collect()
    }

    /// The last five minutes. Written at most once a second, however many ask.
    pub(crate) fn whole(&self, app: &App) -> Bytes {
        let second = app.stats.second();
        let mut whole = self.whole.lock();
        if whole.0 != second {
            *whole = (second, snapshot(app, SECONDS));
        }
        whole.1.clone()
    }

    /// What a viewer is sent, if there is room for one more.
    pub(crate) fn view(&self, app: &Arc<App>) -> Option<Body> {
        let mut ticks = self.ticks.lock().as_ref()?.subscribe();
        let seat = self.seats.clone().try_acquire_owned().ok()?;
        let (sender, frames) = mpsc::channel(1);
        let first = event(&self.whole(app));
        tokio::spawn(async move {
            let mut next = first;
            while sender.send(next).await.is_ok() {
                tokio::select! {
                    changed = ticks.changed() => if changed.is_err() { return },
                    () = sender.closed() => return,
                }
                next = ticks.borrow_and_update().clone();
            }
        });
        Some(Either::Right(BoxBody::new(Events { frames, _seat: seat }.map_err(|never| match never {}))))
    }

    /// Writes and sends what there is to say of the second that has just ended, if anybody looks.
    fn tick(&self, app: &App) {
        if let Some(ticks) = &*self.ticks.lock()
            && ticks.receiver_count() > 0
        {
            ticks.send_replace(event(&snapshot(app, LATEST)));
        }
    }
}

fn event(snapshot: &[u8]) -> Bytes {
    [b"data: ", snapshot, b"\n\n"].concat().into()
}

/// Tells the seconds, and sends what they brought, until the server ends.
pub(crate) async fn feed(app: Arc<App>) {
    let clock = Clock::system();
    while app.feed.is_open() {
        let into_second = clock.now().get() % 1_000_000;
        tokio::time::sleep(Duration::from_micros(1_000_000 - into_second)).await;
        // What was counted until now belongs to the second that ends.
        app.state().gate.hand_over_counts();
        let second = clock.now().get() / 1_000_000;
        app.stats.tick(second);
        app.feed.note_store(second, app.state().gate.store_health().state == StoreState::Up);
        app.feed.tick(&app);
        if second.is_multiple_of(60) {
            tokio::spawn(JobsView::note(app.clone(), second));
        }
        if second.is_multiple_of(UPKEEP) {
            app.metrics.run_upkeep();
        }
    }
}

/// A body that goes on until the viewer goes, or the server ends.
struct Events {
    frames: mpsc::Receiver<Bytes>,
    _seat: OwnedSemaphorePermit,
}

impl hyper::body::Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.frames.poll_recv(context).map(|frame| frame.map(|bytes| Ok(Frame::data(bytes))))
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    async fn next(body: &mut Body) -> Option<serde_json::Value> {
        let frame = body.frame().await?.expect("no error").into_data().expect("data");
        let text = std::str::from_utf8(&frame).expect("text");
        let data = text.strip_prefix("data: ").and_then(|text| text.strip_suffix("\n\n")).expect("an event");
        Some(serde_json::from_str(data).expect("JSON in one line"))
    }

    #[tokio::test]
    async fn a_viewer_gets_five_minutes_and_then_seconds_until_the_server_ends() {
        let app = Arc::new(crate::app::tests::app());
        let start = app.stats.second();
        let mut viewer = app.feed.view(&app).expect("room");
        let first = next(&mut viewer).await.expect("the whole");
        assert_eq!(first["limits"][0]["seconds"]["allowed"].as_array().map(Vec::len), Some(300));
        assert_eq!(first["limits"][0]["limit"], "api");
        for second in 1..4 {
            app.stats.tick(start + second);
            app.feed.tick(&app);
            let tick = next(&mut viewer).await.expect("a second");
            assert_eq!(tick["second"].as_u64(), Some(start + second));
            assert_eq!(tick["limits"][0]["seconds"]["allowed"].as_array().map(Vec::len), Some(10));
        }
        app.drain();
        assert!(app.feed.view(&app).is_some(), "who asks while it drains is answered");
        app.end();
        assert_eq!(next(&mut viewer).await, None);
        assert!(app.feed.view(&app).is_none(), "nobody is let in at the end");
    }

    #[test]
    fn a_time_of_trouble_has_a_beginning_and_an_end() {
        let feed = Feed::default();
        for (second, is_up) in [(1, true), (2, false), (3, false), (4, true), (5, true), (6, false)] {
            feed.note_store(second, is_up);
        }
        assert_eq!(feed.troubles(), [Trouble { from: 2, to: Some(4) }, Trouble { from: 6, to: None }]);
        for second in 0..200 {
            feed.note_store(10 + second, second % 2 == 0);
        }
        assert_eq!(feed.troubles().len(), TROUBLES);
    }

    #[tokio::test]
    async fn there_is_room_for_so_many_viewers() {
        let app = Arc::new(crate::app::tests::app());
        let mut viewers: Vec<Body> = (0..VIEWERS).map(|_| app.feed.view(&app).expect("room")).collect();
        assert!(app.feed.view(&app).is_none());
        viewers.pop();
        assert!(app.feed.view(&app).is_some());
        let whole = app.feed.whole(&app);
        assert_eq!(whole.as_ptr(), app.feed.whole(&app).as_ptr(), "it is written once a second");
    }

    #[tokio::test]
    async fn a_viewer_who_does_not_keep_up_gets_the_newest() {
        let app = Arc::new(crate::app::tests::app());
        let start = app.stats.second();
        let mut viewer = app.feed.view(&app).expect("room");
        for second in 1..50 {
            app.stats.tick(start + second);
            app.feed.tick(&app);
            tokio::task::yield_now().await;
        }
        let mut last = 0;
        let mut messages = 0;
        while last < start + 49 {
            last = next(&mut viewer).await.expect("a message")["second"].as_u64().expect("a number");
            messages += 1;
        }
        assert!(messages <= 4, "{messages} messages were stored up");
    }
}
