//! Which of many charges are sent at once, where the counters are remote: those that concern different keys, so that it makes
//! no difference which is decided first, and not too many at a time. They are answered in the order in which they came.
//!
//! A store that sends checks together which come at the same time then makes few calls of them.

/// How many are asked at once: so many calls to the store one connection has under way, however much it has sent.
const MOST: usize = 16;

/// Whether a question may be asked along with those before it.
pub(crate) fn goes_along<T>(before: &[T], next: &T, is_of_one_key: impl Fn(&T, &T) -> bool) -> bool {
    before.len() < MOST && !before.iter().any(|other| is_of_one_key(other, next))
}

/// How many of the first questions may be asked at once; at least one, if there is one.
pub(crate) fn first_run<T>(questions: &[T], is_of_one_key: impl Fn(&T, &T) -> bool) -> usize {
    let is_end = |&at: &usize| !goes_along(&questions[..at], &questions[at], &is_of_one_key);
    (1..questions.len()).find(is_end).unwrap_or(questions.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_ends_before_a_key_comes_again_and_when_there_are_many() {
        for (keys, expected) in [
            (vec![], 0),
            (vec![1], 1),
            (vec![1, 2, 3], 3),
            (vec![1, 1, 2], 1),
            (vec![1, 2, 3, 2, 4], 3),
            ((0..100).collect(), MOST),
        ] {
            assert_eq!(first_run(&keys, |one, other| one == other), expected, "{keys:?}");
        }
    }
}
