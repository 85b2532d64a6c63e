//! Which requests a toll is for: by path template, by prefix, by method.
//!
//! Every route stands by itself: it matches a request or it does not, whatever other routes say, so that adding one can never
//! take another's limit away. A router may read a path otherwise than we do (`/files/../x` is a file to one and `/x` to another),
//! so there are two ways to match. What charges does so in doubt: the path fits as it came, in the one spelling of `path.rs`, with
//! or without a slash at its end, or as axum has matched it. What frees (a skip, an exception) does so only without a doubt.

use http::Method;

use super::path::{self, EncodedSeparators};
use crate::error::Error;

/// Which requests are meant.
///
/// ```
/// use tollgate::http::Route;
///
/// let everything = Route::any();
/// let one_user = Route::at("/users/{id}");
/// let uploads = Route::post("/files/{*path}");
/// let api = Route::below("/api").except(Route::get("/api/health"));
/// ```
///
/// A template has the form that axum 0.8 uses: `{id}` is one segment and `{*path}` all that follow, at least one. Each route
/// stands by itself: `/users/{id}` also matches `/users/me`, unless that is [excepted](Route::except).
#[derive(Clone, Debug)]
pub struct Route {
    at: At,
    methods: Vec<Method>,
    except: Vec<Route>,
}

#[derive(Clone, Debug)]
enum At {
    Any,
    Template(String),
    Below(String),
}

impl Route {
    fn new(at: At) -> Route {
        Route { at, methods: Vec::new(), except: Vec::new() }
    }

    /// Every request.
    pub fn any() -> Route {
        Route::new(At::Any)
    }

    /// Requests whose path fits a template, by any method.
    pub fn at(template: impl Into<String>) -> Route {
        Route::new(At::Template(template.into()))
    }

    /// Requests for this path and everything below it: `/api` covers `/api` and `/api/users`, not `/apis`.
    pub fn below(prefix: impl Into<String>) -> Route {
        Route::new(At::Below(prefix.into()))
    }

    /// GET requests whose path fits a template, and HEAD requests, which are answered like them.
    pub fn get(template: impl Into<String>) -> Route {
        Route::at(template).method(Method::GET)
    }

    /// POST requests whose path fits a template.
    pub fn post(template: impl Into<String>) -> Route {
        Route::at(template).method(Method::POST)
    }

    /// PUT requests whose path fits a template.
    pub fn put(template: impl Into<String>) -> Route {
        Route::at(template).method(Method::PUT)
    }

    /// PATCH requests whose path fits a template.
    pub fn patch(template: impl Into<String>) -> Route {
        Route::at(template).method(Method::PATCH)
    }

    /// DELETE requests whose path fits a template.
    pub fn delete(template: impl Into<String>) -> Route {
        Route::at(template).method(Method::DELETE)
    }

    /// The same, by this method; several may be given. GET covers HEAD.
    #[must_use]
    pub fn method(mut self, method: Method) -> Route {
        self.methods.push(method);
        self
    }

    /// The same, without what the other matches. A request is excepted only if its path is written plainly, without escapes that
    /// need none, dots or doubled slashes, and if axum has not matched it to another route.
    #[must_use]
    pub fn except(mut self, other: Route) -> Route {
        self.except.push(other);
        self
    }

    /// Made ready to be compared with requests; the error says which template will not do, and why.
    pub(crate) fn compile(&self) -> Result<Matcher, Error> {
        let place = match &self.at {
            At::Any => Place::Any,
            At::Template(template) => Place::Template(Template::parse(template)?),
            At::Below(prefix) => Place::Below(literal(prefix)?.trim_end_matches('/').to_owned()),
        };
        let except = self.except.iter().map(Route::compile).collect::<Result<_, _>>()?;
        Ok(Matcher { place, methods: self.methods.clone(), except })
    }
}

/// What a route looks at in a request: one on its way, or one that somebody has recorded.
pub(crate) trait Asked {
    /// The method; `None` where a log does not say.
    fn method(&self) -> Option<&Method>;
    /// The path in its one spelling.
    fn path(&self) -> &str;
    /// The path as it came.
    fn raw_path(&self) -> &str;
    /// Whether the two are the same.
    fn is_plain(&self) -> bool;
    /// The template that a router has matched, if that is known.
    fn matched(&self) -> Option<&str>;
}

/// A route that is ready to be compared with requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Matcher {
    place: Place,
    methods: Vec<Method>,
    except: Vec<Matcher>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    Any,
    Template(Template),
    /// Without a trailing slash.
    Below(String),
}

impl Matcher {
    /// Whether a request is meant, for who would charge it: in doubt it is. A router may see another path than we do, so it is
    /// enough that the path fits as it came, or in its one spelling, or that the router has matched it so.
    pub(crate) fn charges(&self, head: &impl Asked) -> bool {
        let place = match &self.place {
            Place::Any => true,
            Place::Template(template) => {
                template.matches(head.path())
                    || (!head.is_plain() && template.matches(head.raw_path()))
                    || head.matched().is_some_and(|other| template.equals(other))
            }
            Place::Below(prefix) => {
                is_below(prefix, head.path())
                    || (!head.is_plain() && is_below(prefix, head.raw_path()))
                    || head.matched().is_some_and(|other| is_below(prefix, other))
            }
        };
        place && self.is_by_method(head.method()) && !self.except.iter().any(|other| other.frees(head))
    }

    /// Whether a request is meant, for who would let it pass uncharged: in doubt it is not. The path must be written in its one
    /// spelling, to the last slash, and the router must not have matched it to anything else.
    pub(super) fn frees(&self, head: &impl Asked) -> bool {
        let place = match &self.place {
            Place::Any => true,
            Place::Template(template) => {
                let is_ended = head.path().len() > 1 && head.path().ends_with('/');
                head.is_plain()
                    && template.is_ended == is_ended
                    && template.matches(head.path())
                    && head.matched().is_none_or(|other| template.equals(other))
            }
            Place::Below(prefix) => {
                head.is_plain()
                    && is_below(prefix, head.path())
                    && head.matched().is_none_or(|other| is_below(prefix, other))
            }
        };
        place && self.is_by_method(head.method()) && !self.except.iter().any(|other| other.charges(head))
    }

    fn is_by_method(&self, method: Option<&Method>) -> bool {
        let Some(method) = method else { return self.methods.is_empty() };
        let is = |wanted: &Method| wanted == method || (wanted == Method::GET && method == Method::HEAD);
        self.methods.is_empty() || self.methods.iter().any(is)
    }

    /// Whether the path is asked for at all.
    pub(super) fn needs_path(&self) -> bool {
        !matches!(self.place, Place::Any) || self.except.iter().any(Matcher::needs_path)
    }

    /// A parameter of its template.
    pub(crate) fn parameter<'p>(&self, path: &'p str, name: &str) -> Option<&'p str> {
        match &self.place {
            Place::Template(template) => template.parameter(path, name),
            Place::Any | Place::Below(_) => None,
        }
    }

    pub(crate) fn has_parameter(&self, name: &str) -> bool {
        matches!(&self.place, Place::Template(template) if template.has_parameter(name))
    }
}

/// Whether a path is this one, or one below it.
fn is_below(prefix: &str, path: &str) -> bool {
    path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// A path with holes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Template {
    segments: Vec<Segment>,
    /// Whether it is written with a slash at its end.
    is_ended: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    Text(String),
    One(String),
    Rest(String),
}

impl Template {
    fn parse(text: &str) -> Result<Template, Error> {
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

    fn matches(&self, path: &str) -> bool {
        self.walk(path, |_, _| {}).is_some()
    }

    /// Whether it is the same as another's text but for the names of parameters.
    fn equals(&self, other: &str) -> bool {
        let Ok(other) = Template::parse(other) else { return false };
        let alike = |pair: (&Segment, &Segment)| match pair {
            (Segment::Text(one), Segment::Text(other)) => one == other,
            (one, other) => std::mem::discriminant(one) == std::mem::discriminant(other),
        };
        self.segments.len() == other.segments.len() && self.segments.iter().zip(&other.segments).all(alike)
    }

    fn has_parameter(&self, name: &str) -> bool {
        let is = |segment: &Segment| matches!(segment, Segment::One(one) | Segment::Rest(one) if one == name);
        self.segments.iter().any(is)
    }

    fn parameter<'p>(&self, path: &'p str, name: &str) -> Option<&'p str> {
        let mut found = None;
        self.walk(path, |parameter, text| {
            if parameter == name {
                found = Some(text);
            }
        })?;
        found
    }

    /// Goes along a path, tells each parameter, and returns `None` where they part.
    fn walk<'p>(&self, path: &'p str, mut tell: impl FnMut(&str, &'p str)) -> Option<()> {
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
                Segment::One(name) | Segment::Rest(name) if !part.is_empty() => tell(name, part),
                _ => return None,
            }
            (rest, is_over) = after.map_or(("", true), |after| (after, false));
        }
        is_over.then_some(())
    }
}

/// A text that paths are compared with, in their spelling.
fn literal(text: &str) -> Result<String, Error> {
    let wrong = |why: &str| Error::call(format!("the route `{}`: {why}", text.escape_debug()));
    if !text.starts_with('/') {
        return Err(wrong("must start with `/`"));
    }
    let normalized = path::normalized(text, EncodedSeparators::Keep);
    normalized.map(|path| path.into_owned()).map_err(|error| wrong(&error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a template finds in a path: `None`, or its parameters as `name=text`.
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
