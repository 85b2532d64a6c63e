//! A limit whose numbers change while it is charged, in miniature: the old table and the new one, the lock of the engine's limits, the
//! lock under which keys are begun and moved, and the successor of an entry. Step for step as in `engine/limits.rs`,
//! `engine/fast_path.rs` and `engine/local.rs` of the library and `charge_locked` of the store's table. The numbers themselves are left
//! out: both tables count up to the same limit, so what is lost or made by a move shows in the count.

use loom::sync::atomic::{AtomicBool, Ordering};
use loom::sync::{Mutex, RwLock};

use crate::chain::{Chain, Seen, key};
use crate::node::Fingerprint;
use crate::sync::{Loss, is_lost};

/// The key that everybody charges.
const KEY: Fingerprint = key(1, 0);

pub(crate) struct Reloaded {
    limit: u64,
    /// The limits by name: charges on the slow path read it, a reload writes it.
    limits: RwLock<()>,
    /// Whether the old entry has a successor.
    has_next: AtomicBool,
    /// Whether there are two tables.
    several: AtomicBool,
    /// Held by the charge that begins or moves a key while there are two tables.
    moving: Mutex<()>,
    /// The old table and the new one.
    tables: [Chain<1>; 2],
}

impl Reloaded {
    /// With nothing reloaded yet, and nothing charged to the key, which is known or not.
    pub(crate) fn new(limit: u64, is_known: bool) -> Reloaded {
        let tables = [Chain::new(), Chain::new()];
        if is_known {
            tables[0].insert(KEY, [0]);
        }
        Reloaded {
            limit,
            limits: RwLock::new(()),
            has_next: AtomicBool::new(false),
            several: AtomicBool::new(false),
            moving: Mutex::new(()),
            tables,
        }
    }

    fn fits(&self, [used]: [u64; 1]) -> Option<[u64; 1]> {
        (used < self.limit).then_some([used + 1])
    }

    /// The table of the newest entry, as a handle on the old one finds it.
    fn newest(&self) -> usize {
        usize::from(self.has_next.load(Ordering::Acquire))
    }

    /// One unit, by a handle that was looked up before the reload. Whether it was admitted.
    pub(crate) fn charge(&self) -> bool {
        let known = self.tables[self.newest()].charge(KEY, |words| self.fits(words));
        known.unwrap_or_else(|| self.charge_slowly())
    }

    fn charge_slowly(&self) -> bool {
        let _limits = (!is_lost(Loss::LimitsLock)).then(|| self.limits.read().expect("no panic"));
        let (own, other) = (self.newest(), 1 - self.newest());
        let is_alone = || !self.several.load(Ordering::Acquire);
        let fits = |words| self.fits(words);
        if let Some(admitted) = self.tables[own].charge_locked(KEY, fits, [0], is_alone) {
            return admitted;
        }
        let _moving = (!is_lost(Loss::MoveLock)).then(|| self.moving.lock().expect("no panic"));
        if !self.tables[own].knows(KEY)
            && let Some(words) = self.tables[other].take(KEY)
        {
            self.tables[own].insert(KEY, words);
        }
        self.tables[own].charge_locked(KEY, fits, [0], || true).expect("it is there, or begun")
    }

    /// Puts the new table in the place of the old one.
    pub(crate) fn reload(&self) {
        let _limits = (!is_lost(Loss::LimitsLock)).then(|| self.limits.write().expect("no panic"));
        {
            let _moving = self.moving.lock().expect("no panic");
            self.several.store(true, Ordering::Release);
        }
        self.has_next.store(true, Ordering::Release);
    }

    /// What was charged, in each table that has the key. With nobody else there.
    pub(crate) fn used(&self) -> Vec<u64> {
        let used = |table: &Chain<1>| match table.look(KEY) {
            Seen::State([used]) => Some(used),
            Seen::Nothing => None,
            Seen::Disturbed => panic!("somebody is still there"),
        };
        self.tables.iter().filter_map(used).collect()
    }
}
