//! What a reservation and a lease take in Redis, by `MEMORY USAGE`: all that the keys of a store grow by for one more of them under
//! a key that has a state. The state of the key itself is not counted, the record of the lease in it is.

use tollgate_store::{ChargeId, Hold, Limit, Micros, Settled, Settlement, Store, StoredCharge, StoredLimit};
use tollgate_testkit::redis::RedisServer;

use super::{HOUR, beside_others, item, keys, store_on};

/// The bytes of all keys of a store.
fn bytes(server: &RedisServer, prefix: &str) -> i64 {
    let of = |key: &String| server.command(&["MEMORY", "USAGE", key, "SAMPLES", "0"]).expect("usage").int();
    keys(server, prefix).iter().map(|key| of(key).expect("a number")).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reservation_and_a_lease_take_at_most_two_hundred_bytes() {
    const MOST: i64 = 200;
    const COUNT: i64 = 100;
    let _turn = beside_others().await;
    let server = RedisServer::start();
    let day = Micros::from_secs(86_400);
    for limit in [
        Limit::token_bucket("1000/m", 1_000),
        Limit::leaky_bucket("1000/m", 1_000),
        Limit::fixed_window(1_000, HOUR),
        Limit::clock_window(1_000, day),
        Limit::sliding_window(1_000, HOUR),
        Limit::sliding_window_counter(1_000, day),
        Limit::concurrency(1_000, Micros::from_secs(60)),
    ] {
        let limit = StoredLimit::new("requests", limit.expect("a sound limit"));
        let store = store_on(&server, None);
        let mut ids = Vec::new();
        let mut before = 0;
        for number in 0..=COUNT {
            let hold = Hold { id: ChargeId::random(), ttl: Micros::from_secs(600) };
            let charged = store.charge(&[item(&limit, "k")], Some(hold)).await.expect("a hold");
            assert!(charged.allowed);
            if number == 0 {
                before = bytes(&server, store.prefix());
            }
            ids.push(hold.id);
        }
        let each = (bytes(&server, store.prefix()) - before) / COUNT;
        let strategy = limit.limit.strategy();
        assert!(each > 0 && each <= MOST, "a reservation under {strategy:?} takes {each} bytes");
        let open = bytes(&server, store.prefix());
        for id in ids {
            assert_eq!(store.settle(id, &Settlement::Release).await.expect("a release"), Settled::Done);
        }
        let settled = bytes(&server, store.prefix());
        assert!(settled <= open, "settled ones take no more, {strategy:?}: {settled} after {open}");
    }
}

/// A charge of three limits at once is held in one key.
#[tokio::test(flavor = "multi_thread")]
async fn a_reservation_of_three_limits_takes_at_most_four_hundred_bytes() {
    let _turn = beside_others().await;
    let server = RedisServer::start();
    let store = store_on(&server, None);
    let limits = [
        ("requests", Limit::token_bucket("1000/m", 1_000)),
        ("tokens", Limit::sliding_window_counter(1_000_000, HOUR)),
        ("running", Limit::concurrency(1_000, Micros::from_secs(60))),
    ]
    .map(|(name, limit)| StoredLimit::new(name, limit.expect("a sound limit")));
    let items: Vec<StoredCharge<'_>> = limits.iter().map(|limit| item(limit, "k")).collect();
    let mut before = 0;
    for number in 0..=20 {
        let hold = Hold { id: ChargeId::random(), ttl: Micros::from_secs(600) };
        assert!(store.charge(&items, Some(hold)).await.expect("a hold").allowed);
        if number == 0 {
            before = bytes(&server, store.prefix());
        }
    }
    let each = (bytes(&server, store.prefix()) - before) / 20;
    assert!(each > 0 && each <= 400, "{each} bytes");
}
