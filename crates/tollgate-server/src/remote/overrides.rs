//! `tollgate override`: sets, lists and removes overrides on a running server.

use std::io::{self, Write};

use serde_json::{Map, Value, json};
use tollgate::store::Micros;

use super::{not_ours, text};
use crate::cli::{AdminArgs, OverrideArgs, OverrideCommand, RemoveOverrideArgs, SetOverrideArgs};
use crate::client::Client;
use crate::failure::Failure;
use crate::screen::{Ink, Tone};
use crate::table::{Cell, Side, Table};

/// Runs the command.
pub(crate) fn run(args: &OverrideArgs) -> Result<(), Failure> {
    match &args.command {
        Some(OverrideCommand::List(args)) => list(&args.with),
        Some(OverrideCommand::Remove(args)) => remove(args),
        None => set(&args.set),
    }
}

fn client(with: &AdminArgs) -> Result<Client, Failure> {
    Client::new(&with.server.url)?.token(with.token.as_deref())
}

fn print(line: std::fmt::Arguments<'_>) -> Result<(), Failure> {
    writeln!(io::stdout().lock(), "{line}").map_err(Failure::answering)
}

fn set(args: &SetOverrideArgs) -> Result<(), Failure> {
    let what = &args.what;
    let mut fields = Map::new();
    let mut put = |name: &str, value: Value| {
        if !value.is_null() && value != false {
            fields.insert(name.to_owned(), value);
        }
    };
    put("blocked", what.blocked.into());
    put("unlimited", what.unlimited.into());
    put("limit", json!(what.limit));
    put("window", json!(what.window));
    put("lease", json!(what.lease));
    put("rate", json!(what.rate));
    put("burst", json!(what.burst));
    put("capacity", json!(what.capacity));
    let mut body = json!({ "limit": args.name, "key": args.key, "override": fields });
    if let Some(lasts) = &args.lasts {
        let lasts: Micros = lasts
            .parse()
            .map_err(|_| Failure::new(format!("--for {lasts:?}: write a duration such as 1h or 30m")))?;
        body["for_ms"] = lasts.get().div_ceil(1_000).into();
    }
    for (name, value) in [("until", &args.until), ("reason", &args.reason), ("by", &args.by)] {
        if let Some(value) = value {
            body[name] = value.as_str().into();
        }
    }
    let answer = client(&args.with)?.post_json("/v1/overrides", &body)?;
    if args.with.json {
        return print(format_args!("{answer}"));
    }
    let (Some(rule), Some(before)) = (answer["rule"].as_str(), answer["instead_of"].as_str()) else {
        return Err(not_ours());
    };
    let until =
        answer["until"].as_str().map_or_else(|| "with no end".to_owned(), |until| format!("until {until}"));
    let kept = match answer["survives_restart"].as_bool() {
        Some(true) => "",
        _ => "; the server counts in its memory, so a restart of the server ends it",
    };
    print(format_args!(
        "{} for {}: {rule} instead of {before}, {until}{kept}",
        text(&answer["limit"]),
        text(&answer["key"])
    ))
}

fn remove(args: &RemoveOverrideArgs) -> Result<(), Failure> {
    let mut body = json!({ "limit": args.limit, "key": args.key });
    if let Some(by) = &args.by {
        body["by"] = by.as_str().into();
    }
    let answer = client(&args.with)?.post_json("/v1/overrides/remove", &body)?;
    if args.with.json {
        return print(format_args!("{answer}"));
    }
    match answer["removed"].as_bool() {
        Some(true) => print(format_args!("removed: {} again", text(&answer["rule"]))),
        Some(false) => print(format_args!("nothing to remove: no override was set for this key")),
        None => Err(not_ours()),
    }
}

fn list(with: &AdminArgs) -> Result<(), Failure> {
    let answer = client(with)?.get_json("/v1/overrides")?;
    if with.json {
        return print(format_args!("{answer}"));
    }
    let Some(all) = answer["overrides"].as_array() else { return Err(not_ours()) };
    if answer["stale"] == true {
        eprintln!(
            "tollgate: the store does not answer: this is what the server saw last, and nothing if it has seen none since its start"
        );
    }
    if all.is_empty() {
        return print(format_args!("no overrides"));
    }
    let mut table = Table::new(&[
        ("LIMIT", Side::Left),
        ("KEY", Side::Left),
        ("RULE", Side::Left),
        ("INSTEAD OF", Side::Left),
        ("UNTIL", Side::Left),
        ("BY", Side::Left),
        ("REASON", Side::Left),
    ]);
    for one in all {
        let rule = match one["applied"].as_bool() {
            Some(true) => text(&one["rule"]),
            _ => format!("not applied: {}", text(&one["why_not"])),
        };
        let until = match (one["source"].as_str(), &one["until"]) {
            (Some("config"), _) => "(config)".to_owned(),
            (_, Value::Null) => "no end".to_owned(),
            (_, until) => text(until),
        };
        table.row([
            Cell::toned(Tone::Strong, text(&one["limit"])),
            text(&one["key"]).into(),
            rule.into(),
            text(&one["instead_of"]).into(),
            until.into(),
            text(&one["by"]).into(),
            text(&one["reason"]).into(),
        ]);
    }
    table.print(&mut io::stdout().lock(), Ink::of(&io::stdout()), 0).map_err(Failure::answering)
}
