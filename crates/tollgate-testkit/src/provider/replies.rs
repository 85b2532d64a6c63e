//! What providers answer: whole and streamed, with the usage that the request asks for in its `metadata`.

use serde_json::{Value, json};

use super::{Arrival, Reply, cached_of, usage_of};

/// What a tool is called with.
const TOOL_INPUT: &str = "{\"city\":\"Riga\"}";

/// What either provider answers on all its routes, with a header of its own.
pub fn any(arrival: &Arrival) -> Reply {
    let reply = match arrival.path.split('?').next().unwrap_or_default() {
        "/v1/messages" => anthropic(arrival),
        "/v1/messages/count_tokens" => {
            Reply::json(200, &json!({ "input_tokens": usage_of(&arrival.body).0 }))
        }
        "/v1/responses" => responses(arrival),
        "/v1/embeddings" => embeddings(arrival),
        "/v1/models" => models(),
        _ => openai(arrival),
    };
    reply.header("x-custom: kept")
}

/// The list of models of either provider.
fn models() -> Reply {
    let model = |id: &str| {
        json!({
            "id": id, "object": "model", "type": "model", "created": 0, "owned_by": "up", "display_name": id,
            "created_at": "1970-01-01T00:00:00Z",
        })
    };
    let data: Vec<Value> = ["gpt-4o", "text-embedding-3-small"].into_iter().map(model).collect();
    Reply::json(200, &json!({ "object": "list", "data": data, "has_more": false }))
}

/// An answer of OpenAI's embeddings.
fn embeddings(arrival: &Arrival) -> Reply {
    let input = usage_of(&arrival.body).0;
    let count = arrival.body["input"].as_array().map_or(1, Vec::len);
    let one = |index: usize| json!({ "object": "embedding", "index": index, "embedding": [0.25, -0.5, 1.0] });
    let data: Vec<Value> = (0..count).map(one).collect();
    let usage = json!({ "prompt_tokens": input, "total_tokens": input });
    Reply::json(
        200,
        &json!({ "object": "list", "data": data, "model": arrival.body["model"], "usage": usage }),
    )
}

/// An answer of OpenAI's Responses API, streamed where that is asked for.
pub fn responses(arrival: &Arrival) -> Reply {
    let (input, output) = usage_of(&arrival.body);
    let usage = json!({
        "input_tokens": input, "input_tokens_details": { "cached_tokens": 0 }, "output_tokens": output,
        "output_tokens_details": { "reasoning_tokens": 0 }, "total_tokens": input + output,
    });
    let text = |text: &str| json!({ "type": "output_text", "text": text, "annotations": [] });
    let message = |status: &str, content: Value| json!({ "type": "message", "id": "msg_1", "role": "assistant", "status": status, "content": content });
    let call = json!({
        "type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather", "arguments": TOOL_INPUT,
        "status": "completed",
    });
    let output_items = match arrival.body["tools"].is_array() {
        true => json!([call]),
        false => json!([message("completed", json!([text("Hello there")]))]),
    };
    let response = |status: &str, output: &Value, usage: Value| {
        json!({
            "id": "resp_1", "object": "response", "created_at": 1, "model": arrival.body["model"], "status": status,
            "output": output, "parallel_tool_calls": true, "tool_choice": "auto", "tools": [], "error": null,
            "incomplete_details": null, "instructions": null, "metadata": {}, "temperature": 1.0, "top_p": 1.0, "usage": usage,
        })
    };
    if !arrival.is_stream() {
        return Reply::json(200, &response("completed", &output_items, usage));
    }
    let mut number = 0;
    let mut event = |kind: &str, mut data: Value| {
        (data["type"], data["sequence_number"]) = (kind.into(), number.into());
        number += 1;
        format!("event: {kind}\ndata: {data}\n\n")
    };
    let started = response("in_progress", &json!([]), Value::Null);
    let mut events = vec![event("response.created", json!({ "response": started }))];
    if output_items[0]["type"] == "message" {
        let place = json!({ "item_id": "msg_1", "output_index": 0, "content_index": 0 });
        let at = |more: Value| {
            let mut data = place.clone();
            for (name, value) in more.as_object().into_iter().flatten() {
                data[name] = value.clone();
            }
            data
        };
        let item = message("in_progress", json!([]));
        events.push(event("response.output_item.added", json!({ "output_index": 0, "item": item })));
        events.push(event("response.content_part.added", at(json!({ "part": text("") }))));
        for word in ["Hel", "lo there"] {
            events.push(event("response.output_text.delta", at(json!({ "delta": word, "logprobs": [] }))));
        }
        events.push(event("response.output_text.done", at(json!({ "text": "Hello there", "logprobs": [] }))));
        events.push(event("response.content_part.done", at(json!({ "part": text("Hello there") }))));
    }
    let item = &output_items[0];
    events.push(event("response.output_item.done", json!({ "output_index": 0, "item": item })));
    let done = response("completed", &output_items, usage);
    events.push(event("response.completed", json!({ "response": done })));
    Reply::events(events)
}

/// An answer of OpenAI's chat completions, streamed where that is asked for, with usage where that is.
pub fn openai(arrival: &Arrival) -> Reply {
    let (input, output) = usage_of(&arrival.body);
    let usage = json!({
        "prompt_tokens": input, "completion_tokens": output, "total_tokens": input + output,
        "prompt_tokens_details": { "cached_tokens": cached_of(&arrival.body) },
    });
    let model = &arrival.body["model"];
    let has_tools = arrival.body["tools"].is_array();
    if !arrival.is_stream() {
        let message = match has_tools {
            false => json!({ "role": "assistant", "content": "Hello there" }),
            true => json!({ "role": "assistant", "content": null, "tool_calls": [{
                "id": "call_1", "type": "function", "function": { "name": "weather", "arguments": TOOL_INPUT },
            }] }),
        };
        return Reply::json(
            200,
            &json!({
                "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": model, "usage": usage,
                "choices": [{ "index": 0, "finish_reason": "stop", "message": message }],
            }),
        );
    }
    let chunk = |choices: Value, usage: Value| {
        let chunk = json!({
            "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": model, "choices": choices, "usage": usage,
        });
        format!("data: {chunk}\n\n")
    };
    let with_usage = arrival.body["stream_options"]["include_usage"] == true;
    let word = |text: &str| {
        chunk(json!([{ "index": 0, "delta": { "content": text }, "finish_reason": null }]), Value::Null)
    };
    let call = |function: Value| {
        let call = json!({ "index": 0, "id": "call_1", "type": "function", "function": function });
        chunk(json!([{ "index": 0, "delta": { "tool_calls": [call] }, "finish_reason": null }]), Value::Null)
    };
    let mut events = match has_tools {
        false => vec![word("Hel"), word("lo"), word(" there")],
        true => vec![
            call(json!({ "name": "weather", "arguments": "" })),
            call(json!({ "arguments": &TOOL_INPUT[..5] })),
            call(json!({ "arguments": &TOOL_INPUT[5..] })),
        ],
    };
    events.push(chunk(json!([{ "index": 0, "delta": {}, "finish_reason": "stop" }]), Value::Null));
    if with_usage {
        events.push(chunk(json!([]), usage));
    }
    events.push("data: [DONE]\n\n".to_owned());
    Reply::events(events)
}

/// An answer of Anthropic's messages, streamed where that is asked for.
pub fn anthropic(arrival: &Arrival) -> Reply {
    let (input, output) = usage_of(&arrival.body);
    let model = &arrival.body["model"];
    let message = |content: Value, output: u64| {
        json!({
            "id": "msg_1", "type": "message", "role": "assistant", "model": model, "content": content, "stop_reason": null,
            "stop_sequence": null, "usage": {
                "input_tokens": input, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached_of(&arrival.body),
                "output_tokens": output,
            },
        })
    };
    let has_tools = arrival.body["tools"].is_array();
    let tool =
        |input: Value| json!({ "type": "tool_use", "id": "toolu_1", "name": "weather", "input": input });
    if !arrival.is_stream() {
        let content = match has_tools {
            false => json!([{ "type": "text", "text": "Hello there" }]),
            true => json!([tool(json!({ "city": "Riga" }))]),
        };
        return Reply::json(200, &message(content, output));
    }
    let event = |kind: &str, data: Value| format!("event: {kind}\ndata: {data}\n\n");
    let delta = |delta: Value| {
        event("content_block_delta", json!({ "type": "content_block_delta", "index": 0, "delta": delta }))
    };
    let part = |text: &str| match has_tools {
        false => delta(json!({ "type": "text_delta", "text": text })),
        true => delta(json!({ "type": "input_json_delta", "partial_json": text })),
    };
    let (block, parts) = match has_tools {
        false => (json!({ "type": "text", "text": "" }), ["Hel", "lo there"]),
        true => (tool(json!({})), [&TOOL_INPUT[..5], &TOOL_INPUT[5..]]),
    };
    Reply::events([
        event("message_start", json!({ "type": "message_start", "message": message(json!([]), 1) })),
        event(
            "content_block_start",
            json!({ "type": "content_block_start", "index": 0, "content_block": block }),
        ),
        event("ping", json!({ "type": "ping" })),
        part(parts[0]),
        part(parts[1]),
        event("content_block_stop", json!({ "type": "content_block_stop", "index": 0 })),
        event(
            "message_delta",
            json!({ "type": "message_delta", "delta": { "stop_reason": "end_turn", "stop_sequence": null }, "usage": { "output_tokens": output } }),
        ),
        event("message_stop", json!({ "type": "message_stop" })),
    ])
}
