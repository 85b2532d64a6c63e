//! `/v1/reserve`, `/v1/settle`, `/v1/cancel` and `/v1/renew`.

use crate::server::{self, Tollgate};

/// Reserves, and gives the name of the reservation.
fn reserve(server: &Tollgate, limit: &str, cost: u64) -> String {
    let body = format!(r#"{{"limit":"{limit}","key":"user:1","cost":{cost},"ttl_ms":60000}}"#);
    let answer = server.post("/v1/reserve", &body);
    let (_, rest) = answer.body.split_once("\"reservation\":\"").expect("a reservation");
    rest[..32].to_owned()
}

fn remaining(server: &Tollgate, limit: &str) -> u64 {
    let body = server.get(&format!("/v1/status?limit={limit}&key=user:1")).body;
    let (_, rest) = body.split_once("\"remaining\":").expect("what remains");
    rest.split(',').next().unwrap().parse().expect("a number")
}

/// Asks about a reservation: what became of it, and what remains under the limit.
fn check(server: &Tollgate, path: &str, id: &str, more: &str, settled: &str, limit: &str, left: u64) {
    let answer = server.post(path, &format!(r#"{{"reservation":"{id}"{more}}}"#));
    assert_eq!(answer.status, 200, "{path}{more}: {}", answer.body);
    assert_eq!(answer.body, format!(r#"{{"settled":"{settled}"}}"#), "{path}{more}");
    assert_eq!(remaining(server, limit), left, "{path}{more}");
}

#[test]
fn a_reservation_is_corrected_once() {
    let server = server::start();
    let id = reserve(&server, "api", 3);
    assert_eq!(remaining(&server, "api"), 0);
    check(&server, "/v1/settle", &id, r#","actual":1"#, "done", "api", 2);
    check(&server, "/v1/settle", &id, r#","actual":3"#, "already", "api", 2);
    check(&server, "/v1/cancel", &id, "", "already", "api", 2);
    let id = reserve(&server, "api", 2);
    check(&server, "/v1/cancel", &id, "", "done", "api", 2);
    let id = reserve(&server, "api", 1);
    check(&server, "/v1/settle", &id, r#","actual":{"api":2}"#, "done", "api", 0);
    let never = "0123456789abcdef0123456789abcdef";
    check(&server, "/v1/settle", never, r#","actual":1"#, "unknown", "api", 0);
}

#[test]
fn a_lease_is_renewed_and_given_back() {
    let server = server::start();
    let id = reserve(&server, "uploads", 2);
    check(&server, "/v1/renew", &id, "", "done", "uploads", 0);
    check(&server, "/v1/cancel", &id, "", "done", "uploads", 2);
    check(&server, "/v1/renew", &id, "", "already", "uploads", 2);
}

#[test]
fn what_is_denied_is_not_reserved() {
    let server = server::start();
    let answer = server.post("/v1/reserve", r#"{"limit":"login","key":"user:1","cost":3}"#);
    assert_eq!(answer.status, 200);
    assert!(answer.body.contains("\"allowed\":false"), "{}", answer.body);
    assert!(!answer.body.contains("reservation"), "{}", answer.body);
}
