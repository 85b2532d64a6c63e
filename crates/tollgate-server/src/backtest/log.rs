//! A log file of the command line: opened, its format found out, read.

use std::io::BufRead;
use std::path::Path;

use super::intake::Intake;
use super::lines::Lines;
use super::{from_combined, from_csv, from_jsonl};
use crate::cli::Format;
use crate::failure::Failure;
use crate::source;

/// Reads one file into `intake`. An access log needs rules in the config.
pub(super) fn read(path: &Path, format: Format, config: &Path, intake: &mut Intake) -> Result<(), Failure> {
    let name = source::name(path);
    let mut input = source::open(path)?;
    let format = match format {
        Format::Auto => guess(path, input.fill_buf().map_err(|error| Failure::reading(&name, &error))?),
        chosen => chosen,
    };
    let lines = Lines::new(input).map_err(|error| Failure::reading(&name, &error))?;
    match format {
        Format::Jsonl => from_jsonl::read(lines, &name, intake),
        Format::Combined if intake.has_no_rules() => Err(without_rules(&name, &source::name(config))),
        Format::Combined => from_combined::read(lines, &name, intake),
        Format::Csv | Format::Auto => from_csv::read(lines, &name, intake),
    }
}

/// An access log says nothing of limits.
fn without_rules(name: &str, config: &str) -> Failure {
    let example = [
        "[[rules]]",
        "path = \"/api/*\"        # any, unless said",
        "limit = \"api\"",
        "key = \"ip\"             # who pays",
    ];
    Failure::with_details(
        example.map(str::to_string).to_vec(),
        format!(
            "cannot replay {name}: an access log does not say which limits its requests meet, and {config} has no rules for that; \
             add some, such as the one above"
        ),
    )
}

/// The format by the file's name, or else by how it begins.
fn guess(path: &Path, beginning: &[u8]) -> Format {
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    match extension.to_ascii_lowercase().as_str() {
        "csv" => return Format::Csv,
        "jsonl" | "ndjson" => return Format::Jsonl,
        _ => {}
    }
    let text = beginning.strip_prefix(b"\xef\xbb\xbf").unwrap_or(beginning).trim_ascii_start();
    let first = text.split(|&byte| byte == b'\n').next().unwrap_or_default();
    if first.starts_with(b"{") {
        Format::Jsonl
    } else if from_combined::is_access(first) {
        Format::Combined
    } else {
        Format::Csv
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_found_out() {
        let combined = "::1 - bob [10/Oct/2000:13:55:36 -0700] \"GET / HTTP/1.0\" 200 2326 \"-\" \"curl\"\n";
        for (name, beginning, format) in [
            ("a.csv", "{\"time\":1}", Format::Csv),
            ("a.CSV", "", Format::Csv),
            ("a.jsonl", "time,limit,key", Format::Jsonl),
            ("a.ndjson", "", Format::Jsonl),
            ("-", "\u{feff}{\"time\":1}\n", Format::Jsonl),
            ("a.log", "\n {\"time\":1}\n", Format::Jsonl),
            ("a.log", "time,limit,key\n", Format::Csv),
            ("-", "", Format::Csv),
            ("access.log", combined, Format::Combined),
            ("-", "\n::1 - a b [10/Oct/2000:13:55:36 -0700] \"-\" 408 0\r\n", Format::Combined),
            ("a.log", "::1 - - [10/Okt/2000:13:55:36 -0700] \"GET / HTTP/1.0\" 200 2326\n", Format::Csv),
        ] {
            assert_eq!(guess(Path::new(name), beginning.as_bytes()), format, "{name} {beginning:?}");
        }
    }
}
