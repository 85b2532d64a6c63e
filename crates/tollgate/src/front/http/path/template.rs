//! Which rules a path meets: templates such as `/users/{id}`, matched as axum 0.8 matches them.

use std::borrow::Cow;
use std::fmt;

use super::{EncodedSeparators, decoded, normalized};

/// The matcher counts parameters with letters and gives up, loudly, after the last.
const MAX_PARAMETERS: usize = 16;

/// The templates of all rules. Where several fit a path, the more exact one is found, wherever it stands in the list.
///
/// ```
/// use tollgate::http::Templates;
///
/// let templates = Templates::new([("/users/{id}", 0), ("/files/{*rest}", 1), ("/users/{id}", 2)])?;
/// let (rules, parameters) = templates.find("/users/42").expect("a template fits");
/// assert_eq!(rules, [0, 2]);
/// assert_eq!(parameters.get("id"), Some("42"));
/// assert!(templates.find("/users/").is_none());
/// # Ok::<(), String>(())
/// ```
#[derive(Clone)]
pub struct Templates {
    /// To a place in `found`.
    router: matchit::Router<usize>,
    found: Vec<Template>,
}

#[derive(Clone)]
struct Template {
    text: String,
    rules: Vec<usize>,
}

impl Templates {
    /// From templates and the rules they belong to. A template may belong to several.
    ///
    /// The error says what is wrong with which template.
    pub fn new<T: AsRef<str>>(templates: impl IntoIterator<Item = (T, usize)>) -> Result<Templates, String> {
        let mut all = Templates { router: matchit::Router::new(), found: Vec::new() };
        for (text, rule) in templates {
            all.add(text.as_ref(), rule)?;
        }
        Ok(all)
    }

    fn add(&mut self, text: &str, rule: usize) -> Result<(), String> {
        if let Some(template) = self.found.iter_mut().find(|template| template.text == text) {
            template.rules.push(rule);
            return Ok(());
        }
        check_spelling(text)?;
        check_names(text)?;
        self.router.insert(text, self.found.len()).map_err(|error| refused(text, &error))?;
        self.found.push(Template { text: text.to_owned(), rules: vec![rule] });
        Ok(())
    }

    /// The rules of the template that fits a [normalised](super::normalized) path, and what its parameters stand for.
    pub fn find<'t, 'p>(&'t self, path: &'p str) -> Option<(&'t [usize], Params<'t, 'p>)> {
        let found = self.router.at(path).ok()?;
        Some((&self.found.get(*found.value)?.rules, Params(found.params)))
    }
}

impl fmt::Debug for Templates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.found.iter().map(|template| &template.text)).finish()
    }
}

/// What the parameters of a template stand for in a path.
pub struct Params<'t, 'p>(matchit::Params<'t, 'p>);

impl<'p> Params<'_, 'p> {
    /// A parameter as it stands in the path.
    pub fn get(&self, name: &str) -> Option<&'p str> {
        self.0.get(name)
    }

    /// A parameter [decoded].
    ///
    /// ```
    /// use tollgate::http::Templates;
    /// let templates = Templates::new([("/packages/{name}", 0)])?;
    /// let (_, parameters) = templates.find("/packages/@scope%2Fname").expect("a template fits");
    /// assert_eq!(parameters.decoded("name").as_deref(), Some("@scope/name"));
    /// # Ok::<(), String>(())
    /// ```
    pub fn decoded(&self, name: &str) -> Option<Cow<'p, str>> {
        self.get(name).map(decoded)
    }
}

/// Without what they stand for: parameters are often somebody's name.
impl fmt::Debug for Params<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(name, _)| name)).finish()
    }
}

/// A template is compared with normalised paths; one in another spelling would never fit any.
fn check_spelling(text: &str) -> Result<(), String> {
    match normalized(text, EncodedSeparators::Keep) {
        Ok(spelling) if spelling == text && text != "*" => Ok(()),
        Ok(_) if !text.starts_with('/') => Err(format!("the template `{text}` does not start with `/`")),
        Ok(spelling) => {
            Err(format!("the template `{text}` fits no path, since paths are normalised; write `{spelling}`"))
        }
        Err(bad) => Err(format!("the template `{text}` is no path: {bad}")),
    }
}

fn check_names(text: &str) -> Result<(), String> {
    let mut names: Vec<&str> = Vec::new();
    let mut pieces = Pieces(text);
    while let Some(piece) = pieces.next() {
        let (Piece::Segment(name) | Piece::Rest(name)) = piece else { continue };
        // The matcher would take doubled braces as part of the name, which nobody means.
        if name.contains('{') || pieces.0.starts_with('}') {
            return Err(format!("the template `{text}` has a brace in the name of a parameter; remove it"));
        }
        if names.contains(&name) {
            return Err(format!(
                "the template `{text}` has the parameter `{name}` twice; give each a name of its own"
            ));
        }
        names.push(name);
    }
    if names.len() > MAX_PARAMETERS {
        return Err(format!(
            "the template `{text}` has {} parameters; {MAX_PARAMETERS} are allowed",
            names.len()
        ));
    }
    Ok(())
}

fn refused(text: &str, error: &matchit::InsertError) -> String {
    use matchit::InsertError;
    match error {
        InsertError::Conflict { with } => format!(
            "the template `{text}` stands where `{with}` does; in one place, use one name, and either `{{name}}` \
             or `{{*name}}`"
        ),
        InsertError::InvalidParamSegment => {
            format!("the template `{text}` has something after a parameter; a parameter ends its segment")
        }
        InsertError::InvalidParam => format!(
            "the template `{text}` has a parameter without a name or with an odd brace; write `{{name}}`, and braces \
             that are meant as such twice"
        ),
        InsertError::InvalidCatchAll => {
            format!(
                "the template `{text}` has a `{{*rest}}` that is not a whole last segment; move it to the end"
            )
        }
        _ => format!("the template `{text}` is not understood: {error}"),
    }
}

/// One parameter of a path whose template is known, as axum says which one it matched.
///
/// `None` if the template has no such parameter, or the path does not fit it after all.
#[cfg_attr(not(test), expect(dead_code, reason = "for the layer that stands on this"))]
pub(crate) fn parameter<'p>(template: &str, path: &'p str, name: &str) -> Option<&'p str> {
    let mut rest = path;
    let mut found = None;
    for piece in Pieces(template) {
        let (value, known_as);
        (value, rest, known_as) = match piece {
            Piece::Text(text) => ("", rest.strip_prefix(text)?, None),
            Piece::Segment(known_as) => {
                let (value, after) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
                (value, after, Some(known_as))
            }
            Piece::Rest(known_as) => (rest, "", Some(known_as)),
        };
        if let Some(known_as) = known_as {
            // As in matching: a parameter may stand for nothing between two slashes, but not at the end.
            if value.is_empty() && rest.is_empty() {
                return None;
            }
            if known_as == name && found.is_none() {
                found = Some(value);
            }
        }
    }
    if rest.is_empty() { found } else { None }
}

/// A part of a template.
#[derive(Debug, PartialEq)]
enum Piece<'t> {
    Text(&'t str),
    Segment(&'t str),
    Rest(&'t str),
}

/// The parts of a template in order; a doubled brace is text. Nothing is checked here: an open brace is text too.
struct Pieces<'t>(&'t str);

impl<'t> Iterator for Pieces<'t> {
    type Item = Piece<'t>;

    fn next(&mut self) -> Option<Piece<'t>> {
        let text = self.0;
        let piece = |size: usize, skipped: usize| (Piece::Text(&text[..size]), &text[size + skipped..]);
        let (piece, rest) = match text.find(['{', '}']) {
            None if text.is_empty() => return None,
            None => piece(text.len(), 0),
            Some(0) if text.starts_with("{{") || text.starts_with("}}") => piece(1, 1),
            Some(0) => match text[1..].split_once('}') {
                Some((name, rest)) if text.starts_with('{') => match name.strip_prefix('*') {
                    Some(name) => (Piece::Rest(name), rest),
                    None => (Piece::Segment(name), rest),
                },
                _ => piece(1, 0),
            },
            Some(brace) => piece(brace, 0),
        };
        self.0 = rest;
        Some(piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_path_meets_the_rules_of_one_template() {
        let templates = Templates::new([
            ("/", 0),
            ("/users/{id}", 1),
            ("/users/me", 2),
            ("/users/{id}/posts/{post}", 3),
            ("/files/{*rest}", 4),
            ("/users/{id}", 5),
            ("/v-{version}/x", 6),
            ("/{{literal}}", 7),
            ("/caf\u{e9}/{name}", 8),
        ])
        .unwrap();
        for (path, rules, parameters) in [
            ("/", &[0][..], &[][..]),
            ("/users/42", &[1, 5], &[("id", "42")]),
            ("/users/me", &[2], &[]),
            ("/users/me/", &[], &[]),
            ("/users/", &[], &[]),
            ("/users", &[], &[]),
            ("/users/42/posts/7", &[3], &[("id", "42"), ("post", "7")]),
            ("/users/me/posts/7", &[3], &[("id", "me"), ("post", "7")]),
            ("/files/a/b/c", &[4], &[("rest", "a/b/c")]),
            ("/files/", &[], &[]),
            ("/v-2/x", &[6], &[("version", "2")]),
            ("/{literal}", &[7], &[]),
            ("/caf\u{e9}/\u{e9}", &[8], &[("name", "\u{e9}")]),
            ("/USERS/42", &[], &[]),
            ("*", &[], &[]),
            ("", &[], &[]),
        ] {
            let found = templates.find(path);
            assert_eq!(found.as_ref().map_or(&[][..], |(rules, _)| *rules), rules, "{path}");
            for (name, value) in parameters {
                assert_eq!(
                    found.as_ref().and_then(|(_, known)| known.get(name)),
                    Some(*value),
                    "{path} {name}"
                );
            }
        }
    }

    #[test]
    fn a_bad_template_is_refused_with_what_is_wrong() {
        let many: String = (0..17).map(|n| format!("/{{p{n}}}")).collect();
        for (template, says) in [
            ("users", "is no path: the path does not start with `/`"),
            ("", "`` does not start with `/`"),
            ("*", "`*` does not start with `/`"),
            ("/a//b", "write `/a/b`"),
            ("/caf%c3%a9", "write `/caf\u{e9}`"),
            ("/a%2fb", "write `/a%2Fb`"),
            ("/a%", "a percent sign is written `%25`"),
            ("/a?b", "give the path alone"),
            ("/{", "odd brace"),
            ("/}", "odd brace"),
            ("/{}", "without a name"),
            ("/{*}", "without a name"),
            ("/{a/b}", "odd brace"),
            ("/{a}}", "brace in the name"),
            ("/{a}}b}", "brace in the name"),
            ("/{*a}}}", "brace in the name"),
            ("/{{{a{{b}", "brace in the name"),
            ("/{id}.json", "after a parameter"),
            ("/x/{*rest}/y", "move it to the end"),
            ("/{id}/{id}", "parameter `id` twice"),
            ("/{name}", "stands where `/{id}` does"),
            ("/{*rest}", "stands where `/{id}` does"),
            (&many, "has 17 parameters; 16 are allowed"),
        ] {
            let error = Templates::new([("/{id}", 0), (template, 1)]).unwrap_err();
            assert!(error.contains(says), "{template}: {error}");
        }
    }

    #[test]
    fn a_known_template_gives_its_parameters() {
        for (template, path, name, expected) in [
            ("/users/{id}", "/users/42", "id", Some("42")),
            ("/users/{id}", "/users/42", "name", None),
            ("/users/{id}", "/users/", "id", None),
            ("/users/{id}", "/users/42/", "id", None),
            ("/users/{id}", "/teams/42", "id", None),
            ("/{a}/x/{b}/{*c}", "/1/x/2/3/4", "a", Some("1")),
            ("/{a}/x/{b}/{*c}", "/1/x/2/3/4", "b", Some("2")),
            ("/{a}/x/{b}/{*c}", "/1/x/2/3/4", "c", Some("3/4")),
            ("/{a}/x/{b}/{*c}", "/1/x/2/", "a", None),
            ("/{a}/x", "//x", "a", Some("")),
            ("/v-{version}/x", "/v-2/x", "version", Some("2")),
            ("/{{id}}/{id}", "/{id}/42", "id", Some("42")),
            ("/caf\u{e9}/{id}", "/caf\u{e9}/\u{1f980}", "id", Some("\u{1f980}")),
            ("", "", "id", None),
            ("/{", "/{", "id", None),
        ] {
            assert_eq!(parameter(template, path, name), expected, "{template} {path} {name}");
        }
    }

    proptest! {
        /// The matcher may be given anything, and the walk along a known template finds what the matcher found.
        #[test]
        fn the_walk_finds_what_the_matcher_found(
            texts in prop::collection::vec("(/([ab]|\\{[xyz]\\}|\\{\\*[xyz]\\}|\\{\\{|\\}\\}|[{}*é]){0,2}){1,4}", 1..6),
            path in "(/[abé{}]{0,2}){1,4}",
        ) {
            let sound: Vec<&String> =
                texts.iter().filter(|text| Templates::new([(text, 0)]).is_ok()).collect();
            let Ok(templates) = Templates::new(sound.iter().zip(0..)) else { return Ok(()) };
            let Some((rules, parameters)) = templates.find(&path) else { return Ok(()) };
            for name in ["x", "y", "z"] {
                prop_assert_eq!(parameter(sound[rules[0]], &path, name), parameters.get(name));
            }
        }
    }
}
