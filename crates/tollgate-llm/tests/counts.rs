//! Counting against the oracle: tiktoken-rs, whose counts are those of the provider's own library.

use tiktoken_rs::CoreBPE;
use tollgate::Tollgate;
use tollgate::config::Config;
use tollgate_llm::count::{Encoding, Tokenizer};
use tollgate_llm::{Api, Caller, LlmSection, ModelLimits, ModelRequest, Usage, of_whole_answer};
use tollgate_testkit::Random;

fn oracle(encoding: Encoding) -> &'static CoreBPE {
    match encoding {
        Encoding::O200k => tiktoken_rs::o200k_base_singleton(),
        Encoding::Cl100k => tiktoken_rs::cl100k_base_singleton(),
    }
}

fn both(encoding: Encoding, text: &str) -> (u64, u64) {
    (encoding.count(text), oracle(encoding).count_ordinary(text) as u64)
}

/// Texts of every kind that callers send: prose, code, JSON, other scripts, and what tries to break a tokenizer.
#[test]
fn g4_texts_of_every_kind_count_as_the_oracle_counts_them() {
    let code = include_str!("../src/line.rs");
    let texts = [
        code,
        include_str!("../../../README.md"),
        include_str!("../../../Cargo.lock"),
        "Съешь же ещё этих мягких французских булок, да выпей чаю. ",
        "我能吞下玻璃而不伤身体。私はガラスを食べられます。",
        "{\"a\":[1,2.5e-3,null,true],\"é\":\"\\u00e9\"}",
        "<|endoftext|><|im_start|>system<|fim_prefix|>",
        "👩‍👩‍👧‍👦🏳️‍🌈 \u{200b}\u{feff}\u{0}\u{7f}",
        "\r\n\r\n\t\t   \n  x",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "DON'T won't I'LL we'Ve",
        "",
    ];
    for encoding in [Encoding::O200k, Encoding::Cl100k] {
        for text in texts {
            let (ours, theirs) = both(encoding, text);
            assert_eq!(ours, theirs, "{}: {:?}", encoding.name(), text.chars().take(60).collect::<String>());
        }
    }
    assert!(Encoding::O200k.count("<|endoftext|>") > 1, "a special token in a text is plain text");
}

/// How many texts are tried under each encoding.
fn cases() -> u64 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(100_000)
}

/// What random texts are made of: whole words, so that merges happen, and letters of every kind that pre-tokenizers treat by themselves.
const PIECES: [&str; 48] = [
    "the",
    " quick",
    "Brown",
    " FOX",
    "'s",
    "'S",
    "'ll",
    "'LL",
    "'ve",
    "'ſ",
    "ſ",
    "'",
    "’s",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "\u{a0}",
    "\u{3000}",
    "1",
    "12",
    "1234",
    "٣",
    "½",
    "…",
    "!!!",
    "//",
    "<|endoftext|>",
    "{\"a\":",
    "é",
    "e\u{301}",
    "ß",
    "İ",
    "ǅ",
    "привет",
    " мир",
    "你好",
    "こんにちは",
    "한국",
    "שלום",
    "मनुष्य",
    "👩‍👧",
    "🏳️",
    "\u{200d}",
    "\u{feff}",
    "\u{0}",
    "\u{e000}",
];

fn text(random: &mut Random) -> String {
    let mut text = String::new();
    for _ in 0..random.below(24) {
        match random.below(8) {
            // Any character at all.
            0 => text.extend(char::from_u32(u32::try_from(random.below(0x11_0000)).unwrap_or(0))),
            1 => text.extend(char::from_u32(u32::try_from(random.below(0x250)).unwrap_or(0))),
            _ => text.push_str(PIECES[usize::try_from(random.below(PIECES.len() as u64)).unwrap_or(0)]),
        }
    }
    text
}

/// 200,000 random texts, half of them under each encoding: never more than one token off, and off only where case folding of U+017F (long s) behind an apostrophe differs.
#[test]
fn g4_random_texts_count_as_the_oracle_counts_them() {
    let count = |encoding: Encoding| {
        let mut random = Random::seeded(encoding as u64 + 1);
        let mut different = Vec::new();
        for _ in 0..cases() {
            let text = text(&mut random);
            let (ours, theirs) = both(encoding, &text);
            if ours != theirs {
                different.push((text, ours, theirs));
            }
        }
        different
    };
    let other = std::thread::spawn(move || count(Encoding::Cl100k));
    let o200k = count(Encoding::O200k);
    let cl100k = other.join().expect("no panic");
    for (name, different) in [("o200k", &o200k), ("cl100k", &cl100k)] {
        for (text, ours, theirs) in different {
            eprintln!("{name}: {text:?} counts {ours}, and the oracle has {theirs}");
            assert!(ours.abs_diff(*theirs) <= 1, "{name}: {text:?}: {ours} and {theirs}");
            assert!(text.contains('\u{17f}'), "{name}: {text:?}: {ours} and {theirs}");
        }
        assert!(different.len() as u64 * 1_000 <= cases().max(1_000), "{name}: {} differ", different.len());
    }
}

/// An image counts a flat number of tokens, which is another one for each provider.
#[tokio::test]
async fn an_image_counts_a_stated_number_of_tokens() {
    let text = r#"{"type":"text","text":"hello world"}"#;
    for (kind, model, api, image, expected) in [
        (
            "anthropic",
            "claude-new",
            Api::Messages,
            r#"{"type":"image","source":{"type":"base64","data":"AAAA"}}"#,
            1_600,
        ),
        (
            "anthropic",
            "claude-new",
            Api::Messages,
            r#"{"type":"image","source":{"type":"url","url":"https://a/b.png"}}"#,
            1_600,
        ),
        (
            "anthropic",
            "claude-new",
            Api::CountTokens,
            r#"{"type":"image","source":{"type":"file","file_id":"f"}}"#,
            1_600,
        ),
        ("openai", "gpt-4o", Api::ChatCompletions, r#"{"type":"image_url","image_url":{"url":"x"}}"#, 765),
        ("openai", "gpt-4o", Api::Responses, r#"{"type":"input_image","image_url":"x","detail":"low"}"#, 85),
    ] {
        let limits = limits(kind, model);
        let mut counted = Vec::new();
        for content in [text.to_owned(), format!("{text},{image}"), format!("{image},{text},{image}")] {
            let name = if api == Api::Responses { "input" } else { "messages" };
            let body = format!(
                r#"{{"model":"{model}","{name}":[{{"role":"user","content":[{content}]}}],"max_tokens":5}}"#
            );
            let request = ModelRequest::read(api, body.as_bytes()).expect("a request");
            counted.push(limits.count(&request).await.tokens);
        }
        assert_eq!([counted[1] - counted[0], counted[2] - counted[0]], [expected, 2 * expected], "{image}");
    }
}

fn limits(kind: &str, model: &str) -> ModelLimits {
    let text = format!(
        "[llm.upstreams.up]\nkind = '{kind}'\nbase_url = 'http://localhost/v1'\napi_key = 'x'\n[llm.models.{model}]\nrpm = 1000000"
    );
    let mut llm = LlmSection::default();
    let config =
        Config::parse_with(&text, [], &mut [&mut llm]).unwrap_or_else(|mistakes| panic!("{mistakes}"));
    let gate = Tollgate::builder().config(&config).build().expect("a gate");
    ModelLimits::new(gate, llm.config.expect("a section"))
}

/// A megabyte without a place to cut it is counted on another thread: the only async thread goes on meanwhile.
#[tokio::test]
async fn g4_a_large_prompt_is_counted_off_the_async_thread() {
    let limits = limits("openai", "gpt-4o");
    let body = format!(
        r#"{{"model":"gpt-4o","messages":[{{"role":"user","content":"{}"}}]}}"#,
        "a".repeat(1_000_000)
    );
    let request = ModelRequest::read(Api::ChatCompletions, body.as_bytes()).expect("a request");
    let mut turns = 0_u64;
    let counting = limits.count(&request);
    let mut counting = std::pin::pin!(counting);
    let counted = loop {
        tokio::select! {
            biased;
            counted = &mut counting => break counted,
            () = tokio::task::yield_now() => turns += 1,
        }
    };
    assert_eq!(
        counted.tokens,
        3 + 1 + 3 + oracle(Encoding::O200k).count_ordinary(&"a".repeat(1_000_000)) as u64
    );
    assert!(turns > 10, "the async thread had {turns} turns while the prompt was counted");
}

/// The same for an answer without usage: the async thread goes on while its text is counted.
#[tokio::test]
async fn b5_a_large_answer_is_counted_off_the_async_thread() {
    let text = "a".repeat(1_000_000);
    let body = serde_json::json!({ "choices": [{ "message": { "role": "assistant", "content": text } }] });
    let mut turns = 0_u64;
    let reading = of_whole_answer(Api::ChatCompletions, body.to_string().into_bytes(), Encoding::O200k);
    let mut reading = std::pin::pin!(reading);
    let found = loop {
        tokio::select! {
            biased;
            found = &mut reading => break found,
            () = tokio::task::yield_now() => turns += 1,
        }
    };
    let output = oracle(Encoding::O200k).count_ordinary(&text) as u64;
    assert_eq!(found, Some((Usage { input: 0, cached: 0, output }, true)));
    assert!(turns > 10, "the async thread had {turns} turns while the answer was counted");
    let small = br#"{"usage":{"prompt_tokens":3,"completion_tokens":5}}"#.to_vec();
    let found = of_whole_answer(Api::ChatCompletions, small, Encoding::O200k).await;
    assert_eq!(found, Some((Usage { input: 3, cached: 0, output: 5 }, false)));
}

/// A new model whose tokenizer makes other tokens, and whose requests vary by some percent around that.
#[tokio::test]
async fn g5_an_estimate_is_within_five_percent_after_twenty_requests() {
    for percent in [100, 130] {
        let limits = limits("anthropic", "claude-new");
        let mut random = Random::seeded(percent);
        let words =
            ["limit", "window", "tokens", "provider", "request", "ответ", "模型", "fn main() {}", "42"];
        for call in 0..60 {
            let length = 200 + random.below(800);
            let text: Vec<&str> = (0..length)
                .map(|_| words[usize::try_from(random.below(words.len() as u64)).unwrap_or(0)])
                .collect();
            let body = serde_json::json!({
                "model": "claude-new", "max_tokens": 10, "messages": [{ "role": "user", "content": text.join(" ") }],
            })
            .to_string();
            let request = ModelRequest::read(Api::Messages, body.as_bytes()).expect("a request");
            let counted = limits.count(&request).await.tokens;
            // Two percent more or less than the tokenizer's factor.
            let reported = counted * percent * (98 + random.below(5)) / 10_000;
            let check = limits.check(&request, &Caller::default()).await.expect("a check");
            if call >= 20 {
                let off = check.input_tokens.abs_diff(reported);
                assert!(
                    off * 20 <= reported,
                    "{percent} %, call {call}: {} and {reported}",
                    check.input_tokens
                );
            }
            let admission = limits.admit(&request, &Caller::default(), None).await.expect("room");
            admission.settle(Usage { input: reported, cached: 0, output: 5 }).await.expect("settled");
        }
    }
}
