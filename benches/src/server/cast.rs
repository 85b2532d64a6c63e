//! Who takes part in each protocol, and what they are asked.
//!
//! Everybody decides by a token bucket over the same keys. Tollgate is asked with its metrics on, as it comes. What is denied
//! is a bucket of one that takes weeks to fill.

use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::Arc;

use prost::Message;
use tollgate_testkit::redis::RedisServer;

use super::Programs;
use super::constant::{self, Face, to_hex};
use super::http1::{Http1, post};
use super::http2::{Http2, framed};
use super::load::{Client, Speech};
use super::process::{Process, free_address, on};
use super::proto::common::RateLimitDescriptor;
use super::proto::common::rate_limit_descriptor::Entry;
use super::proto::service::RateLimitRequest;
use super::resp::{Answer, Resp, pipelines};
use super::rounds::{Cell, Contestant, Plan, run};
use crate::machine::Core;

pub(crate) const INCR: &str = "Redis INCR";
pub(crate) const THROTTLE: &str = "CL.THROTTLE, allowed";
pub(crate) const DENIED: &str = "CL.THROTTLE, denied";
pub(crate) const CHECK: &str = "TOLLGATE.CHECK";
pub(crate) const CRAB_RESP: &str = "throttlecrab THROTTLE";

pub(crate) const HTTP_CONSTANT: &str = "axum, constant";
pub(crate) const HTTP: &str = "POST /v1/check";
pub(crate) const HTTP_16: &str = "POST /v1/checks of 16";
pub(crate) const HTTP_64: &str = "POST /v1/checks of 64";
pub(crate) const CRAB_HTTP: &str = "throttlecrab POST /throttle";

pub(crate) const GRPC_CONSTANT: &str = "tonic, constant, 10x5";
pub(crate) const GRPC: &str = "Envoy RLS, 10x5";
pub(crate) const GRPC_16: &str = "Envoy RLS of 16, 10x5";
pub(crate) const GRPC_CONSTANT_ONE: &str = "tonic, constant, 1x64";
pub(crate) const GRPC_ONE: &str = "Envoy RLS, 1x64";
pub(crate) const GRPC_16_ONE: &str = "Envoy RLS of 16, 1x64";

/// How many connections there are, of Redis' protocol and HTTP.
pub(crate) const CONNECTIONS: usize = 50;

/// How answers begin.
const JSON: &[u8] = b"{\"allowed\":true";
const JSON_MANY: &[u8] = b"{\"results\":[{\"allowed\":true";
/// The first field is the code, and the code is OK.
const RLS_OK: &[u8] = &[8, 1];

/// The keys, in an order that no store keeps them in.
pub(crate) fn keys(count: usize) -> Vec<String> {
    // A prime, so that every key is met once.
    (0..count).map(|index| format!("user:{:010}", index * 7_919 % count)).collect()
}

/// Tollgate, serving.
struct Tollgate {
    process: Process,
    http: SocketAddr,
    resp: SocketAddr,
    grpc: SocketAddr,
}

impl Tollgate {
    fn start(core: Option<Core>, programs: &Programs) -> Result<Tollgate, String> {
        let policy = concat!(env!("CARGO_MANIFEST_DIR"), "/src/server/policy.toml");
        let mut command = Command::new(&programs.tollgate);
        command.args(["serve", "--config", policy]);
        command.args(["--listen", "127.0.0.1:0", "--resp", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]);
        let mut process = Process::start(core, command.stdout(Stdio::null()).stderr(Stdio::piped()))?;
        let text = process.take_stderr();
        let [http, resp, grpc] = process.addresses(text, ["API    http://", "redis://", "grpc://"])?;
        Ok(Tollgate { process, http, resp, grpc })
    }
}

/// throttlecrab-server with one door open.
fn throttlecrab(
    core: Option<Core>,
    programs: &Programs,
    face: &str,
) -> Result<(Process, SocketAddr), String> {
    let address = free_address()?;
    let mut command = Command::new(&programs.throttlecrab);
    command.args([format!("--{face}"), format!("--{face}-host"), "127.0.0.1".into()]);
    command.args([format!("--{face}-port"), address.port().to_string()]);
    let mut process = Process::start(core, command.stdout(Stdio::null()).stderr(Stdio::null()))?;
    process.until_listening(address)?;
    Ok((process, address))
}

/// This program again, answering what was heard.
fn constant(core: Option<Core>, face: Face, answer: &[u8]) -> Result<(Process, SocketAddr), String> {
    let program = std::env::current_exe().map_err(|error| format!("looking for this program: {error}"))?;
    let mut command = Command::new(program);
    command.args([constant::COMMAND, face.word(), &to_hex(answer)]);
    let mut process = Process::start(core, command.stdout(Stdio::piped()))?;
    let text = process.take_stdout();
    let [address] = process.addresses(text, ["listening on "])?;
    Ok((process, address))
}

/// The response of a server to the first request.
fn first_answer(address: SocketAddr, speech: impl Fn() -> Box<dyn Speech>) -> Result<Vec<u8>, String> {
    let heard = Client::connect(address, 1, speech)?.run_through(1)?;
    if heard.astray > 0 {
        return Err(format!("{address} did not answer as it should"));
    }
    heard.first.ok_or_else(|| format!("{address} sent nothing"))
}

/// Redis' protocol.
pub(crate) fn resp(plan: &Plan, server_core: Option<Core>, programs: &Programs) -> Result<Vec<Cell>, String> {
    let keys = keys(plan.keys);
    let redis = on(server_core, RedisServer::start);
    let ours = Tollgate::start(server_core, programs)?;
    let (crab, crab_address) = throttlecrab(server_core, programs, "redis")?;
    let redis_address = SocketAddr::from(([127, 0, 0, 1], redis.port()));
    let redis_id = redis.pid().ok_or("Redis is gone")?;
    let denied: Vec<String> = keys.iter().map(|key| format!("no-{key}")).collect();
    let five = |begins| Answer { lines: 6, begins };
    let one = |name, about, process, address, pipelines: Arc<[Vec<u8>]>, answer| {
        let speech = || Box::new(Resp::new(pipelines.clone(), answer)) as Box<dyn Speech>;
        let client = Client::connect(address, CONNECTIONS, speech)?;
        Ok::<_, String>(Contestant { name, about, client, process, checks: 1 })
    };
    let mut contestants = [
        one(
            INCR,
            "what Redis does at its fastest: counts, and decides nothing",
            redis_id,
            redis_address,
            pipelines(&keys, |key| vec!["INCR", key]),
            Answer { lines: 1, begins: b":" },
        )?,
        one(
            THROTTLE,
            "as redis-cell has it; limits come with the call",
            ours.process.id(),
            ours.resp,
            pipelines(&keys, |key| vec!["CL.THROTTLE", key, "999999999", "1000000", "1"]),
            five(b"*5\r\n:0\r\n"),
        )?,
        one(
            DENIED,
            "the same for keys that have nothing left",
            ours.process.id(),
            ours.resp,
            pipelines(&denied, |key| vec!["CL.THROTTLE", key, "0", "1", "10000000"]),
            five(b"*5\r\n:1\r\n"),
        )?,
        one(
            CHECK,
            "a limit of the policy",
            ours.process.id(),
            ours.resp,
            pipelines(&keys, |key| vec!["TOLLGATE.CHECK", "api", key]),
            Answer { lines: 8, begins: b"*6\r\n:1\r\n" },
        )?,
        one(
            CRAB_RESP,
            "throttlecrab-server; it stalls between pipelines, so only its CPU says something",
            crab.id(),
            crab_address,
            pipelines(&keys, |key| vec!["THROTTLE", key, "999999", "1000000", "1"]),
            five(b"*5\r\n:1\r\n"),
        )?,
    ];
    run(plan, &mut contestants)
}

/// HTTP with JSON.
pub(crate) fn http(plan: &Plan, server_core: Option<Core>, programs: &Programs) -> Result<Vec<Cell>, String> {
    let keys = keys(plan.keys);
    let ours = Tollgate::start(server_core, programs)?;
    let (crab, crab_address) = throttlecrab(server_core, programs, "http")?;
    let check = |key: &String| format!("{{\"limit\":\"api\",\"key\":\"{key}\"}}");
    let single: Arc<[Vec<u8>]> = keys.iter().map(|key| post("/v1/check", &check(key))).collect();
    let several = |count: usize| -> Arc<[Vec<u8>]> {
        let body = |keys: &[String]| {
            let checks: Vec<String> = keys.iter().map(check).collect();
            post("/v1/checks", &format!("{{\"checks\":[{}]}}", checks.join(",")))
        };
        keys.chunks_exact(count).map(body).collect()
    };
    let to_crab = |key: &String| {
        let numbers = "\"max_burst\":999999,\"count_per_period\":1000000,\"period\":1";
        post("/throttle", &format!("{{\"key\":\"{key}\",{numbers}}}"))
    };
    let answer = first_answer(ours.http, || Box::new(Http1::new(single.clone(), JSON)))?;
    let (axum, axum_address) = constant(server_core, Face::Axum, &answer)?;
    let one = |name, about, process, address, requests: Arc<[Vec<u8>]>, begins, checks| {
        let speech = || Box::new(Http1::new(requests.clone(), begins)) as Box<dyn Speech>;
        let client = Client::connect(address, CONNECTIONS, speech)?;
        Ok::<_, String>(Contestant { name, about, client, process, checks })
    };
    let (we, api) = (ours.process.id(), ours.http);
    let mut contestants = [
        one(
            HTTP_CONSTANT,
            "our first answer, always, to the same requests",
            axum.id(),
            axum_address,
            single.clone(),
            JSON,
            1,
        )?,
        one(HTTP, "one check", we, api, single, JSON, 1)?,
        one(HTTP_16, "checks/s and CPU of one check", we, api, several(16), JSON_MANY, 16)?,
        one(HTTP_64, "the same", we, api, several(64), JSON_MANY, 64)?,
        one(
            CRAB_HTTP,
            "throttlecrab-server",
            crab.id(),
            crab_address,
            keys.iter().map(to_crab).collect(),
            JSON,
            1,
        )?,
    ];
    run(plan, &mut contestants)
}

/// Envoy's service.
pub(crate) fn grpc(plan: &Plan, server_core: Option<Core>, programs: &Programs) -> Result<Vec<Cell>, String> {
    let keys = keys(plan.keys);
    let ours = Tollgate::start(server_core, programs)?;
    let calls_of = |count: usize| -> Arc<[Vec<u8>]> {
        keys.chunks_exact(count).map(|keys| framed(&call(keys).encode_to_vec())).collect()
    };
    let (single, sixteen) = (calls_of(1), calls_of(16));
    let answer = first_answer(ours.grpc, || Box::new(Http2::new(single.clone(), 1, RLS_OK)))?;
    let (tonic, tonic_address) = constant(server_core, Face::Tonic, &answer)?;
    let one = |name, about, process, address, (connections, calls), messages: &Arc<[Vec<u8>]>, checks| {
        let speech = || Box::new(Http2::new(messages.clone(), calls, RLS_OK)) as Box<dyn Speech>;
        let client = Client::connect(address, connections, speech)?;
        Ok::<_, String>(Contestant { name, about, client, process, checks })
    };
    let (we, envoy) = (ours.process.id(), ours.grpc);
    let (ten, lone) = ((10, 5), (1, 64));
    let about = "our first answer, always; 10 connections with 5 calls at once";
    let mut contestants = [
        one(GRPC_CONSTANT, about, tonic.id(), tonic_address, ten, &single, 1)?,
        one(GRPC, "one descriptor", we, envoy, ten, &single, 1)?,
        one(
            GRPC_16,
            "16 descriptors, one charge; checks/s and CPU of one check",
            we,
            envoy,
            ten,
            &sixteen,
            16,
        )?,
        one(GRPC_CONSTANT_ONE, "1 connection with 64", tonic.id(), tonic_address, lone, &single, 1)?,
        one(GRPC_ONE, "one descriptor", we, envoy, lone, &single, 1)?,
        one(GRPC_16_ONE, "16 descriptors", we, envoy, lone, &sixteen, 16)?,
    ];
    run(plan, &mut contestants)
}

/// A call with a descriptor for each key.
fn call(keys: &[String]) -> RateLimitRequest {
    let descriptor = |key: &String| RateLimitDescriptor {
        entries: vec![Entry { key: "remote_address".into(), value: key.clone() }],
        ..RateLimitDescriptor::default()
    };
    let descriptors = keys.iter().map(descriptor).collect();
    RateLimitRequest { domain: "edge".into(), descriptors, hits_addend: 0 }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_key_comes_once() {
        for count in [1_000, 10_000] {
            assert_eq!(keys(count).into_iter().collect::<HashSet<_>>().len(), count);
        }
    }
}
