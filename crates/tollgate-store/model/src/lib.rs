//! The memory store's node and its array of homes under every interleaving and every order of memory that the language allows.
//!
//! `node` and `homes` below are the very files that the store is made of, mounted beside a `sync` that hands them the model checker's
//! atomics instead of the processor's. What the table does with a node (look without the lock, lock if nothing changed, move a chain)
//! is repeated here in miniature, in `chain`, because the table itself is too large to be explored. Each of the `models`
//! checks one promise; `tests/models.rs` runs them all.
//!
//! Not in here: the arithmetic of limits, growth beyond one split, and sweeping, which is a split that moves nothing.

pub mod models;

mod chain;
#[path = "../../src/memory/homes.rs"]
#[allow(dead_code)] // The table uses all of it.
mod homes;
#[path = "../../src/memory/node.rs"]
mod node;
pub mod sync;
