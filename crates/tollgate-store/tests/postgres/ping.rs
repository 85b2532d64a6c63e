//! Pings: answered by a server that can serve anybody, and by no other.

use std::time::Duration;

use tollgate_store::{Failure, NodeId, PostgresOptions, Store};
use tollgate_testkit::postgres::PostgresServer;

use super::{connect, options};

#[tokio::test]
async fn a_server_that_serves_anybody_answers_and_no_other_does() {
    let server = PostgresServer::start();
    let timeout = Duration::from_millis(500);
    let store = connect(PostgresOptions { timeout, ..options(&server.url("postgres")) }).await;
    let ping = async || store.ping(NodeId::ONLY).await.map_err(|error| error.failure());
    let connections = store.connections();
    assert_eq!(ping().await, Ok(()));
    assert_eq!(store.connections(), connections, "a ping is none of the pool's");
    server.stop();
    assert_eq!(ping().await, Err(Some(Failure::Timeout)), "hung");
    server.resume();
    assert_eq!(ping().await, Ok(()));
    server.kill();
    assert_eq!(ping().await, Err(Some(Failure::Connection)), "gone");
    server.restart();
    server.wait_until_ready();
    assert_eq!(ping().await, Ok(()), "the connection that broke is made anew");
    server.psql("alter database postgres set default_transaction_read_only = on");
    server.psql("select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()");
    assert_eq!(ping().await, Err(Some(Failure::NotReady)), "read only");
}
