//! See `crate::fuzzing`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::OnceLock;

use tollgate::Key;

use super::intake::{BadLines, BadValues, Intake, NO_KEY};
use super::lines::Lines;
use super::{from_combined, from_csv, from_decision_log, from_json_access, from_jsonl};
use crate::config::Config;

const CONFIG: &str = "[limits]\napi = { strategy = 'fixed_window', limit = 5, window = '1m' }\nlogin = { strategy = 'fixed_window', limit = 2, window = '1s' }\n\
    [[routes]]\npath = '/users/{id}'\nlimit = 'api'\nkey = '{id}'\n\
    [[routes]]\npath = '/login'\nlimit = 'login'\nkey = 'ip'\n\
    [llm.upstreams.up]\nkind = 'anthropic'\nbase_url = 'http://localhost'\n\
    [llm.models.m]\nrpm = 5\ntpm = 100\ninput_tpm = 50\nconcurrency = 2\n";

/// A log of a backtest, as each of its formats.
pub fn log(bytes: &[u8]) {
    read(bytes);
}

/// How many charges of each limit were read, in all formats together.
fn read(bytes: &[u8]) -> BTreeMap<&'static str, usize> {
    static READ: OnceLock<Config> = OnceLock::new();
    let config = READ.get_or_init(|| Config::parse(CONFIG).expect("sound"));
    let limits: Vec<&'static str> = config.gate.policy.rules().iter().map(tollgate::Rule::name).collect();
    let names: Vec<String> = limits.iter().map(|name| (*name).to_owned()).collect();
    let mut charges = BTreeMap::new();
    let lines = bytes.split(|byte| *byte == b'\n').count() as u64;
    let _ = super::log::guess(Path::new("x"), bytes);
    for read in [
        from_combined::read,
        from_csv::read,
        from_decision_log::read,
        from_json_access::read,
        from_jsonl::read,
    ] {
        let mut intake =
            Intake::new(&names, &config.gate, config.llm.clone(), BadLines::Skip, BadValues::Shown)
                .expect("few limits");
        intake.begin_file(0, "fuzz");
        let Ok(input) = Lines::new(bytes) else { continue };
        if read(input, "fuzz", &mut intake).is_err() {
            continue;
        }
        let Ok(harvest) = intake.finish() else { continue };
        assert!(harvest.skipped <= lines, "{} of {lines} lines left out", harvest.skipped);
        for request in &harvest.traffic.requests {
            let key = harvest.traffic.keys.text(request.key);
            assert!(
                key == NO_KEY || Key::parse(key).is_ok_and(|parsed| parsed.canonical() == key),
                "{key:?} is not as our keys are written"
            );
            assert!(request.line <= lines);
            *charges.entry(limits[usize::from(request.limit)]).or_default() += 1;
        }
    }
    charges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trail_of_models_is_read_too() {
        let trail = br#"{"timestamp":"1970-01-01T00:00:09.5Z","model":"m","input_tokens":30,"output_tokens":5,"status":"success","attempt":1}"#;
        let charges = read(trail);
        assert_eq!(charges, [("llm.m.input_tpm", 1), ("llm.m.rpm", 1), ("llm.m.tpm", 1)].into());
    }
}
