//! Upstreams over HTTPS, as they are in production: whom the gateway trusts, and what becomes of calls to whom it does not.

use tollgate_testkit::provider::{Provider, openai};
use tollgate_testkit::tls::Certificates;
use tollgate_testkit::tollgate::Tollgate;

use crate::{chat, left, until};

/// A gateway before a provider under TLS, with this line in its upstream and this in its environment.
fn gateway(provider: &Provider, line: &str, env: &[(&str, &str)]) -> Tollgate {
    let config = format!(
        "[llm.models.gpt-4o]\nrpm = 10\ntpm = 1000\n[llm.upstreams.up]\nkind = 'openai'\nbase_url = 'https://{}/v1'\n\
         api_key = 'provider-key'\n{line}\n[limits.x]\nunlimited = true\n",
        provider.address()
    );
    Tollgate::builder(env!("CARGO_BIN_EXE_tollgate")).config(&config).envs(env).start()
}

fn ca_file(path: &std::path::Path) -> String {
    format!("ca_file = '{}'", path.display())
}

#[test]
fn an_upstream_that_the_named_authority_vouches_for_is_called_whole_and_streamed() {
    let certificates = Certificates::generate();
    let provider = Provider::start_tls(&certificates, openai);
    let server = gateway(&provider, &ca_file(&certificates.authority()), &[]);
    let whole = server.post("/v1/chat/completions", &chat(100, ""));
    assert!(whole.status == 200 && whole.body.contains("Hello there"), "{whole:?}");
    let streamed = server.post("/v1/chat/completions", &chat(100, ",\"stream\":true"));
    assert_eq!(streamed.field("content-type"), Some("text/event-stream"), "{streamed:?}");
    assert!(streamed.body.ends_with("data: [DONE]\n\n") && streamed.body.contains(" there"), "{streamed:?}");
    assert!(!streamed.body.contains("\"choices\":[]"), "the usage that the gateway asked for is hidden");
    until("both are settled", || left(&server, "llm.gpt-4o.tpm") == 800);
    let arrivals = provider.arrivals();
    assert_eq!((arrivals.len(), left(&server, "llm.gpt-4o.rpm")), (2, 8));
    assert!(arrivals.iter().all(|arrival| arrival.header("authorization") == Some("Bearer provider-key")));
}

/// Without `ca_file` the certificates of the machine count, which OpenSSL's variable names.
#[test]
fn an_upstream_is_trusted_by_the_certificates_of_the_machine() {
    let certificates = Certificates::generate();
    let provider = Provider::start_tls(&certificates, openai);
    let authority = certificates.authority();
    let server = gateway(&provider, "", &[("SSL_CERT_FILE", authority.to_str().expect("text"))]);
    assert_eq!(server.post("/v1/chat/completions", &chat(100, "")).status, 200);
}

#[test]
fn an_upstream_that_nobody_vouches_for_gets_no_call_and_no_key() {
    let certificates = Certificates::generate();
    let provider = Provider::start_tls(&certificates, openai);
    for line in [ca_file(&certificates.other_authority()), String::new()] {
        let server = gateway(&provider, &line, &[]);
        for more in ["", ",\"stream\":true"] {
            let answer = server.post("/v1/chat/completions", &chat(500, more));
            assert_eq!((answer.status, answer.field("x-should-retry")), (502, Some("false")), "{answer:?}");
            let port = provider.address().port().to_string();
            let is_plain = answer.body.contains("cannot be reached") && !answer.body.contains(&port);
            assert!(is_plain, "{line}: {}", answer.body);
        }
        // The log says why, and which upstream it is.
        let logged = || server.output();
        until("it is logged", || logged().contains("the upstream cannot be reached"));
        let log = logged();
        let warning = log.lines().find(|line| line.contains("cannot be reached")).unwrap_or_default();
        let host = provider.address().to_string();
        for wanted in ["\"up\"", host.as_str(), "gpt-4o", "invalid peer certificate", "UnknownIssuer"] {
            assert!(warning.contains(wanted), "{line}: {wanted} is not in {warning}");
        }
        assert!(!log.contains("provider-key"), "{log}");
        assert_eq!((left(&server, "llm.gpt-4o.rpm"), left(&server, "llm.gpt-4o.tpm")), (10, 1_000), "{line}");
    }
    assert!(provider.arrivals().is_empty(), "nothing was sent");
}

/// Nothing that speaks plain HTTP is taken for an upstream under TLS.
#[test]
fn an_upstream_without_tls_gets_no_call_over_https() {
    let provider = Provider::start(openai);
    let server = gateway(&provider, &ca_file(&Certificates::generate().authority()), &[]);
    assert_eq!(server.post("/v1/chat/completions", &chat(500, "")).status, 502);
    assert!(provider.arrivals().iter().all(|arrival| arrival.header("authorization").is_none()));
    assert_eq!((left(&server, "llm.gpt-4o.rpm"), left(&server, "llm.gpt-4o.tpm")), (10, 1_000));
}

/// Otherwise every call would fail, and the first of them would say so.
#[test]
fn a_file_without_certificates_is_refused() {
    let certificates = Certificates::generate();
    let provider = Provider::start_tls(&certificates, openai);
    let server = gateway(&provider, &ca_file(&certificates.authority()), &[]);
    std::fs::write(server.home().join("ca.pem"), "no PEM").expect("written");
    let config = std::fs::read_to_string(server.home().join("tollgate.toml")).expect("a config");
    server.write_config(&config.replace(&ca_file(&certificates.authority()), "ca_file = 'ca.pem'"));
    let answer = server.post("/v1/reload", "");
    let expected = "llm.upstreams.up: ca_file ca.pem: there is no certificate in it";
    assert!(answer.status == 400 && answer.body.contains(expected), "{answer:?}");
    assert_eq!(server.post("/v1/chat/completions", &chat(100, "")).status, 200, "it goes on as before");
}
