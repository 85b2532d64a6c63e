//! "Did you mean …?": finds the known word nearest to an unknown one.
//!
//! Used where people type names: fields of the configuration, their values, names of limits. Not performance critical.

/// No name in Tollgate is longer, so a longer word is near to none.
const LONGEST: usize = 64;

/// The nearest of `known`, if it is near enough to suggest: one slip in three letters, ignoring case, or the same start.
pub(crate) fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word: String = word.chars().take(LONGEST + 1).flat_map(char::to_lowercase).collect();
    let length = word.chars().count();
    if length == 0 || length > LONGEST {
        return None;
    }
    let ranked = known.into_iter().filter_map(|candidate| {
        let slips = strsim::osa_distance(&word, candidate);
        let tolerated = (length.max(candidate.chars().count()) / 3).max(1);
        let begins_alike = length >= 3 && candidate.starts_with(&word);
        (slips <= tolerated || begins_alike).then_some((slips, candidate))
    });
    ranked.min_by_key(|&(slips, _)| slips).map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

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
