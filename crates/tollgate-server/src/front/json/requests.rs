//! Parses JSON requests, and explains what is wrong with them.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, Visitor};
use smallvec::SmallVec;
use tollgate::{Charge, Key, KeyRef};

use super::fault::Fault;
use crate::overrides::Fields;

/// How many limits one charge, and how many checks one batch may name.
pub(crate) const MOST_CHARGES: usize = 64;
pub(crate) const MOST_CHECKS: usize = 1_024;

/// The body of check, peek and reserve: one charge, or several that are charged together.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CheckRequest<'a> {
    #[serde(borrow, default, deserialize_with = "present")]
    limit: Option<Text<'a>>,
    #[serde(borrow, default, deserialize_with = "present")]
    key: Option<KeyText<'a>>,
    #[serde(default, deserialize_with = "present")]
    cost: Option<Whole<1>>,
    #[serde(borrow, default, deserialize_with = "present")]
    charges: Option<Vec<Object<One<'a>>>>,
    #[serde(default, deserialize_with = "present")]
    ttl_ms: Option<Whole<1>>,
}

/// The body of a batch: each check is charged separately.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Batch<'a> {
    #[serde(borrow)]
    pub(crate) checks: Vec<Object<One<'a>>>,
}

/// One limit of a charge.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct One<'a> {
    #[serde(borrow)]
    limit: Text<'a>,
    #[serde(borrow)]
    key: KeyText<'a>,
    #[serde(default, deserialize_with = "present")]
    cost: Option<Whole<1>>,
}

/// The body of calls about one key.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OfKey<'a> {
    #[serde(borrow)]
    pub(crate) limit: Text<'a>,
    #[serde(borrow)]
    pub(crate) key: KeyText<'a>,
}

/// The body of a call about one key under all limits: the key, or the hash by which the log and the page name it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OneKey<'a> {
    #[serde(borrow, default, deserialize_with = "present")]
    pub(crate) key: Option<KeyText<'a>>,
    #[serde(borrow, default, deserialize_with = "present")]
    pub(crate) hash: Option<Text<'a>>,
}

/// The body of a call that sets an override.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SetOverrideRequest<'a> {
    #[serde(borrow)]
    pub(crate) limit: Text<'a>,
    #[serde(borrow)]
    pub(crate) key: KeyText<'a>,
    #[serde(rename = "override")]
    pub(crate) fields: Object<Fields>,
    #[serde(borrow, default, deserialize_with = "present")]
    pub(crate) until: Option<Text<'a>>,
    #[serde(default, deserialize_with = "present")]
    pub(crate) for_ms: Option<Whole<1>>,
    #[serde(borrow, default, deserialize_with = "present")]
    pub(crate) reason: Option<Text<'a>>,
    #[serde(borrow, default, deserialize_with = "present")]
    pub(crate) by: Option<Text<'a>>,
}

/// The body of a call that removes it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RemoveOverride<'a> {
    #[serde(borrow)]
    pub(crate) limit: Text<'a>,
    #[serde(borrow)]
    pub(crate) key: KeyText<'a>,
    #[serde(borrow, default, deserialize_with = "present")]
    pub(crate) by: Option<Text<'a>>,
}

/// The body of a call that closes a key of jobs.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CloseKey<'a> {
    #[serde(borrow)]
    pub(crate) key: KeyText<'a>,
    pub(crate) for_ms: Whole<1>,
    #[serde(borrow, default, deserialize_with = "present")]
    pub(crate) reason: Option<Text<'a>>,
}

/// The body of a call that compares a config with the one in force.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CompareConfig<'a> {
    #[serde(borrow)]
    pub(crate) config: Text<'a>,
}

/// The body of a call that opens it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OpenKey<'a> {
    #[serde(borrow)]
    pub(crate) key: KeyText<'a>,
    /// Whether each value of the field that splits it is opened too.
    #[serde(default)]
    pub(crate) values: bool,
}

/// The body of settle; cancel and renew have no amount.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OfReservation<'a> {
    #[serde(borrow)]
    pub(crate) reservation: Text<'a>,
    #[serde(default, deserialize_with = "present")]
    pub(crate) actual: Option<Actual>,
}

/// The actual cost of a reservation: the same under every limit of it, or by name.
pub(crate) enum Actual {
    All(u64),
    Each(std::collections::BTreeMap<String, u64>),
}

impl<'de> Deserialize<'de> for Actual {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NumberOrLimits;
        impl<'de> Visitor<'de> for NumberOrLimits {
            type Value = Actual;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}, or an object with one for each limit", Whole::<0>::words())
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Actual, E> {
                Ok(Actual::All(number))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Actual, A::Error> {
                let mut each = std::collections::BTreeMap::new();
                while let Some((limit, Whole::<0>(number))) = map.next_entry()? {
                    each.insert(limit, number);
                }
                Ok(Actual::Each(each))
            }
        }
        deserializer.deserialize_any(NumberOrLimits)
    }
}

/// A whole number. The expected minimum is only for the message: the caller reports a number that is too small.
#[derive(Clone, Copy)]
pub(crate) struct Whole<const LEAST: u64>(pub(super) u64);

impl<const LEAST: u64> Whole<LEAST> {
    fn words() -> String {
        format!("a whole number from {LEAST} to {}", u64::MAX)
    }
}

impl<'de, const LEAST: u64> Deserialize<'de> for Whole<LEAST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Number<const LEAST: u64>;
        impl<const LEAST: u64> Visitor<'_> for Number<LEAST> {
            type Value = Whole<LEAST>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&Whole::<LEAST>::words())
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Whole<LEAST>, E> {
                Ok(Whole(number))
            }
        }
        deserializer.deserialize_u64(Number)
    }
}

pub(crate) type Charges<'a> = SmallVec<[Charge<'a>; 4]>;

impl CheckRequest<'_> {
    /// The requested time to live.
    pub(crate) fn ttl_ms(&self) -> Option<u64> {
        self.ttl_ms.map(|Whole(ms)| ms)
    }

    /// The name of the list with the charges, if there is one.
    pub(crate) fn list(&self) -> Option<&'static str> {
        self.charges.as_ref().map(|_| "charges")
    }

    /// The charges of one request.
    pub(crate) fn charges(&self) -> Result<Charges<'_>, Fault> {
        match (&self.limit, &self.key, &self.charges) {
            (Some(limit), Some(key), None) => {
                Ok(std::iter::once(charge(limit, key, self.cost).map_err(Misfit::alone)?).collect())
            }
            (None, None, Some(charges)) if self.cost.is_none() => {
                if charges.is_empty() || charges.len() > MOST_CHARGES {
                    let count = charges.len();
                    return Err(Fault::malformed(format!(
                        "`charges` has {count} entries; a charge names 1 to {MOST_CHARGES} limits"
                    )));
                }
                charges
                    .iter()
                    .zip(0..)
                    .map(|(one, index)| one.0.charge(ListEntry { list: "charges", index }))
                    .collect()
            }
            _ => Err(Fault::malformed(
                "write either {\"limit\":…,\"key\":…,\"cost\":…} or {\"charges\":[{\"limit\":…,\"key\":…},…]}",
            )),
        }
    }
}

impl One<'_> {
    pub(crate) fn charge(&self, entry: ListEntry) -> Result<Charge<'_>, Fault> {
        charge(&self.limit, &self.key, self.cost).map_err(|misfit| match misfit {
            Misfit::Key(fault) => fault.at(entry, "key"),
            Misfit::NoCost => Fault::malformed(NO_COST).at(entry, "cost"),
        })
    }
}

/// The position of a charge in a request with several, for messages: `checks[3]`.
#[derive(Clone, Copy)]
pub(crate) struct ListEntry {
    pub(crate) list: &'static str,
    pub(crate) index: usize,
}

const NO_COST: &str = "must be at least 1; to look without charging, ask /v1/peek";

/// What is wrong with one charge.
enum Misfit {
    Key(Fault),
    NoCost,
}

impl Misfit {
    /// The fault of a request that has one charge.
    fn alone(self) -> Fault {
        match self {
            Misfit::Key(fault) => fault,
            Misfit::NoCost => Fault::malformed(format!("`cost` {NO_COST}")),
        }
    }
}

fn charge<'a>(
    limit: &'a Text<'_>,
    key: &'a KeyText<'_>,
    cost: Option<Whole<1>>,
) -> Result<Charge<'a>, Misfit> {
    match cost.map_or(1, |Whole(cost)| cost) {
        0 => Err(Misfit::NoCost),
        cost => Ok(Charge::new(&limit.0, key.charged().map_err(Misfit::Key)?).cost(cost)),
    }
}

/// A text that is borrowed where it can be.
pub(crate) struct Text<'a>(pub(crate) Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Words;
        impl<'de> Visitor<'de> for Words {
            type Value = Text<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }
            fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(Words)
    }
}

/// The key: `"user:42"`, or raw parts that need no encoding, `{"namespace":"ip","key":"2001:db8::1"}`.
pub(crate) enum KeyText<'a> {
    Text(Cow<'a, str>),
    /// The key of raw parts, or what is wrong with them.
    Parts(Result<Key<'static>, String>),
}

impl KeyText<'_> {
    /// The key as a charge has it, if it is one. It is parsed here, and the engine does not parse it again.
    fn charged(&self) -> Result<KeyRef<'_>, Fault> {
        match self {
            KeyText::Parts(Ok(key)) => Ok(key.into()),
            _ => self.parsed().map(KeyRef::from),
        }
    }

    /// The key, if it is one.
    pub(crate) fn parsed(&self) -> Result<Key<'_>, Fault> {
        match self {
            KeyText::Text(text) => key(text),
            KeyText::Parts(Ok(key)) => Ok(key.clone()),
            KeyText::Parts(Err(why)) => Err(Fault::malformed(why.clone())),
        }
    }
}

/// A key from its text, or what is wrong with it and a suggestion.
pub(crate) fn key(text: &str) -> Result<Key<'_>, Fault> {
    Key::parse(text).map_err(|error| {
        let meant = error.suggestion().map(|text| format!("; did you mean `{text}`?"));
        Fault::malformed(format!("{error}{}", meant.unwrap_or_default()))
    })
}

/// A key from a URL: its text, or raw with a separate namespace, because proxies cannot encode an IPv6 address.
pub(crate) fn key_of_url<'a>(namespace: Option<&str>, text: &'a str) -> Result<Key<'a>, Fault> {
    match namespace {
        None => key(text),
        Some(namespace) => Key::new(namespace, text).map_err(|error| Fault::malformed(error.to_string())),
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for KeyText<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Parts<'a> {
            #[serde(borrow, default, deserialize_with = "present")]
            namespace: Option<Text<'a>>,
            #[serde(borrow)]
            key: Text<'a>,
            #[serde(borrow, default, deserialize_with = "present")]
            version: Option<Text<'a>>,
        }
        struct TextOrParts;
        impl<'de> Visitor<'de> for TextOrParts {
            type Value = KeyText<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a key such as \"user:42\" or {\"namespace\":…,\"key\":…}")
            }
            fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<KeyText<'de>, E> {
                Ok(KeyText::Text(Cow::Borrowed(text)))
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<KeyText<'de>, E> {
                Ok(KeyText::Text(Cow::Owned(text.to_owned())))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<KeyText<'de>, A::Error> {
                let parts = Parts::deserialize(de::value::MapAccessDeserializer::new(map))?;
                let namespace = parts.namespace.as_ref().map_or("default", |namespace| &namespace.0);
                let key = match &parts.version {
                    Some(version) => Key::with_version(namespace, &parts.key.0, &version.0),
                    None => Key::new(namespace, &parts.key.0),
                };
                Ok(KeyText::Parts(key.map_err(|error| error.to_string())))
            }
        }
        deserializer.deserialize_any(TextOrParts)
    }
}

/// Requires an object. By default serde also accepts an array of the values in the order of the fields.
pub(crate) struct Object<T>(pub(crate) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
            type Value = T;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
                T::deserialize(de::value::MapAccessDeserializer::new(map))
            }
        }
        deserializer.deserialize_map(Fields(PhantomData)).map(Object)
    }
}

/// A field that may be missing, but not `null`.
fn present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

/// Parses a body, or explains what is wrong with it, and where.
pub(crate) fn read<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Fault> {
    // Looked through once as text, and not again string by string.
    let read = match std::str::from_utf8(body) {
        Ok(text) => serde_json::from_str(text),
        Err(_) => serde_json::from_slice(body),
    };
    read.map(|Object(read)| read).map_err(|_| wrong::<T>(body))
}

/// What is wrong with a body. It is parsed again with the path to the field, which is too slow for valid ones.
#[cold]
fn wrong<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Fault {
    let mut json = serde_json::Deserializer::from_slice(body);
    let read = serde_path_to_error::deserialize::<_, Object<T>>(&mut json);
    let (path, error) = match read {
        Err(error) => (error.path().to_string(), error.into_inner()),
        Ok(_) => match json.end() {
            Err(error) => (".".to_owned(), error),
            Ok(()) => return Fault::malformed("the body is not JSON of the expected form"),
        },
    };
    let (line, column) = (error.line(), error.column());
    Fault::malformed(format!(
        "the body, line {line} column {column}: {}",
        explained(&path, &error.to_string())
    ))
}

/// The message for an error of serde. It does not repeat the caller's text, which may contain a key.
fn explained(path: &str, text: &str) -> String {
    let text = text.split(" at line ").next().unwrap_or_default();
    let field = match path {
        "." => "it".to_owned(),
        path => format!("`{path}`"),
    };
    let words = |wrong: &str| {
        let (found, expected) = wrong.split_once(", expected ")?;
        let kinds = [
            ("string", "a string"),
            ("boolean", "true or false"),
            ("null", "null"),
            ("map", "an object"),
            ("sequence", "an array"),
        ];
        let found = kinds.iter().find(|(kind, _)| found.starts_with(kind));
        let found = found.map_or_else(String::new, |(_, name)| format!(", not {name}"));
        Some(format!("{field} must be {expected}{found}"))
    };
    if let Some(wrong) = text.strip_prefix("invalid type: ").or_else(|| text.strip_prefix("invalid value: "))
        && let Some(words) = words(wrong)
    {
        return words;
    }
    // Which entry of a list it is about.
    let within = path.find(']').map(|end| format!("`{}`: ", &path[..=end])).unwrap_or_default();
    if let Some(name) = text.strip_prefix("duplicate field ") {
        return format!("{within}the field {name} is there twice");
    }
    if text.starts_with("missing field") && path != "." {
        return format!("{field}: {text}");
    }
    if text.starts_with("unknown field") {
        return format!("{within}{text}");
    }
    match ["missing field", "EOF", "expected", "trailing", "recursion"]
        .iter()
        .any(|start| text.starts_with(start))
    {
        true => text.to_owned(),
        false => "it is not JSON of the expected form".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The charges of a body, as `limit key cost` each, or the error.
    fn check(body: &str, expected: Result<&[&str], &str>) {
        let request = read::<CheckRequest<'_>>(body.as_bytes());
        let charges = request.as_ref().map_err(ToString::to_string).and_then(|request| {
            let charges = request.charges().map_err(|fault| fault.to_string())?;
            assert!(
                charges.iter().map(Charge::limit).eq(parts(request).map(|(limit, _, _)| &*limit.0)),
                "{body}"
            );
            // A charge does not show its key.
            let words = |(limit, key, cost): (&Text<'_>, &KeyText<'_>, Option<Whole<1>>)| {
                let key = key.parsed().map_err(|fault| fault.to_string())?;
                Ok(format!("{} {} {}", limit.0, key.canonical(), cost.map_or(1, |cost| cost.0)))
            };
            parts(request).map(words).collect::<Result<Vec<_>, String>>()
        });
        match (charges, expected) {
            (Ok(charges), Ok(expected)) => assert_eq!(charges, expected, "{body}"),
            (Err(message), Err(expected)) => assert!(message.contains(expected), "{body}: {message}"),
            (found, expected) => panic!("{body}: {found:?} {expected:?}"),
        }
    }

    fn parts<'a>(
        request: &'a CheckRequest<'_>,
    ) -> impl Iterator<Item = (&'a Text<'a>, &'a KeyText<'a>, Option<Whole<1>>)> {
        let alone =
            request.limit.as_ref().zip(request.key.as_ref()).map(|(limit, key)| (limit, key, request.cost));
        let several = request.charges.iter().flatten().map(|Object(one)| (&one.limit, &one.key, one.cost));
        alone.into_iter().chain(several)
    }

    #[test]
    fn a_request_has_one_charge_or_several() {
        check(r#"{"limit":"api","key":"user:42"}"#, Ok(&["api user:42 1"]));
        check(r#"{"limit":"api","key":"user:42","cost":3}"#, Ok(&["api user:42 3"]));
        check(
            r#"{"limit":"api","key":{"namespace":"ip","key":"2001:db8::1"}}"#,
            Ok(&["api ip:2001%3Adb8%3A%3A1 1"]),
        );
        check(r#"{"limit":"api","key":{"key":"a","version":"v2"}}"#, Ok(&["api default:a:v2 1"]));
        check(r#"{"limit":"api","key":"\u0061"}"#, Ok(&["api a 1"]));
        check(
            r#"{"charges":[{"limit":"a","key":"x"},{"limit":"b","key":"y","cost":2}]}"#,
            Ok(&["a x 1", "b y 2"]),
        );
    }

    #[test]
    fn mistakes_are_explained() {
        check("", Err("EOF"));
        check("{", Err("EOF"));
        check("[]", Err("it must be an object, not an array"));
        check(r#"["api","k",1]"#, Err("it must be an object, not an array"));
        check(r#"{"charges":[["api","k"]]}"#, Err("`charges[0]` must be an object, not an array"));
        check("{}", Err("write either"));
        check(r#"{"limit":"api"}"#, Err("write either"));
        check(r#"{"limit":"api","key":"k","charges":[]}"#, Err("write either"));
        check(r#"{"charges":[]}"#, Err("0 entries"));
        check(r#"{"charges":[{"limit":"a"}]}"#, Err("`charges[0]`: missing field `key`"));
        check(
            r#"{"charges":[{"limit":"a","key":"k","cost":-1}]}"#,
            Err("`charges[0].cost` must be a whole number"),
        );
        check(r#"{"limit":"api","key":"k","cost":1,"cost":2}"#, Err("the field `cost` is there twice"));
        check(r#"{"limit":"api","key":"k","ttl_ms":-1}"#, Err("`ttl_ms` must be a whole number from 1"));
        check(r#"{"limit":"api","kye":"k"}"#, Err("unknown field"));
        check(r#"{"limit":"api","key":"k","cost":0}"#, Err("ask /v1/peek"));
        check(
            r#"{"limit":"api","key":"k","cost":-1}"#,
            Err("`cost` must be a whole number from 1 to 18446744073709551615"),
        );
        check(r#"{"limit":"api","key":"k","cost":1.5}"#, Err("`cost` must be a whole number from 1"));
        check(
            r#"{"limit":"api","key":"k","cost":"user:7"}"#,
            Err("`cost` must be a whole number from 1 to 18446744073709551615, not a string"),
        );
        check(
            r#"{"limit":"api","key":"k","cost":18446744073709551616}"#,
            Err("`cost` must be a whole number from 1"),
        );
        check(r#"{"limit":"api","key":""}"#, Err("the key is empty"));
        check(r#"{"limit":"api","key":"ip:2001:db8::1"}"#, Err("did you mean `ip:2001%3Adb8%3A%3A1`?"));
        check(r#"{"limit":"api","key":{"namespace":"","key":"a"}}"#, Err("the namespace is empty"));
        check(r#"{"limit":"api","key":7}"#, Err("`key` must be a key such as \"user:42\""));
        check(
            r#"{"limit":"api","key":"k","cost":null}"#,
            Err("`cost` must be a whole number from 1 to 18446744073709551615, not null"),
        );
        check(
            r#"{"limit":"api","key":{"key":"k","version":null}}"#,
            Err("`key.version` must be a string, not null"),
        );
        let not_text =
            read::<CheckRequest<'_>>(b"{\"limit\":\"\xff\"}").map(drop).expect_err("not text").to_string();
        assert!(not_text.contains("the body, line 1 column"), "{not_text}");
        let deep = format!("{{\"limit\":{}", "[".repeat(100_000));
        check(&deep, Err("the body"));
    }
}
