//! Physical lines, counted: the line that a message names is the line that an editor shows.
//!
//! [`Lines`] hands out one line at a time. [`Records`] hands the same lines to the csv reader, never more than one record at a time,
//! so that it is known which line each record starts on: the csv reader's own count is off by one after CRLF and blank lines.
//! A record may span lines, where a quoted field holds line breaks, but only so many: a stray quote costs its own line, not the rest of the file.

use std::collections::VecDeque;
use std::io::{self, BufRead, Read};

use memchr::memchr;
use smallvec::SmallVec;

use super::mistake::Mistake;
use crate::failure::reason;

/// The longest line: no log has one, but a file that is no log may.
pub(super) const MAX_LINE: usize = 1024 * 1024;

/// The lines of an input, with their numbers.
pub(super) struct Lines<R> {
    input: R,
    line: u64,
    /// A line that does not lie whole in the buffer of the input.
    buffer: Vec<u8>,
    /// How many bytes of the input's buffer are the line that was handed out last.
    handed_out: usize,
}

impl<R: BufRead> Lines<R> {
    /// A byte order mark, which some programs write first, is not part of the first line.
    pub(super) fn new(mut input: R) -> io::Result<Self> {
        if input.fill_buf()?.starts_with(b"\xef\xbb\xbf") {
            input.consume(3);
        }
        Ok(Lines { input, line: 0, buffer: Vec::new(), handed_out: 0 })
    }

    /// The next line with its number, from 1 on, and its line break; `None` at the end. A line that is too long is passed over
    /// without being held, and its beginning is handed out in its place. Nearly all lines are handed out where they lie.
    pub(super) fn next_line(&mut self) -> io::Result<Option<Line<'_>>> {
        self.input.consume(std::mem::take(&mut self.handed_out));
        let end =
            self.input.fill_buf().map_err(|error| after(self.line, error)).map(|all| memchr(b'\n', all))?;
        match end {
            Some(end) if end < MAX_LINE => {
                self.line += 1;
                self.handed_out = end + 1;
                // The same bytes again, because nothing was consumed.
                let whole = self.input.fill_buf().map_err(|error| after(self.line, error))?;
                Ok(Some(Line::Whole(self.line, &whole[..=end])))
            }
            _ => self.next_copied(),
        }
    }

    /// Copies the line that was handed out last.
    fn copy_current(&mut self) -> io::Result<()> {
        if self.handed_out > 0 {
            self.buffer.clear();
            self.buffer.extend_from_slice(&self.input.fill_buf()?[..self.handed_out]);
            self.input.consume(std::mem::take(&mut self.handed_out));
        }
        Ok(())
    }

    /// The next line, copied.
    fn next_copied(&mut self) -> io::Result<Option<Line<'_>>> {
        self.input.consume(std::mem::take(&mut self.handed_out));
        self.buffer.clear();
        let read = self.input.by_ref().take(MAX_LINE as u64 + 1).read_until(b'\n', &mut self.buffer);
        let read = read.map_err(|error| after(self.line, error))?;
        if read == 0 {
            return Ok(None);
        }
        self.line += 1;
        if read > MAX_LINE {
            if self.buffer.last() != Some(&b'\n') {
                self.input.skip_until(b'\n').map_err(|error| after(self.line, error))?;
            }
            return Ok(Some(Line::TooLong(self.line, &self.buffer[..SHOWN_OF_LONG])));
        }
        Ok(Some(Line::Whole(self.line, &self.buffer)))
    }
}

/// One line, with its number.
pub(super) enum Line<'a> {
    Whole(u64, &'a [u8]),
    TooLong(u64, &'a [u8]),
}

/// How much of a line is kept that is too long.
const SHOWN_OF_LONG: usize = 256;

/// What a line that is too long should have been.
pub(super) const TOO_LONG: &str = "is longer than 1 MiB; is this a log?";

/// What is wrong with a line whose quote the lines after it do not close either.
const STRAY_QUOTE: &str = "has a quote that is not closed within 16 lines or 64 KiB; close it";

/// Says how far reading came: what is damaged is most often the end of a file.
fn after(line: u64, error: io::Error) -> io::Error {
    match line {
        0 => error,
        _ => io::Error::new(error.kind(), format!("after line {line}: {}", reason(&error))),
    }
}

/// How many lines a record may span, and how many bytes those may have: a quote that is not closed by then is a stray one, and what follows it
/// is not the rest of its field.
const MOST_SPANNED: usize = 16;
const MOST_SPANNED_BYTES: usize = 64 * 1024;

/// How many lines in a row may have a stray quote: they are in memory until a record is found.
const MOST_REFUSED: usize = 10_000;

/// The records of an input as the csv reader wants them: bytes, but never of two records at once. A line that can be no record is left out and
/// noted, and reading goes on with the line after it.
pub(super) struct Records<R> {
    lines: Lines<R>,
    /// Whether the line at hand was handed out already, and is now to be read as a record.
    is_given: bool,
    /// Lines that were read to find the end of a record which has none.
    ahead: VecDeque<Ahead>,
    /// The record at hand, how much of it has been read, and the line it starts on.
    record: Vec<u8>,
    taken: usize,
    start: u64,
    refused: Vec<(u64, Mistake)>,
}

/// A line that was read ahead.
struct Ahead {
    line: u64,
    text: Vec<u8>,
    is_too_long: bool,
}

/// Where in a field the csv reader is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Quoting {
    FieldStart,
    Bare,
    Quoted,
    /// After a quote in a quoted field: its end, or the first half of a doubled quote.
    QuoteSeen,
}

impl Quoting {
    /// After a line.
    fn after(mut self, line: &[u8]) -> Quoting {
        // Without a quote only the last byte counts.
        if self != Quoting::Quoted && !line.contains(&b'"') {
            return match line.last() {
                Some(b',' | b'\r' | b'\n') => Quoting::FieldStart,
                _ => Quoting::Bare,
            };
        }
        for byte in line {
            self = match (self, byte) {
                (Quoting::FieldStart | Quoting::QuoteSeen, b'"') => Quoting::Quoted,
                (Quoting::Quoted, b'"') => Quoting::QuoteSeen,
                (Quoting::Quoted, _) => Quoting::Quoted,
                (_, b',' | b'\r' | b'\n') => Quoting::FieldStart,
                _ => Quoting::Bare,
            };
        }
        self
    }
}

impl<R: BufRead> Records<R> {
    pub(super) fn new(lines: Lines<R>) -> Self {
        Records {
            lines,
            is_given: false,
            ahead: VecDeque::new(),
            record: Vec::new(),
            taken: 0,
            start: 0,
            refused: Vec::new(),
        }
    }

    /// From the line on that was handed out last.
    pub(super) fn from_current(mut lines: Lines<R>) -> io::Result<Self> {
        lines.copy_current()?;
        Ok(Records { is_given: true, ..Records::new(lines) })
    }

    /// The line that the record starts on.
    pub(super) fn line(&self) -> u64 {
        self.start
    }

    /// The lines that were left out since this was asked last, in order.
    pub(super) fn refused(&mut self) -> impl Iterator<Item = (u64, Mistake)> {
        self.refused.drain(..)
    }

    /// Finds the next record. False at the end.
    fn find(&mut self) -> io::Result<bool> {
        loop {
            self.record.clear();
            self.taken = 0;
            // The lines of the record: the number and the end of each.
            let mut lines: SmallVec<[(u64, usize); MOST_SPANNED]> = SmallVec::new();
            let mut quoting = Quoting::FieldStart;
            while lines.is_empty() || quoting == Quoting::Quoted {
                let is_over = !lines.is_empty() && self.record.len() > MOST_SPANNED_BYTES;
                if lines.len() == MOST_SPANNED || is_over || !self.append(&mut lines)? {
                    break;
                }
                let from = lines.len().checked_sub(2).map_or(0, |before| lines[before].1);
                quoting = quoting.after(&self.record[from..]);
            }
            let Some(&(start, first_end)) = lines.first() else { return Ok(false) };
            if quoting != Quoting::Quoted {
                self.start = start;
                return Ok(true);
            }
            let first = String::from_utf8_lossy(self.record[..first_end].trim_ascii_end());
            self.refused.push((start, Mistake::new("line", &first, STRAY_QUOTE)));
            if self.refused.len() >= MOST_REFUSED {
                let error = format!(
                    "line {start} and {} before it have a quote that is not closed: is this CSV?",
                    MOST_REFUSED - 1
                );
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            }
            for pair in lines.windows(2).rev() {
                let text = self.record[pair[0].1..pair[1].1].to_vec();
                self.ahead.push_front(Ahead { line: pair[1].0, text, is_too_long: false });
            }
        }
    }

    /// Appends the next line to the record. False at the end, and before a line that is too long to belong to a record that has begun; if none has, such a line
    /// is left out.
    fn append(&mut self, lines: &mut SmallVec<[(u64, usize); MOST_SPANNED]>) -> io::Result<bool> {
        loop {
            if let Some(ahead) = self.ahead.pop_front() {
                if !ahead.is_too_long {
                    self.record.extend_from_slice(&ahead.text);
                    lines.push((ahead.line, self.record.len()));
                    return Ok(true);
                }
                if !lines.is_empty() {
                    self.ahead.push_front(ahead);
                    return Ok(false);
                }
                let mistake = Mistake::new("line", &String::from_utf8_lossy(&ahead.text), TOO_LONG);
                self.refused.push((ahead.line, mistake));
                continue;
            }
            let line = match std::mem::take(&mut self.is_given) {
                true => Some(Line::Whole(self.lines.line, &self.lines.buffer)),
                false => self.lines.next_copied()?,
            };
            match line {
                None => return Ok(false),
                Some(Line::Whole(line, text)) => {
                    self.record.extend_from_slice(text);
                    lines.push((line, self.record.len()));
                    return Ok(true);
                }
                Some(Line::TooLong(line, text)) => {
                    self.ahead.push_back(Ahead { line, text: text.to_vec(), is_too_long: true });
                }
            }
        }
    }
}

impl<R: BufRead> Read for Records<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.taken == self.record.len() && !self.find()? {
            return Ok(0);
        }
        let left = &self.record[self.taken..];
        let count = left.len().min(into.len());
        into[..count].copy_from_slice(&left[..count]);
        self.taken += count;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The line that each record starts on, and the lines that were left out.
    fn starts(text: &[u8]) -> (Vec<u64>, Vec<u64>) {
        let lines = Lines::new(text).unwrap();
        let mut reader =
            csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(Records::new(lines));
        let mut record = csv::ByteRecord::new();
        let mut starts = Vec::new();
        while reader.read_byte_record(&mut record).unwrap() {
            starts.push(reader.get_ref().line());
        }
        let refused = reader.get_mut().refused().map(|(line, _)| line).collect();
        (starts, refused)
    }

    #[test]
    fn records_know_the_line_they_start_on() {
        let long = format!("a,{}\nb,1\n", "x".repeat(100_000));
        for (text, lines) in [
            ("a,b\n1,2\n3,4\n", &[1, 2, 3][..]),
            ("a,b\r\n1,2\r\n3,4", &[1, 2, 3]),
            ("a,b\n\n\n1,2\n\r\n3,4\n\n", &[1, 4, 6]),
            ("\n\na,b\r\n\r\n1,2\r\n", &[3, 5]),
            ("a,\"x\n\ny\"\n1,2\n", &[1, 4]),
            ("\u{feff}a,b\n1,2\n", &[1, 2]),
            ("a,5\" disk\n1,2\n", &[1, 2]),
            (&long, &[1, 2]),
        ] {
            assert_eq!(starts(text.as_bytes()), (lines.to_vec(), Vec::new()), "{text:.40?}");
        }
    }

    #[test]
    fn a_file_of_nothing_but_stray_quotes_does_not_fill_the_memory() {
        let read = |lines: usize| {
            let text = "x\",\"y\n".repeat(lines);
            let mut records = Records::new(Lines::new(text.as_bytes()).unwrap());
            records.read(&mut [0; 64]).map(|_| ())
        };
        assert!(read(9_000).is_ok());
        let error = read(20_000).expect_err("too many");
        assert!(error.to_string().contains("is this CSV?"), "{error}");
    }

    #[test]
    fn a_stray_quote_costs_its_own_line() {
        let spanned = |lines: usize| format!("a,\"b{}\"\n1,2\n", "\n".repeat(lines - 1));
        let wide = |bytes: usize| format!("a,\"{}\nb\"\n1,2\n", "x".repeat(bytes));
        for (text, lines, refused) in [
            ("a,\"b", &[][..], &[1][..]),
            ("a,\"b\n", &[], &[1]),
            ("a,b\n1,\"2\n3,4\n", &[1, 3], &[2]),
            ("a,\"b\"", &[1], &[]),
            ("a,\"b\"\"", &[], &[1]),
            ("a,\"b\"\"\"", &[1], &[]),
            ("a,5\"", &[1], &[]),
            ("\"a\"b\"", &[1], &[]),
            // Each of them is tried, and each is left out only if nothing closes it.
            ("1,\"2\n3,\"4\n5,\"6\n7,8\n", &[1, 4], &[3]),
            // A carriage return alone ends a record, of which the line has two then.
            ("a\rb,\"c\nd\"\ne\n", &[1, 1, 3], &[]),
            (&spanned(16), &[1, 17], &[]),
            (&wide(64 * 1024 - 10), &[1, 3], &[]),
        ] {
            assert_eq!(starts(text.as_bytes()), (lines.to_vec(), refused.to_vec()), "{text:.40?}");
        }
        // The line that would close it opens what is never closed; blank ones are no records.
        assert_eq!(starts(spanned(17).as_bytes()), (vec![18], vec![1, 17]));
        assert_eq!(starts(wide(64 * 1024).as_bytes()), (vec![2, 3], vec![1]));
    }

    #[test]
    fn a_line_that_is_too_long_is_left_out_and_does_not_fill_the_memory() {
        let endless = vec![b'x'; MAX_LINE + 1];
        let text = [&endless[..], b"\nnext\n"].concat();
        let mut lines = Lines::new(&text[..]).unwrap();
        assert!(matches!(lines.next_line().unwrap(), Some(Line::TooLong(1, start)) if start.len() == 256));
        assert!(matches!(lines.next_line().unwrap(), Some(Line::Whole(2, b"next\n"))));
        assert!(lines.next_line().unwrap().is_none());
        assert_eq!(starts(&text), (vec![2], vec![1]));
        // Inside of what a stray quote opened.
        let text = [b"a,\"b\n1,2\n", &text[..]].concat();
        assert_eq!(starts(&text), (vec![2, 4], vec![1, 3]));
    }
}
