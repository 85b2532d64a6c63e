//! The providers' own SDKs, unmodified, with only the base URL changed. `./test` installs them.

use std::process::Command;

use tollgate_testkit::provider::{Provider, anthropic, openai};

use crate::{gateway, left, until};

pub(crate) fn python(script: &str, base_url: &str) -> String {
    let python = std::env::var("TOLLGATE_SDK_PY").unwrap_or_else(|_| "python3".to_owned());
    let mut command = Command::new(&python);
    command.args(["-c", script, base_url]).env_remove("OPENAI_API_KEY").env_remove("ANTHROPIC_API_KEY");
    let output =
        command.output().unwrap_or_else(|error| panic!("{python}: {error}; ./test installs the SDKs"));
    let errors = String::from_utf8_lossy(&output.stderr);
    let install = "./test installs the SDKs: pip install openai==3.49.0 anthropic==2.8.0";
    assert!(output.status.success(), "{errors}\n{install}");
    String::from_utf8(output.stdout).expect("text")
}

const OPENAI: &str = r#"
import sys, asyncio, openai
from openai import OpenAI, AsyncOpenAI
base = sys.argv[1] + "/v1"
client = OpenAI(base_url=base, api_key="any")
ask = dict(model="gpt-4o", messages=[{"role": "user", "content": "hi"}], max_tokens=92, metadata={"input_tokens": "8"})
print("sync", client.chat.completions.create(**ask).choices[0].message.content)
print("stream", "".join(chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(stream=True, **ask)))
with client.chat.completions.with_streaming_response.create(**ask) as raw:
    print("raw", raw.headers["x-ratelimit-limit-tokens"])
async def several():
    one = AsyncOpenAI(base_url=base, api_key="any")
    answers = await asyncio.gather(*(one.chat.completions.create(**ask) for _ in range(3)))
    print("async", len(answers))
asyncio.run(several())
stream = client.chat.completions.create(stream=True, **ask)
next(iter(stream))
stream.close()
print("models", [model.id for model in client.models.list()])
try:
    client.with_options(max_retries=0).chat.completions.create(**{**ask, "max_tokens": 1000000})
except openai.BadRequestError as error:
    print("never", error.code)
try:
    client.with_options(max_retries=0).chat.completions.create(**{**ask, "model": "nobody"})
except openai.NotFoundError as error:
    print("unknown", error.code)
"#;

#[test]
fn a_openai_sdk_works_by_its_base_url_alone() {
    let provider = Provider::start(openai);
    let server = gateway(
        &provider,
        "openai",
        "llm.unknown_model = 'refuse'\n[llm.models.gpt-4o]\nrpm = 100\ntpm = 100000",
    );
    let reported = python(OPENAI, &server.url());
    let expected = "sync Hello there\nstream Hello there\nraw 100000\nasync 3\nmodels ['gpt-4o']\n\
                    never request_too_large_for_limit\nunknown model_not_found\n";
    assert_eq!(reported, expected);
    until("all is settled", || left(&server, "llm.gpt-4o.rpm") == 93);
}

const WAITS: &str = r#"
import sys, concurrent.futures as futures
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="any", max_retries=0)
ask = dict(model="gpt-4o", messages=[{"role": "user", "content": "hi"}], max_tokens=92, metadata={"input_tokens": "8"})
with futures.ThreadPoolExecutor(20) as pool:
    print(sum(1 for _ in pool.map(lambda _: client.chat.completions.create(**ask), range(20))))
"#;

#[test]
fn a3_a_sdk_that_may_wait_sees_no_429() {
    let allowed = tollgate_testkit::provider::Allowed {
        requests: 5,
        tokens: 100_000,
        window: std::time::Duration::from_secs(1),
    };
    let provider = Provider::judging(allowed, openai);
    let server =
        gateway(&provider, "openai", "llm.window = '1s'\nllm.margin = '300ms'\n[llm.models.gpt-4o]\nrpm = 5");
    assert_eq!(python(WAITS, &server.url()), "20\n");
    provider.assert_clean();
}

const ANTHROPIC: &str = r#"
import sys, anthropic
from anthropic import Anthropic
client = Anthropic(base_url=sys.argv[1], api_key="any", max_retries=0)
ask = dict(model="claude-x", max_tokens=50, messages=[{"role": "user", "content": "hi"}])
print("sync", client.messages.create(**ask).content[0].text)
with client.messages.stream(**ask) as stream:
    print("stream", "".join(stream.text_stream))
    print("usage", stream.get_final_message().usage.output_tokens)
try:
    client.messages.create(**{**ask, "model": "nobody"})
except anthropic.NotFoundError as error:
    print("unknown", error.body["error"]["type"])
"#;

#[test]
fn a_anthropic_sdk_works_by_its_base_url_alone() {
    let provider = Provider::start(anthropic);
    let server = gateway(
        &provider,
        "anthropic",
        "llm.unknown_model = 'refuse'\n[llm.models.claude-x]\nrpm = 100\noutput_tpm = 10000",
    );
    let reported = python(ANTHROPIC, &server.url());
    assert_eq!(reported, "sync Hello there\nstream Hello there\nusage 50\nunknown not_found_error\n");
    until("all is settled", || left(&server, "llm.claude-x.output_tpm") == 9_900);
}
