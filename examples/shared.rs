//! One policy on whichever store the environment names: memory, Redis, Redis Cluster or PostgreSQL.
//!
//! ```sh
//! cargo run -p tollgate --example shared --features config,redis,postgres
//! RL_STORAGE_MODE=redis REDIS_ADDR=127.0.0.1:6379 cargo run -p tollgate --example shared --features config,redis,postgres
//! RL_STORAGE_MODE=postgres DATABASE_URL=postgres://localhost/app cargo run -p tollgate --example shared --features config,redis,postgres
//! ```

use tollgate::config::Config;
use tollgate::{Charge, Tollgate};

const POLICY: &str = r#"
[store]
fallback = "local"               # count in this process while the store is out of reach

[limits.global]
strategy = "token_bucket"
rate = "1000/s"
burst = 2000

[limits.per-user]
strategy = "fixed_window"
limit = 3
window = "1m"
fallback = "closed"              # rather deny than lose count
"#;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    if let Err(error) = run().await {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

async fn run() -> Result<(), Box<dyn std::error::Error>> {
    let config = Config::parse_with_env(POLICY, std::env::vars())?;
    println!("counting in {}", config.store.mode);
    let gate = Tollgate::open(&config).await?;
    for request in 1..=4 {
        let decision =
            gate.charge(&[Charge::new("global", "all"), Charge::new("per-user", "user:42")]).await?;
        let how = if decision.is_degraded() { " (the store did not answer)" } else { "" };
        println!("request {request}: {decision}{how}");
    }
    // So that it can be run again at once.
    gate.reset("per-user", "user:42").await?;
    Ok(())
}
