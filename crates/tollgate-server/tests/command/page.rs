//! `--report`: one HTML file that says what the summary says, needs nothing else, and in which no text is more than a text.

use base64::prelude::{BASE64_STANDARD, Engine};
use sha2::{Digest, Sha256};

use crate::binary::Scratch;

const POLICY: &str = r#"
[limits.api]
strategy = "token_bucket"
rate = "1/s"
burst = 2
overrides = { "user:<b>vip</b>" = { burst = 5 } }

[limits.mail]
strategy = "leaky_bucket"
rate = "1/s"
capacity = 3

[limits.watched]
strategy = "fixed_window"
limit = 1
window = "1m"
shadow = true

[limits.unmet]
blocked = true

[[routes]]
path = "/a&b/*"
limit = "api"
headers = { user-agent = "<i>*" }
"#;

const HOSTILE: [&str; 4] = [
    "x:<img src=x onerror=alert(1)>",
    "x:\"><script>alert(1)</script>",
    "x:'--></style>&lt;",
    "x:\u{202e}evil",
];

/// Ten charges for each hostile key, so that most are denied; some mail that waits, and what a shadow would deny.
fn log() -> String {
    let mut log = "time,limit,key\n".to_owned();
    for second in 0..5 {
        for key in HOSTILE {
            let quoted = key.replace('"', "\"\"");
            log += &format!("{second},api,\"{quoted}\"\n{second},api,\"{quoted}\"\n");
        }
        log += &format!("{second},mail,user:1\n{second},mail,user:1\n{second},watched,user:1\n");
    }
    log
}

fn report(scratch: &Scratch, logs: &[&str]) -> String {
    let mut args = vec!["backtest", "--config", "policy.toml", "--report", "out.html"];
    args.extend(logs);
    scratch.run(&args).done(&logs.join(" "));
    scratch.read("out.html")
}

/// The names of all elements, if every one that is opened is closed in its turn and every attribute is quoted.
fn elements(html: &str) -> Vec<String> {
    let mut open: Vec<String> = Vec::new();
    let mut all = Vec::new();
    let mut rest = html.strip_prefix("<!doctype html>").expect("a doctype");
    while let Some((text, after)) = rest.split_once('<') {
        assert!(
            !text.contains('>') || open.last().is_some_and(|name| name == "style"),
            "a stray > in {text:?}"
        );
        let (tag, after) = after.split_once('>').expect("a tag ends");
        rest = after;
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name), "</{name}>");
            continue;
        }
        let is_over = tag.ends_with('/');
        let (name, mut attributes) =
            tag.trim_end_matches('/').split_once(' ').unwrap_or((tag.trim_end_matches('/'), ""));
        while !attributes.is_empty() {
            let (attribute, value) = attributes.split_once("=\"").unwrap_or_else(|| panic!("<{tag}>"));
            let (_, left) = value.split_once('"').expect("a value ends");
            let is_name = attribute.bytes().all(|b| b.is_ascii_alphabetic() || b == b'-');
            assert!(is_name && !attribute.starts_with("on") && attribute != "style", "<{tag}>");
            attributes = left.trim_start();
        }
        all.push(name.to_owned());
        if !is_over && name != "meta" {
            open.push(name.to_owned());
        }
    }
    assert!(open.is_empty() && rest.trim().is_empty(), "left open: {open:?}");
    all
}

#[test]
fn everything_is_there_and_no_text_is_more_than_a_text() {
    let scratch = Scratch::new("page");
    scratch.write("policy.toml", POLICY);
    scratch.write("<u>&.csv", log() + "x,api,<s>\n");
    let html = report(&scratch, &["<u>&.csv"]);
    let elements = elements(&html);
    for name in ["script", "img", "i", "b", "u", "s", "link", "iframe", "object", "form", "a", "use", "image"]
    {
        assert!(!elements.iter().any(|element| element == name), "<{name}>");
    }
    for active in ["://", "url(", "@import", "javascript:", "srcset", "http-equiv=\"refresh"] {
        assert!(!html.contains(active), "{active}");
    }
    // A browser applies the style only if this is its hash.
    let (_, rest) = html.split_once("content=\"default-src 'none'; style-src 'sha256-").expect("a policy");
    let (_, style) = html.split_once("<style>").expect("a style");
    let hash = BASE64_STANDARD.decode(rest.split('\'').next().unwrap()).expect("a hash in base64");
    assert_eq!(hash, Sha256::digest(style.split("</style>").next().unwrap()).to_vec());
    // Of each of four keys ten charges: two of the burst, then one a second. Of ten mails the bucket takes two, two and then one a
    // second, and only the first need not wait. The shadow would deny four of five.
    for said in [
        "<h1>What policy.toml would have done</h1>",
        "<dt>requests</dt><dd class=\"\">55</dd>",
        "<dt>keys</dt><dd class=\"\">5</dd>",
        "<dt>allowed</dt><dd class=\"\">36 <small>(65.5 %)</small></dd>",
        "<dt>denied</dt><dd class=\"some\">19 <small>(34.5 %)</small></dd>",
        "<dt>of those allowed, had to wait</dt><dd class=\"\">6</dd>",
        "shadow limit would have denied</dt><dd class=\"\">4</dd>",
        "<dt>bad line left out</dt><dd class=\"\">1</dd>",
        "<h3>api</h3><p class=\"policy\">1/s, bursts of 2</p>",
        "<li><code>unmet</code>: blocked</li>",
        "<bdi>x:&lt;img src=x onerror=alert(1)&gt;</bdi></td><td>4</td><td>10</td><td>40.0 %</td><td>api</td>",
        "<bdi>x:&quot;&gt;&lt;script&gt;alert(1)&lt;/script&gt;</bdi>",
        "<bdi>x:&#39;--&gt;&lt;/style&gt;&amp;lt;</bdi>",
        "<td><bdi>/a&amp;b/* with user-agent &lt;i&gt;*, by ip</bdi></td>",
        "<bdi>user:&lt;b&gt;vip&lt;/b&gt;</bdi>",
        "<dd><bdi>&lt;u&gt;&amp;.csv</bdi></dd>",
        "1 bad line left out, first</dt>\n<dd><bdi>&lt;u&gt;&amp;.csv:57: time = &quot;x&quot;: write RFC 3339",
        "aria-label=\"All requests over time, 21 bars of 200ms: 36 allowed, 19 denied, at worst 5 from 00:00:02.000 on\"",
        "<tr><th scope=\"row\">00:00:00.000</th><td>11</td><td>0</td><td>0</td></tr>",
    ] {
        assert!(
            html.contains(said),
            "{said}\nis not in\n{}",
            html.split_once("</style>").expect("a style").1
        );
    }
}

#[test]
fn the_file_appears_whole_or_not_at_all_and_spares_what_is_read() {
    let scratch = Scratch::new("page-file");
    scratch.write("policy.toml", POLICY);
    scratch.write("log.csv", log());
    scratch.write("bad.csv", "time,limit,key\nx,api,a\n");
    scratch.write("out.html", "before");
    let run = |args: &[&str]| scratch.run(&[&["backtest", "--config", "policy.toml"], args].concat());
    run(&["bad.csv", "--report", "out.html"]).could_not("a bad log");
    assert_eq!(scratch.read("out.html"), "before");
    for (args, reported) in [
        (&["log.csv", "--report", "log.csv"][..], "cannot write log.csv: it is one of the logs"),
        (&["log.csv", "--report", "./policy.toml"], "cannot write ./policy.toml: it is the config"),
        (&["log.csv", "--report", "."], "cannot write .: it is a directory"),
        (&["log.csv", "--report", "no/out.html"], "cannot write no/out.html: No such file"),
        (
            &["log.csv", "--report", "new.html", "--decisions", "./new.html"],
            "--decisions and --report both name new.html",
        ),
        (&["log.csv", "--report", "-", "--decisions", "-"], "--decisions and --report both name stdout"),
    ] {
        let ended = run(args);
        ended.could_not(reported);
        assert!(ended.stderr.contains(reported), "{args:?}: {}", ended.stderr);
    }
    assert_eq!(scratch.files(), ["bad.csv", "log.csv", "out.html", "policy.toml"]);
    run(&["log.csv", "--report", "out.html", "--decisions", "out.jsonl"]).done("both");
    elements(&scratch.read("out.html"));
    assert_eq!(scratch.files(), ["bad.csv", "log.csv", "out.html", "out.jsonl", "policy.toml"]);

    scratch.write("log.csv", "time,limit,key\n1,api,user:1\n");
    run(&["log.csv", "--report", "out.html"]).done("to a file");
    let ended = run(&["log.csv", "--report", "-"]);
    ended.done("to stdout");
    assert_eq!(ended.stdout, scratch.read("out.html"));
    assert!(ended.stderr.starts_with("1 request of 1 key"), "{}", ended.stderr);
}

#[test]
fn no_traffic_is_a_page_too() {
    let scratch = Scratch::new("page-empty");
    scratch.write("policy.toml", POLICY);
    scratch.write("log.csv", "time,limit,key\n");
    let html = report(&scratch, &["log.csv"]);
    elements(&html);
    assert!(html.contains("Nothing in the log met a limit.") && html.contains("Nobody was denied."));
    assert!(!html.contains("role=\"img\""));
}
