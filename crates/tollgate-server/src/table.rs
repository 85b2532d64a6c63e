//! Aligned tables: text to the left, numbers to the right, two spaces between.

use std::io::{self, Write};

use crate::screen::{Ink, Tone};

/// Which side a column keeps to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Left,
    Right,
}

/// One entry.
#[derive(Clone, Debug)]
pub(crate) struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    pub(crate) fn toned(tone: Tone, text: impl Into<String>) -> Cell {
        Cell { text: text.into(), tone }
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Cell {
        Cell::toned(Tone::Plain, text)
    }
}

/// Rows under a heading.
#[derive(Debug)]
pub(crate) struct Table {
    sides: Vec<Side>,
    rows: Vec<Vec<Cell>>,
}

impl Table {
    /// A table with these columns.
    pub(crate) fn new(columns: &[(&str, Side)]) -> Table {
        Table {
            sides: columns.iter().map(|&(_, side)| side).collect(),
            rows: vec![columns.iter().map(|&(name, _)| Cell::toned(Tone::Faint, name)).collect()],
        }
    }

    /// Adds a row, an entry for each column.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        let cells: Vec<Cell> = cells.into_iter().collect();
        debug_assert_eq!(cells.len(), self.sides.len(), "a row has an entry for each column");
        self.rows.push(cells);
    }

    /// Prints it, `indent` spaces from the left.
    pub(crate) fn print(&self, out: &mut impl Write, ink: Ink, indent: usize) -> io::Result<()> {
        let width = |column: usize| {
            self.rows.iter().map(|row| row[column].text.chars().count()).max().unwrap_or_default()
        };
        let widths: Vec<usize> = (0..self.sides.len()).map(width).collect();
        for row in &self.rows {
            write!(out, "{:indent$}", "")?;
            for (column, cell) in row.iter().enumerate() {
                let fill = widths[column] - cell.text.chars().count();
                let text = ink.paint(cell.tone, &cell.text);
                let gap = if column == 0 { "" } else { "  " };
                match self.sides[column] {
                    Side::Right => write!(out, "{gap}{:fill$}{text}", "")?,
                    // Nothing follows the last entry of a line, not even blanks.
                    Side::Left if column + 1 == row.len() => write!(out, "{gap}{text}")?,
                    Side::Left => write!(out, "{gap}{text}{:fill$}", "")?,
                }
            }
            writeln!(out)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&[("LIMIT", Side::Left), ("DENIED", Side::Right), ("RULE", Side::Left)]);
        table.row(["api".into(), "7".into(), "10/s".into()]);
        table.row(["per-user".into(), Cell::toned(Tone::Bad, "1,234"), "é".into()]);
        let mut text = Vec::new();
        table.print(&mut text, Ink::Plain, 1).unwrap();
        let expected = " LIMIT     DENIED  RULE\n api            7  10/s\n per-user   1,234  é\n";
        assert_eq!(String::from_utf8(text).unwrap(), expected);
    }
}
