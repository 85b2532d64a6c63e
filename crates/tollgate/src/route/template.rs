//! Path templates: `/users/{id}` is one segment, `/files/{*path}` all that follow.
//!
//! A template is compared with the normalised path (`path.rs`). `pattern.rs` decides which requests a route matches.

use super::path::{self, EncodedSeparators};
use crate::error::Error;

/// A path with holes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Template {
    segments: Vec<Segment>,
    /// Whether it is written with a slash at its end.
    pub(super) is_ended: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    Text(String),
    One(String),
    Rest(String),
}

impl Template {
    pub(super) fn parse(text: &str) -> Result<Template, Error> {
        let wrong = |why: &str| Error::call(format!("the route `{}`: {why}", text.escape_debug()));
        let Some(inside) = text.strip_prefix('/') else {
            return Err(wrong("must start with `/`"));
        };
        let mut segments = Vec::new();
        for part in inside.strip_suffix('/').unwrap_or(inside).split('/') {
            if matches!(segments.last(), Some(Segment::Rest(_))) {
                return Err(wrong("nothing may follow `{*…}`"));
            }
            let hole = part.strip_prefix('{').and_then(|part| part.strip_suffix('}'));
            let segment = match (hole, hole.and_then(|hole| hole.strip_prefix('*'))) {
                (_, Some(name)) => Segment::Rest(name.to_owned()),
                (Some(name), None) => Segment::One(name.to_owned()),
                (None, None) if part.contains(['{', '}']) || part.starts_with([':', '*']) => {
                    return Err(wrong("a parameter is a whole segment, written `{name}` or `{*name}`"));
                }
                (None, None) => {
                    Segment::Text(literal(&format!("/{part}"))?.trim_start_matches('/').to_owned())
                }
            };
            if let Segment::One(name) | Segment::Rest(name) = &segment {
                let is_name = !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '_');
                let is_taken = segments.iter().any(
                    |other| matches!(other, Segment::One(other) | Segment::Rest(other) if other == name),
                );
                if !is_name || is_taken {
                    return Err(wrong("each parameter needs a name of its own, of letters, digits and `_`"));
                }
            }
            segments.push(segment);
        }
        Ok(Template { segments, is_ended: inside.ends_with('/') })
    }

    pub(super) fn matches(&self, path: &str) -> bool {
        self.walk(path, |_, _| {}).is_some()
    }

    /// Whether it is the same as another's text but for the names of parameters.
    pub(super) fn equals(&self, other: &str) -> bool {
        let Ok(other) = Template::parse(other) else { return false };
        let alike = |pair: (&Segment, &Segment)| match pair {
            (Segment::Text(one), Segment::Text(other)) => one == other,
            (one, other) => std::mem::discriminant(one) == std::mem::discriminant(other),
        };
        self.segments.len() == other.segments.len() && self.segments.iter().zip(&other.segments).all(alike)
    }

    pub(super) fn has_parameter(&self, name: &str) -> bool {
        let is = |segment: &Segment| matches!(segment, Segment::One(one) | Segment::Rest(one) if one == name);
        self.segments.iter().any(is)
    }

    pub(super) fn parameter<'p>(&self, path: &'p str, name: &str) -> Option<&'p str> {
        let mut found = None;
        self.walk(path, |parameter, text| {
            if parameter == name {
                found = Some(text);
            }
        })?;
        found
    }

    /// Compares a path segment by segment and hands each parameter to `found`; `None` if the path does not fit.
    fn walk<'p>(&self, path: &'p str, mut found: impl FnMut(&str, &'p str)) -> Option<()> {
        let mut rest = path.strip_prefix('/')?;
        // A trailing slash makes no difference.
        rest = rest.strip_suffix('/').unwrap_or(rest);
        let mut is_over = false;
        for segment in &self.segments {
            if is_over {
                return None;
            }
            let (part, after) = match (segment, rest.split_once('/')) {
                (Segment::Rest(_), _) | (_, None) => (rest, None),
                (_, Some((part, after))) => (part, Some(after)),
            };
            match segment {
                Segment::Text(text) if part == text => {}
                Segment::One(name) | Segment::Rest(name) if !part.is_empty() => found(name, part),
                _ => return None,
            }
            (rest, is_over) = after.map_or(("", true), |after| (after, false));
        }
        is_over.then_some(())
    }
}

/// A text that paths are compared with, in their spelling.
pub(super) fn literal(text: &str) -> Result<String, Error> {
    let wrong = |why: &str| Error::call(format!("the route `{}`: {why}", text.escape_debug()));
    if !text.starts_with('/') {
        return Err(wrong("must start with `/`"));
    }
    let normalized = path::normalized(text, EncodedSeparators::Keep);
    normalized.map(|path| path.into_owned()).map_err(|error| wrong(&error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::super::pattern::Route;
    use super::*;

    /// The match of a template with a path: `None`, or its parameters as `name=text`.
    fn check(template: &str, path: &str, expected: Option<&str>) {
        let template = Template::parse(template).expect("a sound template");
        let mut parameters = Vec::new();
        let found = template.walk(path, |name, text| parameters.push(format!("{name}={text}")));
        assert_eq!(found.map(|()| parameters.join(" ")).as_deref(), expected, "{template:?} {path}");
    }

    #[test]
    fn a_template_fits_whole_paths() {
        check("/", "/", Some(""));
        check("/", "/a", None);
        check("/login", "/login", Some(""));
        check("/login", "/login/", Some(""));
        check("/login/", "/login", Some(""));
        check("/login", "/logins", None);
        check("/login", "/login/x", None);
        check("/login", "", None);
        check("/login", "*", None);
        check("/users/{id}", "/users/7", Some("id=7"));
        check("/users/{id}", "/users/me/", Some("id=me"));
        check("/users/{id}", "/users/", None);
        check("/users/{id}", "/users", None);
        check("/users/{id}/posts/{post}", "/users/7/posts/9", Some("id=7 post=9"));
        check("/users/{id}/posts", "/users/7/likes", None);
        check("/files/{*path}", "/files/a/b/c", Some("path=a/b/c"));
        check("/files/{*path}", "/files", None);
        check("/files/{*path}", "/files/", None);
        check("/{*all}", "/a/b", Some("all=a/b"));
        check("/%75sers", "/users", Some(""));
    }

    #[test]
    fn a_template_that_will_not_do_says_why() {
        for (template, why) in [
            ("login", "must start with `/`"),
            ("", "must start with `/`"),
            ("/users/{}", "each parameter needs a name"),
            ("/users/{id}/{id}", "each parameter needs a name of its own"),
            ("/users/{i d}", "each parameter needs a name"),
            ("/users/a{id}", "a parameter is a whole segment"),
            ("/users/:id", "a parameter is a whole segment"),
            ("/files/{*path}/x", "nothing may follow"),
            ("/a%zz", "the route `/a%zz`"),
        ] {
            let error = Route::at(template).compile().expect_err(template).to_string();
            assert!(error.contains(why), "{template}: {error}");
        }
        assert!(Route::below("api").compile().is_err());
        assert!(Route::any().except(Route::at("x")).compile().is_err());
    }

    #[test]
    fn templates_are_equal_whatever_their_parameters_are_called() {
        for (one, other, equal) in [
            ("/users/{id}", "/users/{user_id}", true),
            ("/users/{id}", "/users/{*id}", false),
            ("/users/{id}", "/users/me", false),
            ("/users", "/users/", true),
            ("/users/{id}", "/users/{id}/posts", false),
            ("/users", "no template", false),
        ] {
            assert_eq!(Template::parse(one).unwrap().equals(other), equal, "{one} {other}");
        }
    }
}
