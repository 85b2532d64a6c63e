//! Limits of a language model inside a program, without a gateway: `cargo run -p tollgate-llm --example llm`.
//!
//! Shows the three calls (check, admit, settle), and a batch through the executor. The provider here is a function; a program puts its HTTP
//! client in its place.

use std::error::Error;

use tollgate::Tollgate;
use tollgate::config::Config;
use tollgate_llm::executor::{Admit, Executor, ModelCall, Outgoing, Reply, SendError, Transport};
use tollgate_llm::{Api, Caller, LlmSection, ModelLimits, ModelRequest, Usage};

const CONFIG: &str = r#"
[llm]
window = "1s"                                   # a minute in production; short here, so that the example ends soon
[llm.upstreams.openai]
kind = "openai"
base_url = "https://api.openai.com/v1"
[llm.models."gpt-4o"]
rpm = 5
tpm = 1_000
"#;

/// Stands in for an HTTP client.
struct Provider;

impl Transport for Provider {
    async fn send(&self, outgoing: Outgoing<'_>) -> Result<Reply, SendError> {
        let _ = (outgoing.api, outgoing.body);
        let body = br#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":20}}"#.to_vec();
        Ok(Reply { status: 200, body, ..Reply::default() })
    }
}

fn body(text: &str) -> Vec<u8> {
    format!(r#"{{"model":"gpt-4o","max_tokens":100,"messages":[{{"role":"user","content":"{text}"}}]}}"#)
        .into_bytes()
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut llm = LlmSection::default();
    let config = Config::parse_with(CONFIG, [], &mut [&mut llm])?;
    let gate = Tollgate::open(&config).await?;
    let limits = ModelLimits::new(gate, llm.config.unwrap_or_default());

    // Can it proceed, why not, and how long until it can. Nothing is charged.
    let hello = body("Hello");
    let request = ModelRequest::read(Api::ChatCompletions, &hello)?;
    let check = limits.check(&request, &Caller::default()).await?;
    println!(
        "{} input tokens, {} reserved, can proceed: {}",
        check.input_tokens, check.reserved_tokens, check.can_proceed
    );

    // Reserve, send, settle with what the answer reports.
    let admission = limits.admit(&request, &Caller::default(), None).await?;
    let reported = Usage::read(r#"{"prompt_tokens":8,"completion_tokens":20,"total_tokens":28}"#);
    match reported {
        Some(usage) => admission.settle(usage).await?,
        // The estimate, where nothing is reported: the input as counted, and the output as long as the text that came.
        None => admission.settle_estimated(20, true).await?,
    }

    // A batch: twelve calls against five in each window. All are answered, in order, by waiting.
    let executor = Executor::new(limits, Provider);
    let calls =
        (0..12).map(|number| ModelCall { api: Api::ChatCompletions, body: body(&format!("Hello {number}")) });
    let results = executor.submit_batch(calls.collect(), Admit::AsCapacityAllows).all().await;
    let answered = results.iter().filter(|result| result.is_ok()).count();
    println!("{answered} of {} answered", results.len());
    Ok(())
}
