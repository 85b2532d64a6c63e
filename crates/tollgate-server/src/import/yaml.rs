//! YAML as a tree of texts, with the line of each: what an importer needs, and no more.
//!
//! Texts are kept as they are written, because what looks like a number may be meant as a value. Depth and size are bounded:
//! a file can be short and still unfold without end.

use std::collections::HashMap;

use saphyr_parser::{Event, Parser};

const DEEPEST: usize = 64;
const MOST_NODES: usize = 1_000_000;

/// One node, and the line where it starts.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) line: usize,
    pub(super) yaml: Yaml,
}

#[derive(Clone, Debug)]
pub(super) enum Yaml {
    Text(String),
    List(Vec<Node>),
    /// In the order of the file.
    Map(Vec<(String, Node)>),
}

/// A list or a map that is not finished.
struct Open {
    anchor: usize,
    node: Node,
    /// The key that waits for its value, in a map.
    key: Option<String>,
}

impl Node {
    pub(super) fn text(&self) -> Option<&str> {
        match &self.yaml {
            Yaml::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The items of a list; nothing at all is as good as an empty one.
    pub(super) fn list(&self) -> Option<&[Node]> {
        match &self.yaml {
            Yaml::List(items) => Some(items),
            Yaml::Text(text) if is_null(text) => Some(&[]),
            _ => None,
        }
    }

    pub(super) fn map(&self) -> Option<&[(String, Node)]> {
        match &self.yaml {
            Yaml::Map(fields) => Some(fields),
            _ => None,
        }
    }

    pub(super) fn field(&self, name: &str) -> Option<&Node> {
        self.map()?.iter().find(|(other, _)| other == name).map(|(_, node)| node)
    }

    fn size(&self) -> usize {
        match &self.yaml {
            Yaml::Text(_) => 1,
            Yaml::List(items) => 1 + items.iter().map(Node::size).sum::<usize>(),
            Yaml::Map(fields) => 1 + fields.iter().map(|(_, node)| node.size()).sum::<usize>(),
        }
    }
}

fn is_null(text: &str) -> bool {
    matches!(text, "" | "~" | "null" | "Null" | "NULL")
}

/// The documents of a file, or what is wrong with it.
pub(super) fn read(text: &str) -> Result<Vec<Node>, String> {
    let mut documents = Vec::new();
    let mut open: Vec<Open> = Vec::new();
    let mut anchors: HashMap<usize, Node> = HashMap::new();
    let mut nodes = 0;
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| {
            let (line, column) = (error.marker().line(), error.marker().col() + 1);
            format!("line {line} column {column}: it is not YAML: {}", error.info())
        })?;
        let line = span.start.line();
        let (anchor, done) = match event {
            Event::SequenceStart(anchor, _) => {
                open.push(Open { anchor, node: Node { line, yaml: Yaml::List(Vec::new()) }, key: None });
                (0, None)
            }
            Event::MappingStart(anchor, _) => {
                open.push(Open { anchor, node: Node { line, yaml: Yaml::Map(Vec::new()) }, key: None });
                (0, None)
            }
            Event::Scalar(text, _, anchor, _) => {
                (anchor, Some(Node { line, yaml: Yaml::Text(text.into_owned()) }))
            }
            Event::Alias(anchor) => {
                let Some(node) = anchors.get(&anchor) else {
                    return Err(format!("line {line}: an alias of nothing that stands before it"));
                };
                nodes += node.size();
                (0, (nodes <= MOST_NODES).then(|| node.clone()))
            }
            Event::SequenceEnd | Event::MappingEnd => match open.pop() {
                Some(open) => (open.anchor, Some(open.node)),
                None => (0, None),
            },
            _ => (0, None),
        };
        nodes += usize::from(done.is_some());
        if open.len() > DEEPEST || nodes > MOST_NODES {
            return Err(format!("line {line}: it is nested too deeply, or unfolds to too much"));
        }
        let Some(node) = done else { continue };
        if anchor > 0 {
            anchors.insert(anchor, node.clone());
        }
        match open.last_mut() {
            None => documents.push(node),
            Some(Open { node: outer, key, .. }) => match (&mut outer.yaml, key.take()) {
                (Yaml::List(items), _) => items.push(node),
                (Yaml::Map(fields), Some(name)) => fields.push((name, node)),
                (Yaml::Map(_), None) => match node.yaml {
                    Yaml::Text(name) => *key = Some(name),
                    _ => return Err(format!("line {line}: the name of a field must be a text")),
                },
                (Yaml::Text(_), _) => {}
            },
        }
    }
    Ok(documents)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tree as a line: `{a:[1,2]}`.
    fn described(node: &Node) -> String {
        let joined = |parts: Vec<String>| parts.join(",");
        match &node.yaml {
            Yaml::Text(text) => text.clone(),
            Yaml::List(items) => format!("[{}]", joined(items.iter().map(described).collect())),
            Yaml::Map(fields) => {
                let fields = fields.iter().map(|(name, node)| format!("{name}:{}", described(node)));
                format!("{{{}}}", joined(fields.collect()))
            }
        }
    }

    fn check(text: &str, expected: Result<&str, &str>) {
        match (read(text), expected) {
            (Ok(documents), Ok(expected)) => {
                let all: Vec<_> = documents.iter().map(described).collect();
                assert_eq!(all.join(" "), expected, "{text:.80}");
            }
            (Err(why), Err(expected)) => assert!(why.contains(expected), "{text:.80}: {why}"),
            (found, expected) => panic!("{text:.80}: {found:?} {expected:?}"),
        }
    }

    #[test]
    fn files_are_read_as_written() {
        check("a: 007\nb:\n  - yes\n  - 'x: y'\n", Ok("{a:007,b:[yes,x: y]}"));
        check("a: &x {b: 1}\nc: *x\n", Ok("{a:{b:1},c:{b:1}}"));
        check("a\n---\nb\n", Ok("a b"));
        check("", Ok(""));
        assert_eq!(read("a:\n  b: 1\n").unwrap()[0].field("a").unwrap().field("b").unwrap().line, 2);
    }

    #[test]
    fn what_unfolds_without_end_is_refused() {
        check("a: [", Err("it is not YAML"));
        check("a: *x", Err(""));
        check("? [a]\n: b", Err("line 1: the name of a field must be a text"));
        for open in ["[", "- ", "{a: "] {
            check(&open.repeat(100_000), Err(""));
        }
        let mut laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for level in 1..10 {
            let below = vec![format!("*a{}", level - 1); 10].join(", ");
            laughs.push_str(&format!("a{level}: &a{level} [{below}]\n"));
        }
        check(&laughs, Err("unfolds to too much"));
    }
}
