//! Requests from access logs that have a JSON object a line: what nginx writes with `log_format … escape=json`, and Envoy with
//! `json_format`.
//!
//! Neither has names of its own, so the names that are in use are known here: the variables of nginx (`time_iso8601`, `remote_addr`,
//! `request_method`, …) and the names of Envoy's and Istio's examples (`start_time`, `downstream_remote_address`, `method`, `path`, …). Of several
//! fields that say the same, the one that says it best is taken, in whatever order they stand. What the requests meet, the config's `[[routes]]` say.

use std::borrow::Cow;
use std::fmt;
use std::io::BufRead;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::from_combined::{Access, Requested};
use super::from_jsonl::{Name, given, invalid_json, text, text_or_number};
use super::instant;
use super::intake::Intake;
use super::lines::Lines;
use super::mistake::Mistake;
use crate::failure::Failure;

/// Reads a whole file into `intake`.
pub(super) fn read<R: BufRead>(mut lines: Lines<R>, name: &str, intake: &mut Intake) -> Result<(), Failure> {
    intake.begin_access_log();
    while let Some(line) = lines.next_line().map_err(|error| Failure::reading(name, &error))? {
        let Some((line, bytes)) = intake.whole_line(&line)? else { continue };
        match object(bytes).and_then(|object| Ok((object.time_us()?, object.access()?))) {
            Ok((time_us, access)) => intake.take_request(line, time_us, &access)?,
            Err(mistake) => intake.refuse_request(line, &mistake)?,
        }
    }
    Ok(())
}

/// Whether an object reads as a line of such a log.
pub(super) fn is_access(line: &[u8]) -> bool {
    object(line).is_ok_and(|object| {
        let is_request = object.request.is_some() || object.method.is_some() || object.target.is_some();
        object.time.is_some() && (is_request || object.client.is_some())
    })
}

fn object(bytes: &[u8]) -> Result<Object<'_>, Mistake> {
    let text = str::from_utf8(bytes).map_err(|_| Mistake::not_utf8("line", bytes))?;
    serde_json::from_str(text).map_err(|error| invalid_json(text, &error))
}

/// A value as it is written, and how well its field says it: less is better.
type Ranked<'a> = Option<(u8, &'a RawValue)>;

/// The fields of a line, as far as a backtest reads them.
#[derive(Debug, Default)]
struct Object<'a> {
    time: Ranked<'a>,
    client: Ranked<'a>,
    user: Ranked<'a>,
    request: Ranked<'a>,
    method: Ranked<'a>,
    target: Ranked<'a>,
    bytes: Ranked<'a>,
    referer: Ranked<'a>,
    agent: Ranked<'a>,
}

impl<'a> Object<'a> {
    /// Where the value of a field belongs, and how well it says it.
    fn place(&mut self, name: &str) -> Option<(&mut Ranked<'a>, u8)> {
        Some(match name {
            "start_time" | "msec" => (&mut self.time, 0),
            "time_iso8601" | "@timestamp" | "timestamp" => (&mut self.time, 1),
            "time" | "time_local" | "ts" => (&mut self.time, 2),
            "remote_addr" | "downstream_remote_address" | "downstream_remote_address_without_port" => {
                (&mut self.client, 0)
            }
            "client_ip" | "client" | "remote_ip" => (&mut self.client, 1),
            "downstream_direct_remote_address" => (&mut self.client, 2),
            "remote_user" | "user" => (&mut self.user, 0),
            "request" => (&mut self.request, 0),
            "request_method" | "method" => (&mut self.method, 0),
            "request_uri" => (&mut self.target, 0),
            "path" => (&mut self.target, 1),
            "uri" => (&mut self.target, 2),
            "body_bytes_sent" => (&mut self.bytes, 0),
            "bytes_sent" => (&mut self.bytes, 1),
            "http_referer" | "referer" | "referrer" => (&mut self.referer, 0),
            "http_user_agent" | "user_agent" => (&mut self.agent, 0),
            _ => return None,
        })
    }

    fn time_us(&self) -> Result<u64, Mistake> {
        let absent = || {
            Mistake::absent(
                "time",
                "write it as time_iso8601, msec, time_local, start_time, timestamp or time",
            )
        };
        let raw = written(self.time).ok_or_else(absent)?;
        let time = text_or_number("time", raw)?;
        // As nginx has it in the common format: 10/Oct/2000:13:55:36 -0700.
        let parsed = match time.as_bytes().get(2) {
            Some(b'/') => instant::parse_access_time(time.as_bytes()),
            _ => instant::parse(&time),
        };
        parsed.map_err(|fix| Mistake::new("time", &time, fix))
    }

    fn access(&self) -> Result<Access<'a>, Mistake> {
        let optional = |field: &'static str, ranked: Ranked<'a>| -> Result<Option<Cow<'a, str>>, Mistake> {
            let value = written(ranked).map(|raw| text(field, raw)).transpose()?;
            Ok(value.filter(|value| !matches!(&**value, "" | "-")))
        };
        let requested = match optional("request", self.request)? {
            Some(line) => Requested::Line(line),
            None => match (optional("method", self.method)?, optional("path", self.target)?) {
                (Some(method), Some(target)) => Requested::Parts(method, target),
                (method, target) => Requested::Parts(method.unwrap_or_default(), target.unwrap_or_default()),
            },
        };
        let client = optional("client", self.client)?.unwrap_or(Cow::Borrowed("-"));
        let bytes = written(self.bytes).map(|raw| text_or_number("bytes", raw)).transpose()?;
        Ok(Access::recorded(
            client,
            optional("user", self.user)?,
            requested,
            bytes.as_deref().unwrap_or_default(),
            [optional("referer", self.referer)?, optional("user_agent", self.agent)?],
        ))
    }
}

/// A value that is there and is not `null`.
fn written(ranked: Ranked<'_>) -> Option<&str> {
    given(ranked.map(|(_, raw)| raw))
}

impl<'de: 'a, 'a> Deserialize<'de> for Object<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ObjectVisitor)
    }
}

struct ObjectVisitor;

impl<'de> Visitor<'de> for ObjectVisitor {
    type Value = Object<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object<'de>, A::Error> {
        let mut object = Object::default();
        while let Some(Name(name)) = map.next_key()? {
            match object.place(&name) {
                Some((ranked, rank)) if ranked.is_none_or(|(other, _)| rank < other) => {
                    let raw: &RawValue = map.next_value()?;
                    if !matches!(raw.get(), "null" | "\"-\"" | "\"\"") {
                        *ranked = Some((rank, raw));
                    }
                }
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(object)
    }
}

#[cfg(test)]
mod tests {
    use tollgate::route::RequestReader;

    use super::*;

    /// The time, the client, the method and the path of a line.
    fn seen(line: &str) -> Result<(u64, String), Mistake> {
        let object = object(line.as_bytes())?;
        let (time, access) = (object.time_us()?, object.access()?);
        let reader = RequestReader::new();
        let head = access.request(&reader);
        let client = head.client().map_or("-".to_owned(), |client| client.to_string());
        let shown = [client, head.user().unwrap_or("-").to_owned(), head.path().to_owned()].join(" ");
        Ok((time, shown))
    }

    #[test]
    fn lines_of_nginx_and_envoy_are_requests() {
        let nginx = r#"{"time_local":"14/Nov/2023:22:13:20 +0000","remote_addr":"203.0.113.7","remote_user":"","request":"GET /api/v1?x=1 HTTP/1.1","status":"200","body_bytes_sent":"612","http_referer":"-","http_user_agent":"curl"}"#;
        assert_eq!(seen(nginx).unwrap(), (1_700_000_000_000_000, "203.0.113.7 - /api/v1".to_owned()));
        let parts = r#"{"msec":1700000000.25,"time_iso8601":"2023-11-14T22:13:20+00:00","remote_addr":"2001:db8::7","remote_user":"bob","request_method":"POST","uri":"/index.php","request_uri":"/login","status":302,"bytes_sent":5}"#;
        assert_eq!(seen(parts).unwrap(), (1_700_000_000_250_000, "2001:db8::7 bob /login".to_owned()));
        let envoy = r#"{"start_time":"2023-11-14T22:13:20.409Z","method":"GET","path":"/a%2Fb?c","protocol":"HTTP/1.1","response_code":200,"bytes_sent":135,"duration":4,"user_agent":"curl/7.60.0","authority":"httpbin","upstream_host":"127.0.0.1:80","downstream_direct_remote_address":"10.0.0.9:1","downstream_remote_address":"10.44.1.23:37652","x_forwarded_for":null}"#;
        assert_eq!(seen(envoy).unwrap(), (1_700_000_000_409_000, "10.44.1.23 - /a%2Fb".to_owned()));
        // What was no request at all has neither method nor path.
        let none = r#"{"start_time":"2023-11-14T22:13:20Z","method":null,"path":null,"downstream_remote_address":"[2001:db8::1]:5"}"#;
        assert_eq!(seen(none).unwrap().1, "2001:db8::1 - ");
        for line in [nginx, parts, envoy, none] {
            assert!(is_access(line.as_bytes()), "{line}");
        }
        for line in [r#"{"time":1,"limit":"api","key":"u"}"#, r#"{"remote_addr":"::1"}"#, "{", "[]", "{}"] {
            assert!(!is_access(line.as_bytes()), "{line}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_refused_with_its_field() {
        for (line, field) in [
            (r#"{"method":"GET","path":"/"}"#, "time is missing"),
            (r#"{"time":true,"path":"/"}"#, "time = true"),
            (r#"{"time":"noon","path":"/"}"#, "time = \"noon\""),
            (r#"{"time_local":"14/Foo/2023:22:13:20 +0000"}"#, "time = \"14/Foo"),
            (r#"{"time":1,"request":{"method":"GET"}}"#, "request = {\"method\":\"GET\"}"),
            (r#"{"time":1,"path":7}"#, "path = 7"),
            ("{\"time\":1", "line = {\"time\":1"),
            ("[1]", "line = [1]"),
        ] {
            let mistake = seen(line).expect_err(line).in_words("f", 1);
            assert!(mistake.starts_with(&format!("f:1: {field}")), "{mistake}");
        }
    }
}
