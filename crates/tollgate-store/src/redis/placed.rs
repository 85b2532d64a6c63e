//! Where the parts of a held charge are on a cluster: what is stored under the name of its place.

use super::codec;
use crate::StoreError;
use crate::remote::MergedCharges;

/// The groups of a hold: the indexes of the parts of each, and its keys, the hold's key first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Placed {
    pub(super) request: String,
    pub(super) groups: Vec<(Vec<usize>, Vec<String>)>,
}

impl Placed {
    /// The charge that was made.
    pub(super) fn charges(&self) -> Result<codec::RememberedCharge, StoreError> {
        codec::RememberedCharge::read(&self.request).ok_or_else(|| codec::no_answer("a hold"))
    }

    /// The actual cost of each part, from one amount for each charge.
    pub(super) fn totals(&self, actuals: &[u64]) -> Result<Vec<u64>, StoreError> {
        let remembered = self.charges()?;
        let charges = remembered.charges();
        match charges.len() == actuals.len() {
            true => Ok(MergedCharges::of(&charges).totals(actuals)),
            false => Err(StoreError::wrong_count(charges.len(), actuals.len())),
        }
    }

    /// The stored text: a line for each group, an empty line, and the request.
    pub(super) fn write(&self) -> String {
        let mut text = String::new();
        for (indexes, keys) in &self.groups {
            let indexes: Vec<String> = indexes.iter().map(usize::to_string).collect();
            text.push_str(&format!("{} {}\n", indexes.join(","), keys.join(" ")));
        }
        text.push('\n');
        text.push_str(&self.request);
        text
    }

    pub(super) fn read(text: &str) -> Option<Placed> {
        let (groups, request) = text.split_once("\n\n")?;
        let group = |line: &str| {
            let (indexes, keys) = line.split_once(' ')?;
            let indexes: Option<Vec<usize>> = match indexes {
                "" => Some(Vec::new()),
                indexes => indexes.split(',').map(|index| index.parse().ok()).collect(),
            };
            Some((indexes?, keys.split(' ').map(str::to_owned).collect()))
        };
        let groups: Option<Vec<_>> = groups.lines().map(group).collect();
        Some(Placed { request: request.to_owned(), groups: groups? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_read_as_it_was_written() {
        let place = Placed {
            request: "0 1 0 a 3 5 1000 0\n".to_owned(),
            groups: vec![(vec![0, 2], vec!["hold".into(), "x".into()]), (vec![], vec!["other".into()])],
        };
        assert_eq!(Placed::read(&place.write()), Some(place));
        for wrong in ["", "x\n", "1,b key\n\nq"] {
            assert_eq!(Placed::read(wrong), None, "{wrong}");
        }
    }
}
