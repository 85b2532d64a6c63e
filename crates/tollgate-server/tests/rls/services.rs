//! Health and reflection, and the end of the server.

use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

use crate::client::{ask, call, channel};
use crate::server;

const SERVICE: &str = "envoy.service.ratelimit.v3.RateLimitService";

#[tokio::test]
async fn health_is_told_until_the_end() {
    let server = server::start("");
    let mut health = HealthClient::new(channel(&server).await);
    let asked = |service: &str| HealthCheckRequest { service: service.to_owned() };
    for service in ["", SERVICE] {
        let answered = health.check(asked(service)).await.expect("an answer").into_inner();
        assert_eq!(answered.status(), ServingStatus::Serving, "{service}");
    }
    assert_eq!(health.check(asked("other")).await.expect_err("not ours").code(), Code::NotFound);
    // A watcher gets the end of the stream, and does not delay it.
    let mut watched = health.watch(asked("")).await.expect("an answer").into_inner();
    let first = watched.message().await.expect("a message").expect("one");
    assert_eq!(first.status(), ServingStatus::Serving);
    let stopped = tokio::spawn(server::stop(server));
    let last = watched.message().await.expect("a message").expect("one");
    assert_eq!(last.status(), ServingStatus::NotServing);
    assert_eq!(watched.message().await.expect("no fault"), None);
    assert_eq!(stopped.await.expect("it ends").code, Some(0));
}

#[tokio::test]
async fn with_a_delay_health_is_told_first_and_calls_are_answered_until_then() {
    let server = server::start("server.drain_delay = '10m'");
    let mut health = HealthClient::new(channel(&server).await);
    let mut watched = health.watch(HealthCheckRequest::default()).await.expect("an answer").into_inner();
    let first = watched.message().await.expect("a message").expect("one");
    assert_eq!(first.status(), ServingStatus::Serving);
    server.signal(rustix::process::Signal::TERM);
    let next = watched.message().await.expect("a message").expect("one");
    assert_eq!(next.status(), ServingStatus::NotServing);
    let anew = channel(&server).await;
    ask(&anew, call("user=a", 0)).await.expect("an answer");
    let asked = HealthCheckRequest { service: SERVICE.to_owned() };
    let answered = HealthClient::new(anew).check(asked).await.expect("an answer").into_inner();
    assert_eq!(answered.status(), ServingStatus::NotServing);
    assert_eq!(server::stop(server).await.code, Some(0), "after a second signal it ends at once");
}

#[tokio::test]
async fn reflection_lists_the_services_and_knows_their_messages() {
    let server = server::start("");
    let channel = channel(&server).await;
    let mut reflection = ServerReflectionClient::new(channel);
    let requests = [
        MessageRequest::ListServices(String::new()),
        MessageRequest::FileContainingSymbol(SERVICE.to_owned()),
    ];
    let requests = requests
        .map(|request| ServerReflectionRequest { host: String::new(), message_request: Some(request) });
    let asked = tokio_stream(requests);
    let mut answers = reflection.server_reflection_info(asked).await.expect("an answer").into_inner();
    let mut next = async || answers.message().await.expect("a message").expect("one").message_response;
    let Some(MessageResponse::ListServicesResponse(list)) = next().await else { panic!("no list") };
    let mut names: Vec<_> = list.service.into_iter().map(|service| service.name).collect();
    names.sort();
    assert_eq!(names, [SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"]);
    let Some(MessageResponse::FileDescriptorResponse(files)) = next().await else { panic!("no file") };
    let text = String::from_utf8_lossy(&files.file_descriptor_proto.concat()).into_owned();
    assert!(text.contains("ShouldRateLimit") && text.contains("hits_addend"));
}

/// Questions as a stream that ends with the last.
fn tokio_stream(
    requests: [ServerReflectionRequest; 2],
) -> impl tonic::IntoStreamingRequest<Message = ServerReflectionRequest> {
    tonic::codegen::tokio_stream::iter(requests)
}

#[tokio::test]
async fn calls_in_flight_are_answered_and_then_it_ends() {
    let server = server::start("");
    let channel = channel(&server).await;
    let calls = (0..50).map(|_| {
        let channel = channel.clone();
        tokio::spawn(async move { ask(&channel, call("user=a", 0)).await })
    });
    let calls: Vec<_> = calls.collect();
    for call in calls {
        call.await.expect("no panic").expect("an answer");
    }
    assert_eq!(server::stop(server).await.code, Some(0));
    let error = ask(&channel, call("user=a", 0)).await.expect_err("nobody is there");
    assert_eq!(error.code(), Code::Unavailable);
}
