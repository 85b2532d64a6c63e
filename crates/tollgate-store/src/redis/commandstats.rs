//! The time that scripts take inside of the servers, from the section `commandstats` of `INFO`.
//!
//! A server counts the calls of each command and their time since it was started, or since `CONFIG RESETSTAT`. The watch of each
//! server (`watch.rs`) reads both about once a second and adds what was new to one sum for the whole store. The scripts of other
//! programs on the server are part of it: a server does not count them apart.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::ScriptTime;

/// The commands that run scripts: charges use the first, records the second.
const COMMANDS: [&str; 2] = ["cmdstat_evalsha", "cmdstat_eval"];

/// The first line of the section.
const HEADER: &str = "# Commandstats";

/// What one server has counted for each of [`COMMANDS`]; `None` where it is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CommandStats([Option<ScriptTime>; COMMANDS.len()]);

impl CommandStats {
    /// Reads the section. A command without a line was not called since the count began, a line that cannot be read is ignored,
    /// and a text that is not this section says nothing.
    pub(super) fn read(text: &str) -> CommandStats {
        let mut lines = text.lines().map(str::trim_end);
        if !lines.any(|line| line.eq_ignore_ascii_case(HEADER)) {
            return CommandStats::default();
        }
        let mut stats = CommandStats([Some(ScriptTime::default()); COMMANDS.len()]);
        for line in lines {
            let Some((name, numbers)) = line.split_once(':') else { continue };
            if let Some(index) = COMMANDS.iter().position(|command| *command == name) {
                stats.0[index] = read_numbers(numbers);
            }
        }
        stats
    }

    /// Replaces what was known by what the server says `now`, and returns what was added meanwhile; `None` if it says nothing.
    /// What was counted before the first look is not added.
    fn replace(&mut self, now: CommandStats) -> Option<ScriptTime> {
        let mut added = None;
        for (known, now) in self.0.iter_mut().zip(now.0) {
            let Some(now) = now else { continue };
            let before = known.replace(now);
            let new = before.map_or_else(ScriptTime::default, |before| since(before, now));
            added = Some(plus(added.unwrap_or_default(), new));
        }
        added
    }
}

/// The numbers of a line: `calls=3,usec=45,usec_per_call=15.00,rejected_calls=0,failed_calls=0`.
fn read_numbers(numbers: &str) -> Option<ScriptTime> {
    let number = |name: &str| {
        let fields = numbers.split(',').filter_map(|field| field.split_once('='));
        fields.filter(|(field, _)| *field == name).find_map(|(_, value)| value.parse::<u64>().ok())
    };
    Some(ScriptTime { calls: number("calls")?, us: number("usec")? })
}

/// What was added. A count of calls that went back began anew, so all of it is new. A time that alone went back is that of a
/// server whose clock was set back during a script (6.2 measures by it), and adds nothing.
fn since(before: ScriptTime, now: ScriptTime) -> ScriptTime {
    match now.calls.checked_sub(before.calls) {
        Some(calls) => ScriptTime { calls, us: now.us.saturating_sub(before.us) },
        None => now,
    }
}

fn plus(sum: ScriptTime, more: ScriptTime) -> ScriptTime {
    ScriptTime { calls: sum.calls.saturating_add(more.calls), us: sum.us.saturating_add(more.us) }
}

/// The sum of all servers of a store; nothing until one of them has said how long its scripts take. It never goes back, also when
/// a server leaves the cluster. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct ScriptSum(Arc<Mutex<Option<ScriptTime>>>);

impl ScriptSum {
    /// Adds what one server counted since `known`, which becomes `now`.
    pub(super) fn add(&self, known: &mut CommandStats, now: CommandStats) {
        let Some(added) = known.replace(now) else { return };
        let mut sum = self.0.lock();
        *sum = Some(plus(sum.unwrap_or_default(), added));
    }

    pub(super) fn get(&self) -> Option<ScriptTime> {
        *self.0.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(calls: u64, us: u64) -> ScriptTime {
        ScriptTime { calls, us }
    }

    fn stats(evalsha: (u64, u64), eval: (u64, u64)) -> CommandStats {
        CommandStats([Some(time(evalsha.0, evalsha.1)), Some(time(eval.0, eval.1))])
    }

    #[test]
    fn the_time_of_scripts_is_read_and_that_of_other_commands_is_not() {
        let text = "# Commandstats\r\n\
             cmdstat_eval:calls=2,usec=31,usec_per_call=15.50,rejected_calls=0,failed_calls=1\r\n\
             cmdstat_get:calls=400,usec=500,usec_per_call=1.25,rejected_calls=0,failed_calls=0\r\n\
             cmdstat_evalsha:calls=700,usec=12345,usec_per_call=17.64,rejected_calls=4,failed_calls=0\r\n\
             cmdstat_evalsha_ro:calls=9,usec=9,usec_per_call=1.00,rejected_calls=0,failed_calls=0\r\n";
        assert_eq!(CommandStats::read(text), stats((700, 12_345), (2, 31)));
        // As before 6.2, without the last two fields; and in any order.
        let short = "# commandstats\ncmdstat_evalsha:usec=8,calls=7";
        assert_eq!(CommandStats::read(short), stats((7, 8), (0, 0)));
    }

    #[test]
    fn a_command_without_a_line_was_not_called() {
        assert_eq!(CommandStats::read("# Commandstats\r\n"), stats((0, 0), (0, 0)));
        let (sum, mut known) = (ScriptSum::default(), CommandStats::default());
        sum.add(&mut known, CommandStats::read("# Commandstats\ncmdstat_evalsha:calls=5,usec=50\n"));
        assert_eq!(sum.get(), Some(time(0, 0)), "what was before is not ours to count");
        let text = "# Commandstats\ncmdstat_evalsha:calls=6,usec=57\ncmdstat_eval:calls=1,usec=9\n";
        sum.add(&mut known, CommandStats::read(text));
        assert_eq!(sum.get(), Some(time(2, 16)));
    }

    #[test]
    fn a_text_that_is_not_the_section_says_nothing() {
        for text in ["", "nonsense", "cmdstat_evalsha:calls=1,usec=1", "# Stats\r\nevicted_keys:7\r\n"] {
            let (sum, mut known) = (ScriptSum::default(), stats((5, 50), (0, 0)));
            assert_eq!(CommandStats::read(text), CommandStats::default(), "{text}");
            sum.add(&mut known, CommandStats::read(text));
            assert_eq!((sum.get(), known), (None, stats((5, 50), (0, 0))), "{text}");
        }
    }

    #[test]
    fn a_garbled_line_is_ignored_and_what_it_hid_is_added_later() {
        for line in [
            "",
            "calls=6",
            "usec=60",
            "calls=,usec=60",
            "calls=x,usec=60",
            "calls=-6,usec=60",
            "calls=6,usec=-60",
            "calls=6.0,usec=60",
            "calls=6,usec=18446744073709551616",
            "calls 6 usec 60",
            "calls=6;usec=60",
        ] {
            let text =
                format!("# Commandstats\ncmdstat_evalsha:{line}\ncmdstat_eval:calls=3,usec=4\ncmdstat_\n:\n");
            let garbled = CommandStats::read(&text);
            assert_eq!(garbled, CommandStats([None, Some(time(3, 4))]), "{line}");
            let (sum, mut known) = (ScriptSum::default(), stats((5, 50), (3, 4)));
            sum.add(&mut known, garbled);
            assert_eq!(sum.get(), Some(time(0, 0)), "{line}");
            sum.add(&mut known, stats((9, 90), (3, 4)));
            assert_eq!(sum.get(), Some(time(4, 40)), "{line}");
        }
    }

    #[test]
    fn a_count_that_went_back_began_anew() {
        let (sum, mut known) = (ScriptSum::default(), CommandStats::default());
        for (now, expected) in [
            (stats((1_000, 9_000), (10, 500)), time(0, 0)),
            (stats((1_001, 9_020), (10, 500)), time(1, 20)),
            // The statistics were reset; the other command is not called any more.
            (stats((3, 30), (0, 0)), time(4, 50)),
            (stats((4, 44), (0, 0)), time(5, 64)),
            // A clock was set back during a script: the whole time of the server must not be added again.
            (stats((5, 40), (0, 0)), time(6, 64)),
            (stats((6, 49), (0, 0)), time(7, 73)),
        ] {
            sum.add(&mut known, now);
            assert_eq!(sum.get(), Some(expected), "{now:?}");
        }
    }

    #[test]
    fn sums_end_at_the_largest_number() {
        let (sum, most) = (ScriptSum::default(), u64::MAX);
        let mut known = stats((0, 0), (0, 0));
        sum.add(&mut known, stats((most, most), (most, most)));
        assert_eq!(sum.get(), Some(time(most, most)));
        sum.add(&mut known, stats((1, 1), (1, 1)));
        assert_eq!(sum.get(), Some(time(most, most)));
        let text = format!("# Commandstats\ncmdstat_evalsha:calls={most},usec={most}");
        assert_eq!(CommandStats::read(&text), stats((most, most), (0, 0)));
    }

    #[test]
    fn the_servers_of_a_store_have_one_sum() {
        let sum = ScriptSum::default();
        let (mut one, mut two) = (stats((1, 10), (0, 0)), stats((100, 1_000), (0, 0)));
        sum.add(&mut one, stats((3, 35), (0, 0)));
        sum.clone().add(&mut two, stats((104, 1_070), (1, 5)));
        assert_eq!(sum.get(), Some(time(7, 100)));
        assert_eq!((one, two), (stats((3, 35), (0, 0)), stats((104, 1_070), (1, 5))));
    }
}
