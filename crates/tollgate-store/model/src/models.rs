//! One promise a model. Each panics if there is an interleaving in which its promise is broken.

use loom::model::Builder;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use loom::thread::{self, JoinHandle};

use crate::chain::{Chain, Seen, Sighted, key};
use crate::homes::Homes;
use crate::node::{Fingerprint, Node};
use crate::sync::Loss::{self, ExchangeAcquire, FenceAcquire, FenceRelease, LoadAcquire, StoreRelease};

/// A promise, and what it rests on.
pub struct Model {
    /// The promise in words.
    pub promise: &'static str,
    /// Explores the model, and panics if the promise is broken.
    pub run: fn(),
    /// The losses of ordering that break it: each of them, or, where several are named together, only all of them.
    ///
    /// The exchange that takes the lock is never the only one to acquire: it succeeds on a version that was read before, and
    /// that reading acquired all there is.
    pub rests_on: &'static [&'static [Loss]],
}

/// All models.
pub const ALL: [Model; 16] = [
    Model {
        promise: "a reader never believes another key's state",
        run: readers_and_a_replacement,
        rests_on: &[&[LoadAcquire], &[StoreRelease], &[FenceAcquire], &[FenceRelease]],
    },
    Model {
        promise: "a state of several words is seen whole",
        run: whole_states,
        rests_on: &[&[LoadAcquire], &[StoreRelease], &[FenceAcquire], &[FenceRelease]],
    },
    Model {
        promise: "two admitters lose no update and keep to the limit",
        run: two_admitters,
        rests_on: &[&[LoadAcquire], &[StoreRelease]],
    },
    Model {
        promise: "three admitters lose no update and keep to the limit",
        run: three_admitters,
        rests_on: &[&[LoadAcquire], &[StoreRelease]],
    },
    Model {
        promise: "a charge over two limits takes from both or from neither",
        run: two_limits,
        rests_on: &[&[LoadAcquire], &[StoreRelease]],
    },
    Model {
        promise: "a charge over two limits that locks one before it looks at the other takes from both or from neither",
        run: two_limits_one_last,
        rests_on: &[&[LoadAcquire], &[StoreRelease]],
    },
    Model {
        promise: "a charge over three limits takes from all or from none",
        run: three_limits,
        rests_on: &[&[LoadAcquire], &[StoreRelease]],
    },
    Model {
        promise: "a refusal was true at some instant",
        run: refusals,
        rests_on: &[&[LoadAcquire], &[StoreRelease], &[FenceAcquire], &[FenceRelease]],
    },
    Model {
        promise: "a refusal by one of two limits was true at some instant",
        run: refusals_of_two_limits,
        rests_on: &[&[LoadAcquire], &[StoreRelease], &[FenceAcquire], &[FenceRelease]],
    },
    Model {
        promise: "a refusal by the limit that is looked at last was true at some instant",
        run: refusals_of_the_last,
        rests_on: &[&[LoadAcquire], &[StoreRelease], &[FenceAcquire], &[FenceRelease]],
    },
    Model {
        promise: "one holds the lock at a time",
        run: mutual_exclusion,
        rests_on: &[&[LoadAcquire, ExchangeAcquire], &[StoreRelease]],
    },
    Model {
        promise: "a key that is moved is not found, or found as it is",
        run: a_split_and_a_reader,
        rests_on: &[&[LoadAcquire], &[FenceAcquire], &[FenceRelease]],
    },
    Model {
        promise: "a key that is moved is charged all the same",
        run: a_split_and_a_charge,
        rests_on: &[&[LoadAcquire], &[StoreRelease]],
    },
    Model {
        promise: "a node is not used before it was made",
        run: a_longer_chain,
        rests_on: &[&[LoadAcquire], &[StoreRelease]],
    },
    Model {
        promise: "a size that was read leads to a home that was made",
        run: a_home_in_a_small_chunk,
        rests_on: &[&[LoadAcquire], &[StoreRelease]],
    },
    Model {
        promise: "a size that was read leads to a directory and a home that were made",
        run: a_home_in_a_large_chunk,
        rests_on: &[&[LoadAcquire], &[StoreRelease]],
    },
];

/// Explores every interleaving, or those with at most so many preemptions.
fn explore(preemptions: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = preemptions;
    builder.max_branches = 20_000;
    builder.check(model);
}

/// Runs `body` on a thread of its own, on a shared `subject`.
fn run<T, R>(subject: &Arc<T>, body: impl FnOnce(&T) -> R + Send + 'static) -> JoinHandle<R>
where
    T: Send + Sync + 'static,
    R: Send + 'static,
{
    let subject = subject.clone();
    thread::spawn(move || body(&subject))
}

fn join<R>(thread: JoinHandle<R>) -> R {
    thread.join().expect("a thread of the model ends")
}

/// A slot changes hands while one reader looks for the old key and one for the new. The keys may have half of their
/// fingerprints in common.
fn readers_and_a_replacement() {
    for (old, new) in [(key(1, 0), key(2, 0)), (key(1, 0), key(1, 7))] {
        explore(Some(3), move || {
            let chain = Arc::new(Chain::<1>::new());
            chain.insert(old, [10]);
            let readers = [(old, 10), (new, 20)].map(|(key, words)| {
                run(&chain, move |chain: &Chain<1>| match chain.look(key) {
                    Seen::State(seen) => assert_eq!(seen, [words], "another key's state"),
                    Seen::Nothing | Seen::Disturbed => {}
                })
            });
            chain.replace(old, new, [20]);
            readers.into_iter().for_each(join);
            assert_eq!(chain.look(old), Seen::Nothing);
            assert_eq!(chain.look(new), Seen::State([20]));
        });
    }
}

/// Three words that are always equal, written twice.
fn whole_states() {
    explore(None, || {
        let chain = Arc::new(Chain::<3>::new());
        chain.insert(key(1, 0), [1; 3]);
        let is_whole = |words: [u64; 3]| words.iter().all(|word| *word == words[0]);
        let reader = run(&chain, move |chain: &Chain<3>| {
            if let Seen::State(words) = chain.look(key(1, 0)) {
                assert!(is_whole(words), "torn: {words:?}");
            }
        });
        for _ in 0..2 {
            chain.charge(key(1, 0), |words| {
                assert!(is_whole(words), "torn under the lock: {words:?}");
                Some(words.map(|word| word + 1))
            });
        }
        join(reader);
        assert_eq!(chain.look(key(1, 0)), Seen::State([3; 3]));
    });
}

/// Charges one unit where at most `limit` fit.
fn charge_one(chain: &Chain<1>, limit: u64) -> u64 {
    let charged = chain.charge(key(1, 0), |[used]| {
        assert!(used <= limit, "{used} of {limit}");
        (used < limit).then_some([used + 1])
    });
    u64::from(charged.expect("the key is there"))
}

fn admitters(others: usize, charges_each: u64, limit: u64, preemptions: Option<usize>) {
    explore(preemptions, move || {
        let chain = Arc::new(Chain::<1>::new());
        chain.insert(key(1, 0), [0]);
        let charge = move |chain: &Chain<1>| (0..charges_each).map(|_| charge_one(chain, limit)).sum::<u64>();
        let threads: Vec<_> = (0..others).map(|_| run(&chain, charge)).collect();
        let admitted = charge(&chain) + threads.into_iter().map(join).sum::<u64>();
        assert_eq!(admitted, limit, "admitted");
        assert_eq!(chain.look(key(1, 0)), Seen::State([limit]), "counted");
    });
}

fn two_admitters() {
    admitters(1, 2, 3, None);
}

fn three_admitters() {
    admitters(2, 1, 2, Some(3));
}

/// Charges one unit under each of two limits, or none: on what can be seen without the locks if that is undisturbed, and else
/// under both, taken in one order everywhere. `fits` gets the limit that it is asked about.
fn charge_both<const W: usize>(
    chains: &[Chain<W>; 2],
    order: [usize; 2],
    fits: impl Fn(usize, [u64; W]) -> Option<[u64; W]>,
) -> bool {
    let seen = order.map(|index| chains[index].see(key(1, 0), |words| fits(index, words)));
    charge_both_seen(seen).unwrap_or_else(|| charge_both_locked(chains, fits))
}

fn charge_both_locked<const W: usize>(
    chains: &[Chain<W>; 2],
    fits: impl Fn(usize, [u64; W]) -> Option<[u64; W]>,
) -> bool {
    let locked = [0, 1].map(|index| (index, chains[index].lock_home(key(1, 0))));
    let found = locked.each_ref().map(|(index, (first, _))| {
        let (node, slot) = chains[*index].find(first, key(1, 0)).expect("the key is there");
        (node, slot, fits(*index, node.words(slot)))
    });
    let admitted = found.iter().all(|(.., after)| after.is_some());
    for (node, slot, after) in found {
        if let (true, Some(words)) = (admitted, after) {
            node.set_words(slot, words);
        }
    }
    admitted
}

fn charge_both_seen<const W: usize>(seen: [Option<Sighted<'_, W>>; 2]) -> Option<bool> {
    let [Some(one), Some(other)] = seen else { return None };
    assert!(!one.sight.is_of_same_chain(&other.sight));
    if one.after.is_none() || other.after.is_none() {
        return (one.sight.is_unchanged() && other.sight.is_unchanged()).then_some(false);
    }
    let _locks = (one.sight.lock()?, other.sight.lock()?);
    one.commit();
    other.commit();
    Some(true)
}

/// The same as `bucket_charge.rs` does it: the first of `order` is locked before the last is looked at, and the last is tried a few
/// times. Who fails gives up its lock before it takes both in one order.
fn charge_last<const W: usize>(
    chains: &[Chain<W>; 2],
    order: [usize; 2],
    fits: impl Fn(usize, [u64; W]) -> Option<[u64; W]>,
) -> bool {
    charge_last_seen(chains, order, &fits).unwrap_or_else(|| charge_both_locked(chains, &fits))
}

fn charge_last_seen<const W: usize>(
    chains: &[Chain<W>; 2],
    order: [usize; 2],
    fits: impl Fn(usize, [u64; W]) -> Option<[u64; W]>,
) -> Option<bool> {
    const TRIES: usize = 2;
    let see = |index: usize| chains[index].see(key(1, 0), |words| fits(index, words));
    let first = see(order[0])?;
    if first.after.is_none() {
        let last = see(order[1])?;
        return (first.sight.is_unchanged() && last.sight.is_unchanged()).then_some(false);
    }
    let _lock = first.sight.lock()?;
    for _ in 0..TRIES {
        let last = see(order[1])?;
        if last.after.is_none() {
            return last.sight.is_unchanged().then_some(false);
        }
        if let Some(_lock) = last.sight.lock() {
            first.commit();
            last.commit();
            return Some(true);
        }
    }
    None
}

type ChargeBoth = fn(&[Chain<1>; 2], [usize; 2], &dyn Fn(usize, [u64; 1]) -> Option<[u64; 1]>) -> bool;

/// Two limits, charged together by two threads in either order, while one of them is charged alone as well.
fn two_limits_by(charge: ChargeBoth) {
    explore(Some(2), move || {
        let limits = [2, 3];
        let chains = Arc::new([Chain::<1>::new(), Chain::<1>::new()]);
        chains.iter().for_each(|chain| chain.insert(key(1, 0), [0]));
        let threads = [[0, 1], [1, 0]].map(|order| {
            run(&chains, move |chains: &[Chain<1>; 2]| {
                let fits = |index: usize, [used]: [u64; 1]| (used < limits[index]).then_some([used + 1]);
                u64::from(charge(chains, order, &fits))
            })
        });
        let alone = charge_one(&chains[0], limits[0]);
        let together: u64 = threads.into_iter().map(join).sum();
        assert_eq!(alone + together, limits[0], "admitted");
        let counted = chains.each_ref().map(|chain| chain.look(key(1, 0)));
        assert_eq!(counted, [alone + together, together].map(|word| Seen::State([word])), "counted");
    });
}

fn two_limits() {
    two_limits_by(|chains, order, fits| charge_both(chains, order, fits));
}

fn two_limits_one_last() {
    two_limits_by(|chains, order, fits| charge_last(chains, order, fits));
}

/// Three limits: the first two are looked at and locked in this order before the last is looked at, as `charge_several` does it. A lock
/// that is not free is not waited for: all are given up, and the charge is tried again.
fn charge_three(
    chains: &[Chain<1>; 3],
    order: [usize; 3],
    fits: impl Fn(usize, [u64; 1]) -> Option<[u64; 1]>,
) -> Option<bool> {
    let see = |index: usize| chains[index].see(key(1, 0), |words| fits(index, words));
    let seen = [see(order[0])?, see(order[1])?];
    if seen.iter().any(|seen| seen.after.is_none()) {
        let last = see(order[2])?;
        let is_unchanged = last.sight.is_unchanged() && seen.iter().all(|seen| seen.sight.is_unchanged());
        return is_unchanged.then_some(false);
    }
    let _locks = (seen[0].sight.lock()?, seen[1].sight.lock()?);
    let last = see(order[2])?;
    if last.after.is_none() {
        return last.sight.is_unchanged().then_some(false);
    }
    let _lock = last.sight.lock()?;
    seen.iter().chain([&last]).for_each(Sighted::commit);
    Some(true)
}

/// Two threads charge all three in opposite orders, while one of them is charged alone as well. A charge that was disturbed has charged nothing.
fn three_limits() {
    explore(Some(2), || {
        let limits = [2, 3, 3];
        let chains = Arc::new([Chain::<1>::new(), Chain::<1>::new(), Chain::<1>::new()]);
        chains.iter().for_each(|chain| chain.insert(key(1, 0), [0]));
        let threads = [[0, 1, 2], [1, 2, 0]].map(|order| {
            run(&chains, move |chains: &[Chain<1>; 3]| {
                let fits = |index: usize, [used]: [u64; 1]| (used < limits[index]).then_some([used + 1]);
                u64::from(charge_three(chains, order, fits) == Some(true))
            })
        });
        let alone = charge_one(&chains[0], limits[0]);
        let of_all: u64 = threads.into_iter().map(join).sum();
        let counted = chains.each_ref().map(|chain| chain.look(key(1, 0)));
        assert_eq!(counted, [alone + of_all, of_all, of_all].map(|word| Seen::State([word])), "counted");
    });
}

/// A state of (used, limit).
fn has_room([used, limit]: [u64; 2]) -> Option<[u64; 2]> {
    (used < limit).then_some([used + 1, limit])
}

/// Asks while another thread writes one state after another, from full to room to more room. Of what may be pieced together
/// from these states (5 of 4) and (5 of 1) would be refused, too, but never stood.
fn refusals_to(ask: fn(&[Chain<2>; 2]) -> bool) {
    explore(Some(3), move || {
        let chains = Arc::new([Chain::<2>::new(), Chain::<2>::new()]);
        chains[0].insert(key(1, 0), [1, 1]);
        chains[1].insert(key(1, 0), [0, 9]);
        let is_roomy = Arc::new(AtomicBool::new(false));
        let asker = run(&chains, {
            let is_roomy = is_roomy.clone();
            move |chains: &[Chain<2>; 2]| {
                let was_roomy = is_roomy.load(Ordering::Acquire);
                assert!(ask(chains) || !was_roomy, "refused although there was room all along");
            }
        });
        for state in [[0, 4], [5, 9]] {
            chains[0].charge(key(1, 0), |_| Some(state));
            is_roomy.store(true, Ordering::Release);
        }
        join(asker);
    });
}

fn refusals() {
    refusals_to(|chains| chains[0].charge(key(1, 0), has_room).expect("the key is there"));
}

fn refusals_of_two_limits() {
    refusals_to(|chains| charge_both(chains, [1, 0], |_, words| has_room(words)));
}

fn refusals_of_the_last() {
    refusals_to(|chains| charge_last(chains, [1, 0], |_, words| has_room(words)));
}

/// A count that is read and written in two steps, with no ordering of its own.
fn mutual_exclusion() {
    explore(Some(3), || {
        let subject = Arc::new((Node::<1, 1>::default(), AtomicU64::new(0)));
        let count = |(node, count): &(Node<1, 1>, AtomicU64)| {
            let _lock = node.lock();
            count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        };
        let threads = [run(&subject, count), run(&subject, count)];
        count(&subject);
        threads.into_iter().for_each(join);
        assert_eq!(subject.1.load(Ordering::Relaxed), 3);
    });
}

/// A chain of two nodes is split; the key in its spill node moves and is charged, and a third key takes over the spill node.
/// Meanwhile one other thread does `meanwhile` with the key that moves, which leaves its state at `after`.
fn split_under(after: u64, meanwhile: fn(&Chain<1>, Fingerprint)) {
    explore(Some(3), move || {
        let chain = Arc::new(Chain::<1>::new());
        let (stays, moves, third) = (key(1, 0), key(2, 1), key(3, 0));
        chain.insert(stays, [10]);
        chain.insert(moves, [20]);
        let other = run(&chain, move |chain: &Chain<1>| meanwhile(chain, moves));
        chain.split();
        chain.charge(moves, |[word]| Some([word + 1])).expect("a key is never lost");
        chain.insert(third, [30]);
        join(other);
        let found = [stays, moves, third].map(|key| chain.look(key));
        assert_eq!(found, [10, after, 30].map(|word| Seen::State([word])));
    });
}

fn a_split_and_a_reader() {
    split_under(21, |chain, moves| match chain.look(moves) {
        Seen::State(words) => assert!([[20], [21]].contains(&words), "of another key: {words:?}"),
        Seen::Nothing | Seen::Disturbed => {}
    });
}

fn a_split_and_a_charge() {
    split_under(22, |chain, moves| {
        chain.charge(moves, |[word]| Some([word + 1])).expect("a key is never lost");
    });
}

/// A second key makes the chain longer by a new node while a reader walks it.
fn a_longer_chain() {
    explore(None, || {
        let chain = Arc::new(Chain::<1>::new());
        chain.insert(key(1, 0), [10]);
        let reader = run(&chain, |chain: &Chain<1>| {
            if let Seen::State(words) = chain.look(key(2, 0)) {
                assert_eq!(words, [20]);
            }
        });
        chain.insert(key(2, 0), [20]);
        join(reader);
    });
}

/// There are `count` homes in whole chunks of `chunk`, and one more is made while two readers look for the hash that moves to it.
fn a_new_home(count: usize, chunk: usize) {
    explore(Some(3), move || {
        let homes = Arc::new(Homes::<u8>::new());
        (0..count).step_by(chunk).for_each(|index| homes.ensure(index));
        homes.set_count(count);
        let hash = u32::try_from(count).expect("a small number");
        let find = move |homes: &Homes<u8>| assert_eq!(*homes.of(hash), 0);
        let readers = [run(&homes, find), run(&homes, find)];
        homes.ensure(count);
        homes.set_count(count + 1);
        readers.into_iter().for_each(join);
        assert_eq!(homes.index_of(hash), count);
    });
}

fn a_home_in_a_small_chunk() {
    a_new_home(8, 8);
}

fn a_home_in_a_large_chunk() {
    a_new_home(512, 8);
}
