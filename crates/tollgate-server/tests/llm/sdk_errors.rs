//! What the providers' own SDKs, unmodified, make of refusals, of streams that break off, and of streams that they close.

use std::time::Duration;

use serde_json::json;
use tollgate_testkit::provider::{Arrival, Provider, Reply, anthropic, openai};
use tollgate_testkit::tollgate::Tollgate;

use crate::sdks::python;
use crate::{gateway, left, until};

/// What both SDKs are asked by the same script: `client`, `ask` and `errors`, the class and the status of what is raised.
const OPENAI: &str = r#"
import sys, openai as sdk
client = sdk.OpenAI(base_url=sys.argv[1] + "/v1", api_key="any")
ask = dict(model="gpt-4o", messages=[{"role": "user", "content": "hi"}], max_tokens=92, metadata={"input_tokens": "8"})
def create(client, **more):
    return client.chat.completions.create(**ask, **more)
"#;

const ANTHROPIC: &str = r#"
import sys, anthropic as sdk
client = sdk.Anthropic(base_url=sys.argv[1], api_key="any")
ask = dict(model="claude-x", max_tokens=92, messages=[{"role": "user", "content": "hi"}])
def create(client, **more):
    return client.messages.create(**ask, **more)
"#;

const ERRORS: &str = r#"
def raised(run):
    try:
        run()
        return "nothing"
    except Exception as error:
        return f"{type(error).__name__} {getattr(error, 'status_code', None)}"
"#;

/// An SDK, the provider that it speaks to, and what the gateway calls it.
struct Sdk {
    kind: &'static str,
    script: &'static str,
    answers: fn(&Arrival) -> Reply,
    limit: &'static str,
}

const SDKS: [Sdk; 2] = [
    Sdk { kind: "openai", script: OPENAI, answers: openai, limit: "llm.gpt-4o" },
    Sdk { kind: "anthropic", script: ANTHROPIC, answers: anthropic, limit: "llm.claude-x" },
];

impl Sdk {
    /// What a script prints.
    fn run(&self, script: &str, url: &str) -> String {
        python(&[self.script, ERRORS, script].concat(), url)
    }

    /// A gateway with these limits of its model.
    fn gateway(&self, provider: &Provider, rest: &str, limits: &str) -> Tollgate {
        let model = self.limit.strip_prefix("llm.").unwrap_or_default();
        gateway(provider, self.kind, &format!("{rest}\n[llm.models.{model}]\n{limits}"))
    }

    fn left(&self, server: &Tollgate, unit: &str) -> u64 {
        left(server, &format!("{}.{unit}", self.limit))
    }
}

/// The number of lines of `tollgate_llm_requests_total`, of all outcomes: how often the SDK asked.
fn asked(server: &Tollgate) -> f64 {
    let metrics = server.get("/metrics").body;
    let lines = metrics.lines().filter(|line| line.starts_with("tollgate_llm_requests_total{"));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

/// A stream that breaks off after some words raises in the SDK what it raises at the provider, after the same words; it is not sent again.
#[test]
fn c4_a_stream_that_breaks_off_raises_the_sdks_own_error() {
    const BROKEN: &str = r#"
seen = []
def read():
    for event in create(client, stream=True):
        seen.append(event)
print(raised(read), len(seen))
"#;
    for (sdk, events, error) in [(&SDKS[0], 2, "APIConnectionError"), (&SDKS[1], 4, "RemoteProtocolError")] {
        let cut = sdk.answers;
        // Pings are no events of the SDK.
        let steps = if sdk.kind == "openai" { events } else { events + 1 };
        let provider = Provider::start(move |arrival| cut(arrival).cut_after(steps));
        let direct = sdk.run(BROKEN, &format!("http://{}", provider.address()));
        let server = sdk.gateway(&provider, "", "rpm = 10\ntpm = 1000");
        let through = sdk.run(BROKEN, &server.url());
        assert_eq!(
            (through.as_str(), direct.as_str()),
            (format!("{error} None {events}\n").as_str(), through.as_str())
        );
        assert_eq!(
            (provider.arrivals().len(), asked(&server)),
            (2, 1.0),
            "{}: it is not sent again",
            sdk.kind
        );
        // Two words were streamed: charged once, with the input.
        until("it is settled", || (900..1_000).contains(&sdk.left(&server, "tpm")));
        assert_eq!(sdk.left(&server, "rpm"), 9, "{}", sdk.kind);
    }
}

/// The gateway and an SDK that tries three times make three attempts together, and the SDK raises the error of the status.
#[test]
fn d4_an_sdk_and_the_gateway_make_three_attempts_together() {
    const ASKED: &str = "print(raised(lambda: create(client)))";
    let refusal = |status: u16, kind: &'static str, hint: &'static str| {
        let body = json!({ "type": "error", "error": { "type": kind, "code": kind, "message": "no" } });
        let reply = Reply::json(status, &body);
        if hint.is_empty() { reply } else { reply.header(hint) }
    };
    std::thread::scope(|scope| {
        for sdk in &SDKS {
            // The status, what the SDK makes of it, and how often the SDK asks.
            let overloaded = if sdk.kind == "openai" { "InternalServerError" } else { "OverloadedError" };
            for (status, kind, hint, raised, times) in [
                (429, "rate_limit_error", "retry-after-ms: 10", "RateLimitError", 1.0),
                (529, "overloaded_error", "retry-after-ms: 10", overloaded, 1.0),
                (500, "server_error", "", "InternalServerError", 3.0),
                (400, "invalid_request_error", "", "BadRequestError", 1.0),
            ] {
                scope.spawn(move || {
                    let provider = Provider::start(move |_| refusal(status, kind, hint));
                    let server = sdk.gateway(&provider, "", "rpm = 100");
                    let printed = sdk.run(ASKED, &server.url());
                    assert_eq!(printed, format!("{raised} {status}\n"), "{}", sdk.kind);
                    let sent = if status == 400 { 1 } else { 3 };
                    assert_eq!(
                        (provider.arrivals().len(), asked(&server)),
                        (sent, times),
                        "{} {status}",
                        sdk.kind
                    );
                });
            }
        }
    });
    for sdk in &SDKS {
        let gone = tollgate_testkit::free_port();
        let model = sdk.limit.strip_prefix("llm.").unwrap_or_default();
        let config = format!(
            "[llm.models.{model}]\nrpm = 10\n[llm.upstreams.up]\nkind = '{}'\nbase_url = 'http://127.0.0.1:{gone}'\n\
             api_key = 'x'\n[limits.x]\nunlimited = true\n",
            sdk.kind
        );
        let server = Tollgate::builder(env!("CARGO_BIN_EXE_tollgate")).config(&config).start();
        assert_eq!(sdk.run(ASKED, &server.url()), "InternalServerError 502\n", "{}", sdk.kind);
        assert_eq!(asked(&server), 1.0, "{}: the SDK does not try a dead upstream again", sdk.kind);
    }
}

/// A refusal of the gateway says when there is room, and an SDK that comes back then is let in at its first retry.
#[test]
fn d4_an_sdk_comes_back_when_the_hint_says() {
    const TWICE: &str = "create(client)\nprint(raised(lambda: create(client)))";
    for sdk in &SDKS {
        let provider = Provider::start(sdk.answers);
        let server = sdk.gateway(&provider, "llm.window = '2s'\nllm.max_wait = '1ms'", "rpm = 1");
        assert_eq!(sdk.run(TWICE, &server.url()), "nothing\n", "{}", sdk.kind);
        let arrivals = provider.arrivals();
        assert_eq!((arrivals.len(), asked(&server)), (2, 3.0), "{}: one refusal, one retry", sdk.kind);
        assert_eq!(arrivals[1].header("x-stainless-retry-count"), Some("1"), "{}", sdk.kind);
        assert!(arrivals[1].at - arrivals[0].at >= Duration::from_millis(1_950), "{}", sdk.kind);
    }
}

/// A call waits where its SDK's timeout allows it, and is refused at once where it does not: no SDK ever runs into its timeout.
#[test]
fn d6_the_timeout_of_an_sdk_decides_whether_it_waits() {
    const FITS: &str = r#"
patient = client.with_options(max_retries=0, timeout=30)
create(patient)
print(raised(lambda: create(patient)))
"#;
    const LONG: &str = r#"
hasty = client.with_options(max_retries=0, timeout=15)
create(hasty)
try:
    create(hasty)
except sdk.RateLimitError as error:
    wait = int(error.response.headers["retry-after-ms"])
    print(type(error).__name__, 30_000 < wait <= 60_000, error.response.request.headers["x-stainless-read-timeout"])
"#;
    for sdk in &SDKS {
        let provider = Provider::start(sdk.answers);
        let server = sdk.gateway(&provider, "llm.window = '2s'\nllm.max_wait = '600s'", "rpm = 1");
        assert_eq!(sdk.run(FITS, &server.url()), "nothing\n", "{}", sdk.kind);
        assert_eq!((provider.arrivals().len(), asked(&server)), (2, 2.0), "{}", sdk.kind);

        let provider = Provider::start(sdk.answers);
        let server = sdk.gateway(&provider, "llm.max_wait = '600s'", "rpm = 1");
        // It raises `APITimeoutError` where the gateway keeps it.
        assert_eq!(sdk.run(LONG, &server.url()), "RateLimitError True 15\n", "{}", sdk.kind);
        assert_eq!(provider.arrivals().len(), 1, "{}", sdk.kind);
    }
}

/// `stream.close()` after some events closes the upstream's connection and frees the place while the SDK goes on; the input and what was
/// streamed are charged.
#[test]
fn c3_an_sdk_that_closes_its_stream_frees_its_place() {
    const CLOSES: &str = r#"
stream = create(client, stream=True)
events = iter(stream)
for _ in range(5):
    next(events)
stream.close()
print(raised(lambda: create(client.with_options(max_retries=0, timeout=25))))
"#;
    for sdk in &SDKS {
        let answers = sdk.answers;
        let first_word = if sdk.kind == "openai" { 0 } else { 3 };
        let provider = Provider::start(move |arrival| {
            let mut reply = answers(arrival);
            if arrival.is_stream() {
                // The same words again and again, for longer than the SDK waits.
                let words = reply.steps.split_off(first_word);
                reply.steps.extend(words[..2].iter().cloned().cycle().take(6_000));
                reply = reply.paced(Duration::from_millis(10));
            }
            reply
        });
        let limits = "tpm = 100000\nconcurrency = 1";
        let server = sdk.gateway(&provider, "llm.log_dir = 'logs'\nllm.max_wait = '600s'", limits);
        // The second call has its place only once the first has left it.
        assert_eq!(sdk.run(CLOSES, &server.url()), "nothing\n", "{}", sdk.kind);
        assert_eq!(provider.arrivals().len(), 2, "{}", sdk.kind);
        until("the upstream is closed", || provider.cut() == 1);
        until("the trail is written", || {
            crate::trail(&server).iter().filter(|line| line["attempt"].is_number()).count() == 2
        });
        let lines = crate::trail(&server);
        let left_early = lines.iter().find(|line| line["source"] == "estimated");
        let line = left_early.unwrap_or_else(|| panic!("{lines:?}"));
        let output = line["output_tokens"].as_u64().expect("a count");
        assert!((1..=200).contains(&output), "{line}");
        assert!(line["reason"].as_str().is_some_and(|reason| reason.contains("left")), "{line}");
        assert_eq!(line["status"], "left");
        until("both are settled", || sdk.left(&server, "concurrency") == 1);
        let charged: u64 = lines.iter().filter_map(|line| line["total_tokens"].as_u64()).sum();
        assert_eq!(sdk.left(&server, "tpm"), 100_000 - charged, "{}: {lines:?}", sdk.kind);
    }
}
