//! Calls that are waited for: a peer that has the server wait for all it can takes nothing from another.

use std::future::Future;
use std::net::{IpAddr, Ipv4Addr};

use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::Code;
use tonic::codegen::tokio_stream::{self, StreamExt};
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::client::{ask, ask_slowly, call, channel_from, reported};
use crate::server;

const CONFIG: &str = "[limits.api]\nstrategy = 'fixed_window'\nlimit = 1\nwindow = '1d'\n\
                      [[envoy]]\ndomain = 'edge'\nentries = ['user']\nlimit = 'api'\n";

/// Two machines, as the server sees it.
const GREEDY: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
const OTHER: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// More connections than it takes to hold all seats that there are, with a hundred calls each.
const CONNECTIONS: usize = 20;
const CALLS: usize = 100;

/// Beside a peer that does this with its connections, those of honest ones are served.
async fn check<H, F: Future<Output = H>>(hold: impl Fn(Vec<Channel>) -> F, honest: &[IpAddr]) {
    let server = server::start(CONFIG);
    let mut connections = Vec::new();
    for _ in 0..CONNECTIONS {
        connections.push(channel_from(&server, Some(GREEDY)).await);
    }
    let _held = hold(connections).await;
    for address in honest {
        is_served(channel_from(&server, Some(*address)).await, *address).await;
    }
}

/// Fifty calls whose headers come before their messages are answered, and so are a watch and a check of health.
async fn is_served(honest: Channel, address: IpAddr) {
    let (go, gone) = watch::channel(false);
    let mut calls = JoinSet::new();
    for index in 0..50 {
        let mut gone = gone.clone();
        let message = async move {
            gone.wait_for(|gone| *gone).await.expect("it is reported");
            call(&format!("user={address}/{index}"), 0)
        };
        let message = tokio_stream::once(message).then(|message| message);
        calls.spawn(ask_slowly(honest.clone(), message));
    }
    // With the first of these all calls were begun, and with the second their headers have come before it.
    for name in ["first", "second"] {
        ask(&honest, call(&format!("user={address}/{name}"), 0)).await.expect("an answer");
    }
    go.send(true).expect("they wait");
    while let Some(answered) = calls.join_next().await {
        assert_eq!(
            reported(&answered.expect("no panic").expect("an answer")),
            "OK: OK 0/1 DAY api",
            "{address}"
        );
    }

    let mut health = HealthClient::new(honest);
    let mut watched = health.watch(HealthCheckRequest::default()).await.expect("an answer").into_inner();
    watched.message().await.expect("a message").expect("one");
    health.check(HealthCheckRequest::default()).await.expect("an answer");
}

#[tokio::test]
async fn a_peer_that_watches_health_takes_nothing_from_another_nor_from_its_own_calls() {
    let hold = async |connections: Vec<Channel>| {
        let mut held = Vec::new();
        for connection in connections {
            let mut health = HealthClient::new(connection);
            for _ in 0..CALLS {
                // Where it is refused it has all it can have.
                held.extend(health.watch(HealthCheckRequest::default()).await);
            }
        }
        assert!((1..CONNECTIONS * CALLS).contains(&held.len()), "{}", held.len());
        held
    };
    check(hold, &[OTHER, GREEDY]).await;
}

#[tokio::test]
async fn a_peer_whose_calls_do_not_come_whole_takes_nothing_from_another() {
    let hold = async |connections: Vec<Channel>| {
        let mut held = JoinSet::new();
        for connection in connections {
            for _ in 0..CALLS {
                held.spawn(ask_slowly(connection.clone(), tokio_stream::pending()));
            }
        }
        // Where one is refused the peer has all it can have.
        let first = held.join_next().await.expect("one").expect("no panic").expect_err("it is not whole");
        assert_eq!(first.code(), Code::ResourceExhausted, "{first}");
        held
    };
    check(hold, &[OTHER]).await;
}
