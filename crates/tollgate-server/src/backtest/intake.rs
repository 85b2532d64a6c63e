//! Where lines become requests, or are refused with their file, line, field, value and fix.
//!
//! The readers (`from_csv.rs`, `from_jsonl.rs`) hand over the texts of a line's fields; what they mean is decided here, once,
//! so that both formats give the same answers. `from_combined.rs` hands over whole requests, and the config's `[[routes]]` say which
//! limits those meet: one line becomes a charge for each, found by the same code as in the tower layer. A line that cannot be read is
//! never guessed at: it is counted and left out, and the first few are reported. With `--strict`, and where no line could be read, nothing is
//! replayed.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};

use foldhash::fast;
use tollgate::Key;
use tollgate::config::Config;
use tollgate::route::Routes;
use tollgate_llm::LlmConfig;

use super::from_combined::Access;
use super::from_trail::Call;
use super::instant;
use super::lines::{Line, TOO_LONG};
use super::mistake::{Mistake, SHOWN};
use super::traffic::{Request, Traffic};
use crate::failure::{Failure, print_line};
use crate::figures::{counted, shortened};
use crate::screen::Progress;
use crate::validate::is_concurrency;

/// The key of a request that has none: every limit denies it, and nothing is charged.
pub(super) const NO_KEY: &str = "";

/// How many bad lines are reported; with `--strict`, the rest of the input is left unread then.
const MOST_BAD: usize = 20;

/// How many charges a backtest holds: 8 GiB of them. A few bytes of a compressed file can unfold to more.
const MOST_CHARGES: usize = 1 << 28;

/// How many names of ignored columns are reported.
const MOST_IGNORED: usize = 8;

/// The largest cost: 2^53 − 1, like every count of Tollgate.
const MAX_COST: u64 = (1 << 53) - 1;

/// The fields of one line, as texts. A field that is absent is `None`.
#[derive(Debug, Default)]
pub(super) struct Entry<'a> {
    pub(super) time: Option<Cow<'a, str>>,
    pub(super) limit: Option<Cow<'a, str>>,
    pub(super) key: Option<Cow<'a, str>>,
    pub(super) cost: Option<Cow<'a, str>>,
}

/// What to do with a line that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BadLines {
    Refuse,
    Skip,
}

/// Whether values of bad lines, in which a key may be, are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BadValues {
    Shown,
    Hidden,
}

/// The requests read so far, and what could not be read.
pub(super) struct Intake {
    limits: HashMap<String, u16, fast::RandomState>,
    /// The names of all limits, for messages.
    known: String,
    /// Which limits a request of an access log meets.
    routes: Routes,
    /// The limit of each route.
    limits_of_routes: Vec<u16>,
    /// Which limits a call of a language model charges.
    llm: Option<LlmConfig>,
    /// The routes that cannot be replayed from an access log, and why; until they are reported.
    left_out: Vec<String>,
    bad_lines: BadLines,
    bad_values: BadValues,
    file: u16,
    file_name: String,
    traffic: Traffic,
    reported: Vec<String>,
    bad: u64,
    unmet: u64,
    ignored: BTreeSet<String>,
    /// The files that had nothing in them.
    empty: Vec<String>,
    /// Decisions that a decision log says it left out.
    left_out_decisions: u64,
    progress: Progress,
    seen: u64,
}

/// What the files came to.
pub(super) struct Harvest {
    pub(super) traffic: Traffic,
    /// How many lines were skipped, and the first few of them.
    pub(super) skipped: u64,
    pub(super) first_skipped: Vec<String>,
    /// How many requests of access logs met no route.
    pub(super) unmet: u64,
}

impl Intake {
    /// For the limits of a policy, in this order, and the routes and language models of its config.
    pub(super) fn new(
        limits: &[String],
        config: &Config,
        llm: Option<LlmConfig>,
        bad_lines: BadLines,
        bad_values: BadValues,
    ) -> Result<Intake, Failure> {
        let mut ids = HashMap::default();
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
            llm,
            left_out,
            known: if limits.is_empty() { "none".to_string() } else { limits.join(", ") },
            bad_lines,
            bad_values,
            file: 0,
            file_name: String::new(),
            traffic: Traffic::default(),
            reported: Vec::new(),
            bad: 0,
            unmet: 0,
            ignored: BTreeSet::new(),
            empty: Vec::new(),
            left_out_decisions: 0,
            progress: Progress::new(),
            seen: 0,
        })
    }

    /// Shows how much of the input has been read.
    pub(super) fn follow(&mut self, progress: Progress) {
        self.progress = progress;
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
            Ok(request) => self.charge(request),
            Err(mistake) => self.refuse(&mistake, line),
        }
    }

    fn charge(&mut self, request: Request) -> Result<(), Failure> {
        if self.traffic.requests.len() >= MOST_CHARGES {
            return Err(self.too_many_charges());
        }
        self.traffic.requests.push(request);
        Ok(())
    }

    fn too_many_charges(&self) -> Failure {
        let name = &self.file_name;
        Failure::new(format!("{name} has more charges than a backtest holds (268,435,456); split the log"))
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
        if before >= MOST_CHARGES {
            return Err(self.too_many_charges());
        }
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

    /// Takes in one line of the trail of a gateway: a charge of every limit of its model.
    pub(super) fn take_call(&mut self, line: u64, call: &Call<'_>) -> Result<(), Failure> {
        self.seen += 1;
        self.progress.at("reading", self.seen);
        let time_us = match call.sent() {
            Ok(time_us) => time_us,
            Err(mistake) => return self.refuse(&mistake, line),
        };
        self.traffic.whole_lines.insert(self.file);
        let charges = call.charges(self.llm.as_ref());
        for (limit, key, cost) in charges {
            let Some(limit) = self.limits.get(&limit).copied() else { continue };
            let key = Key::parse(&key);
            let text = key.as_ref().map_or(NO_KEY, Key::canonical);
            let keys = &mut self.traffic.keys;
            let Some(key) = keys.find(text).or_else(|| keys.enter(text, text)) else {
                return Err(Failure::new("the log has more than 2^32 keys; split it"));
            };
            self.charge(Request { time_us, cost, line, key, limit, file: self.file })?;
        }
        Ok(())
    }

    /// Notes how many decisions a decision log left out.
    pub(super) fn note_left_out(&mut self, decisions: u64) {
        self.left_out_decisions = self.left_out_decisions.saturating_add(decisions);
    }

    /// Passes over a line that is no charge and no mistake.
    pub(super) fn pass_over(&mut self) {
        self.seen += 1;
        self.progress.at("reading", self.seen);
    }

    /// A line of an access log and its number, without the spaces around it. `None` if it is empty, or too long and therefore refused.
    pub(super) fn whole_line<'a>(&mut self, line: &Line<'a>) -> Result<Option<(u64, &'a [u8])>, Failure> {
        match *line {
            Line::Whole(line, bytes) => {
                Ok(Some((line, bytes.trim_ascii())).filter(|(_, bytes)| !bytes.is_empty()))
            }
            Line::TooLong(line, start) => {
                let mistake = Mistake::new("line", &String::from_utf8_lossy(start), TOO_LONG);
                self.refuse_request(line, &mistake).map(|()| None)
            }
        }
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

    /// Everything that was read, unless nothing could be read or bad lines are refused.
    pub(super) fn finish(mut self) -> Result<Harvest, Failure> {
        if self.bad > 0 && (self.bad_lines == BadLines::Refuse || self.bad == self.seen) {
            return Err(self.refused(""));
        }
        drop(self.progress);
        if self.left_out_decisions > 0 {
            let decisions = counted(self.left_out_decisions, "decision");
            print_line(format_args!(
                "tollgate: note: the decision log says that it left out {decisions}; `log_all = true` in [server] writes all"
            ));
        }
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
            first_skipped: self.reported,
            unmet: self.unmet,
        })
    }

    fn refuse(&mut self, mistake: &Mistake, line: u64) -> Result<(), Failure> {
        self.bad += 1;
        if self.reported.len() < MOST_BAD {
            self.reported.push(match self.bad_values {
                BadValues::Shown => mistake.in_words(&self.file_name, line),
                BadValues::Hidden => mistake.without_value(&self.file_name, line),
            });
        }
        if self.bad_lines == BadLines::Refuse && self.reported.len() == MOST_BAD {
            return Err(self.refused(", and the rest was not read"));
        }
        Ok(())
    }

    fn refused(&mut self, rest: &str) -> Failure {
        let why = match self.bad_lines {
            BadLines::Refuse => " (without --strict such lines are counted and left out)",
            BadLines::Skip if self.bad == 1 => ", because it is the only one",
            BadLines::Skip => ", because no line could be read",
        };
        let message =
            format!("{} in the log{rest}; nothing was replayed{why}", counted(self.bad, "bad line"));
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
        let mut intake = Intake::new(
            &["api".to_string(), "login".to_string()],
            &Config::default(),
            None,
            bad_lines,
            BadValues::Shown,
        )
        .unwrap();
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
    fn a_bad_line_is_reported_with_file_line_field_value_and_fix() {
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
    fn strict_reading_stops_at_the_twentieth_bad_line_and_other_reading_goes_on() {
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
        lenient.take(51, Ok(entry("1", "api", "u", None))).unwrap();
        let harvest = lenient.finish().unwrap();
        assert_eq!((harvest.skipped, harvest.first_skipped.len()), (50, MOST_BAD));
        assert!(harvest.first_skipped[0].starts_with("log.csv:1: cost"));

        // A file without one good line is most likely no log.
        let mut hopeless = intake(BadLines::Skip);
        for (line, entry) in (1..=50).map(bad) {
            hopeless.take(line, entry).unwrap();
        }
        let Err(Failure::CouldNot { details, message }) = hopeless.finish() else { panic!("went on") };
        assert_eq!(
            (details.len(), &*message),
            (20, "50 bad lines in the log; nothing was replayed, because no line could be read")
        );
    }
}
