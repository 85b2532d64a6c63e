//! "Did you mean …?": the known word nearest to one that nobody knows.
//!
//! Used where people type names by hand: fields of the configuration, its choices, names of limits. Cold code, small words.

/// No name in Tollgate is longer, so a longer word is near to none.
const LONGEST: usize = 64;

/// The nearest of `known`, if it is near enough to be worth a guess: one slip in three letters, whatever the case, or the
/// same beginning.
pub(crate) fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word: Vec<char> = word.chars().take(LONGEST + 1).flat_map(char::to_lowercase).collect();
    if word.is_empty() || word.len() > LONGEST {
        return None;
    }
    let ranked = known.into_iter().filter_map(|candidate| {
        let letters: Vec<char> = candidate.chars().collect();
        let slips = slips_between(&word, &letters);
        let tolerated = (word.len().max(letters.len()) / 3).max(1);
        let begins_alike = word.len() >= 3 && letters.starts_with(&word);
        (slips <= tolerated || begins_alike).then_some((slips, candidate))
    });
    ranked.min_by_key(|&(slips, _)| slips).map(|(_, candidate)| candidate)
}

/// How many letters were left out, put in, exchanged or swapped with their neighbour (optimal string alignment).
fn slips_between(one: &[char], other: &[char]) -> usize {
    let mut before_last: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=other.len()).collect();
    for (i, &letter) in one.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, &wanted) in other.iter().enumerate() {
            let exchanged = last[j] + usize::from(letter != wanted);
            let mut fewest = exchanged.min(last[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && letter == other[j - 1] && one[i - 1] == wanted {
                fewest = fewest.min(before_last[j - 1] + 1);
            }
            row.push(fewest);
        }
        before_last = std::mem::replace(&mut last, row);
    }
    last[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_counted() {
        for (one, other, slips) in [
            ("", "", 0),
            ("rate", "rate", 0),
            ("", "abc", 3),
            ("abc", "", 3),
            ("rat", "rate", 1),
            ("rrate", "rate", 1),
            ("rite", "rate", 1),
            ("brust", "burst", 1),
            ("window", "limit", 5),
        ] {
            let letters = |text: &str| text.chars().collect::<Vec<_>>();
            assert_eq!(slips_between(&letters(one), &letters(other)), slips, "{one} {other}");
            assert_eq!(slips_between(&letters(other), &letters(one)), slips, "{other} {one}");
        }
    }

    #[test]
    fn a_near_word_is_guessed_and_a_far_one_is_not() {
        let known = ["rate", "burst", "limit", "window", "sliding_window", "sliding_window_counter", "api"];
        for (word, guess) in [
            ("brust", Some("burst")),
            ("Rate", Some("rate")),
            ("APIs", Some("api")),
            ("limits", Some("limit")),
            ("slidingwindow", Some("sliding_window")),
            ("sliding", Some("sliding_window")),
            ("sliding_window_count", Some("sliding_window_counter")),
            ("colour", None),
            ("", None),
            (&"r".repeat(1 << 16), None),
        ] {
            assert_eq!(nearest(word, known), guess, "{word:.20}");
        }
        assert_eq!(nearest("rate", []), None);
    }
}
