//! The primitives that nodes and homes are made of, as the model checker has them. Stands in for the store's own `sync`.
//!
//! An ordering can be lost on purpose. A model that cannot be broken checks nothing, so each model names the orderings that
//! its promise rests on, and the tests see it broken without them.

use std::cell::Cell;

use loom::sync::atomic as checked;

/// The orderings that `node` and `homes` ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ordering {
    Relaxed,
    Acquire,
    Release,
}

/// An ordering that can be lost. Each is relied on in a few places of `node` only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// `version` and `next` are read as if they said nothing about what was written before them.
    LoadAcquire,
    /// The lock is given up, and a node is linked, before what was written under the lock is there.
    StoreRelease,
    /// The lock is taken without seeing what its last holder wrote.
    ExchangeAcquire,
    /// A reader looks at the version a second time before it has looked at the slots.
    FenceAcquire,
    /// A holder writes before the version says that the lock is held.
    FenceRelease,
}

/// How many rounds of waiting are explored.
const ROUNDS: u32 = 2;

thread_local! {
    // The model checker runs all threads of a model on one thread of the machine, so this is one value for each test.
    static LOST: Cell<&'static [Loss]> = const { Cell::new(&[]) };
}

/// Runs a model without some of its orderings.
pub fn without<R>(losses: &'static [Loss], model: impl FnOnce() -> R) -> R {
    struct Restore;
    impl Drop for Restore {
        fn drop(&mut self) {
            LOST.set(&[]);
        }
    }
    LOST.set(losses);
    let _restore = Restore;
    model()
}

fn is_lost(loss: Loss) -> bool {
    LOST.get().contains(&loss)
}

/// The ordering that is asked for, unless it is lost.
fn ordering(asked: Ordering, loss: Loss) -> checked::Ordering {
    match asked {
        _ if is_lost(loss) => checked::Ordering::Relaxed,
        Ordering::Relaxed => checked::Ordering::Relaxed,
        Ordering::Acquire => checked::Ordering::Acquire,
        Ordering::Release => checked::Ordering::Release,
    }
}

macro_rules! atomic {
    ($name:ident, $number:ty) => {
        pub(crate) struct $name(checked::$name);

        impl $name {
            pub(crate) fn new(value: $number) -> Self {
                $name(checked::$name::new(value))
            }

            pub(crate) fn load(&self, order: Ordering) -> $number {
                self.0.load(ordering(order, Loss::LoadAcquire))
            }

            pub(crate) fn store(&self, value: $number, order: Ordering) {
                self.0.store(value, ordering(order, Loss::StoreRelease));
            }
        }
    };
}

atomic!(AtomicU32, u32);
atomic!(AtomicU64, u64);

impl AtomicU32 {
    pub(crate) fn compare_exchange(
        &self,
        current: u32,
        new: u32,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u32, u32> {
        let (success, failure) =
            (ordering(success, Loss::ExchangeAcquire), ordering(failure, Loss::ExchangeAcquire));
        self.0.compare_exchange(current, new, success, failure)
    }
}

/// A value that is made once. It may be seen as missing for as long as nothing that was read says that it was made: std's own cell is read
/// in the same way, with an `Acquire` of its own, which is never lost.
pub(crate) struct OnceLock<T> {
    is_made: checked::AtomicBool,
    value: std::sync::OnceLock<T>,
}

impl<T> OnceLock<T> {
    pub(crate) fn new() -> Self {
        OnceLock { is_made: checked::AtomicBool::new(false), value: std::sync::OnceLock::new() }
    }

    pub(crate) fn get(&self) -> Option<&T> {
        self.is_made.load(checked::Ordering::Acquire).then(|| self.value.get())?
    }

    /// For one thread alone.
    pub(crate) fn set(&self, value: T) -> Result<(), T> {
        self.value.set(value)?;
        self.is_made.store(true, checked::Ordering::Release);
        Ok(())
    }

    /// For one thread alone.
    pub(crate) fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
        let value = self.value.get_or_init(make);
        self.is_made.store(true, checked::Ordering::Release);
        value
    }
}

pub(crate) fn fence(order: Ordering) {
    let (loss, order) = match order {
        Ordering::Release => (Loss::FenceRelease, checked::Ordering::Release),
        _ => (Loss::FenceAcquire, checked::Ordering::Acquire),
    };
    if !is_lost(loss) {
        checked::fence(order);
    }
}

/// Passes a moment of waiting: somebody else must run before it is worth looking again. Waiting changes nothing, so a thread
/// that waits longer shows nothing new: what follows then is run once and not explored.
pub(crate) fn pause(round: u32) {
    if round >= ROUNDS {
        loom::skip_branch();
    }
    loom::thread::yield_now();
}
