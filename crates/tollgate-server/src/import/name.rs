//! Names for limits that had none, or others than ours can be.

use std::collections::HashSet;

/// The longest name of a limit.
const LONGEST: usize = 64;

/// A name like `wanted`, of the characters that names have, that was not given yet.
pub(super) fn given(wanted: &str, taken: &mut HashSet<String>) -> String {
    let mut plain = String::new();
    for character in wanted.chars().flat_map(char::to_lowercase) {
        match character {
            'a'..='z' | '0'..='9' | '_' | '-' | '.' => plain.push(character),
            // Several that cannot be written are one.
            _ if plain.ends_with('_') => {}
            _ => plain.push('_'),
        }
    }
    let plain = plain.trim_matches(['_', '-', '.']);
    let plain = if plain.is_empty() { "limit" } else { plain };
    let mut name = plain[..plain.len().min(LONGEST)].to_owned();
    let mut count = 1;
    while !taken.insert(name.clone()) {
        count += 1;
        let suffix = format!("-{count}");
        name = format!("{}{suffix}", &plain[..plain.len().min(LONGEST - suffix.len())]);
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_made_of_what_names_have() {
        let mut taken = HashSet::new();
        let long = "x".repeat(100);
        for (wanted, name) in [
            ("edge", "edge"),
            ("edge", "edge-2"),
            ("Edge", "edge-3"),
            ("edge-/Login Page/", "edge-_login_page"),
            ("ünter", "nter"),
            ("", "limit"),
            ("/", "limit-2"),
            (&long, &long[..64]),
            (&long, &format!("{}-2", &long[..62])),
        ] {
            assert_eq!(given(wanted, &mut taken), name, "{wanted}");
        }
    }
}
