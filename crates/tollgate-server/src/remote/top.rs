//! `tollgate top`: the limits of a running server and what they decide, once a second, until q.
//!
//! What is counted comes from `/metrics`, what there is from `/v1/limits`, how it fares from `/v1/server`. The terminal is put
//! back as it was however this ends, short of being killed. Where stdout is no terminal there is one table, with totals.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use serde_json::Value;

use super::{number, text};
use crate::cli::TopArgs;
use crate::client::Client;
use crate::failure::Failure;
use crate::figures::grouped;
use crate::screen::{Ink, Tone};
use crate::table::{Cell, Side, Table};

/// How often it is looked at.
const LOOK: Duration = Duration::from_secs(1);

/// What a limit has decided so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Count {
    allowed: f64,
    denied: f64,
}

/// One look at a server.
struct Look {
    at: Instant,
    limits: Value,
    server: Value,
    counts: BTreeMap<String, Count>,
}

impl Look {
    fn take(client: &Client) -> Result<Look, Failure> {
        let (limits, server) = (client.get_json("/v1/limits")?, client.get_json("/v1/server")?);
        let counts = counts(&client.get("/metrics")?.body);
        Ok(Look { at: Instant::now(), limits, server, counts })
    }
}

/// Does what was asked.
pub(crate) fn run(asked: &TopArgs) -> Result<(), Failure> {
    let client = Client::new(&asked.server.url)?;
    let first = Look::take(&client)?;
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        let mut out = io::stdout().lock();
        return show(&mut out, Ink::of(&io::stdout()), &client, &first, None).map_err(Failure::answering);
    }
    let screen = Screen::open().map_err(|error| Failure::new(format!("cannot use the terminal: {error}")))?;
    let ended = live(&client, first);
    drop(screen);
    ended
}

fn live(client: &Client, first: Look) -> Result<(), Failure> {
    let ink = Ink::of(&io::stdout());
    let (mut last, mut before, mut trouble) = (first, None, None);
    loop {
        let mut page = Vec::new();
        show(&mut page, ink, client, &last, before.as_ref()).map_err(Failure::answering)?;
        // A server that restarts comes back; until then the last page stands, with what is wrong below it.
        if let Some(trouble) = &trouble {
            page.extend_from_slice(format!("\n{}", ink.paint(Tone::Bad, trouble)).as_bytes());
        }
        draw(&page).map_err(Failure::answering)?;
        if wants_to_quit(LOOK).map_err(|error| Failure::reading("stdin", &error))? {
            return Ok(());
        }
        match Look::take(client) {
            Ok(look) => {
                before = Some(std::mem::replace(&mut last, look));
                trouble = None;
            }
            Err(failure) => trouble = Some(failure.to_string()),
        }
    }
}

/// Overwrites what is there, line by line, so that nothing flickers; lines that do not fit are left out.
fn draw(page: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let rows = tcgetwinsize(io::stdout()).map_or(24, |size| usize::from(size.ws_row));
    out.write_all(b"\x1b[H")?;
    for line in page.split(|byte| *byte == b'\n').take(rows.saturating_sub(1).max(1)) {
        out.write_all(line)?;
        out.write_all(b"\x1b[K\n")?;
    }
    out.write_all(b"\x1b[J")?;
    out.flush()
}

fn show(
    out: &mut impl Write,
    ink: Ink,
    client: &Client,
    look: &Look,
    before: Option<&Look>,
) -> io::Result<()> {
    let store = &look.server["store"];
    let tone = if store["state"] == "up" { Tone::Good } else { Tone::Bad };
    writeln!(
        out,
        "{}  store {} {}  keys {}  fallen back {}  version {}",
        ink.paint(Tone::Strong, client.url()),
        text(&store["mode"]),
        ink.paint(tone, text(&store["state"])),
        number(&look.server["keys"]),
        number(&store["fallen_back"]),
        text(&look.server["version"]),
    )?;
    if let Some(why) = look.server["reloads"].as_array().and_then(|all| all.last()?["refused"].as_str()) {
        writeln!(
            out,
            "{}",
            ink.paint(Tone::Bad, format!("the changed config was refused: {}", super::visible(why)))
        )?;
    }
    let restart = look.server["reloads"].as_array().and_then(|all| all.last()?["restart"].as_array());
    let restart: Vec<String> = restart.into_iter().flatten().map(text).collect();
    if !restart.is_empty() {
        writeln!(out, "changed in the config, and needs a restart: {}", restart.join(", "))?;
    }
    writeln!(out)?;
    let mut table = Table::new(&[
        ("LIMIT", Side::Left),
        ("RULE", Side::Left),
        ("ALLOWED/S", Side::Right),
        ("DENIED/S", Side::Right),
        ("ALLOWED", Side::Right),
        ("DENIED", Side::Right),
    ]);
    for limit in look.limits["limits"].as_array().into_iter().flatten() {
        let name = text(&limit["limit"]);
        let now = look.counts.get(&name).copied().unwrap_or_default();
        let rate = |of: fn(&Count) -> f64| {
            let Some(before) = before else { return "-".to_owned() };
            let then = before.counts.get(&name).copied().unwrap_or_default();
            let seconds = look.at.duration_since(before.at).as_secs_f64().max(0.001);
            // A server that was started anew counts from zero.
            format!("{:.1}", (of(&now) - of(&then)).max(0.0) / seconds)
        };
        let denied = if now.denied > 0.0 { Tone::Bad } else { Tone::Plain };
        table.row([
            Cell::toned(Tone::Strong, name.clone()),
            text(&limit["rule"]).into(),
            rate(|count| count.allowed).into(),
            rate(|count| count.denied).into(),
            whole(now.allowed).into(),
            Cell::toned(denied, whole(now.denied)),
        ]);
    }
    table.print(out, ink, 0)
}

/// Counters are whole numbers, and exact as floats far beyond what anybody counts.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a counter is whole and never negative"
)]
fn whole(count: f64) -> String {
    grouped(count as u64)
}

/// What each limit decided, from the text of `/metrics`.
fn counts(metrics: &str) -> BTreeMap<String, Count> {
    let mut counts: BTreeMap<String, Count> = BTreeMap::new();
    for line in metrics.lines() {
        // A fallback is counted there by what it said, and among decisions only as one.
        let decisions = line.strip_prefix("rate_limiter_decisions_total{");
        let Some(rest) = decisions.or_else(|| line.strip_prefix("rate_limiter_fallback_total{")) else {
            continue;
        };
        let Some((labels, value)) = rest.rsplit_once("} ") else { continue };
        let Ok(value) = value.trim().parse::<f64>() else { continue };
        let label = |name: &str| {
            let (_, rest) = labels.split_once(&format!("{name}=\""))?;
            rest.split('"').next()
        };
        let Some(limit) = label("limiter") else { continue };
        let count = counts.entry(limit.to_owned()).or_default();
        match (label("decision"), label("shadow")) {
            (Some("fallback") | None, _) => {}
            (Some("deny"), Some("false") | None) => count.denied += value,
            (Some(_), _) => count.allowed += value,
        }
    }
    counts
}

/// Waits for a key that ends it: q, ctrl-c, ctrl-d, escape, or the end of the input.
fn wants_to_quit(wait: Duration) -> io::Result<bool> {
    let end = Instant::now() + wait;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        let stdin = io::stdin();
        let mut ready = [PollFd::new(&stdin, PollFlags::IN)];
        match poll(&mut ready, Some(&timeout)) {
            Ok(0) => return Ok(false),
            Ok(_) => {
                let mut pressed = [0; 16];
                let length = rustix::io::read(&stdin, &mut pressed)?;
                if length == 0 || pressed[..length].iter().any(|key| matches!(key, b'q' | b'Q' | 3 | 4 | 27))
                {
                    return Ok(true);
                }
            }
            // A window that changes its size interrupts the wait.
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// The terminal's other screen, with keys as they are pressed; the one before comes back when this is dropped.
struct Screen {
    before: Termios,
}

impl Screen {
    fn open() -> io::Result<Screen> {
        let before = tcgetattr(io::stdin())?;
        let mut keys = before.clone();
        keys.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG);
        tcsetattr(io::stdin(), OptionalActions::Now, &keys)?;
        let screen = Screen { before };
        write!(io::stdout(), "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J")?;
        Ok(screen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = write!(io::stdout(), "\x1b[?7h\x1b[?25h\x1b[?1049l");
        let _ = io::stdout().flush();
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_added_up_by_limit() {
        let metrics = "# TYPE rate_limiter_decisions_total counter\n\
            rate_limiter_decisions_total{decision=\"allow\",shadow=\"false\",limiter=\"api\",namespace=\"a\"} 2\n\
            rate_limiter_decisions_total{decision=\"deny\",shadow=\"true\",limiter=\"api\",namespace=\"b\"} 3\n\
            rate_limiter_decisions_total{decision=\"deny\",shadow=\"false\",limiter=\"api\",namespace=\"b\"} 7\n\
            rate_limiter_decisions_total{decision=\"fallback\",shadow=\"false\",limiter=\"api\",namespace=\"b\"} 30\n\
            rate_limiter_fallback_total{fallback=\"local\",decision=\"allow\",shadow=\"false\",limiter=\"api\"} 10\n\
            rate_limiter_fallback_total{fallback=\"local\",decision=\"deny\",shadow=\"false\",limiter=\"api\"} 20\n\
            rate_limiter_decisions_total{decision=\"deny\"} 7\n\
            rate_limiter_decisions_total{decision=\"deny\",limiter=\"x\"} many\n\
            rate_limiter_keys 9\n";
        let expected = BTreeMap::from([("api".to_owned(), Count { allowed: 15.0, denied: 27.0 })]);
        assert_eq!(counts(metrics), expected);
    }
}
