//! `tollgate validate`: every mistake of a config with its line, field, value and fix, or its limits in words.
//!
//! Which fields a config may have is decided by `config.rs`, through which every command reads it; this module reports the result.

use std::io::{self, Write};
use std::path::Path;

use serde::Serialize;
use tollgate::config::{Mistake, Mistakes};
use tollgate::{Allowance, Policy, Rule};

use crate::cli::ValidateArgs;
use crate::client::{Client, visible};
use crate::config::{Config, warnings};
use crate::difference::Difference;
use crate::failure::{Failure, print_line};
use crate::figures::{counted, shortened};
use crate::screen::{Ink, Tone};
use crate::source;
use crate::table::{Cell, Side, Table};

/// Runs the command.
pub(crate) fn run(args: &ValidateArgs) -> Result<(), Failure> {
    let text = source::read_text(args.file())?;
    let parsed = parse(&text);
    let mut warnings = variable_warnings(&text);
    if let Ok(config) = &parsed {
        warnings.extend(warnings::of_machine(config, |name| std::env::var(name).ok()));
    }
    let is_refused = args.strict && !warnings.is_empty();
    // A file with mistakes has nothing to compare.
    let against = args.against.as_deref().filter(|_| parsed.is_ok());
    let difference = against.map(|url| compared(url, args.token.as_deref(), &text)).transpose()?;
    if args.json {
        let valid = parsed.is_ok() && !is_refused;
        answer(&parsed, &warnings, valid, difference.as_ref()).map_err(Failure::answering)?;
        return if valid { Ok(()) } else { Err(Failure::Answered) };
    }
    let config = parsed.map_err(|mistakes| failure_of(args.file(), &mistakes))?;
    let name = source::name(args.file());
    if is_refused {
        let message =
            format!("{} in {name}, and --strict refuses them", counted(warnings.len() as u64, "warning"));
        return Err(Failure::with_details(warnings, message));
    }
    print(&config, &name).map_err(Failure::answering)?;
    if let (Some(difference), Some(url)) = (&difference, &args.against) {
        print_difference(difference, url).map_err(Failure::answering)?;
    }
    report(&warnings);
    Ok(())
}

/// What a server says that a file would change.
fn compared(url: &str, token: Option<&str>, text: &str) -> Result<Difference, Failure> {
    let client = Client::new(url)?.token(token)?;
    let answer = client.post_json("/v1/compare", &serde_json::json!({ "config": text }))?;
    serde_json::from_value(answer).map_err(|_| {
        Failure::new(format!(
            "{url} does not say what the file would change; is it a Tollgate of this version?"
        ))
    })
}

fn print_difference(difference: &Difference, url: &str) -> io::Result<()> {
    let (mut out, ink) = (io::BufWriter::new(io::stdout().lock()), Ink::of(&io::stdout()));
    let lines: Vec<String> = difference.lines().collect();
    if lines.is_empty() {
        writeln!(out, "\nThe server at {} has the same.", visible(url))?;
        return out.flush();
    }
    writeln!(out, "\n{}", ink.paint(Tone::Strong, format!("What it would change at {}", visible(url))))?;
    for line in lines {
        let tone = match line.as_bytes().first() {
            Some(b'+') => Tone::Good,
            Some(b'-') => Tone::Bad,
            Some(b'!') => Tone::Strong,
            _ => Tone::Plain,
        };
        writeln!(out, "{}", ink.paint(tone, visible(&line)))?;
    }
    out.flush()
}

/// Reads a config for another command; its mistakes are reported in the same way.
pub(crate) fn load(path: &Path) -> Result<Config, Failure> {
    let text = source::read_text(path)?;
    report(&variable_warnings(&text));
    parse(&text).map_err(|mistakes| failure_of(path, &mistakes))
}

/// A config as the environment has it: `TOLLGATE_…` and the short names go before what the file says.
pub(crate) fn parse(text: &str) -> Result<Config, Mistakes> {
    Config::parse_with_env(text, variables())
}

/// The environment, as far as it is text: a variable that is no text is none of ours.
fn variables() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
}

/// Variables that set nothing.
pub(crate) fn variable_warnings(text: &str) -> Vec<String> {
    let variables: Vec<(String, String)> = variables().collect();
    warnings::of_variables(variables.iter().map(|(name, value)| (name.as_str(), value.as_str())), text)
}

/// Prints warnings, one line each.
pub(crate) fn report(warnings: &[String]) {
    for warning in warnings {
        print_line(format_args!("tollgate: warning: {warning}"));
    }
}

fn failure_of(path: &Path, mistakes: &Mistakes) -> Failure {
    let name = source::name(path);
    let details: Vec<String> = mistakes.iter().map(|mistake| line(&name, mistake)).collect();
    let message = format!("{} in {name}", counted(details.len() as u64, "mistake"));
    Failure::with_details(details, message)
}

/// `tollgate.toml:7: limits.api.rate = "10/x": use one of …`; where there is no field to name, the column helps.
fn line(name: &str, mistake: &Mistake) -> String {
    if mistake.variable.is_some() {
        return mistake.to_string();
    }
    let column = if mistake.field.is_empty() { format!("{}:", mistake.column) } else { String::new() };
    format!("{name}:{}:{column} {}", mistake.line, mistake.message())
}

/// A limit in words: how much, and whether it is in shadow mode.
pub(crate) fn words(rule: &Rule) -> String {
    let how_much = rule.allowance().to_string();
    if rule.is_shadow() { format!("{how_much} (shadow)") } else { how_much }
}

fn strategy(allowance: &Allowance) -> Option<&'static str> {
    match allowance {
        Allowance::Limited(limit) => Some(limit.strategy().name()),
        Allowance::Unlimited | Allowance::Blocked => None,
    }
}

/// The answer for programs.
#[derive(Serialize)]
struct Answer<'a> {
    valid: bool,
    mistakes: Vec<AnswerMistake<'a>>,
    warnings: &'a [String],
    limits: Vec<AnswerLimit<'a>>,
    /// The changes according to the server, if `--against` names one.
    #[serde(skip_serializing_if = "Option::is_none")]
    difference: Option<&'a Difference>,
}

#[derive(Serialize)]
struct AnswerMistake<'a> {
    line: usize,
    column: usize,
    /// The environment variable that says so, if it is not the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    variable: Option<&'a str>,
    field: &'a str,
    value: &'a str,
    fix: &'a str,
}

#[derive(Serialize)]
struct AnswerLimit<'a> {
    limit: &'a str,
    /// `null` for a limit that lets everything through, or nothing.
    strategy: Option<&'static str>,
    rule: String,
    shadow: bool,
    overrides: Vec<AnswerOverride>,
}

#[derive(Serialize)]
struct AnswerOverride {
    key: String,
    strategy: Option<&'static str>,
    rule: String,
}

impl<'a> AnswerLimit<'a> {
    fn of(rule: &'a Rule) -> AnswerLimit<'a> {
        AnswerLimit {
            limit: rule.name(),
            strategy: strategy(rule.allowance()),
            rule: rule.allowance().to_string(),
            shadow: rule.is_shadow(),
            overrides: rule
                .overrides()
                .iter()
                .map(|(key, other)| AnswerOverride {
                    key: key.to_string(),
                    strategy: strategy(other),
                    rule: other.to_string(),
                })
                .collect(),
        }
    }
}

fn answer(
    parsed: &Result<Config, Mistakes>,
    warnings: &[String],
    valid: bool,
    difference: Option<&Difference>,
) -> io::Result<()> {
    let mistakes = parsed.as_ref().err().into_iter().flat_map(Mistakes::iter);
    let rules = parsed.as_ref().ok().into_iter().flat_map(|config| config.gate.policy.rules());
    let answer = Answer {
        valid,
        warnings,
        mistakes: mistakes
            .map(|mistake| AnswerMistake {
                line: mistake.line,
                column: mistake.column,
                variable: mistake.variable.as_deref(),
                field: &mistake.field,
                value: &mistake.value,
                fix: &mistake.fix,
            })
            .collect(),
        limits: rules.map(AnswerLimit::of).collect(),
        difference,
    };
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, &answer)?;
    writeln!(out)?;
    out.flush()
}

/// How many overrides of a limit are shown before the rest is only counted.
const MOST_OVERRIDES: usize = 5;

/// How much of a key is shown.
const KEY: usize = 48;

/// Whether a limit of a policy, or one of its overrides, is a concurrency limit.
pub(crate) fn is_concurrency(policy: &Policy, name: &str) -> bool {
    let rules = policy.rules().iter().filter(|rule| rule.name() == name);
    let overrides =
        |rule: &'_ Rule| rule.overrides().iter().map(|(_, allowance)| *allowance).collect::<Vec<_>>();
    let mut allowances = rules.flat_map(|rule| overrides(rule).into_iter().chain([*rule.allowance()]));
    let concurrency = |limit: &tollgate::Limit| limit.strategy() == tollgate::Strategy::Concurrency;
    allowances.any(|allowance| matches!(&allowance, Allowance::Limited(limit) if concurrency(limit)))
}

fn print(config: &Config, name: &str) -> io::Result<()> {
    let (mut out, ink) = (io::BufWriter::new(io::stdout().lock()), Ink::of(&io::stdout()));
    let rules = config.gate.policy.rules();
    write!(out, "{name} is {}: {}", ink.paint(Tone::Good, "valid"), counted(rules.len() as u64, "limit"))?;
    match config.gate.routes.len() as u64 {
        0 => writeln!(out)?,
        routes => writeln!(out, ", {}", counted(routes, "route"))?,
    }
    let mut table = Table::new(&[("LIMIT", Side::Left), ("STRATEGY", Side::Left), ("RULE", Side::Left)]);
    for rule in rules {
        let strategy = strategy(rule.allowance()).unwrap_or("-");
        table.row([Cell::toned(Tone::Strong, rule.name()), strategy.into(), words(rule).into()]);
        for (key, other) in rule.overrides().iter().take(MOST_OVERRIDES) {
            let key = format!("  {}", shortened(&key.to_string(), KEY));
            table.row([key.into(), "".into(), format!("{other} instead").into()]);
        }
        let more = rule.overrides().len().saturating_sub(MOST_OVERRIDES);
        if more > 0 {
            table.row([format!("  and {}", counted(more as u64, "other key")).into(), "".into(), "".into()]);
        }
    }
    if !rules.is_empty() {
        writeln!(out)?;
        table.print(&mut out, ink, 0)?;
    }
    out.flush()
}
