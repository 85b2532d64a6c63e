//! Which measurements there are, what they are called, and which of them a run takes.
//!
//! A scene is a key set, a spread, a regime and a call; measured with one thread and with two it gives two cells. A cell is
//! named by its words, `2T/1M/zipf/allow/check`, and `--cells` chooses by words in any order: a pattern takes every cell that
//! carries all of its words. Bytes per key are cells too, `memory/1M`. How a cell is measured is described in `harness.rs`.

use crate::contestant::{Call, Regime};
use crate::workload::{KeySet, Spread};

pub(crate) const ONE_KEY: KeySet = KeySet { count: 1 };
pub(crate) const THOUSAND: KeySet = KeySet { count: 1_000 };
pub(crate) const MILLION: KeySet = KeySet { count: 1_000_000 };
pub(crate) const FIVE_MILLION: KeySet = KeySet { count: 5_000_000 };

const MEMORY_WORD: &str = "memory";
const THREAD_WORDS: [(usize, &str); 2] = [(1, "1T"), (2, "2T")];

/// What all contestants do in the same rounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scene {
    pub(crate) keys: KeySet,
    pub(crate) spread: Spread,
    pub(crate) regime: Regime,
    pub(crate) call: Call,
}

impl Scene {
    /// One check of one key under a limit.
    pub(crate) const fn check(keys: KeySet, spread: Spread, regime: Regime) -> Scene {
        Scene { keys, spread, regime, call: Call::Check }
    }

    /// `1M/zipf/allow/check`.
    pub(crate) fn name(&self) -> String {
        let (spread, regime, call) = (self.spread.word(), self.regime.word(), self.call.word());
        format!("{}/{spread}/{regime}/{call}", self.keys.word())
    }

    /// `2T/1M/zipf/allow/check`.
    pub(crate) fn cell(&self, threads: usize) -> String {
        format!("{threads}T/{}", self.name())
    }
}

/// Scenes that share prepared contestants, with the numbers of threads wanted for each.
pub(crate) struct Group {
    pub(crate) keys: KeySet,
    pub(crate) regime: Regime,
    pub(crate) scenes: Vec<(Scene, Vec<usize>)>,
}

/// The scenes of a run, grouped by what they share.
pub(crate) fn groups(selection: &Selection) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for scene in all_scenes() {
        let threads: Vec<usize> = THREAD_WORDS
            .map(|(threads, _)| threads)
            .into_iter()
            .filter(|&n| selection.takes(&scene.cell(n)))
            .collect();
        if threads.is_empty() {
            continue;
        }
        let (keys, regime) = (scene.keys, scene.regime);
        match groups.last_mut() {
            // Few keys are charged often: each scene gets fresh buckets, so that none of them runs dry.
            Some(group) if group.keys == keys && group.regime == regime && keys.count > THOUSAND.count => {
                group.scenes.push((scene, threads));
            }
            _ => groups.push(Group { keys, regime, scenes: vec![(scene, threads)] }),
        }
    }
    groups
}

/// The sizes at which a run measures bytes per key.
pub(crate) fn memory_sizes(selection: &Selection) -> Vec<KeySet> {
    let sizes = [MILLION, FIVE_MILLION].into_iter();
    sizes.filter(|keys| selection.takes(&format!("{MEMORY_WORD}/{}", keys.word()))).collect()
}

fn all_scenes() -> Vec<Scene> {
    use Spread::{Uniform, Zipf};

    let mut scenes = Vec::new();
    for keys in [ONE_KEY, THOUSAND, MILLION, FIVE_MILLION] {
        for regime in [Regime::Allow, Regime::Deny] {
            let spreads: &[Spread] = if keys == ONE_KEY { &[Uniform] } else { &[Uniform, Zipf] };
            scenes.extend(spreads.iter().map(|&spread| Scene::check(keys, spread, regime)));
            if regime == Regime::Deny {
                continue;
            }
            let calls: &[(Call, Spread)] = match keys {
                THOUSAND => &[(Call::Many, Uniform), (Call::Pair, Uniform)],
                MILLION => {
                    &[(Call::Many, Uniform), (Call::Many, Zipf), (Call::Pair, Uniform), (Call::Pair, Zipf)]
                }
                FIVE_MILLION => &[(Call::Many, Uniform)],
                _ => &[],
            };
            scenes.extend(calls.iter().map(|&(call, spread)| Scene { keys, spread, regime, call }));
        }
    }
    scenes
}

/// The cells that a run takes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Selection {
    /// Any of these; none means all.
    patterns: Vec<Vec<String>>,
    /// The largest key set, if bounded.
    most_keys: Option<KeySet>,
}

impl Selection {
    /// Reads `--cells`. A word that no cell carries is a mistake, not an empty choice.
    pub(crate) fn parse(patterns: &[String]) -> Result<Selection, String> {
        let known = all_words();
        let mut selection = Selection::default();
        for pattern in patterns {
            let words: Vec<String> = pattern.split('/').map(str::to_string).collect();
            if let Some(word) = words.iter().find(|word| !known.contains(word)) {
                return Err(format!(
                    "--cells {pattern}: no cell has the word '{word}'; words are {}",
                    known.join(", ")
                ));
            }
            selection.patterns.push(words);
        }
        Ok(selection)
    }

    /// The same without key sets above `most_keys`.
    pub(crate) fn up_to(self, most_keys: KeySet) -> Selection {
        Selection { most_keys: Some(most_keys), ..self }
    }

    fn takes(&self, cell: &str) -> bool {
        let words: Vec<&str> = cell.split('/').collect();
        let too_many = |keys: &KeySet| {
            let larger = [THOUSAND, MILLION, FIVE_MILLION].into_iter().filter(|set| set.count > keys.count);
            larger.into_iter().any(|set| words.contains(&set.word().as_str()))
        };
        if self.most_keys.as_ref().is_some_and(too_many) {
            return false;
        }
        let carries_all = |pattern: &Vec<String>| pattern.iter().all(|word| words.contains(&word.as_str()));
        self.patterns.is_empty() || self.patterns.iter().any(carries_all)
    }
}

/// Every word that some cell carries, once, in the order of the names.
fn all_words() -> Vec<String> {
    let mut words: Vec<String> = THREAD_WORDS.map(|(_, word)| word.to_string()).to_vec();
    let of_scenes = all_scenes();
    let names = of_scenes.iter().map(Scene::name).chain([MEMORY_WORD.to_string()]);
    for word in names.flat_map(|name| name.split('/').map(str::to_string).collect::<Vec<_>>()) {
        if !words.contains(&word) {
            words.push(word);
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cells(patterns: &[&str]) -> Vec<String> {
        let patterns: Vec<String> = patterns.iter().map(ToString::to_string).collect();
        let groups = groups(&Selection::parse(&patterns).unwrap());
        let scenes = groups.into_iter().flat_map(|group| group.scenes);
        scenes.flat_map(|(scene, threads)| threads.into_iter().map(move |n| scene.cell(n))).collect()
    }

    #[test]
    fn a_pattern_takes_the_cells_with_all_its_words() {
        assert_eq!(cells(&["1T/1M/uniform/deny"]), ["1T/1M/uniform/deny/check"]);
        assert_eq!(
            cells(&["pair/2T/1k", "deny/1"]),
            ["1T/1/uniform/deny/check", "2T/1/uniform/deny/check", "2T/1k/uniform/allow/pair"]
        );
        assert_eq!(cells(&[]).len(), 42);
        assert!(memory_sizes(&Selection::parse(&["memory/5M".into()]).unwrap()) == [FIVE_MILLION]);
    }

    #[test]
    fn an_unknown_word_is_refused() {
        let refusal = Selection::parse(&["1T/2M".into()]).unwrap_err();
        assert!(refusal.contains("'2M'") && refusal.contains("5M"), "{refusal}");
    }

    #[test]
    fn a_bound_leaves_larger_sets_out() {
        let selection = Selection::default().up_to(MILLION);
        assert!(groups(&selection).iter().all(|group| group.keys.count <= MILLION.count));
        assert_eq!(memory_sizes(&selection), [MILLION]);
    }
}
