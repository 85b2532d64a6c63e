//! Physical lines, counted: the line that a message names is the line that an editor shows.
//!
//! [`Lines`] hands out one line at a time. [`Records`] hands the same lines to the csv reader, never more than one at a time,
//! so that it is known which line each record starts on: the csv reader's own count is off by one after CRLF and blank lines.
//! A record may span lines, where a quoted field holds line breaks.

use std::io::{self, BufRead, Read};

use memchr::memchr;

use crate::failure::reason;

/// The longest line, and the longest record: no log has one, but a file that is no log may, and so does a quote left open.
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

/// Says how far reading came: what is damaged is most often the end of a file.
fn after(line: u64, error: io::Error) -> io::Error {
    match line {
        0 => error,
        _ => io::Error::new(error.kind(), format!("after line {line}: {}", reason(&error))),
    }
}

/// The lines of an input as the csv reader wants them: bytes, but never of two lines at once.
pub(super) struct Records<R> {
    lines: Lines<R>,
    /// How much of the line at hand has been read.
    taken: usize,
    /// The line that the record at hand starts on, once it has one.
    start: Option<u64>,
    /// How many bytes it has had so far.
    bytes: usize,
    quoting: Quoting,
    /// Whether the line at hand was handed out already, and is now to be read as a record.
    is_given: bool,
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

impl<R: BufRead> Records<R> {
    pub(super) fn new(lines: Lines<R>) -> Self {
        Records { lines, taken: 0, start: None, bytes: 0, quoting: Quoting::FieldStart, is_given: false }
    }

    /// From the line on that was handed out last.
    pub(super) fn from_current(mut lines: Lines<R>) -> io::Result<Self> {
        lines.copy_current()?;
        Ok(Records { is_given: true, ..Records::new(lines) })
    }

    /// Says that the next line which is not blank begins a record.
    pub(super) fn begin(&mut self) {
        (self.start, self.bytes, self.quoting) = (None, 0, Quoting::FieldStart);
    }

    /// The line that the record starts on.
    pub(super) fn line(&self) -> u64 {
        self.start.unwrap_or(self.lines.line)
    }

    /// Whether the record ended, with the file, in a quoted field that nothing closed.
    pub(super) fn left_open(&self) -> bool {
        self.quoting == Quoting::Quoted
    }

    fn follow(&mut self) {
        // Without a quote only the last byte counts.
        if self.quoting != Quoting::Quoted && !self.lines.buffer.contains(&b'"') {
            self.quoting = match self.lines.buffer.last() {
                Some(b',' | b'\r' | b'\n') => Quoting::FieldStart,
                _ => Quoting::Bare,
            };
            return;
        }
        for byte in &self.lines.buffer {
            self.quoting = match (self.quoting, byte) {
                (Quoting::FieldStart | Quoting::QuoteSeen, b'"') => Quoting::Quoted,
                (Quoting::Quoted, b'"') => Quoting::QuoteSeen,
                (Quoting::Quoted, _) => Quoting::Quoted,
                (_, b',' | b'\r' | b'\n') => Quoting::FieldStart,
                _ => Quoting::Bare,
            };
        }
    }
}

impl<R: BufRead> Read for Records<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.is_given || self.taken == self.lines.buffer.len() {
            self.taken = 0;
            let (number, line) = if std::mem::take(&mut self.is_given) {
                (self.lines.line, &*self.lines.buffer)
            } else {
                match self.lines.next_copied()? {
                    None => return Ok(0),
                    Some(Line::TooLong(number, _)) => return Err(too_long(number)),
                    Some(Line::Whole(number, line)) => (number, line),
                }
            };
            self.bytes += line.len();
            let blank = matches!(line, b"\n" | b"\r\n");
            if self.bytes > MAX_LINE {
                return Err(too_long(number));
            }
            if self.start.is_none() && !blank {
                self.start = Some(number);
            }
            self.follow();
        }
        let left = &self.lines.buffer[self.taken..];
        let count = left.len().min(into.len());
        into[..count].copy_from_slice(&left[..count]);
        self.taken += count;
        Ok(count)
    }
}

pub(super) fn too_long(line: u64) -> io::Error {
    let message =
        format!("line {line} is longer than 1 MiB, or a quote before it was never closed; is this a log?");
    io::Error::new(io::ErrorKind::InvalidData, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The line that each record starts on, and whether the last one was left open.
    fn starts(text: &str) -> (Vec<u64>, bool) {
        let lines = Lines::new(text.as_bytes()).unwrap();
        let mut reader =
            csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(Records::new(lines));
        let mut record = csv::ByteRecord::new();
        let (mut starts, mut open) = (Vec::new(), false);
        while reader.read_byte_record(&mut record).unwrap() {
            starts.push(reader.get_ref().line());
            open = reader.get_ref().left_open();
            reader.get_mut().begin();
        }
        (starts, open)
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
            assert_eq!(starts(text), (lines.to_vec(), false), "{text:.40?}");
        }
    }

    #[test]
    fn a_quote_left_open_is_noticed() {
        for (text, open) in [
            ("a,\"b", true),
            ("a,\"b\n", true),
            ("a,b\n1,\"2\n3,4\n", true),
            ("a,\"b\"", false),
            ("a,\"b\"\"", true),
            ("a,\"b\"\"\"", false),
            ("a,5\"", false),
            ("\"a\"b\"", false),
        ] {
            assert_eq!(starts(text).1, open, "{text:?}");
        }
    }

    #[test]
    fn what_is_no_log_is_refused_before_it_fills_the_memory() {
        let endless = vec![b'x'; MAX_LINE + 1];
        let text = [&endless[..], b"\nnext\n"].concat();
        let mut lines = Lines::new(&text[..]).unwrap();
        assert!(matches!(lines.next_line().unwrap(), Some(Line::TooLong(1, start)) if start.len() == 256));
        assert!(matches!(lines.next_line().unwrap(), Some(Line::Whole(2, b"next\n"))));
        assert!(lines.next_line().unwrap().is_none());
        let mut records = Records::new(Lines::new(&endless[..]).unwrap());
        let error = records.read(&mut [0; 9]).unwrap_err();
        assert!(error.to_string().contains("line 1 is longer than 1 MiB"));

        let open = format!("a,\"b\n{}", "1,2\n".repeat(MAX_LINE / 4));
        let mut reader =
            csv::ReaderBuilder::new().from_reader(Records::new(Lines::new(open.as_bytes()).unwrap()));
        let error = reader.read_byte_record(&mut csv::ByteRecord::new()).unwrap_err();
        assert!(error.to_string().contains("a quote before it was never closed"), "{error}");
    }
}
