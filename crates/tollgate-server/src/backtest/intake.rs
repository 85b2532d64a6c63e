//! Where lines become requests, or are refused with their file, line, field, value and fix.
//!
//! The readers (`from_csv.rs`, `from_jsonl.rs`) hand over the texts of a line's fields; what they mean is decided here, once,
//! so that both formats give the same answers. `from_combined.rs` hands over whole requests, and the config's `[[routes]]` say which
//! limits those meet: one line becomes a charge for each, found by the same code as in the tower layer. A line that cannot be read is never guessed at: by default all of them are
//! reported (the first twenty, if there are more) and nothing is replayed; with `--skip-bad` they are counted.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};

use tollgate::Key;
use tollgate::config::Config;
use tollgate::key::KeyError;
use tollgate::route::Routes;

use super::from_combined::Access;
use super::instant;
use super::traffic::{Request, Traffic};
use crate::failure::{Failure, print_line};
use crate::figures::{counted, shortened};
use crate::screen::Progress;
use crate::validate::is_concurrency;

/// The key of a request that has none: every limit denies it, and nothing is charged.
pub(super) const NO_KEY: &str = "";

/// How many bad lines are reported before the rest of the input is left unread.
const MOST_BAD: usize = 20;

/// How many names of ignored columns are reported.
const MOST_IGNORED: usize = 8;

/// The largest cost: 2^53 − 1, like every count of Tollgate.
const MAX_COST: u64 = (1 << 53) - 1;

/// How much of a bad value is shown.
const SHOWN: usize = 60;

/// The fields of one line, as texts. A field that is absent is `None`.
#[derive(Debug, Default)]
pub(super) struct Entry<'a> {
    pub(super) time: Option<Cow<'a, str>>,
    pub(super) limit: Option<Cow<'a, str>>,
    pub(super) key: Option<Cow<'a, str>>,
    pub(super) cost: Option<Cow<'a, str>>,
}

/// Why a line cannot be replayed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mistake {
    field: &'static str,
    /// As it stands in the file; `None` when the field is absent.
    value: Option<String>,
    fix: String,
}

impl Mistake {
    pub(super) fn new(field: &'static str, value: &str, fix: impl Into<String>) -> Self {
        Mistake { field, value: Some(format!("{:?}", shortened(value, SHOWN))), fix: fix.into() }
    }

    /// For a value that is not UTF-8, shown as far as it can be.
    pub(super) fn not_utf8(field: &'static str, value: &[u8]) -> Self {
        Mistake::new(field, &String::from_utf8_lossy(value), "is not UTF-8; save the log as UTF-8")
    }

    /// For a key that makes no sense, with the text that was probably meant.
    fn malformed_key(value: &str, error: &KeyError) -> Self {
        let meant = error.suggestion().map(|meant| format!(", such as {meant:?}")).unwrap_or_default();
        Mistake::new("key", value, format!("{error}{meant}"))
    }

    /// For a value of JSON that is shown as it is written, without quotes around it.
    pub(super) fn wrong_type(field: &'static str, value: &str, fix: impl Into<String>) -> Self {
        Mistake { field, value: Some(shortened(value, SHOWN)), fix: fix.into() }
    }

    fn absent(field: &'static str, fix: impl Into<String>) -> Self {
        Mistake { field, value: None, fix: fix.into() }
    }

    fn in_words(&self, file: &str, line: u64) -> String {
        let Mistake { field, value, fix } = self;
        match value {
            Some(value) => format!("{file}:{line}: {field} = {value}: {fix}"),
            None => format!("{file}:{line}: {field} is missing: {fix}"),
        }
    }
}

/// What to do with a line that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BadLines {
    Refuse,
    Skip,
}

/// The requests read so far, and what could not be read.
pub(super) struct Intake {
    limits: HashMap<String, u16>,
    /// The names of all limits, for messages.
    known: String,
    /// Which limits a request of an access log meets.
    routes: Routes,
    /// The limit of each route.
    limits_of_routes: Vec<u16>,
    /// The routes that cannot be replayed from an access log, and why; until they are reported.
    left_out: Vec<String>,
    bad_lines: BadLines,
    file: u16,
    file_name: String,
    traffic: Traffic,
    reported: Vec<String>,
    bad: u64,
    unmet: u64,
    ignored: BTreeSet<String>,
    /// The files that had nothing in them.
    empty: Vec<String>,
    progress: Progress,
    seen: u64,
}

/// What the files came to.
pub(super) struct Harvest {
    pub(super) traffic: Traffic,
    /// How many lines were skipped, and the first of them.
    pub(super) skipped: u64,
    pub(super) first_skipped: Option<String>,
    /// How many requests of access logs met no route.
    pub(super) unmet: u64,
}

impl Intake {
    /// For the limits of a policy, in this order, and the routes of its config.
    pub(super) fn new(limits: &[String], config: &Config, bad_lines: BadLines) -> Result<Intake, Failure> {
        let mut ids = HashMap::new();
        for (index, name) in limits.iter().enumerate() {
            let index = u16::try_from(index)
                .map_err(|_| Failure::new("a backtest takes at most 65,536 limits; split the config"))?;
            ids.insert(name.clone(), index);
        }
        let (mut kept, mut limits_of_routes, mut left_out) = (Vec::new(), Vec::new(), Vec::new());
        for (number, route) in (1..).zip(&config.routes) {
            let name = route.limit().unwrap_or_default();
            // A route names a limit of its config.
            let Some(limit) = ids.get(name) else { continue };
            let concurrency = is_concurrency(&config.policy, name)
                .then(|| "a log does not say when a request is done".to_owned());
            match concurrency.or_else(|| route.not_in_access_logs()) {
                Some(why) => left_out.push(format!("routes[{number}] (limit {name}): {why}")),
                None => {
                    kept.push(route.clone());
                    limits_of_routes.push(*limit);
                }
            }
        }
        let routes = Routes::new(kept).map_err(|error| Failure::new(error.to_string()))?;
        let routes = routes.read_by(config.requests.reader());
        Ok(Intake {
            limits: ids,
            routes,
            limits_of_routes,
            left_out,
            known: if limits.is_empty() { "none".to_string() } else { limits.join(", ") },
            bad_lines,
            file: 0,
            file_name: String::new(),
            traffic: Traffic::default(),
            reported: Vec::new(),
            bad: 0,
            unmet: 0,
            ignored: BTreeSet::new(),
            empty: Vec::new(),
            progress: Progress::new(),
            seen: 0,
        })
    }

    /// Says which file the next lines are from.
    pub(super) fn begin_file(&mut self, index: u16, name: &str) {
        self.file = index;
        self.file_name = name.to_string();
    }

    /// Says that the file has nothing in it.
    pub(super) fn pass_over_file(&mut self) {
        self.empty.push(self.file_name.clone());
    }

    /// Takes in one line, or refuses it. An `Err` ends the reading.
    pub(super) fn take(&mut self, line: u64, entry: Result<Entry<'_>, Mistake>) -> Result<(), Failure> {
        self.seen += 1;
        self.progress.at("reading", self.seen);
        match entry.and_then(|entry| self.request(line, &entry)) {
            Ok(request) => {
                self.traffic.requests.push(request);
                Ok(())
            }
            Err(mistake) => self.refuse(&mistake, line),
        }
    }

    /// Whether nothing says which limits a request of an access log meets.
    pub(super) fn has_no_routes(&self) -> bool {
        self.routes.is_empty() && self.left_out.is_empty()
    }

    /// Says that each line of the file is one charge: it is an access log. Reports the routes that are left out, once.
    pub(super) fn begin_access_log(&mut self) {
        self.traffic.whole_lines.insert(self.file);
        for route in std::mem::take(&mut self.left_out) {
            print_line(format_args!("tollgate: note: left out {route}"));
        }
    }

    /// Takes in one request of an access log: a charge for each route that it meets. A request without a key is charged to the
    /// empty one, which every limit denies.
    pub(super) fn take_request(
        &mut self,
        line: u64,
        time_us: u64,
        access: &Access<'_>,
    ) -> Result<(), Failure> {
        self.seen += 1;
        self.progress.at("reading", self.seen);
        let before = self.traffic.requests.len();
        let request = access.request(self.routes.reader());
        for charge in self.routes.charges(&request) {
            let text = charge.key.as_ref().map_or(NO_KEY, Key::canonical);
            let keys = &mut self.traffic.keys;
            let Some(key) = keys.find(text).or_else(|| keys.enter(text, text)) else {
                return Err(Failure::new("the log has more than 2^32 keys; split it"));
            };
            let (limit, file) = (self.limits_of_routes[charge.route], self.file);
            self.traffic.requests.push(Request { time_us, cost: charge.cost.get(), line, key, limit, file });
        }
        self.unmet += u64::from(self.traffic.requests.len() == before);
        Ok(())
    }

    /// Refuses a line of an access log. An `Err` ends the reading.
    pub(super) fn refuse_request(&mut self, line: u64, mistake: &Mistake) -> Result<(), Failure> {
        self.seen += 1;
        self.refuse(mistake, line)
    }

    /// Notes a column or a field that a backtest does not read.
    pub(super) fn ignore(&mut self, name: &str) {
        if self.ignored.len() <= MOST_IGNORED && !self.ignored.contains(name) {
            self.ignored.insert(name.to_string());
        }
    }

    /// Everything that was read, unless there were bad lines and they were not to be skipped.
    pub(super) fn finish(mut self) -> Result<Harvest, Failure> {
        if self.bad > 0 && self.bad_lines == BadLines::Refuse {
            return Err(self.refused(""));
        }
        drop(self.progress);
        if !self.empty.is_empty() {
            if self.empty.len() == usize::from(self.file) + 1 {
                let logs = counted(self.empty.len() as u64, "log");
                return Err(Failure::new(format!("all {logs} are empty; there is nothing to replay")));
            }
            let (logs, names) = (counted(self.empty.len() as u64, "empty log"), self.empty.join(", "));
            print_line(format_args!("tollgate: note: passed over {logs}: {}", names.escape_debug()));
        }
        if !self.ignored.is_empty() {
            let more = if self.ignored.len() > MOST_IGNORED { " and more" } else { "" };
            let names: Vec<String> =
                self.ignored.iter().take(MOST_IGNORED).map(|name| shortened(name, SHOWN)).collect();
            let names = names.join(", ").escape_debug().to_string();
            print_line(format_args!("tollgate: note: ignored what a backtest does not read: {names}{more}"));
        }
        Ok(Harvest {
            traffic: self.traffic,
            skipped: self.bad,
            first_skipped: self.reported.into_iter().next(),
            unmet: self.unmet,
        })
    }

    fn refuse(&mut self, mistake: &Mistake, line: u64) -> Result<(), Failure> {
        self.bad += 1;
        if self.reported.len() < MOST_BAD {
            self.reported.push(mistake.in_words(&self.file_name, line));
        }
        if self.bad_lines == BadLines::Refuse && self.reported.len() == MOST_BAD {
            return Err(self.refused(", and the rest was not read"));
        }
        Ok(())
    }

    fn refused(&mut self, rest: &str) -> Failure {
        let message = format!(
            "{} in the log{rest}; nothing was replayed (--skip-bad counts such lines and goes on)",
            counted(self.bad, "bad line"),
        );
        Failure::with_details(std::mem::take(&mut self.reported), message)
    }

    fn request(&mut self, line: u64, entry: &Entry<'_>) -> Result<Request, Mistake> {
        let time = entry.time.as_deref().ok_or_else(|| Mistake::absent("time", "say when it happened"))?;
        let time_us = instant::parse(time).map_err(|fix| Mistake::new("time", time, fix))?;
        let limit = self.limit(entry.limit.as_deref())?;
        let key =
            entry.key.as_deref().ok_or_else(|| Mistake::absent("key", "write the key, such as user:42"))?;
        let cost = entry.cost.as_deref().map_or(Ok(1), cost)?;
        let key = match self.traffic.keys.find(key) {
            Some(id) => id,
            None => {
                let parsed = Key::parse(key).map_err(|error| Mistake::malformed_key(key, &error))?;
                let too_many = || Mistake::new("key", key, "is one of more than 2^32 keys; split the log");
                self.traffic.keys.enter(key, parsed.canonical()).ok_or_else(too_many)?
            }
        };
        Ok(Request { time_us, cost, line, key, limit, file: self.file })
    }

    fn limit(&self, name: Option<&str>) -> Result<u16, Mistake> {
        let known = || format!("name a limit of the config: {}", self.known);
        match name {
            None | Some("") => Err(Mistake::absent("limit", known())),
            Some(name) => self.limits.get(name).copied().ok_or_else(|| Mistake::new("limit", name, known())),
        }
    }
}

/// A whole number from 1 on.
fn cost(text: &str) -> Result<u64, Mistake> {
    let wrong = |fix: &str| Err(Mistake::new("cost", text, fix));
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return wrong("write a whole number, at least 1, or leave it out for 1");
    }
    match text.parse::<u64>() {
        Ok(0) => {
            wrong("must be at least 1: a charge of nothing is a peek and changes nothing; drop the line")
        }
        Ok(cost) if cost <= MAX_COST => Ok(cost),
        _ => wrong("must be at most 9007199254740991 (2^53 - 1)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn intake(bad_lines: BadLines) -> Intake {
        let mut intake =
            Intake::new(&["api".to_string(), "login".to_string()], &Config::default(), bad_lines).unwrap();
        intake.begin_file(0, "log.csv");
        intake
    }

    fn entry<'a>(time: &'a str, limit: &'a str, key: &'a str, cost: Option<&'a str>) -> Entry<'a> {
        let text = |text: &'a str| Some(Cow::Borrowed(text));
        Entry { time: text(time), limit: text(limit), key: text(key), cost: cost.map(Cow::Borrowed) }
    }

    #[test]
    fn lines_become_requests() {
        let mut intake = intake(BadLines::Refuse);
        intake.take(2, Ok(entry("1.5", "login", "user:42", None))).unwrap();
        intake
            .take(3, Ok(entry("1970-01-01T00:00:01Z", "api", "user:42", Some("9007199254740991"))))
            .unwrap();
        let harvest = intake.finish().unwrap();
        let found: Vec<_> =
            harvest.traffic.requests.iter().map(|r| (r.time_us, r.limit, r.cost, r.line)).collect();
        assert_eq!(found, [(1_500_000, 1, 1, 2), (1_000_000, 0, MAX_COST, 3)]);
        assert_eq!(harvest.traffic.requests[0].key, harvest.traffic.requests[1].key);
        assert_eq!(harvest.skipped, 0);
    }

    #[test]
    fn a_bad_line_is_told_with_file_line_field_value_and_fix() {
        let none = Entry::default;
        for (entry, reported) in [
            (entry("noon", "api", "u", None), "log.csv:7: time = \"noon\": write RFC 3339"),
            (
                entry("1", "apy", "u", None),
                "log.csv:7: limit = \"apy\": name a limit of the config: api, login",
            ),
            (
                entry("1", "", "u", None),
                "log.csv:7: limit is missing: name a limit of the config: api, login",
            ),
            (entry("1", "api", "", None), "log.csv:7: key = \"\": "),
            (entry("1", "api", "a:b:c:d", None), "log.csv:7: key = \"a:b:c:d\": "),
            (entry("1", "api", "u", Some("0")), "log.csv:7: cost = \"0\": must be at least 1"),
            (entry("1", "api", "u", Some("-1")), "log.csv:7: cost = \"-1\": write a whole number"),
            (entry("1", "api", "u", Some("1.0")), "log.csv:7: cost = \"1.0\": write a whole number"),
            (entry("1", "api", "u", Some("")), "log.csv:7: cost = \"\": write a whole number"),
            (entry("1", "api", "u", Some("9007199254740992")), "must be at most 9007199254740991"),
            (entry("1", "api", "u", Some("9223372036854775808")), "must be at most 9007199254740991"),
            (entry("1", "api", "u", Some("99999999999999999999999")), "must be at most 9007199254740991"),
            (none(), "log.csv:7: time is missing: say when"),
            (Entry { key: None, ..entry("1", "api", "", None) }, "log.csv:7: key is missing: write the key"),
            (Entry { limit: None, ..entry("1", "", "u", None) }, "log.csv:7: limit is missing: name a limit"),
        ] {
            let mut intake = intake(BadLines::Refuse);
            intake.take(7, Ok(entry)).unwrap();
            let Err(Failure::CouldNot { details, message }) = intake.finish() else {
                panic!("{reported}: accepted")
            };
            assert!(details[0].contains(reported), "{reported}: {details:?}");
            assert!(message.starts_with("1 bad line in the log; nothing was replayed"), "{message}");
        }
    }

    #[test]
    fn reading_stops_at_the_twentieth_bad_line_unless_they_are_skipped() {
        let bad = |n: u64| (n, Ok(entry("1", "api", "u", Some("0"))));
        let mut strict = intake(BadLines::Refuse);
        for (line, entry) in (1..20).map(bad) {
            strict.take(line, entry).unwrap();
        }
        let Err(Failure::CouldNot { details, message }) = strict.take(20, bad(20).1) else {
            panic!("went on")
        };
        assert_eq!(details.len(), 20);
        assert!(message.starts_with("20 bad lines in the log, and the rest was not read;"), "{message}");

        let mut lenient = intake(BadLines::Skip);
        for (line, entry) in (1..=50).map(bad) {
            lenient.take(line, entry).unwrap();
        }
        let harvest = lenient.finish().unwrap();
        assert_eq!(harvest.skipped, 50);
        assert!(harvest.first_skipped.unwrap().starts_with("log.csv:1: cost"));
    }

    #[test]
    fn long_values_are_cut() {
        let mistake = Mistake::new("key", &"k".repeat(5000), "fix");
        assert!(mistake.in_words("f", 1).len() < 100);
    }
}
