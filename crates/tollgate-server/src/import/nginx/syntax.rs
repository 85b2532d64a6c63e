//! The configuration of nginx as a tree of directives, with the line of each.

/// How deep blocks may be nested, and how many directives there may be.
const DEEPEST: usize = 32;
const MOST: usize = 1_000_000;

/// A directive: its words, and what stands in its block.
#[derive(Debug, Default)]
pub(super) struct Directive {
    pub(super) line: usize,
    pub(super) words: Vec<String>,
    pub(super) block: Vec<Directive>,
}

impl Directive {
    pub(super) fn name(&self) -> &str {
        self.words.first().map_or("", String::as_str)
    }
}

/// The directives of a file, or what is wrong with it.
pub(super) fn read(text: &str) -> Result<Vec<Directive>, String> {
    // The blocks that are open, each with the directive that it belongs to.
    let mut open: Vec<(Directive, Vec<Directive>)> = Vec::new();
    let mut done: Vec<Directive> = Vec::new();
    let mut current = Directive::default();
    let (mut line, mut count) = (1, 0);
    let mut rest = text.chars().peekable();
    while let Some(character) = rest.next() {
        match character {
            '\n' => line += 1,
            _ if character.is_whitespace() => {}
            '#' => while rest.next_if(|next| *next != '\n').is_some() {},
            ';' => {
                if current.words.is_empty() {
                    return Err(format!("line {line}: a `;` without a directive before it"));
                }
                done.push(std::mem::take(&mut current));
            }
            '{' => {
                if current.words.is_empty() {
                    return Err(format!("line {line}: a block without a name"));
                }
                if open.len() == DEEPEST {
                    return Err(format!("line {line}: it is nested too deeply"));
                }
                open.push((std::mem::take(&mut current), std::mem::take(&mut done)));
            }
            '}' => {
                if !current.words.is_empty() {
                    return Err(format!(
                        "line {}: `{}` does not end with `;`",
                        current.line,
                        current.name().escape_debug()
                    ));
                }
                let Some((mut directive, before)) = open.pop() else {
                    return Err(format!("line {line}: a `}}` that nothing opens"));
                };
                directive.block = std::mem::replace(&mut done, before);
                done.push(directive);
            }
            _ => {
                count += 1;
                if count > MOST {
                    return Err(format!("line {line}: it has too many words"));
                }
                if current.words.is_empty() {
                    current.line = line;
                }
                let mut word = String::new();
                if matches!(character, '"' | '\'') {
                    let start = line;
                    loop {
                        match rest.next() {
                            None => return Err(format!("line {start}: a quote that is never closed")),
                            Some(end) if end == character => break,
                            Some('\\') => word.extend(rest.next()),
                            Some(other) => {
                                line += usize::from(other == '\n');
                                word.push(other);
                            }
                        }
                    }
                } else {
                    word.push(character);
                    let mut before = character;
                    // `${name}` has braces that open no block.
                    while let Some(next) = rest.next_if(|&next| {
                        !next.is_whitespace()
                            && next != ';'
                            && (next != '{' || before == '$')
                            && (next != '}' || word.contains("${"))
                    }) {
                        word.push(next);
                        before = next;
                    }
                }
                current.words.push(word);
            }
        }
    }
    match (open.last(), current.words.is_empty()) {
        (Some((directive, _)), _) => Err(format!(
            "line {}: the block of `{}` is never closed",
            directive.line,
            directive.name().escape_debug()
        )),
        (None, false) => {
            Err(format!("line {}: `{}` does not end with `;`", current.line, current.name().escape_debug()))
        }
        (None, true) => Ok(done),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shown(directives: &[Directive]) -> String {
        let one = |directive: &Directive| match directive.block.is_empty() {
            true => format!("{}:{}", directive.line, directive.words.join("|")),
            false => {
                format!("{}:{}{{{}}}", directive.line, directive.words.join("|"), shown(&directive.block))
            }
        };
        directives.iter().map(one).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn files_are_read_as_nginx_reads_them() {
        for (text, expected) in [
            ("", ""),
            ("user www; # comment { ;\nevents {}\n", "1:user|www 2:events"),
            ("a 'b c' \"d\\\"e\";\nhttp{server{x y;}}", "1:a|b c|d\"e 2:http{2:server{2:x|y}}"),
            ("log_format m '$a'\n  '$b';\nc ${d}e;", "1:log_format|m|$a|$b 3:c|${d}e"),
        ] {
            assert_eq!(shown(&read(text).unwrap()), expected, "{text}");
        }
        for (text, why) in [
            ("a", "line 1: `a` does not end with `;`"),
            ("a {\nb", "line 1: the block of `a`"),
            ("a {\nb }", "line 2: `b` does not end"),
            ("\n}", "line 2: a `}` that nothing opens"),
            (";", "line 1: a `;`"),
            ("{", "line 1: a block without a name"),
            ("a 'b\n", "line 1: a quote that is never closed"),
        ] {
            assert!(read(text).unwrap_err().starts_with(why), "{text}: {:?}", read(text));
        }
        assert!(read(&"a {".repeat(100_000)).unwrap_err().contains("nested too deeply"));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[a${}'\"\\\\;#\n ]{0,40}|\\PC{0,40}") {
            let _ = read(&text);
        }
    }
}
