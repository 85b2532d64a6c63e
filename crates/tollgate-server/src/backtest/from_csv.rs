//! Requests from CSV: a header, then a line for each charge.
//!
//! Columns come in any order, fields may be quoted, columns that a backtest does not read are ignored. The csv crate splits
//! the records; this file says which column is which and which physical line a record stands on.

use std::borrow::Cow;
use std::io::{self, BufRead};

use csv::{ByteRecord, Reader, ReaderBuilder};

use super::intake::{Entry, Intake};
use super::lines::{Lines, Records};
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

/// Reads a whole file into `intake`.
pub(super) fn read<R: BufRead>(lines: Lines<R>, name: &str, intake: &mut Intake) -> Result<(), Failure> {
    let mut reader = ReaderBuilder::new().has_headers(false).flexible(true).from_reader(Records::new(lines));
    let mut record = ByteRecord::new();
    if !next(&mut reader, &mut record, name)? {
        return Err(Failure::new(format!("{name} is empty: CSV begins with the header time,limit,key,cost")));
    }
    let header: Vec<String> =
        record.iter().map(|column| String::from_utf8_lossy(column.trim_ascii()).into_owned()).collect();
    let columns = Columns::of(&header)
        .map_err(|wrong| Failure::new(format!("{name}:{}: {wrong}", reader.get_ref().line())))?;
    for (index, column) in header.iter().enumerate() {
        if !columns.reads(index) {
            intake.ignore(column);
        }
    }
    while next(&mut reader, &mut record, name)? {
        let records = reader.get_ref();
        let entry = if records.left_open() {
            let last = record.iter().next_back().unwrap_or_default();
            Err(Mistake::new(
                "line",
                &String::from_utf8_lossy(last),
                "has a quote that is never closed; close it",
            ))
        } else {
            columns.entry(&record)
        };
        let line = records.line();
        intake.take(line, entry)?;
    }
    Ok(())
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
    reader.get_mut().begin();
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

    fn entry<'a>(&self, record: &'a ByteRecord) -> Result<Entry<'a>, Mistake> {
        if record.len() > self.count {
            let extra = String::from_utf8_lossy(&record[self.count]).into_owned();
            let fix = format!(
                "stands beyond the {} columns of the header; quote fields that hold commas",
                self.count
            );
            return Err(Mistake::new("line", &extra, fix));
        }
        let text = |field: &'static str, index: usize| match record.get(index).map(str::from_utf8) {
            None => Ok(None),
            Some(Ok(text)) => Ok(Some(text)),
            Some(Err(_)) => Err(Mistake::not_utf8(field, &record[index])),
        };
        // A blank beside a comma is no part of a number or a name; in a key it may be.
        let trimmed = |field, index| Ok(text(field, index)?.map(|text| Cow::Borrowed(text.trim())));
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

#[cfg(test)]
mod tests {
    use super::*;

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
        for (text, said) in [
            ("time,limit,user", "no column key; name the columns time, limit, key"),
            ("1700000000,api,user:1", "no column time;"),
            ("Time,limit,key", "no column time;"),
            ("time,key", "no column limit;"),
            ("time,limit,key,key", "the column key stands twice; the header is \"time,limit,key,key\""),
            ("time,limit,key,cost,cost", "the column cost stands twice"),
        ] {
            let error = header(text).unwrap_err();
            assert!(error.starts_with(said), "{text}: {error}");
        }
    }
}
