//! Numbers as people read them: grouped digits, shares, sizes of time.
//!
//! Only for the eye: what a program reads is written as JSON and never passes through here.

/// `1234567` as `1,234,567`.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `part` of `whole` in per cent with one decimal. Some never reads as none, nor almost all as all.
pub(crate) fn share(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "-".to_string();
    }
    let (part, whole) = (u128::from(part), u128::from(whole));
    let per_mille = (part * 1000 + whole / 2) / whole;
    match per_mille {
        0 if part > 0 => "<0.1 %".to_string(),
        1000 if part < whole => ">99.9 %".to_string(),
        _ => format!("{}.{} %", per_mille / 10, per_mille % 10),
    }
}

/// `1 line`, `2 lines`.
pub(crate) fn counted(number: u64, thing: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {thing}{plural}", grouped(number))
}

/// At most `most` characters of `text`, with a mark where it was cut.
pub(crate) fn shortened(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        None => text.to_string(),
        Some(_) => text.chars().take(most.saturating_sub(1)).chain(['…']).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_come_in_threes() {
        for (number, text) in [
            (0, "0"),
            (999, "999"),
            (1000, "1,000"),
            (1_234_567, "1,234,567"),
            (u64::MAX, "18,446,744,073,709,551,615"),
        ] {
            assert_eq!(grouped(number), text);
        }
    }

    #[test]
    fn shares_never_round_to_a_lie() {
        for (part, whole, text) in [
            (0, 0, "-"),
            (0, 7, "0.0 %"),
            (1, 8, "12.5 %"),
            (1, 1_000_000, "<0.1 %"),
            (999_999, 1_000_000, ">99.9 %"),
            (7, 7, "100.0 %"),
            (u64::MAX, u64::MAX, "100.0 %"),
        ] {
            assert_eq!(share(part, whole), text, "{part} of {whole}");
        }
    }

    #[test]
    fn one_is_not_many() {
        assert_eq!(counted(1, "line"), "1 line");
        assert_eq!(counted(2000, "line"), "2,000 lines");
    }

    #[test]
    fn long_texts_are_cut_at_a_character() {
        assert_eq!(shortened("abc", 3), "abc");
        assert_eq!(shortened("äöüß", 3), "äö…");
    }
}
