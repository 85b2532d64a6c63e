//! Tables and functions: creates them, updates them, and checks them at the start.
//!
//! Tables change by numbered migration; functions are replaced whenever their text has changed. A migration is one transaction
//! under its own lock, so that two processes that start at once do not collide, and no migration stays half done. Nothing is
//! prepared, and no setting outlives a transaction, so that it also works through a pooler. The SQL texts are in `statement.rs`;
//! `postgres.rs` calls this at the start.

use std::fmt::Write as _;

use sha2::{Digest, Sha256};
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};

use super::codec::column;
use super::fault::{Fault, Stage};
use super::pool::{BEGIN_CHORE, Pool, Session};
use super::statement::{MIGRATIONS, functions, with_prefix};
use crate::{Failure, StoreError};

/// The version of the tables that this program creates and understands: the number of the last migration.
const VERSION: i32 = 5;

/// The oldest supported server.
const OLDEST_SERVER: i32 = 13;

/// Creates the tables and functions, or updates them.
pub(super) async fn migrate(pool: &Pool) -> Result<(), StoreError> {
    let link = pool.open(Session::Chores).await.map_err(|fault| fault.error)?;
    let result = migrate_on(pool, &link.client).await;
    if result.is_err() {
        // The transaction would end with the connection anyway; this ends it sooner.
        let _ = link.client.batch_execute("rollback").await;
    }
    result
}

async fn migrate_on(pool: &Pool, client: &Client) -> Result<(), StoreError> {
    let failed = |error| Fault::of(error, Stage::Before, "migrating", &pool.place).error;
    let prefix = &pool.prefix;
    check_server(pool, client).await?;
    let functions = functions(prefix);
    let fingerprint = fingerprint(&functions);
    if found(pool, client).await? == Some((VERSION, fingerprint.clone())) {
        return Ok(());
    }
    let begin = "{begin}; set local synchronous_commit = on; select pg_advisory_xact_lock(hashtextextended('tollgate migrate {prefix}', 0));
        create table if not exists {prefix}schema (
          one boolean primary key default true check (one), version integer not null, functions text not null)";
    let begin = with_prefix(begin, prefix).replace("{begin}", BEGIN_CHORE);
    client.batch_execute(&begin).await.map_err(failed)?;
    // Another process may have migrated meanwhile.
    let (from, made) = found(pool, client).await?.unwrap_or((0, String::new()));
    for (version, text) in (1..).zip(MIGRATIONS).filter(|(version, _)| *version > from) {
        client.batch_execute(&with_prefix(text, prefix)).await.map_err(|error| {
            if error.code() == Some(&SqlState::DUPLICATE_TABLE) {
                return half_migrated(pool, &format!("some tables of version {version} are there already"))
                    .caused_by(error);
            }
            failed(error)
        })?;
    }
    if made != fingerprint {
        client.batch_execute(&functions).await.map_err(failed)?;
    }
    let note = "insert into {prefix}schema (version, functions) values ($1, $2)
        on conflict (one) do update set version = excluded.version, functions = excluded.functions";
    let values: [(&(dyn ToSql + Sync), Type); 2] = [(&VERSION, Type::INT4), (&fingerprint, Type::TEXT)];
    client.execute_typed(&with_prefix(note, prefix), &values).await.map_err(failed)?;
    client.batch_execute("commit").await.map_err(failed)?;
    tracing::info!(place = %pool.place, version = VERSION, from, "PostgreSQL schema is up to date");
    Ok(())
}

fn half_migrated(pool: &Pool, what: &str) -> StoreError {
    let prefix = &pool.prefix;
    StoreError::failed(
        Failure::Refused,
        format!(
            "PostgreSQL at {}: the schema of prefix {prefix:?} is half there ({what}); finish what was begun, or drop all \
             tables that begin with {prefix} and migrate again",
            pool.place
        ),
    )
}

/// The version of the tables and the fingerprint of the functions; `None` if there are none. A newer version than this program's
/// is an error, because its meaning is unknown.
async fn found(pool: &Pool, client: &Client) -> Result<Option<(i32, String)>, StoreError> {
    let failed = |error| Fault::of(error, Stage::Before, "reading the schema's version", &pool.place).error;
    let exists = "select to_regclass('{prefix}schema') is not null";
    let row = client.query_typed_one(&with_prefix(exists, &pool.prefix), &[]).await.map_err(failed)?;
    if !column::<bool>(&row, 0)? {
        return Ok(None);
    }
    let text = with_prefix("select version, functions from {prefix}schema", &pool.prefix);
    let Some(row) = client.query_typed_opt(&text, &[]).await.map_err(failed)? else { return Ok(None) };
    let version: i32 = column(&row, 0)?;
    if version > VERSION {
        return Err(StoreError::failed(
            Failure::Refused,
            format!(
                "PostgreSQL at {}: the schema of prefix {:?} is of version {version}, and this Tollgate knows up to \
                 {VERSION}: another, newer Tollgate uses it; upgrade this one",
                pool.place, pool.prefix
            ),
        ));
    }
    Ok(Some((version, column(&row, 1)?)))
}

fn fingerprint(text: &str) -> String {
    Sha256::digest(text).iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// Rejects a server that is too old or a standby.
async fn check_server(pool: &Pool, client: &Client) -> Result<(), StoreError> {
    let failed =
        |error| Fault::of(error, Stage::Before, "asking for the server's version", &pool.place).error;
    let text = "select current_setting('server_version_num')::integer, current_setting('server_version'), \
                pg_is_in_recovery(), current_setting('transaction_read_only')::boolean";
    let row = client.query_typed_one(text, &[]).await.map_err(failed)?;
    let (number, name): (i32, String) = (column(&row, 0)?, column(&row, 1)?);
    if number / 10_000 < OLDEST_SERVER {
        return Err(StoreError::failed(
            Failure::Refused,
            format!("PostgreSQL at {} is version {name}; {OLDEST_SERVER} or later is needed", pool.place),
        ));
    }
    if column(&row, 2)? || column(&row, 3)? {
        return Err(StoreError::failed(
            Failure::NotReady,
            format!(
                "PostgreSQL at {} only follows another server and takes no writes; name the primary",
                pool.place
            ),
        ));
    }
    Ok(())
}

/// Checks the server and the schema. A setup that cannot work is an error; dangerous settings are warnings.
pub(super) async fn probe(pool: &Pool) -> Result<Vec<String>, StoreError> {
    let link = pool.open(Session::Chores).await.map_err(|fault| fault.error)?;
    let client = &link.client;
    check_server(pool, client).await?;
    let Some((version, _)) = found(pool, client).await? else {
        return Err(match any_table(pool, client).await? {
            true => half_migrated(pool, "there are tables, and no version of them is noted"),
            false => StoreError::failed(
                Failure::Refused,
                format!(
                    "PostgreSQL at {}: there is no schema of prefix {:?} yet; run migrate",
                    pool.place, pool.prefix
                ),
            ),
        });
    };
    if version < VERSION {
        return Err(StoreError::failed(
            Failure::Refused,
            format!(
                "PostgreSQL at {}: the schema of prefix {:?} is of version {version}, and this Tollgate needs {VERSION}; run migrate",
                pool.place, pool.prefix
            ),
        ));
    }
    check_objects(pool, client).await?;
    warnings(pool, client).await
}

const TABLES: [&str; 7] = ["state", "execution", "hold", "life", "record", "record_revision", "schema"];
const FUNCTIONS: [&str; 14] = [
    "charge",
    "charge_each",
    "settle",
    "settle_each",
    "peek",
    "refund",
    "forget",
    "cleanup",
    "look",
    "now_us",
    "made_just_now",
    "read_records",
    "put_record",
    "remove_record",
];

async fn any_table(pool: &Pool, client: &Client) -> Result<bool, StoreError> {
    let failed = |error| Fault::of(error, Stage::Before, "looking for tables", &pool.place).error;
    let names: Vec<String> = TABLES.iter().map(|table| format!("{}{table}", pool.prefix)).collect();
    let text =
        "select coalesce(bool_or(to_regclass(name) is not null), false) from unnest($1::text[]) as name";
    column(&client.query_typed_one(text, &[(&names, Type::TEXT_ARRAY)]).await.map_err(failed)?, 0)
}

/// Checks that all objects exist, and that this user may use them.
async fn check_objects(pool: &Pool, client: &Client) -> Result<(), StoreError> {
    let failed = |error| Fault::of(error, Stage::Before, "looking the schema over", &pool.place).error;
    let name = |object: &&str| format!("{}{object}", pool.prefix);
    let tables: Vec<String> = TABLES.iter().map(name).collect();
    let functions: Vec<String> = FUNCTIONS.iter().map(name).collect();
    let text = "select 'table ' || name, to_regclass(name) is not null,
          (select string_agg(right_, ', ') from unnest(case when name like '%schema' then array['SELECT']
             else array['SELECT', 'INSERT', 'UPDATE', 'DELETE'] end) as right_
           where not has_table_privilege(to_regclass(name), right_))
        from unnest($1::text[]) as name
        union all
        select 'function ' || name, to_regproc(name) is not null,
          case when has_function_privilege(to_regproc(name), 'EXECUTE') then null else 'EXECUTE' end
        from unnest($2::text[]) as name";
    let values: [(&(dyn ToSql + Sync), Type); 2] =
        [(&tables, Type::TEXT_ARRAY), (&functions, Type::TEXT_ARRAY)];
    for row in client.query_typed(text, &values).await.map_err(failed)? {
        let object: String = column(&row, 0)?;
        if !column::<bool>(&row, 1)? {
            return Err(half_migrated(pool, &format!("{object} is missing")));
        }
        if let Some(rights) = column::<Option<String>>(&row, 2)? {
            let user = client.query_typed_one("select current_user::text", &[]).await.map_err(failed)?;
            let user: String = column(&user, 0)?;
            return Err(StoreError::failed(
                Failure::Refused,
                format!("PostgreSQL at {}: user {user} lacks {rights} on {object}; grant it", pool.place),
            ));
        }
    }
    Ok(())
}

/// Settings that may lose state or cost time, as text.
async fn warnings(pool: &Pool, client: &Client) -> Result<Vec<String>, StoreError> {
    let failed = |error| Fault::of(error, Stage::Before, "reading the server's settings", &pool.place).error;
    let bad = [
        ("fsync", "off", "a crash of the machine can destroy the whole database"),
        ("full_page_writes", "off", "a crash of the machine can tear pages of the tables"),
        ("autovacuum", "off", "tables of counters grow without end"),
        ("track_counts", "off", "autovacuum does not know what to do"),
    ];
    let text = "select name, setting, reset_val from pg_settings where name = any($1)";
    let names: Vec<&str> = bad
        .iter()
        .map(|(name, ..)| *name)
        .chain(["default_transaction_isolation", "deadlock_timeout"])
        .collect();
    let mut warnings = Vec::new();
    if pool.is_pooled() {
        warnings.push(format!(
            "PostgreSQL at {} is reached through a pooler: every call is a transaction of its own there and is not prepared, \
             which takes the server longer; let Tollgate connect to the server itself if it may",
            pool.place
        ));
    }
    for row in client.query_typed(text, &[(&names, Type::TEXT_ARRAY)]).await.map_err(failed)? {
        let (name, setting, reset): (String, String, String) =
            (column(&row, 0)?, column(&row, 1)?, column(&row, 2)?);
        if let Some((_, value, why)) = bad.iter().find(|(bad, value, _)| name == *bad && setting == *value) {
            warnings.push(format!("PostgreSQL runs with {name} = {value}: {why}"));
        }
        if name == "default_transaction_isolation" && reset != "read committed" {
            warnings.push(format!(
                "PostgreSQL's {name} is {reset}; our sessions use read committed, whatever a pooler in between does must leave that"
            ));
        }
    }
    Ok(warnings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_the_number_of_the_last_migration() {
        assert_eq!(usize::try_from(VERSION), Ok(MIGRATIONS.len()));
    }
}
