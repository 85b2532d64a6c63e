//! A log file of the command line: opened, its format found out, read.

use std::io::BufRead;
use std::path::Path;

use super::intake::Intake;
use super::lines::Lines;
use super::{from_csv, from_jsonl};
use crate::cli::Format;
use crate::failure::Failure;
use crate::source;

/// Reads one file into `intake`.
pub(super) fn read(path: &Path, format: Format, intake: &mut Intake) -> Result<(), Failure> {
    let name = source::name(path);
    let mut input = source::open(path)?;
    let format = match format {
        Format::Auto => guess(path, input.fill_buf().map_err(|error| Failure::reading(&name, &error))?),
        chosen => chosen,
    };
    let lines = Lines::new(input).map_err(|error| Failure::reading(&name, &error))?;
    match format {
        Format::Jsonl => from_jsonl::read(lines, &name, intake),
        Format::Combined => Err(unread(&name)),
        Format::Csv | Format::Auto => from_csv::read(lines, &name, intake),
    }
}

/// Access logs are not read yet.
pub(super) fn unread(name: &str) -> Failure {
    Failure::new(format!(
        "cannot read {name}: this version does not read combined access logs yet; give CSV or JSONL with time, limit, key, cost"
    ))
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
    } else if looks_like_access_log(first) {
        Format::Combined
    } else {
        Format::Csv
    }
}

/// `127.0.0.1 - - [10/Oct/2000:13:55:36 -0700] "GET / HTTP/1.0" 200 2326`
fn looks_like_access_log(line: &[u8]) -> bool {
    let parts: Vec<&[u8]> = line.splitn(4, |&byte| byte == b' ').collect();
    matches!(parts[..], [_, _, _, rest] if rest.starts_with(b"[") && rest.windows(3).any(|w| w == b"] \""))
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
        ] {
            assert_eq!(guess(Path::new(name), beginning.as_bytes()), format, "{name} {beginning:?}");
        }
    }
}
