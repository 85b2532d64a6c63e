//! Runs the models. Meant for the release profile: `cargo test -p tollgate-model --release`, half a minute.

use std::panic::catch_unwind;

use tollgate_model::models::ALL;
use tollgate_model::sync::without;

#[test]
fn every_promise_holds_under_every_interleaving() {
    for model in ALL {
        eprintln!("{}", model.promise);
        (model.run)();
    }
}

/// A model that cannot be broken checks nothing.
#[test]
fn no_promise_holds_without_what_it_rests_on() {
    for model in ALL {
        for losses in model.rests_on {
            let broken = catch_unwind(|| without(losses, model.run)).is_err();
            assert!(broken, "{}: holds without {losses:?}", model.promise);
        }
    }
}
