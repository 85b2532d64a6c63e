//! The time that scripts take inside of the server, apart from the round trip: the store says what the server has counted.

use std::time::{Duration, Instant};

use tollgate_store::{RedisOptions, RedisStore, ScriptTime, Store, StoredLimit};
use tollgate_testkit::redis::{RedisCluster, RedisServer};

use super::suite::redis_6_2;
use super::{beside_others, hourly, item, patient, store_on};

/// The store looks about once a second; this is long enough for a loaded machine.
const NOTICED_WITHIN: Duration = Duration::from_secs(20);

/// What one server has counted for the scripts of charges.
fn counted(server: &RedisServer) -> ScriptTime {
    let stat = server.info("commandstats", "cmdstat_evalsha").unwrap_or_default();
    let number = |name: &str| {
        let mut fields = stat.split(',').filter_map(|field| field.split_once('='));
        fields.find(|(field, _)| *field == name).map_or(0, |(_, value)| value.parse().expect("a number"))
    };
    ScriptTime { calls: number("calls"), us: number("usec") }
}

/// One who charges, and what it saw of that.
struct Caller {
    store: RedisStore,
    limit: StoredLimit,
    charges: u64,
    round_trips: Duration,
    last: ScriptTime,
}

impl Caller {
    fn of(store: RedisStore) -> Caller {
        let limit = hourly("api", 1_000_000);
        Caller { store, limit, charges: 0, round_trips: Duration::ZERO, last: ScriptTime::default() }
    }

    /// A charge, and what the store says then; it never goes back.
    async fn charge(&mut self, key: &str) -> Option<ScriptTime> {
        let start = Instant::now();
        let _ = self.store.charge(&[item(&self.limit, key)], None).await;
        self.round_trips += start.elapsed();
        self.charges += 1;
        let script_time = self.store.script_time();
        let now = script_time.unwrap_or_default();
        assert!(now.calls >= self.last.calls && now.us >= self.last.us, "{:?}, then {now:?}", self.last);
        self.last = now;
        script_time
    }

    /// Charges until the store says something that will do.
    async fn until(&mut self, what: &str, will_do: impl Fn(ScriptTime) -> bool) -> ScriptTime {
        let start = Instant::now();
        loop {
            match self.charge("k").await {
                Some(script_time) if will_do(script_time) => return script_time,
                other => assert!(start.elapsed() < NOTICED_WITHIN, "{what}: {other:?}"),
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Some charges, until the store has counted their scripts.
    async fn count(&mut self, charges: u64) -> ScriptTime {
        let before = self.store.script_time().unwrap_or_default();
        for _ in 0..charges {
            self.charge("k").await;
        }
        self.until("as many scripts as charges", |now| now.calls >= before.calls + charges).await
    }
}

async fn is_counted_on(server: RedisServer) {
    let mut caller = Caller::of(store_on(&server, None));
    assert_eq!(caller.store.script_time(), None, "nobody has looked");
    let first = caller.until("the first look", |_| true).await;
    assert!(first.calls < caller.charges, "{first:?}: what was before the first look is not counted");
    let counted_here = caller.count(1_000).await;
    // Each charge was one script, and each script ran within the round trip of its charge.
    assert!(counted_here.calls <= caller.charges, "{counted_here:?} of {} charges", caller.charges);
    let server_says = counted(&server);
    assert!(0 < counted_here.us && counted_here.us <= server_says.us, "{counted_here:?}, {server_says:?}");
    assert!(u128::from(counted_here.us) < caller.round_trips.as_micros(), "{:?}", caller.round_trips);

    server.command(&["CONFIG", "RESETSTAT"]).expect("reset");
    assert_eq!(counted(&server), ScriptTime::default(), "the server begins anew");
    let counted_here = caller.count(50).await;
    assert!(counted_here.calls <= caller.charges, "{counted_here:?} of {} charges", caller.charges);
    assert!(u128::from(counted_here.us) < caller.round_trips.as_micros(), "{:?}", caller.round_trips);

    server.restart();
    caller.count(50).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_time_of_scripts_is_counted_apart_from_round_trips() {
    let _turn = beside_others().await;
    is_counted_on(RedisServer::start()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_time_of_scripts_is_counted_on_redis_6_2() {
    let _turn = beside_others().await;
    is_counted_on(redis_6_2()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_servers_of_a_cluster_are_added_up() {
    let _turn = beside_others().await;
    let cluster = RedisCluster::start();
    let mut caller =
        Caller::of(RedisStore::new(patient(RedisOptions::cluster(cluster.urls()))).expect("sound options"));
    let keys: Vec<String> = (0..32).map(|key| format!("k{key}")).collect();
    let start = Instant::now();
    // More than the busiest server has run by itself, and no more than all of them.
    loop {
        for key in &keys {
            caller.charge(key).await;
        }
        let of_each = cluster.nodes().iter().map(|server| counted(server).calls);
        let most = of_each.max().expect("servers");
        if caller.last.calls > most {
            break;
        }
        assert!(start.elapsed() < NOTICED_WITHIN, "{:?}, and one server alone has {most}", caller.last);
    }
    let all = cluster.nodes().iter().map(counted);
    let (calls, us) = all.fold((0, 0), |sum, server| (sum.0 + server.calls, sum.1 + server.us));
    assert!(caller.last.calls <= calls && caller.last.us <= us, "{:?} of {calls}, {us} us", caller.last);
    assert!(u128::from(caller.last.us) < caller.round_trips.as_micros(), "{:?}", caller.round_trips);
}
