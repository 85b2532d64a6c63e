//! One connection through the proxy: two directions, each a reader that judges pieces and a writer that is triggered.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use super::{Mode, Orders, Shared};

/// How a connection ends.
enum End {
    /// Both sides are closed in good order.
    Close,
    /// Both sides are reset.
    Reset,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Requests,
    Replies,
}

/// What a reader hands to its writer.
enum Piece {
    Bytes(Vec<u8>, Option<Instant>),
    /// The sender has closed its side.
    Eof,
    /// Enough: close the connection.
    Close,
}

/// What is to become of bytes that were read.
enum Fate {
    Forward(Option<Instant>),
    /// Lost, and with them everything that follows in this direction.
    Lose,
    /// This many get through, and then the connection is closed.
    Cut(usize),
}

/// Counts the connection while it lives.
struct Counted<'a> {
    shared: &'a Shared,
    began: u64,
}

impl<'a> Counted<'a> {
    fn new(shared: &'a Shared, began: u64) -> Counted<'a> {
        *shared.census.lock().open.entry(began).or_insert(0) += 1;
        Counted { shared, began }
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        let mut census = self.shared.census.lock();
        if let Some(count) = census.open.get_mut(&self.began) {
            *count -= 1;
            if *count == 0 {
                census.open.remove(&self.began);
            }
        }
        self.shared.census_changed.notify_all();
    }
}

pub(super) async fn serve(client: TcpStream, exempt: bool, shared: Arc<Shared>) {
    let mut orders = shared.orders.subscribe();
    let began = *orders.borrow_and_update();
    if exempt {
        let mut client = client;
        if let Ok(mut server) = TcpStream::connect(shared.upstream).await {
            let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
        }
        return;
    }
    shared.accepted.fetch_add(1, Ordering::SeqCst);
    // Declared before both sockets and so dropped after them: a task that waits for the count finds the sockets closed.
    let _counted = Counted::new(&shared, began.cuts);
    let mut client = client;
    if began.mode.cuts() {
        return reset(&client);
    }
    let mut cut = shared.orders.subscribe();
    let mut server = tokio::select! {
        connected = TcpStream::connect(shared.upstream) => match connected {
            Ok(server) => server,
            Err(_) => return reset(&client),
        },
        _ = cut.wait_for(|orders| orders.cuts != began.cuts) => return reset(&client),
    };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let end = tokio::select! {
        end = converse(&mut client, &mut server, &shared) => end,
        _ = cut.wait_for(|orders| orders.cuts != began.cuts) => End::Reset,
    };
    if matches!(end, End::Reset) {
        reset(&client);
        reset(&server);
    }
}

/// Closing will now send a reset instead of a farewell.
fn reset(stream: &TcpStream) {
    let _ = socket2::SockRef::from(stream).set_linger(Some(Duration::ZERO));
}

async fn converse(client: &mut TcpStream, server: &mut TcpStream, shared: &Shared) -> End {
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    let line = Line { shared, replies_lost: AtomicBool::new(false), client_gone: AtomicBool::new(false) };
    let requests = line.carry(Direction::Requests, from_client, to_server);
    let replies = line.carry(Direction::Replies, from_server, to_client);
    match tokio::try_join!(requests, replies) {
        Ok(_) => End::Close,
        Err(end) => end,
    }
}

/// What the two directions of a connection know of each other.
struct Line<'a> {
    shared: &'a Shared,
    replies_lost: AtomicBool,
    client_gone: AtomicBool,
}

impl Line<'_> {
    /// Carries one direction until its sender closes; an error ends the other direction too.
    async fn carry(&self, direction: Direction, from: ReadHalf<'_>, to: WriteHalf<'_>) -> Result<(), End> {
        let (pieces, judged) = mpsc::unbounded_channel();
        tokio::try_join!(self.read(direction, from, pieces), write(to, judged)).map(|_| ())
    }

    async fn read(
        &self,
        direction: Direction,
        mut from: ReadHalf<'_>,
        pieces: mpsc::UnboundedSender<Piece>,
    ) -> Result<(), End> {
        let mut orders = self.shared.orders.subscribe();
        let mut judge = Judge { direction, shared: self.shared, lost: false, allowance: None };
        let mut buffer = vec![0; 64 * 1024];
        loop {
            let read = from.read(&mut buffer).await;
            let orders = until_not_stalled(&mut orders).await;
            match read {
                Ok(0) => return self.end(direction, &judge, orders.mode, &pieces).await,
                Err(_) if judge.hides_the_end(orders.mode) => {
                    return self.end(direction, &judge, orders.mode, &pieces).await;
                }
                Err(_) => return Err(End::Reset),
                Ok(length) => match judge.fate(length, orders) {
                    Fate::Forward(due) => {
                        let _ = pieces.send(Piece::Bytes(buffer[..length].to_vec(), due));
                    }
                    Fate::Lose if direction == Direction::Replies => {
                        self.replies_lost.store(true, Ordering::SeqCst);
                    }
                    Fate::Lose => {}
                    Fate::Cut(through) => {
                        let _ = pieces.send(Piece::Bytes(buffer[..through].to_vec(), None));
                        let _ = pieces.send(Piece::Close);
                        return Ok(());
                    }
                },
            }
        }
    }

    /// The sender has closed its side. A receiver that lost bytes must not learn of it; but when the client itself has gone, there is
    /// nobody left to keep a connection open for.
    async fn end(
        &self,
        direction: Direction,
        judge: &Judge<'_>,
        mode: Mode,
        pieces: &mpsc::UnboundedSender<Piece>,
    ) -> Result<(), End> {
        let hidden = judge.hides_the_end(mode);
        match direction {
            Direction::Requests => {
                self.client_gone.store(true, Ordering::SeqCst);
                if hidden || self.replies_lost.load(Ordering::SeqCst) {
                    return Err(End::Close);
                }
            }
            Direction::Replies if hidden => {
                self.replies_lost.store(true, Ordering::SeqCst);
                if self.client_gone.load(Ordering::SeqCst) {
                    return Err(End::Close);
                }
                return std::future::pending().await;
            }
            Direction::Replies => {}
        }
        let _ = pieces.send(Piece::Eof);
        Ok(())
    }
}

async fn write(mut to: WriteHalf<'_>, mut judged: mpsc::UnboundedReceiver<Piece>) -> Result<(), End> {
    while let Some(piece) = judged.recv().await {
        match piece {
            Piece::Bytes(bytes, due) => {
                if let Some(due) = due {
                    sleep_until(due).await;
                }
                to.write_all(&bytes).await.map_err(|_| End::Reset)?;
            }
            Piece::Eof => return to.shutdown().await.map_err(|_| End::Reset),
            Piece::Close => return Err(End::Close),
        }
    }
    Ok(())
}

async fn until_not_stalled(orders: &mut watch::Receiver<Orders>) -> Orders {
    let orders = orders.wait_for(|orders| orders.mode != Mode::Stall).await.map(|orders| *orders);
    match orders {
        Ok(orders) => orders,
        // The proxy is being dropped, and this connection with it.
        Err(_) => std::future::pending().await,
    }
}

/// Decides what becomes of each piece of one direction.
struct Judge<'a> {
    direction: Direction,
    shared: &'a Shared,
    lost: bool,
    /// How many bytes may still pass before the cut, and which setting of the mode said so.
    allowance: Option<(u64, usize)>,
}

impl Judge<'_> {
    fn hides_the_end(&self, mode: Mode) -> bool {
        self.lost
            || mode == Mode::Blackhole
            || (mode == Mode::SwallowReplies && self.direction == Direction::Replies)
    }

    fn fate(&mut self, length: usize, orders: Orders) -> Fate {
        if self.lost {
            return Fate::Lose;
        }
        let fate = match self.direction {
            Direction::Requests => match orders.mode {
                Mode::Blackhole => Fate::Lose,
                Mode::Latency(delay) => Fate::Forward(Some(Instant::now() + delay)),
                _ => Fate::Forward(None),
            },
            Direction::Replies => self.fate_of_reply(length, orders),
        };
        if matches!(fate, Fate::Lose) {
            self.lost = true;
            if self.direction == Direction::Replies {
                self.shared.swallowed.fetch_add(1, Ordering::SeqCst);
            }
        }
        fate
    }

    fn fate_of_reply(&mut self, length: usize, orders: Orders) -> Fate {
        let one_less = |count: usize| count.checked_sub(1);
        let swallow_next = &self.shared.swallow_next;
        if swallow_next.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less).is_ok() {
            return Fate::Lose;
        }
        match orders.mode {
            Mode::Blackhole | Mode::SwallowReplies => Fate::Lose,
            Mode::Latency(delay) => Fate::Forward(Some(Instant::now() + delay)),
            Mode::CutReply { after_bytes } => self.cut(length, after_bytes, orders.serial),
            Mode::Faulty { swallow_per_mille, delay_per_mille, delay } => {
                let mut random = self.shared.random.lock();
                if random.chance(swallow_per_mille) {
                    Fate::Lose
                } else if random.chance(delay_per_mille) {
                    Fate::Forward(Some(Instant::now() + delay))
                } else {
                    Fate::Forward(None)
                }
            }
            Mode::Pass | Mode::Stall | Mode::Reset | Mode::Refuse => Fate::Forward(None),
        }
    }

    fn cut(&mut self, length: usize, after_bytes: usize, serial: u64) -> Fate {
        let left = self.allowance.filter(|(set, _)| *set == serial).map_or(after_bytes, |(_, left)| left);
        self.allowance = Some((serial, left.saturating_sub(length)));
        if length < left { Fate::Forward(None) } else { Fate::Cut(left) }
    }
}
