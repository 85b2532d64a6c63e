//! Requests from CSV: a header, then a line for each charge.
//!
//! Columns come in any order, fields may be quoted, columns that a backtest does not read are ignored. The csv crate splits
//! the records; this file says which column is which and which physical line a record stands on.

use std::borrow::Cow;
use std::io::{self, BufRead};

use csv::{ByteRecord, Reader, ReaderBuilder};
use memchr::{memchr_iter, memchr2};
use smallvec::SmallVec;

use super::intake::{Entry, Intake};
use super::lines::{Line, Lines, Records, TOO_LONG};
use super::mistake::Mistake;
use crate::failure::Failure;

/// Where the fields stand.
#[derive(Debug, PartialEq, Eq)]
struct Columns {
    time: usize,
    limit: usize,
    key: usize,
    cost: Option<usize>,
    /// How many columns the header names.
    count: usize,
}

/// Reads a whole file into `intake`. Lines without quotes are split here, which is several times as fast; from the first line on that has one, the
/// csv crate reads.
pub(super) fn read<R: BufRead>(mut lines: Lines<R>, name: &str, intake: &mut Intake) -> Result<(), Failure> {
    let mut columns = None;
    loop {
        let (line, bytes) = match lines.next_line().map_err(|error| Failure::reading(name, &error))? {
            None if columns.is_none() => return Err(empty(name)),
            None => return Ok(()),
            Some(Line::TooLong(line, start)) => {
                if columns.is_none() {
                    return Err(Failure::new(format!("cannot read {name}: line {line} {TOO_LONG}")));
                }
                intake.take(line, Err(Mistake::new("line", &String::from_utf8_lossy(start), TOO_LONG)))?;
                continue;
            }
            Some(Line::Whole(line, bytes)) => (line, bytes),
        };
        let Some(record) = plain(bytes) else { break };
        if record.is_empty() {
            continue;
        }
        match &columns {
            None => columns = Some(header(record.split(|&byte| byte == b','), line, name, intake)?),
            Some(columns) => intake.take(line, columns.split(record))?,
        }
    }
    let records = Records::from_current(lines).map_err(|error| Failure::reading(name, &error))?;
    read_quoted(records, columns, name, intake)
}

/// A line without its end, if it is a record by itself: it has no quotes, and no carriage return but at its end.
fn plain(line: &[u8]) -> Option<&[u8]> {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    memchr2(b'"', b'\r', line).is_none().then_some(line)
}

fn empty(name: &str) -> Failure {
    Failure::new(format!("{name} is empty: CSV begins with the header time,limit,key,cost"))
}

/// Which column is which, by the header.
fn header<'a>(
    names: impl Iterator<Item = &'a [u8]>,
    line: u64,
    name: &str,
    intake: &mut Intake,
) -> Result<Columns, Failure> {
    let header: Vec<String> =
        names.map(|column| String::from_utf8_lossy(column.trim_ascii()).into_owned()).collect();
    let columns = Columns::of(&header).map_err(|wrong| Failure::new(format!("{name}:{line}: {wrong}")))?;
    for (index, column) in header.iter().enumerate() {
        if !columns.reads(index) {
            intake.ignore(column);
        }
    }
    Ok(columns)
}

/// Reads the rest of a file in which fields are quoted; also its header, if that has not been read.
fn read_quoted<R: BufRead>(
    records: Records<R>,
    columns: Option<Columns>,
    name: &str,
    intake: &mut Intake,
) -> Result<(), Failure> {
    let mut reader = ReaderBuilder::new().has_headers(false).flexible(true).from_reader(records);
    let mut record = ByteRecord::new();
    let columns = match columns {
        Some(columns) => columns,
        None => {
            let found = next(&mut reader, &mut record, name)?;
            if let Some((line, mistake)) = reader.get_mut().refused().next() {
                return Err(Failure::new(mistake.in_words(name, line)));
            }
            if !found {
                return Err(empty(name));
            }
            header(record.iter(), reader.get_ref().line(), name, intake)?
        }
    };
    loop {
        let found = next(&mut reader, &mut record, name)?;
        for (line, mistake) in reader.get_mut().refused() {
            intake.take(line, Err(mistake))?;
        }
        if !found {
            return Ok(());
        }
        intake.take(reader.get_ref().line(), columns.entry(record.len(), |index| record.get(index)))?;
    }
}

/// Whether a line reads as a header.
pub(super) fn is_header(line: &[u8]) -> bool {
    let name = |column: &str| column.trim().trim_matches('"').to_string();
    let header: Vec<String> = String::from_utf8_lossy(line).split(',').map(name).collect();
    Columns::of(&header).is_ok()
}

/// The next record; false at the end.
fn next<R: BufRead>(
    reader: &mut Reader<Records<R>>,
    record: &mut ByteRecord,
    name: &str,
) -> Result<bool, Failure> {
    reader.read_byte_record(record).map_err(|error| Failure::reading(name, &io::Error::from(error)))
}

impl Columns {
    fn of(header: &[String]) -> Result<Columns, String> {
        let shown = || format!("the header is {:?}", crate::figures::shortened(&header.join(","), 120));
        let find = |name: &str| {
            let mut places = header.iter().enumerate().filter(|(_, column)| *column == name);
            match (places.next(), places.next()) {
                (_, Some(_)) => Err(format!("the column {name} stands twice; {}", shown())),
                (place, None) => Ok(place.map(|(index, _)| index)),
            }
        };
        let need = |name: &str| {
            find(name)?.ok_or_else(|| {
                // What names none of them is perhaps no header at all.
                let is_ours = |column: &String| ["time", "limit", "key", "cost"].contains(&column.as_str());
                let hint = match header.iter().any(is_ours) {
                    true => "",
                    false => "; if it is no CSV, say which with --format combined, json or jsonl",
                };
                format!(
                    "no column {name}; name the columns time, limit, key and, if there are costs, cost; {}{hint}",
                    shown()
                )
            })
        };
        Ok(Columns {
            time: need("time")?,
            limit: need("limit")?,
            key: need("key")?,
            cost: find("cost")?,
            count: header.len(),
        })
    }

    fn reads(&self, index: usize) -> bool {
        [Some(self.time), Some(self.limit), Some(self.key), self.cost].contains(&Some(index))
    }

    /// The fields of a line without quotes.
    fn split<'a>(&self, line: &'a [u8]) -> Result<Entry<'a>, Mistake> {
        // The line is looked at once for being text, which its fields then are. Only where it is none, each is looked at.
        let Ok(text) = str::from_utf8(line) else {
            let fields: SmallVec<[&[u8]; 16]> = line.split(|&byte| byte == b',').collect();
            return self.entry(fields.len(), |index| fields.get(index).copied());
        };
        let mut fields: SmallVec<[&str; 16]> = SmallVec::new();
        let mut start = 0;
        for end in memchr_iter(b',', line).chain([line.len()]) {
            fields.push(&text[start..end]);
            start = end + 1;
        }
        if fields.len() > self.count {
            return Err(self.too_many(fields[self.count]));
        }
        let trimmed = |index: usize| fields.get(index).map(|text| trim(text));
        Ok(Entry {
            time: trimmed(self.time).map(Cow::Borrowed),
            limit: trimmed(self.limit).map(Cow::Borrowed),
            key: fields.get(self.key).copied().map(Cow::Borrowed),
            cost: self.cost.and_then(trimmed).filter(|text| !text.is_empty()).map(Cow::Borrowed),
        })
    }

    /// A line that has a field beyond those of the header.
    fn too_many(&self, extra: &str) -> Mistake {
        let fix =
            format!("stands beyond the {} columns of the header; quote fields that hold commas", self.count);
        Mistake::new("line", extra, fix)
    }

    /// The fields of a record of so many.
    fn entry<'a>(
        &self,
        count: usize,
        field: impl Fn(usize) -> Option<&'a [u8]>,
    ) -> Result<Entry<'a>, Mistake> {
        if count > self.count {
            return Err(self.too_many(&String::from_utf8_lossy(field(self.count).unwrap_or_default())));
        }
        let text = |name: &'static str, index: usize| match field(index) {
            None => Ok(None),
            Some(bytes) => str::from_utf8(bytes).map(Some).map_err(|_| Mistake::not_utf8(name, bytes)),
        };
        // A blank beside a comma is no part of a number or a name; in a key it may be.
        let trimmed = |field, index| Ok(text(field, index)?.map(|text| Cow::Borrowed(trim(text))));
        Ok(Entry {
            time: trimmed("time", self.time)?,
            limit: trimmed("limit", self.limit)?,
            key: text("key", self.key)?.map(Cow::Borrowed),
            cost: match self.cost {
                Some(index) => trimmed("cost", index)?.filter(|text| !text.is_empty()),
                None => None,
            },
        })
    }
}

/// A text without white space around it. Nearly none has any, and Unicode's is looked for only beside what is not ASCII.
fn trim(text: &str) -> &str {
    let is_graphic = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_graphic);
    let bytes = text.as_bytes();
    if is_graphic(bytes.first()) && is_graphic(bytes.last()) { text } else { text.trim() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::intake::{BadLines, BadValues};
    use super::*;

    /// Every charge with its line, and every bad line, of a text; read as it is, or by the csv crate alone.
    fn charges(text: &str, by_crate_alone: bool) -> Result<String, String> {
        let limits = ["a".to_owned(), "b".to_owned()];
        let config = tollgate::config::Config::default();
        let mut intake = Intake::new(&limits, &config, None, BadLines::Skip, BadValues::Shown).unwrap();
        intake.begin_file(0, "f");
        let lines = Lines::new(text.as_bytes()).unwrap();
        let read = match by_crate_alone {
            true => read_quoted(Records::new(lines), None, "f", &mut intake),
            false => read(lines, "f", &mut intake),
        };
        read.map_err(|failure| failure.to_string())?;
        let harvest = intake.finish().map_err(|failure| failure.to_string())?;
        let keys = &harvest.traffic.keys;
        let one = |request: &super::super::traffic::Request| {
            (request.line, request.time_us, request.limit, keys.text(request.key).to_owned(), request.cost)
        };
        let all: Vec<_> = harvest.traffic.requests.iter().map(one).collect();
        Ok(format!("{all:?} {:?}", harvest.first_skipped))
    }

    proptest! {
        /// Lines that are split here are split as the csv crate splits them, whatever stands around them.
        #[test]
        fn both_ways_to_read_are_one(
            lines in proptest::collection::vec(
                prop_oneof![
                    6 => "[1-9]{1,3},[ab],[k-m]{1,2}(,[0-3])?",
                    1 => "[1-9],a,\"k\n?,\"(,1)?",
                    1 => "[1-9],\"a\",[k\"]{0,3}",
                    1 => "[0-9ab,\" \r]{0,8}",
                    1 => "",
                ],
                0..20,
            ),
            header in prop_oneof![9 => Just("time,limit,key,cost"), 1 => Just("\"time\",key,limit"), 1 => Just("")],
            end in prop::sample::select(vec!["\n", "\r\n"]),
        ) {
            let text = std::iter::once(header.to_owned()).chain(lines).collect::<Vec<_>>().join(end);
            prop_assert_eq!(charges(&text, false), charges(&text, true), "{:?}", text);
        }
    }

    fn header(text: &str) -> Result<Columns, String> {
        Columns::of(&text.split(',').map(str::to_string).collect::<Vec<_>>())
    }

    #[test]
    fn columns_come_in_any_order() {
        let columns = header("cost,path,key,time,limit").unwrap();
        assert_eq!(columns, Columns { time: 3, limit: 4, key: 2, cost: Some(0), count: 5 });
        assert!(columns.reads(0) && !columns.reads(1));
        assert_eq!(header("time,limit,key").unwrap().cost, None);
    }

    #[test]
    fn a_header_that_lacks_a_column_is_refused() {
        for (text, expected) in [
            ("time,limit,user", "no column key; name the columns time, limit, key"),
            ("1700000000,api,user:1", "no column time;"),
            ("Time,limit,key", "no column time;"),
            ("time,key", "no column limit;"),
            ("time,limit,key,key", "the column key stands twice; the header is \"time,limit,key,key\""),
            ("time,limit,key,cost,cost", "the column cost stands twice"),
        ] {
            let error = header(text).unwrap_err();
            assert!(error.starts_with(expected), "{text}: {error}");
        }
    }
}
