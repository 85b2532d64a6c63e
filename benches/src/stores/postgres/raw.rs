//! What people write who have a table already: count the executions in the window, and insert one if there is room.
//!
//! Two statements on one connection, prepared, each a transaction of its own; it may admit too much when two callers count at
//! the same time, and is as fast as it gets.

use std::sync::Arc;

use tokio_postgres::{Client, NoTls, Statement};
use tollgate_testkit::postgres::PostgresServer;

use crate::stores::load::{Answer, Caller, Draw};

pub(super) const ABOUT: &str =
    "a row for each execution: count(*) in the window, then insert; admits too much where two count at once";

/// How many executions each key has in the window when the run begins: hardly any, or half of a limit of 100. None at all would
/// have PostgreSQL plan for an empty table and read all of it ever after.
#[derive(Clone, Copy)]
pub(super) enum Executions {
    One,
    Fifty,
}

impl Executions {
    const fn table(self) -> &'static str {
        match self {
            Executions::One => "executions_one",
            Executions::Fifty => "executions_fifty",
        }
    }

    const fn count(self) -> u32 {
        match self {
            Executions::One => 1,
            Executions::Fifty => 50,
        }
    }
}

/// Makes and fills the tables that are not ours. Keys are made as `workload.rs` makes them.
pub(super) fn make_tables(server: &PostgresServer, keys: u32) -> Result<(), String> {
    let key = "'tenant-' || lpad((i / 1000)::text, 4, '0') || ':user-' || lpad(i::text, 7, '0')";
    let mut texts = vec![
        "create table bare (key bigint primary key, n bigint not null) with (fillfactor = 50)".to_owned(),
        format!("insert into bare select i, 0 from generate_series(1, {keys}) as i"),
    ];
    for executions in [Executions::One, Executions::Fifty] {
        let (table, count) = (executions.table(), executions.count());
        texts.push(format!("create table {table} (key text not null, at timestamptz not null)"));
        texts.push(format!("create index on {table} (key, at)"));
        // All of them stay in the window of ten minutes for as long as the run lasts.
        texts.push(format!(
            "insert into {table} select {key}, clock_timestamp() - random() * interval '1 minute' \
             from generate_series(1, {count}), generate_series(0, {keys} - 1) as i"
        ));
    }
    texts.into_iter().try_for_each(|text| server.try_psql(&text).map(drop))
}

#[derive(Clone)]
pub(super) struct CountThenInsert {
    client: Arc<Client>,
    count: Statement,
    insert: Statement,
}

impl CountThenInsert {
    pub(super) async fn connect(url: &str, executions: Executions) -> Result<CountThenInsert, String> {
        let table = executions.table();
        let connect = async {
            let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
            tokio::spawn(connection);
            client.batch_execute("set synchronous_commit = off").await?;
            let count = format!(
                "select count(*) from {table} where key = $1 and at > clock_timestamp() - interval '10 minutes'"
            );
            let insert = format!("insert into {table} (key, at) values ($1, clock_timestamp())");
            let (count, insert) = (client.prepare(&count).await?, client.prepare(&insert).await?);
            Ok::<_, tokio_postgres::Error>(CountThenInsert { client: Arc::new(client), count, insert })
        };
        connect.await.map_err(|error| format!("connecting to PostgreSQL: {error}"))
    }

    /// How many there are in the window.
    async fn count(&self, key: &str) -> Result<i64, tokio_postgres::Error> {
        Ok(self.client.query_one(&self.count, &[&key]).await?.get(0))
    }

    async fn insert(&self, key: &str) -> Result<(), tokio_postgres::Error> {
        self.client.execute(&self.insert, &[&key]).await.map(drop)
    }
}

impl Caller for CountThenInsert {
    async fn call(&mut self, draw: &mut Draw) -> Result<Answer, String> {
        let key = draw.one();
        let charge = async {
            // Too deep to be emptied, as everybody's.
            let allowed = self.count(key).await? < 1_000_000;
            if allowed {
                self.insert(key).await?;
            }
            Ok::<_, tokio_postgres::Error>(allowed)
        };
        charge.await.map(Answer::one).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stores::load::keys;

    /// What stands beside its speed.
    #[test]
    fn two_that_count_at_once_are_both_admitted() {
        let server = PostgresServer::start();
        make_tables(&server, 1).unwrap();
        let url = server.url("postgres");
        let counted = crate::stores::block_on(async {
            let one = CountThenInsert::connect(&url, Executions::Fifty).await?;
            let other = CountThenInsert::connect(&url, Executions::Fifty).await?;
            let names = keys("", 1);
            let key = names[0].as_str();
            let work = async {
                let before = [one.count(key).await?, other.count(key).await?];
                one.insert(key).await?;
                other.insert(key).await?;
                Ok::<_, tokio_postgres::Error>((before, one.count(key).await?))
            };
            work.await.map_err(|error| error.to_string())
        });
        // Under a limit of 51 both see room for one.
        assert_eq!(counted, Ok(([50, 50], 52)));
    }
}
