//! The files of the page, with a policy for the browser: it may run this script and this style and call this server, and nothing
//! else, so that a key with a hostile name stays text even if the script has a mistake.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::LazyLock;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, ETAG, HeaderName, HeaderValue, IF_NONE_MATCH};
use http::{HeaderMap, Response, StatusCode};

use super::super::json::{Body, full};

/// A file of the page.
pub(crate) struct Asset {
    path: &'static str,
    kind: &'static str,
    text: &'static str,
    etag: HeaderValue,
}

const SCRIPT: &str = "text/javascript; charset=utf-8";

const DOCUMENT: &str = include_str!("index.html");

static ASSETS: LazyLock<[Asset; 20]> = LazyLock::new(|| {
    [
        // One document; which of its views is seen depends on the address.
        Asset::new("/", "text/html; charset=utf-8", DOCUMENT),
        Asset::new("/key", "text/html; charset=utf-8", DOCUMENT),
        Asset::new("/jobs", "text/html; charset=utf-8", DOCUMENT),
        Asset::new("/models", "text/html; charset=utf-8", DOCUMENT),
        Asset::new("/page/page.css", "text/css; charset=utf-8", include_str!("page.css")),
        Asset::new("/page/views.css", "text/css; charset=utf-8", include_str!("views.css")),
        Asset::new("/page/alerts.js", SCRIPT, include_str!("alerts.js")),
        Asset::new("/page/ask.js", SCRIPT, include_str!("ask.js")),
        Asset::new("/page/chart.js", SCRIPT, include_str!("chart.js")),
        Asset::new("/page/csv.js", SCRIPT, include_str!("csv.js")),
        Asset::new("/page/fleet.js", SCRIPT, include_str!("fleet.js")),
        Asset::new("/page/jobs.js", SCRIPT, include_str!("jobs.js")),
        Asset::new("/page/models.js", SCRIPT, include_str!("models.js")),
        Asset::new("/page/overview.js", SCRIPT, include_str!("overview.js")),
        Asset::new("/page/page.js", SCRIPT, include_str!("page.js")),
        Asset::new("/page/key.js", SCRIPT, include_str!("key.js")),
        Asset::new("/page/limits.js", SCRIPT, include_str!("limits.js")),
        Asset::new("/page/nodes.js", SCRIPT, include_str!("nodes.js")),
        Asset::new("/page/try.js", SCRIPT, include_str!("try.js")),
        Asset::new("/page/words.js", SCRIPT, include_str!("words.js")),
    ]
});

const FIELDS: [(&str, &str); 6] = [
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
         form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
];

/// The file at this path, if there is one.
pub(super) fn find(path: &str) -> Option<&'static Asset> {
    ASSETS.iter().find(|asset| asset.path == path)
}

impl Asset {
    fn new(path: &'static str, kind: &'static str, text: &'static str) -> Asset {
        let mut hasher = DefaultHasher::new();
        text.hash(&mut hasher);
        let etag = HeaderValue::from_str(&format!("\"{:016x}\"", hasher.finish()));
        Asset { path, kind, text, etag: etag.unwrap_or(HeaderValue::from_static("\"\"")) }
    }

    /// The file, or "not modified". The browser revalidates each time: another version of the server has another page.
    pub(super) fn answer(&self, request_headers: &HeaderMap) -> Response<Body> {
        let has_it = |value: &HeaderValue| {
            let mut tags = value.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii);
            tags.any(|tag| tag.strip_prefix(b"W/").unwrap_or(tag) == self.etag.as_bytes())
        };
        let is_known = request_headers.get_all(IF_NONE_MATCH).iter().any(has_it);
        let mut response = Response::new(full(if is_known { Bytes::new() } else { self.text.into() }));
        if is_known {
            *response.status_mut() = StatusCode::NOT_MODIFIED;
        }
        let fields = response.headers_mut();
        fields.insert(ETAG, self.etag.clone());
        fields.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        if !is_known {
            fields.insert(CONTENT_TYPE, HeaderValue::from_static(self.kind));
        }
        for (name, value) in FIELDS {
            fields.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_browser_that_has_a_file_is_not_sent_it_again() {
        for asset in ASSETS.iter() {
            let path = asset.path;
            let etag = asset.etag.to_str().expect("visible").to_owned();
            for (request_headers, status) in [
                (None, 200),
                (Some(etag.clone()), 304),
                (Some(format!("\"other\", W/{etag}")), 304),
                (Some("\"other\"".to_owned()), 200),
            ] {
                let mut fields = HeaderMap::new();
                if let Some(request_headers) = request_headers {
                    fields.insert(IF_NONE_MATCH, HeaderValue::from_str(&request_headers).expect("visible"));
                }
                let response = asset.answer(&fields);
                assert_eq!(response.status(), status, "{path} {fields:?}");
                assert!(response.headers().contains_key("content-security-policy"));
            }
        }
        assert!(find("/page").is_none() && find("").is_none());
    }

    #[test]
    fn the_page_has_nothing_that_its_own_policy_forbids() {
        let page = find("/").expect("the page").text;
        assert_eq!(page.matches("<script").count(), 1);
        assert!(page.contains("<script type=\"module\" src=\"/page/page.js\"></script>"));
        for forbidden in ["style=", " onclick", " onload", "<style", "http://", "https://"] {
            let found = page.replace("http://www.w3.org/2000/svg", "").contains(forbidden);
            assert!(!found, "index.html has {forbidden}");
        }
        let forbidden = [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "sessionStorage",
            "cookie",
        ];
        for script in ASSETS.iter().filter(|asset| asset.kind == SCRIPT) {
            for forbidden in forbidden {
                assert!(!script.text.contains(forbidden), "{} has {forbidden}", script.path);
            }
        }
    }
}
