//! One promise a model. Each panics if there is an interleaving in which its promise is broken.

use loom::model::Builder;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use loom::thread::{self, JoinHandle};

use crate::chain::{Chain, Seen, key};
use crate::node::Node;

/// A model with a name, for those who run them all.
pub type Model = (&'static str, fn());

/// All models.
pub const ALL: [Model; 8] = [
    ("a reader never believes another key's state", readers_and_a_replacement),
    ("a state of several words is seen whole", whole_states),
    ("two admitters lose no update and keep to the limit", two_admitters),
    ("three admitters lose no update and keep to the limit", three_admitters),
    ("a refusal was true at some instant", refusals),
    ("one holds the lock at a time", mutual_exclusion),
    ("a key that is moved is not found, or found as it is", a_split),
    ("a node is not used before it was made", a_longer_chain),
];

/// Explores with at most this many preemptions: three find all that more would, at a fraction of the time.
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

/// The state is (used, limit), and an override changes both at once. All states that ever stood have room but the first; only
/// a torn or an old state refuses.
fn refusals() {
    explore(None, || {
        let chain = Arc::new(Chain::<2>::new());
        chain.insert(key(1, 0), [1, 1]);
        let has_room = Arc::new(AtomicBool::new(false));
        let asker = run(&chain, {
            let has_room = has_room.clone();
            move |chain: &Chain<2>| {
                let had_room = has_room.load(Ordering::Acquire);
                let charged = chain.charge(key(1, 0), |[used, limit]| {
                    assert!([1, 5, 6].contains(&used), "{used}");
                    (used < limit).then_some([used + 1, limit])
                });
                let admitted = charged.expect("the key is there");
                assert!(admitted || !had_room, "refused although there was room all along");
            }
        });
        // From full to room to more room; (5, 1) and (1, 1) refuse, and the first never stood.
        for after in [[0, 4], [5, 9]] {
            let written = chain.charge(key(1, 0), |_| Some(after));
            assert_eq!(written, Some(true));
            has_room.store(true, Ordering::Release);
        }
        join(asker);
    });
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

/// A chain of two nodes is split while a reader looks for the key that moves, and a third key takes over the spill node.
fn a_split() {
    explore(Some(3), || {
        let chain = Arc::new(Chain::<1>::new());
        let (stays, moves, third) = (key(1, 0), key(2, 1), key(3, 0));
        chain.insert(stays, [10]);
        chain.insert(moves, [20]);
        let is_charged = Arc::new(AtomicBool::new(false));
        let reader = run(&chain, {
            let is_charged = is_charged.clone();
            move |chain: &Chain<1>| {
                let was_charged = is_charged.load(Ordering::Acquire);
                match chain.look(moves) {
                    Seen::State([20]) => assert!(!was_charged, "as it was before the charge"),
                    Seen::State(words) => assert_eq!(words, [21], "of another key"),
                    Seen::Nothing | Seen::Disturbed => {}
                }
            }
        });
        let charger = run(&chain, move |chain: &Chain<1>| {
            chain.charge(moves, |[words]| Some([words + 1])).expect("a key is never lost");
            is_charged.store(true, Ordering::Release);
        });
        chain.split();
        chain.insert(third, [30]);
        join(reader);
        join(charger);
        let found = [stays, moves, third].map(|key| chain.look(key));
        assert_eq!(found, [10, 21, 30].map(|word| Seen::State([word])));
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
