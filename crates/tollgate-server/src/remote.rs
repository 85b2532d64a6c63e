//! The commands that ask a running server: `check`, `status`, `reset`, `limits`, `override`, and `top`.
//!
//! They speak the server's own JSON (`client.rs`), so `--json` prints what it answered as it came. Without it people get a
//! sentence or a table. A denial is an answer with an exit code of its own, 1; whatever kept a decision from being made is 2.

pub(crate) mod overrides;
pub(crate) mod top;

use std::io::{self, BufRead, IsTerminal, Write};
use std::process::ExitCode;

use serde_json::{Value, json};

use crate::cli::{CheckArgs, LimitsArgs, OfKeyArgs, ResetArgs};
use crate::client::{Client, visible};
use crate::failure::Failure;
use crate::figures::grouped;
use crate::screen::{Ink, Tone};
use crate::table::{Cell, Side, Table};

/// The exit code of a denial.
const DENIED: u8 = 1;

/// `tollgate check`: charges, and says what came of it.
pub(crate) fn check(args: &CheckArgs) -> Result<ExitCode, Failure> {
    let client = Client::new(&args.server.url)?;
    let body = json!({ "limit": args.limit, "key": args.key, "cost": args.cost });
    let decision = client.post_json("/v1/check", &body)?;
    let Some(allowed) = decision["allowed"].as_bool() else { return Err(not_ours()) };
    let mut out = io::stdout().lock();
    let printed = if args.json {
        writeln!(out, "{decision}")
    } else {
        let ink = Ink::of(&io::stdout());
        let word = match allowed {
            true => ink.paint(Tone::Good, "allowed"),
            false => ink.paint(Tone::Bad, "denied"),
        };
        let degraded =
            if decision["degraded"] == true { " (by the fallback: the store is down)" } else { "" };
        let limits = decision["limits"].as_array();
        let outcome: Vec<String> = limits.into_iter().flatten().map(described).collect();
        let delay = match decision["delay_ms"].as_u64() {
            Some(delay @ 1..) if allowed => format!("; start after a delay of {}", span(delay)),
            _ => String::new(),
        };
        writeln!(out, "{word} by {}{delay}{degraded}", outcome.join("; "))
    };
    printed.map_err(Failure::answering)?;
    Ok(if allowed { ExitCode::SUCCESS } else { ExitCode::from(DENIED) })
}

/// `tollgate status`: how a key stands.
pub(crate) fn status(args: &OfKeyArgs) -> Result<(), Failure> {
    let client = Client::new(&args.server.url)?;
    let status = client.post_json("/v1/status", &json!({ "limit": args.limit, "key": args.key }))?;
    let mut out = io::stdout().lock();
    let printed = match args.json {
        true => writeln!(out, "{status}"),
        false => writeln!(out, "{}", described(&status)),
    };
    printed.map_err(Failure::answering)
}

/// `tollgate reset`: forgets what a key was charged, once a person has agreed.
pub(crate) fn reset(args: &ResetArgs) -> Result<(), Failure> {
    let OfKeyArgs { limit, key, server, json } = &args.of;
    let client = Client::new(&server.url)?.token(args.token.as_deref())?;
    if !args.yes && io::stdin().is_terminal() {
        let prompt = format!("forget what {} was charged under {}?", visible(key), visible(limit));
        agreed(&prompt, &mut io::stdin().lock(), &mut io::stderr().lock())?;
    }
    let reset = client.post_json("/v1/reset", &json!({ "limit": limit, "key": key }))?;
    let mut out = io::stdout().lock();
    let printed = match (json, reset["reset"].as_bool()) {
        (true, _) => writeln!(out, "{reset}"),
        (false, Some(true)) => writeln!(out, "forgotten"),
        (false, _) => writeln!(out, "nothing to forget: the key has no counters"),
    };
    printed.map_err(Failure::answering)
}

/// Asks a person, and fails unless the answer is yes.
fn agreed(prompt: &str, from: &mut impl BufRead, to: &mut impl Write) -> Result<(), Failure> {
    let written = write!(to, "{prompt} [y/N] ").and_then(|()| to.flush());
    written.map_err(|error| Failure::writing("to stderr", &error))?;
    let mut answer = String::new();
    from.read_line(&mut answer).map_err(|error| Failure::reading("stdin", &error))?;
    match answer.trim() {
        "y" | "Y" | "yes" => Ok(()),
        _ => Err(Failure::new("nothing was changed; --yes acts without asking")),
    }
}

/// `tollgate limits`: what there is.
pub(crate) fn limits(args: &LimitsArgs) -> Result<(), Failure> {
    let answer = Client::new(&args.server.url)?.get_json("/v1/limits")?;
    let mut out = io::stdout().lock();
    if args.json {
        return writeln!(out, "{answer}").map_err(Failure::answering);
    }
    let Some(limits) = answer["limits"].as_array() else { return Err(not_ours()) };
    let mut table = Table::new(&[
        ("LIMIT", Side::Left),
        ("STRATEGY", Side::Left),
        ("RULE", Side::Left),
        ("OVERRIDES", Side::Right),
        ("STORE", Side::Left),
        ("WITHOUT IT", Side::Left),
    ]);
    for limit in limits {
        let shadow = if limit["shadow"] == true { " (shadow)" } else { "" };
        table.row([
            Cell::toned(Tone::Strong, text(&limit["limit"])),
            text(&limit["strategy"]).into(),
            format!("{}{shadow}", text(&limit["rule"])).into(),
            number(&limit["overrides"]).into(),
            text(&limit["store"]).into(),
            text(&limit["fallback"]).into(),
        ]);
    }
    table.print(&mut out, Ink::of(&io::stdout()), 0).map_err(Failure::answering)
}

/// What one limit says, in words: `api, 19 of 20 left`.
fn described(outcome: &Value) -> String {
    let name = text(&outcome["limit"]);
    let left = match (&outcome["remaining"], &outcome["capacity"]) {
        (Value::Null, _) => "unlimited".to_owned(),
        (remaining, capacity) => format!("{} of {} left", number(remaining), number(capacity)),
    };
    let wait = match (&outcome["allowed"], &outcome["retry_after_ms"]) {
        (Value::Bool(true), _) => String::new(),
        (_, Value::Null) => match outcome["reason"].as_str() {
            Some("blocked") => ", blocked".to_owned(),
            _ => ", the cost is above the capacity".to_owned(),
        },
        (_, wait) => format!(", retry after {}", span(wait.as_u64().unwrap_or_default())),
    };
    let watched =
        if outcome["would_deny"] == true { ", would deny if it were not in shadow mode" } else { "" };
    let full = match outcome["reset_after_ms"].as_u64() {
        Some(reset @ 1..) => format!(", full again in {}", span(reset)),
        _ => String::new(),
    };
    format!("{name}: {left}{wait}{full}{watched}")
}

fn not_ours() -> Failure {
    Failure::new("the server answered with JSON that is not ours; is it a Tollgate?")
}

/// A text of the server's, or a dash.
fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| "-".to_owned(), visible)
}

fn number(value: &Value) -> String {
    value.as_u64().map_or_else(|| "-".to_owned(), grouped)
}

/// A time to wait in the unit that fits it, rounded up so that waiting so long is enough.
fn span(ms: u64) -> String {
    match ms {
        0..1_000 => format!("{ms} ms"),
        1_000..120_000 => format!("{} s", ms.div_ceil(1_000)),
        120_000..7_200_000 => format!("{} min", ms.div_ceil(60_000)),
        _ => format!("{} h", grouped(ms.div_ceil(3_600_000))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_standing_is_a_sentence() {
        for (outcome, expected) in [
            (
                r#"{"limit":"api","allowed":true,"capacity":20,"remaining":19,"retry_after_ms":0,"reset_after_ms":100}"#,
                "api: 19 of 20 left, full again in 100 ms",
            ),
            (
                r#"{"limit":"a","allowed":false,"capacity":2000,"remaining":0,"retry_after_ms":1001,"reset_after_ms":7200001}"#,
                "a: 0 of 2,000 left, retry after 2 s, full again in 3 h",
            ),
            (
                r#"{"limit":"a","allowed":false,"capacity":2,"remaining":2,"retry_after_ms":null,"reset_after_ms":0}"#,
                "a: 2 of 2 left, the cost is above the capacity",
            ),
            (
                r#"{"limit":"a","allowed":true,"capacity":null,"remaining":null,"retry_after_ms":0,"reset_after_ms":0}"#,
                "a: unlimited",
            ),
            (
                r#"{"limit":"a","allowed":true,"capacity":1,"remaining":0,"retry_after_ms":7,"reset_after_ms":7,"would_deny":true}"#,
                "a: 0 of 1 left, full again in 7 ms, would deny if it were not in shadow mode",
            ),
            (
                r#"{"limit":"a","allowed":false,"capacity":0,"remaining":0,"retry_after_ms":null,"reset_after_ms":0,"reason":"blocked"}"#,
                "a: 0 of 0 left, blocked",
            ),
            ("{}", "-: unlimited, the cost is above the capacity"),
        ] {
            let outcome: Value = serde_json::from_str(outcome).expect("JSON");
            assert_eq!(described(&outcome), expected);
        }
    }

    #[test]
    fn only_yes_is_yes() {
        for (answer, is_yes) in
            [("y\n", true), ("yes\n", true), ("Y\n", true), ("\n", false), ("", false), ("yeah\n", false)]
        {
            let mut shown = Vec::new();
            assert_eq!(agreed("sure?", &mut answer.as_bytes(), &mut shown).is_ok(), is_yes, "{answer:?}");
            assert_eq!(shown, b"sure? [y/N] ");
        }
    }
}
