//! Rules as a tree: a level for each entry, so that finding one takes as long as the descriptor is, however many there are.
//!
//! Every node is visited at most once for a descriptor, because it has one parent; and a descriptor has no way to add nodes.

use std::collections::HashMap;

use foldhash::fast::RandomState;

use super::{EnvoyEntry, EnvoyValue};

/// What may follow after the entries that lead here. Only the operator's rules are in the maps, so a caller cannot fill them with keys
/// of one hash.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Node {
    /// The rule that ends here.
    rule: Option<usize>,
    by_key: HashMap<Vec<u8>, Values, RandomState>,
}

/// What may follow after a key, by which values match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Values {
    exact: HashMap<Vec<u8>, Node, RandomState>,
    /// The longest first.
    prefixes: Vec<(String, Node)>,
    any: Option<Box<Node>>,
}

impl Node {
    /// Adds a rule; the error is the rule that is there already.
    pub(super) fn add(&mut self, entries: &[EnvoyEntry], rule: usize) -> Result<(), usize> {
        let Some((entry, rest)) = entries.split_first() else {
            return match self.rule {
                Some(other) => Err(other),
                None => {
                    self.rule = Some(rule);
                    Ok(())
                }
            };
        };
        self.by_key.entry(entry.key.clone().into_bytes()).or_default().for_value(&entry.value).add(rest, rule)
    }

    /// The most specific rule for these entries.
    pub(super) fn find(&self, entries: &[(&[u8], &[u8])]) -> Option<usize> {
        let Some(((key, value), rest)) = entries.split_first() else { return self.rule };
        self.by_key.get(*key)?.matching(value).find_map(|node| node.find(rest))
    }
}

impl Values {
    /// The node of a value as rules write it, made if it is not there.
    fn for_value(&mut self, value: &EnvoyValue) -> &mut Node {
        match value {
            EnvoyValue::Any => self.any.get_or_insert_default(),
            EnvoyValue::Exact(value) => self.exact.entry(value.clone().into_bytes()).or_default(),
            EnvoyValue::Prefix(prefix) => {
                let is_before = |other: &String| (other.len(), prefix) > (prefix.len(), other);
                let place = self.prefixes.partition_point(|(other, _)| is_before(other));
                if self.prefixes.get(place).is_none_or(|(other, _)| other != prefix) {
                    self.prefixes.insert(place, (prefix.clone(), Node::default()));
                }
                &mut self.prefixes[place].1
            }
        }
    }

    /// The nodes that a value leads to, the most specific first.
    fn matching(&self, value: &[u8]) -> impl Iterator<Item = &Node> {
        let prefixes = self.prefixes.iter().filter(move |(prefix, _)| value.starts_with(prefix.as_bytes()));
        self.exact.get(value).into_iter().chain(prefixes.map(|(_, node)| node)).chain(self.any.as_deref())
    }
}

#[cfg(test)]
mod tests {
    use super::super::entry_of;
    use super::*;

    /// Which of the rules a descriptor meets. Entries are written with blanks between.
    fn check(rules: &[&str], expected: &[(&str, Option<&str>)]) {
        // The order of the file does not matter.
        for order in [rules.to_vec(), rules.iter().rev().copied().collect()] {
            let mut tree = Node::default();
            for (index, rule) in order.iter().enumerate() {
                let entries: Vec<_> = rule.split(' ').map(|entry| entry_of(entry).unwrap()).collect();
                tree.add(&entries, index).unwrap();
                assert_eq!(tree.add(&entries, 99), Err(index), "{rule}");
            }
            for (descriptor, rule) in expected {
                let entries = descriptor.split(' ').filter_map(|entry| entry.split_once('='));
                let entries: Vec<_> =
                    entries.map(|(key, value)| (key.as_bytes(), value.as_bytes())).collect();
                assert_eq!(tree.find(&entries).map(|index| order[index]), *rule, "{descriptor} in {order:?}");
            }
        }
    }

    #[test]
    fn the_most_specific_rule_matches() {
        check(
            &["user", "user=a*", "user=ab*", "user=xy*", "user=abc", "user=abc path=/login", "path=/login"],
            &[
                ("user=abc", Some("user=abc")),
                ("user=abcd", Some("user=ab*")),
                ("user=ab", Some("user=ab*")),
                ("user=a", Some("user=a*")),
                ("user=b", Some("user")),
                ("user=", Some("user")),
                ("user=xyz", Some("user=xy*")),
                ("path=/login", Some("path=/login")),
                ("path=/login/", None),
                ("user=abc path=/login", Some("user=abc path=/login")),
                ("path=/login user=abc", None),
                ("user=abd path=/login", None),
                ("User=abc", None),
                ("user=abc path=/login more=1", None),
                ("", None),
            ],
        );
    }

    #[test]
    fn the_first_entry_that_differs_decides_and_what_does_not_match_further_on_is_left() {
        check(
            &["a=1 b", "a b=2", "a=1* b=2 c", "a b"],
            &[
                ("a=1 b=2", Some("a=1 b")),
                ("a=12 b=2", Some("a b=2")),
                ("a=12 b=2 c=3", Some("a=1* b=2 c")),
                ("a=1 b=2 c=3", Some("a=1* b=2 c")),
                ("a=2 b=3", Some("a b")),
            ],
        );
        check(&["a a=1 a"], &[("a=0 a=1 a=2", Some("a a=1 a")), ("a=1 a=0 a=2", None)]);
    }
}
