//! A `tollgate serve` of one's own, on free ports, ended with the test.

pub(crate) use tollgate_testkit::tollgate::{Ended, Tollgate};

pub(crate) fn start(config: &str) -> Tollgate {
    Tollgate::builder(env!("CARGO_BIN_EXE_tollgate")).config(config).start()
}

/// Asks it to end, and waits until it has. Its clients can go on meanwhile.
pub(crate) async fn stop(server: Tollgate) -> Ended {
    tokio::task::spawn_blocking(move || server.stop()).await.expect("no panic")
}
