//! All routes with the providers' own SDKs: the same script gives the same results at the provider and through the gateway.

use tollgate_testkit::provider::{Provider, any};
use tollgate_testkit::tollgate::Tollgate;

use crate::sdks::python;
use crate::{trail, until};

/// A gateway before a provider that speaks as both.
fn both(provider: &Provider, rest: &str) -> Tollgate {
    let address = provider.address();
    let config = format!(
        "llm.log_dir = 'logs'\n{rest}\n\
         [llm.models.gpt-4o]\nupstream = 'openai'\nrpm = 100\ntpm = 100000\n\
         [llm.models.text-embedding-3-small]\nupstream = 'openai'\nrpm = 100\ntpm = 1000\n\
         [llm.models.claude-x]\nupstream = 'anthropic'\nrpm = 100\ninput_tpm = 10000\noutput_tpm = 10000\n\
         [llm.upstreams.openai]\nkind = 'openai'\nbase_url = 'http://{address}/v1'\napi_key = 'provider-key'\n\
         [llm.upstreams.anthropic]\nkind = 'anthropic'\nbase_url = 'http://{address}'\napi_key = 'provider-key'\n\
         [limits.x]\nunlimited = true\n"
    );
    Tollgate::builder(env!("CARGO_BIN_EXE_tollgate")).config(&config).start()
}

const OPENAI: &str = r#"
import sys, asyncio
from openai import OpenAI, AsyncOpenAI
base = sys.argv[1] + "/v1"
client, other = OpenAI(base_url=base, api_key="any"), AsyncOpenAI(base_url=base, api_key="any")
chat = dict(model="gpt-4o", messages=[{"role": "user", "content": "hi"}], max_tokens=92, metadata={"input_tokens": "8"})
tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]

def text(chunks):
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
def calls(chunks):
    return "".join(call.function.arguments or "" for chunk in chunks for call in chunk.choices[0].delta.tool_calls or [])

answer = client.chat.completions.create(**chat)
print("chat", answer.choices[0].message.content, answer.usage.total_tokens)
print("chat stream", text(client.chat.completions.create(stream=True, **chat)))
asked = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **chat))
print("chat usage", asked[-1].choices, asked[-1].usage.total_tokens)
print("chat tools", client.chat.completions.create(tools=tools, **chat).choices[0].message.tool_calls[0].function.arguments)
print("chat tools stream", calls(client.chat.completions.create(tools=tools, stream=True, **chat)))
raw = client.chat.completions.with_raw_response.create(**chat)
print("chat raw", raw.http_response.status_code, raw.headers["x-custom"], raw.headers["content-type"], raw.parse().id)
with client.chat.completions.with_streaming_response.create(stream=True, **chat) as raw:
    print("chat raw stream", raw.headers["content-type"], sum(1 for line in raw.iter_lines() if line))

respond = dict(model="gpt-4o", input="hi", max_output_tokens=50, metadata={"input_tokens": "8"})
flat = [{"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}]
answer = client.responses.create(**respond)
print("responses", answer.output_text, answer.usage.total_tokens)
events = list(client.responses.create(stream=True, **respond))
print("responses stream", "".join(event.delta for event in events if event.type == "response.output_text.delta"), events[-1].response.usage.output_tokens)
with client.responses.stream(**respond) as stream:
    print("responses helper", stream.get_final_response().output_text)
print("responses tools", client.responses.create(tools=flat, **respond).output[0].arguments)
print("responses list", client.responses.create(**{**respond, "input": [{"role": "user", "content": "hi"}]}).status)

embed = dict(model="text-embedding-3-small", extra_body={"metadata": {"input_tokens": "7"}})
print("embeddings", client.embeddings.create(input="hi there", **embed).data[0].embedding)
answer = client.embeddings.create(input=["a", "b", "c"], encoding_format="float", **embed)
print("embeddings list", len(answer.data), answer.usage.prompt_tokens)
print("models", sorted(model.id for model in client.models.list() if not model.id.startswith("claude")))

async def several():
    answers = await asyncio.gather(*(other.chat.completions.create(**chat) for _ in range(3)))
    print("async", [answer.choices[0].message.content for answer in answers])
    print("async stream", "".join([chunk.choices[0].delta.content or "" async for chunk in await other.chat.completions.create(stream=True, **chat)]))
    print("async responses", (await other.responses.create(**respond)).output_text)
    print("async embeddings", len((await other.embeddings.create(input=["a", "b"], **embed)).data))
asyncio.run(several())
"#;

#[test]
fn g6_the_openai_sdk_sees_no_difference() {
    let provider = Provider::start(any);
    let direct = python(OPENAI, &format!("http://{}", provider.address()));
    let calls = provider.arrivals().len();
    let server = both(&provider, "");
    let through = python(OPENAI, &server.url());
    assert_eq!(through, direct);
    assert!(direct.lines().count() >= 19, "{direct}");
    let arrivals = provider.arrivals();
    // The list of models is the gateway's own.
    assert_eq!(arrivals.len(), 2 * calls - 1);
    for path in ["/v1/chat/completions", "/v1/responses", "/v1/embeddings"] {
        assert!(arrivals[calls..].iter().any(|arrival| arrival.path == path), "{path}");
    }
    // All of it is charged and written down as it was reported.
    until("the trail is complete", || trail(&server).len() == calls - 1);
    let tokens = |model: &str| -> u64 {
        let lines = trail(&server);
        let of_model = lines.iter().filter(|line| line["model"] == model);
        of_model.map(|line| line["total_tokens"].as_u64().expect("a count")).sum()
    };
    let judged = |model: &str| -> u64 {
        let of_model = arrivals[calls..].iter().filter(|arrival| arrival.body["model"] == model);
        of_model.map(|arrival| arrival.tokens).sum()
    };
    for (model, limit) in [("gpt-4o", 100_000), ("text-embedding-3-small", 1_000)] {
        assert_eq!(tokens(model), judged(model), "{model}");
        let status = server.get(&format!("/v1/status?limit=llm.{model}.tpm&key=llm:openai")).body;
        assert!(status.contains(&format!("\"remaining\":{},", limit - judged(model))), "{status}");
    }
}

const ANTHROPIC: &str = r#"
import sys, asyncio
from anthropic import Anthropic, AsyncAnthropic
client, other = Anthropic(base_url=sys.argv[1], api_key="any"), AsyncAnthropic(base_url=sys.argv[1], api_key="any")
ask = dict(model="claude-x", max_tokens=50, messages=[{"role": "user", "content": "hi"}])
tools = [{"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]
answer = client.messages.create(**ask)
print("messages", answer.content[0].text, answer.usage.output_tokens)
print("messages events", [event.type for event in client.messages.create(stream=True, **ask)])
with client.messages.stream(**ask) as stream:
    print("messages stream", "".join(stream.text_stream), stream.get_final_message().usage.output_tokens)
print("tools", client.messages.create(tools=tools, **ask).content[0].input)
with client.messages.stream(tools=tools, **ask) as stream:
    print("tools stream", stream.get_final_message().content[0].input)
raw = client.messages.with_raw_response.create(**ask)
print("raw", raw.http_response.status_code, raw.headers["x-custom"], raw.headers["content-type"], raw.parse().id)
print("count", client.messages.count_tokens(model="claude-x", messages=ask["messages"]).input_tokens)
print("system", client.messages.create(system=[{"type": "text", "text": "be brief"}], **ask).stop_reason)
print("models", sorted(model.id for model in client.models.list() if not model.id.startswith("claude")))
async def several():
    answers = await asyncio.gather(*(other.messages.create(**ask) for _ in range(3)))
    print("async", [answer.content[0].text for answer in answers])
    async with other.messages.stream(**ask) as stream:
        print("async stream", "".join([text async for text in stream.text_stream]))
    print("async count", (await other.messages.count_tokens(model="claude-x", messages=ask["messages"])).input_tokens)
asyncio.run(several())
"#;

#[test]
fn g6_the_anthropic_sdk_sees_no_difference() {
    let provider = Provider::start(any);
    let direct = python(ANTHROPIC, &format!("http://{}", provider.address()));
    let calls = provider.arrivals().len();
    let server = both(&provider, "");
    let through = python(ANTHROPIC, &server.url());
    assert_eq!(through, direct);
    assert!(direct.lines().count() >= 12, "{direct}");
    let arrivals = provider.arrivals();
    assert_eq!(arrivals.len(), 2 * calls - 1);
    let counts = arrivals[calls..].iter().filter(|arrival| arrival.path.ends_with("/count_tokens")).count();
    assert_eq!(counts, 2);
    // To count is free: it is no request of the model and costs none of its tokens.
    let messages = (arrivals.len() - calls - counts) as u64;
    let remaining = |limit: &str| {
        let body = server.get(&format!("/v1/status?limit=llm.claude-x.{limit}&key=llm:anthropic")).body;
        serde_json::from_str::<serde_json::Value>(&body).expect("JSON")["remaining"]
            .as_u64()
            .expect("a count")
    };
    until("all is settled", || {
        (remaining("rpm"), remaining("input_tpm"), remaining("output_tpm"))
            == (100 - messages, 10_000 - 10 * messages, 10_000 - 50 * messages)
    });
}
