//! `Forwarded`, RFC 7239: elements between commas, pairs between semicolons, values that may be quoted.
//!
//! Lines are cut from the right, where the proxies wrote. What a client put before that, an open quote for example, is not
//! met before everything that the proxies said has been read.

use std::borrow::Cow;

/// The elements of a line, the last one first.
pub(super) fn elements(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(line);
    std::iter::from_fn(move || {
        let line = rest?;
        let comma = last_comma(line);
        rest = comma.map(|at| &line[..at]);
        Some(comma.map_or(line, |at| &line[at + 1..]))
    })
}

/// The last comma outside quotes.
fn last_comma(line: &[u8]) -> Option<usize> {
    let mut quoted = false;
    for (at, byte) in line.iter().enumerate().rev() {
        match byte {
            b'"' => quoted = !quoted || is_escaped(&line[..at]),
            b',' if !quoted => return Some(at),
            _ => {}
        }
    }
    None
}

/// Whether what follows is escaped: an odd number of backslashes stands before it.
fn is_escaped(before: &[u8]) -> bool {
    before.iter().rev().take_while(|&&byte| byte == b'\\').count() % 2 == 1
}

/// The value of `for` in an element; `None` if it has none, more than one, or is malformed anywhere.
pub(super) fn node(element: &[u8]) -> Option<Cow<'_, [u8]>> {
    let mut found = None;
    let mut rest = element.trim_ascii();
    while !rest.is_empty() {
        // RFC 7239 allows empty pairs, and spaces around semicolons are often written.
        if rest[0] != b';' {
            let (name, after) = run(rest, is_token)?;
            let (value, after) = match after.strip_prefix(b"=")? {
                [b'"', inside @ ..] => quoted(inside)?,
                // Strictly, an address with colons is to be quoted. Not all proxies know, and it cannot mean anything else.
                plain => {
                    let (value, after) = run(plain, |byte| is_token(byte) || b":[]".contains(&byte))?;
                    (Cow::Borrowed(value), after)
                }
            };
            if name.eq_ignore_ascii_case(b"for") && found.replace(value).is_some() {
                return None;
            }
            rest = after.trim_ascii_start();
        }
        match rest {
            [b';', after @ ..] => rest = after.trim_ascii_start(),
            [] => break,
            _ => return None,
        }
    }
    found
}

/// Splits after the bytes that fit; there must be one.
fn run(text: &[u8], fits: impl Fn(u8) -> bool) -> Option<(&[u8], &[u8])> {
    let size = text.iter().position(|&byte| !fits(byte)).unwrap_or(text.len());
    (size > 0).then(|| text.split_at(size))
}

/// A quoted string without its escapes, and what follows it. `inside` starts after the opening quote.
fn quoted(inside: &[u8]) -> Option<(Cow<'_, [u8]>, &[u8])> {
    let plain = inside.iter().position(|byte| b"\"\\".contains(byte))?;
    if inside[plain] == b'"' {
        return Some((Cow::Borrowed(&inside[..plain]), &inside[plain + 1..]));
    }
    let mut value = inside[..plain].to_vec();
    let mut rest = &inside[plain..];
    loop {
        match rest {
            [b'"', after @ ..] => return Some((Cow::Owned(value), after)),
            [b'\\', byte, after @ ..] | [byte, after @ ..] => {
                value.push(*byte);
                rest = after;
            }
            [] => return None,
        }
    }
}

fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line, and the nodes of its elements from the right; `-` where there is none.
    fn check(line: &str, expected: &[&str]) {
        let text =
            |node: Option<Cow<'_, [u8]>>| node.map_or("-".into(), |n| String::from_utf8(n.into()).unwrap());
        let nodes: Vec<String> = elements(line.as_bytes()).map(node).map(text).collect();
        assert_eq!(nodes, expected, "{line}");
    }

    #[test]
    fn elements_are_read_from_the_right() {
        for (line, expected) in [
            ("for=1.2.3.4", &["1.2.3.4"][..]),
            ("for=a, for=b,for=c", &["c", "b", "a"]),
            ("FOR=a;proto=http;by=b", &["a"]),
            ("proto=http; by=b ; For=a", &["a"]),
            (";;for=a;;", &["a"]),
            (r#"for="[2001:db8::1]:443""#, &["[2001:db8::1]:443"]),
            ("for=[2001:db8::1]:443", &["[2001:db8::1]:443"]),
            (r#"for=a;host="x,y;for=z", for=b"#, &["b", "a"]),
            (r#"for=a;host="x\",for=z", for=b"#, &["b", "a"]),
            (r#"for=a;host="x\\", for=b"#, &["b", "a"]),
            (r#"for="\1.\2.\3\.4""#, &["1.2.3.4"]),
            (r#"for="a\\\"b""#, &[r#"a\"b"#]),
            (r#"for="""#, &[""]),
            // What stands left of a sound element cannot hide it.
            (r#"for="x, for=b"#, &["b", "-"]),
            (r#"for=x;y="\, for=b"#, &["b", "-"]),
            (r#"for=x;y=", for="b""#, &["b", "-"]),
            // Malformed in one way each.
            ("", &["-"]),
            (",", &["-", "-"]),
            ("for", &["-"]),
            ("for=", &["-"]),
            ("=a", &["-"]),
            ("for = a", &["-"]),
            ("for=a b", &["-"]),
            ("for=a for=b", &["-"]),
            ("for=a;for=b", &["-"]),
            ("for=a;FOR=a", &["-"]),
            ("by=a", &["-"]),
            ("for=a;by=", &["-"]),
            (r#"for="a"b"#, &["-"]),
            (r#"for="a"#, &["-"]),
            (r#"for="a\"#, &["-"]),
            (r#"for="a\""#, &["-"]),
            ("for=a;\u{e9}=b", &["-"]),
        ] {
            check(line, expected);
        }
    }
}
