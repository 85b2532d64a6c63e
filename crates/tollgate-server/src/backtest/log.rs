//! A log file of the command line: opened, unpacked, its format found out, read.

use std::io::{self, BufRead, Read};
use std::path::Path;

use super::intake::Intake;
use super::lines::{Lines, MAX_LINE};
use super::unpack::unpacked;
use super::{from_combined, from_csv, from_decision_log, from_json_access, from_jsonl};
use crate::cli::{Format, LogArgs as Logs};
use crate::failure::Failure;
use crate::source::{self, ReadBytes};

/// How many lines are looked at: the first of a log that was cut may be half a line.
const LOOKED_AT: usize = 5;

/// Reads one of the logs into `intake`. An access log needs routes in the config. An empty log among several, as there is after
/// a rotation, is passed over, unless it was said how the logs are written.
pub(super) fn read(
    path: &Path,
    args: &Logs,
    config: &str,
    read: &ReadBytes,
    intake: &mut Intake,
) -> Result<(), Failure> {
    let name = source::name(path);
    let failed = |error: io::Error| Failure::reading(&name, &error);
    let mut input = unpacked(source::open_counted(path, read)?).map_err(failed)?;
    let beginning = match args.format {
        Format::Auto => beginning(&mut input).map_err(failed)?,
        _ => Vec::new(),
    };
    let format = match args.format {
        Format::Auto
            if args.logs.len() > 1
                && texts(&beginning).next().is_none()
                && is_at_end(&mut input).map_err(failed)? =>
        {
            intake.pass_over_file();
            return Ok(());
        }
        Format::Auto => guess(path, &beginning),
        chosen => chosen,
    };
    let lines = Lines::new(beginning.as_slice().chain(input)).map_err(failed)?;
    match format {
        Format::Jsonl => from_jsonl::read(lines, &name, intake),
        Format::Combined | Format::Json if intake.has_no_routes() => Err(without_routes(&name, config)),
        Format::Combined => from_combined::read(lines, &name, intake),
        Format::Json => from_json_access::read(lines, &name, intake),
        Format::Decisions => from_decision_log::read(lines, &name, intake),
        Format::Csv | Format::Auto => from_csv::read(lines, &name, intake),
    }
}

/// An access log says nothing of limits.
fn without_routes(name: &str, config: &str) -> Failure {
    let example = [
        "[[routes]]",
        "path = \"/api/*\"        # any by default",
        "limit = \"api\"",
        "key = \"ip\"             # or user, header:x-api-key, {id}",
    ];
    Failure::with_details(
        example.map(str::to_string).to_vec(),
        format!(
            "cannot replay {name}: an access log does not say which limits its requests meet, and {config} has no routes for that; \
             add some, such as the one above"
        ),
    )
}

/// The first lines, whole, however few bytes each read brings; no more than the longest line may have.
fn beginning(input: &mut impl BufRead) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut input = input.take(MAX_LINE as u64);
    let (mut seen, mut line) = (0, 0);
    while seen < LOOKED_AT && input.read_until(b'\n', &mut bytes)? > 0 {
        seen += texts(&bytes[line..]).count();
        line = bytes.len();
    }
    Ok(bytes)
}

fn is_at_end(input: &mut impl BufRead) -> io::Result<bool> {
    Ok(input.fill_buf()?.is_empty())
}

/// The lines that are not blank.
fn texts(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    bytes.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii).filter(|line| !line.is_empty())
}

/// The format by the file's name, or else by the first line that reads as one of them.
pub(super) fn guess(path: &Path, beginning: &[u8]) -> Format {
    let extension = |path: &Path| {
        path.extension().and_then(|extension| extension.to_str()).unwrap_or_default().to_ascii_lowercase()
    };
    let own = extension(path);
    let own = match own.as_str() {
        "gz" | "zst" => extension(&path.with_extension("")),
        _ => own,
    };
    let of_json = |line: &[u8]| line.starts_with(b"{").then(|| json_format(line));
    match own.as_str() {
        "csv" => return Format::Csv,
        "jsonl" | "ndjson" => {
            return texts(beginning).take(LOOKED_AT).find_map(of_json).unwrap_or(Format::Jsonl);
        }
        _ => {}
    }
    let format = |line: &[u8]| {
        if let Some(format) = of_json(line) {
            Some(format)
        } else if from_combined::is_access(line) {
            Some(Format::Combined)
        } else {
            from_csv::is_header(line).then_some(Format::Csv)
        }
    };
    // Of what is none of them, the message names the header that is missing.
    texts(beginning).take(LOOKED_AT).find_map(format).unwrap_or(Format::Csv)
}

/// What an object is a line of.
fn json_format(line: &[u8]) -> Format {
    if from_decision_log::is_log(line) {
        Format::Decisions
    } else if from_jsonl::is_charge(line) {
        Format::Jsonl
    } else if from_json_access::is_access(line) {
        Format::Json
    } else {
        Format::Jsonl
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
            ("a.csv.gz", "{\"time\":1}", Format::Csv),
            ("a.log.zst", combined, Format::Combined),
            ("a.gz", "time,limit,key\n", Format::Csv),
            ("a.jsonl", "{\"start_time\":\"x\",\"path\":\"/\"}\n", Format::Json),
            ("a.log", "{\"time\":1,\"limit\":\"a\",\"key\":\"u\",\"path\":\"/\"}\n", Format::Jsonl),
            (
                "a.log",
                "{\"timestamp\":\"x\",\"level\":\"INFO\",\"target\":\"tollgate::decision\"}\n",
                Format::Decisions,
            ),
            ("a.jsonl", "{\"timestamp\":\"x\",\"model\":\"m\",\"status\":\"success\"}\n", Format::Jsonl),
            ("a.log", "half a line\n\n{\"time\":1}\n", Format::Jsonl),
            ("a.log", "key, \"limit\",time\n{\"time\":1}\n", Format::Csv),
            ("a.log", "1\n2\n\n3\n4\n{\"time\":1}\n", Format::Jsonl),
            ("a.log", "1\n2\n\n3\n4\n5\n{\"time\":1}\n", Format::Csv),
            ("a.log", "::1 - - [10/Okt/2000:13:55:36 -0700] \"GET / HTTP/1.0\" 200 2326\n", Format::Csv),
        ] {
            assert_eq!(guess(Path::new(name), beginning.as_bytes()), format, "{name} {beginning:?}");
        }
    }

    /// A pipe may bring a line in pieces, and only the first piece was looked at.
    #[test]
    fn a_line_may_come_in_pieces() {
        let lines =
            "\u{feff}\r\n::1 - - [10/Oct/2000:13:55:36 -0700] \"GET / HTTP/1.0\" 200 2326\n2\n3\n4\n5\n6\n";
        let endless = "x".repeat(MAX_LINE + 1);
        // Each of them is looked at once: all of them for each would be a million times a million.
        let blank = "\n".repeat(MAX_LINE + 1);
        for (text, taken) in [
            (lines, &lines[..lines.len() - 2]),
            ("1\n\n2", "1\n\n2"),
            ("\n \n", "\n \n"),
            ("", ""),
            (&endless, &endless[1..]),
            (&blank, &blank[1..]),
        ] {
            for piece in [1, 7, 8192] {
                let mut input = io::BufReader::with_capacity(piece, text.as_bytes());
                let found = beginning(&mut input).unwrap();
                assert!(found == taken.as_bytes(), "{text:.40?} by {piece}: {} bytes", found.len());
            }
        }
        assert_eq!(guess(Path::new("-"), lines.as_bytes()), Format::Combined);
    }
}
