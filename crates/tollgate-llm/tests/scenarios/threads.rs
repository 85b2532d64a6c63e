//! Reservations of many threads at once, each of which ends in every way that there is.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use tollgate_llm::{Admission, Api, Caller, ModelRequest};
use tollgate_testkit::Random;

use super::{OPENAI, World, body, used};

const LIMIT: u64 = 500;
const THREADS: u64 = 8;

/// How many operations each thread does between two moves of the clock.
const ROUND: usize = 16;

/// What must be charged at least, whatever the other threads are doing, and what did happen.
#[derive(Default)]
struct Books {
    /// Reserved and settled in this window: added after it was charged, subtracted before it is given back.
    charged: AtomicU64,
    /// Used beyond what was reserved, in this window: added before it is charged.
    debt: AtomicU64,
    admitted: AtomicU64,
    denied: AtomicU64,
    late: AtomicU64,
}

impl Books {
    fn check(&self, charged: u64) {
        let debt = self.debt.load(Ordering::SeqCst);
        assert!(charged <= LIMIT + debt, "{charged} are charged, with a debt of {debt}");
    }

    fn add(&self, tokens: u64) {
        self.check(self.charged.fetch_add(tokens, Ordering::SeqCst) + tokens);
    }

    fn subtract(&self, tokens: u64) {
        self.charged.fetch_sub(tokens, Ordering::SeqCst);
    }
}

/// A call that is not settled yet.
struct Open {
    admission: Admission,
    tokens: u64,
    /// In which window it was admitted.
    round: usize,
}

/// Ends a call in one of the ways: cancelled, settled with less, as much or more, or dropped, which leaves it charged until it leaves the window.
async fn end(books: &Books, random: &mut Random, open: Open, round: usize) {
    let Open { admission, tokens, round: of } = open;
    let is_late = of != round;
    books.late.fetch_add(u64::from(is_late), Ordering::Relaxed);
    // What is given back of an earlier window makes no room in this one.
    let given_back = |less: u64| if is_late { 0 } else { less };
    match random.below(16) {
        0 => {
            books.debt.fetch_add(40, Ordering::SeqCst);
            admission.settle(used(tokens + 40)).await.expect("settled");
            books.add(40);
        }
        1 => admission.settle(used(tokens)).await.expect("settled"),
        2 => drop(admission),
        3..=6 => {
            books.subtract(given_back(tokens - 10));
            admission.settle(used(10)).await.expect("settled");
        }
        _ => {
            books.subtract(given_back(tokens));
            admission.cancel().await.expect("cancelled");
        }
    }
}

/// A million reservations from eight threads, which are cancelled, settled with less, as much and more, dropped, and settled in a later window: at no moment
/// is more charged than the limit and the debt, and when all threads rest exactly that is charged.
#[test]
fn b4_eight_threads_never_hold_more_than_the_limit() {
    let operations: usize = std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|cases| cases.parse().ok())
        .map_or(1_000_000, |cases: usize| cases * 100);
    let rounds = operations.div_ceil(ROUND * 8);
    let world = World::of(OPENAI, &format!("[llm.models.gpt-4o]\ntpm = {LIMIT}\nrpm = 100000000"));
    let books = Arc::new(Books::default());
    let rest = Arc::new(Barrier::new(8));
    // A thread that panics would leave the others at the barrier.
    let has_failed = Arc::new(AtomicBool::new(false));
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let (world, books, rest, has_failed) =
                (world.clone(), books.clone(), rest.clone(), has_failed.clone());
            std::thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
                let mut random = Random::seeded(thread + 1);
                let mut open: Vec<Open> = Vec::new();
                for round in 0..rounds {
                    let work = one_round(&world, &books, &mut random, &mut open, thread, round);
                    let done =
                        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| runtime.block_on(work)));
                    has_failed.fetch_or(done.is_err(), Ordering::SeqCst);
                    rest.wait();
                    if thread == 0 && !has_failed.load(Ordering::SeqCst) {
                        let left = runtime.block_on(world.left("llm.gpt-4o.tpm"));
                        let charged = books.charged.swap(0, Ordering::SeqCst);
                        let is_exact = left == LIMIT.saturating_sub(charged);
                        has_failed.fetch_or(!is_exact, Ordering::SeqCst);
                        if !is_exact {
                            eprintln!("round {round}: {left} are left, and {charged} were charged");
                        }
                        books.debt.store(0, Ordering::SeqCst);
                        world.advance(61);
                    }
                    rest.wait();
                    if has_failed.load(Ordering::SeqCst) {
                        return;
                    }
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    assert!(!has_failed.load(Ordering::SeqCst), "see above");
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let (admitted, denied, late) = (count(&books.admitted), count(&books.denied), count(&books.late));
    println!("{admitted} were admitted, {denied} denied, {late} settled in a later window");
    let least = rounds as u64;
    assert!(admitted > least && denied > least && late > 0, "{admitted}, {denied}, {late}");
}

/// What one thread does while the clock stands still.
async fn one_round(
    world: &World,
    books: &Books,
    random: &mut Random,
    open: &mut Vec<Open>,
    thread: u64,
    round: usize,
) {
    let tokens = 100 + thread;
    let body = body(tokens);
    let request = ModelRequest::read(Api::ChatCompletions, body.as_bytes()).expect("a request");
    for _ in 0..ROUND {
        // Two stay open, so that the threads deny each other also where they run one after the other.
        if open.len() == 2 {
            end(books, random, open.remove(0), round).await;
        }
        match world.limits.admit(&request, &Caller::default(), Some(Duration::ZERO)).await {
            Ok(admission) => {
                books.add(tokens);
                books.admitted.fetch_add(1, Ordering::Relaxed);
                open.push(Open { admission, tokens, round });
            }
            Err(refusal) => {
                let is_denied = refusal.reason.starts_with("Token limit exceeded");
                books.denied.fetch_add(u64::from(is_denied), Ordering::Relaxed);
                if let Some(oldest) = open.pop() {
                    end(books, random, oldest, round).await;
                }
            }
        }
        std::thread::yield_now();
    }
}
