//! The HTTP client of the commands that ask a running server: `check`, `status`, `reset`, `limits` and `top`.
//!
//! Speaks `http://` and `https://`; certificates are verified by the authorities that the machine trusts (`SSL_CERT_FILE` names
//! others). The time and the size of an answer are bounded, redirections are not followed, and the admin token goes to the
//! named server only. The commands are synchronous, so a client has a small runtime of its own.

use std::error::Error;
use std::io;
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use http::uri::{PathAndQuery, Scheme};
use http::{Method, Request, Uri};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client as Pool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};

use crate::failure::{Failure, reason};

/// The timeout of a request, from the name lookup to the last byte of the answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The longest answer that is read: /metrics is the longest there is, and its series are bounded.
const MOST_BYTES: usize = 16 * 1024 * 1024;

/// Where a server is, and what to show it.
pub(crate) struct Client {
    /// As it was named, for messages.
    url: String,
    base: Uri,
    token: Option<HeaderValue>,
    pool: Pool<HttpsConnector<HttpConnector>, Full<Bytes>>,
    /// `None` only while it is dropped.
    runtime: Option<Runtime>,
}

/// What a server answered.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) body: String,
}

impl Client {
    /// For the server at `http[s]://host[:port][/prefix]`.
    pub(crate) fn new(url: &str) -> Result<Client, Failure> {
        let base = base(url).map_err(|why| Failure::new(format!("cannot ask {url:?}: {why}")))?;
        let unable = |error: &dyn Error| Failure::new(format!("cannot ask {url:?}: {error}"));
        let runtime = Builder::new_current_thread().enable_all().build().map_err(|error| unable(&error))?;
        let is_https = base.scheme() == Some(&Scheme::HTTPS);
        let tls = tls(is_https).map_err(|error| unable(&*error))?;
        let connector =
            HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1().build();
        let pool = Pool::builder(TokioExecutor::new()).build(connector);
        Ok(Client { url: url.to_owned(), base, token: None, pool, runtime: Some(runtime) })
    }

    /// Shows the admin token with every request.
    pub(crate) fn token(mut self, token: Option<&str>) -> Result<Client, Failure> {
        self.token = match token {
            None => None,
            Some(token) if !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic()) => {
                let header = HeaderValue::try_from(format!("Bearer {token}"));
                header.ok().map(|mut header| {
                    header.set_sensitive(true);
                    header
                })
            }
            Some(_) => return Err(Failure::new("the admin token must be visible ASCII characters")),
        };
        Ok(self)
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn get(&self, path: &str) -> Result<Reply, Failure> {
        self.ask(Method::GET, path, Bytes::new())
    }

    /// The answer to a request in JSON, if the server gave one.
    pub(crate) fn post_json(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        self.json(self.ask(Method::POST, path, body.to_string().into())?)
    }

    pub(crate) fn get_json(&self, path: &str) -> Result<Value, Failure> {
        self.json(self.get(path)?)
    }

    /// The JSON of an answer. One that asks for the admin token also says where that is named.
    fn json(&self, reply: Reply) -> Result<Value, Failure> {
        let is_unauthorized = reply.status == 401;
        reply.json().map_err(|failure| match (is_unauthorized, &self.token) {
            (false, _) => failure,
            (true, None) => Failure::new(format!(
                "{failure}; no token was sent: name it in TOLLGATE_ADMIN_TOKEN or with --token"
            )),
            (true, Some(_)) => Failure::new(format!(
                "{failure}; compare TOLLGATE_ADMIN_TOKEN or --token with server.admin_token of the server"
            )),
        })
    }

    fn ask(&self, method: Method, path: &str, body: Bytes) -> Result<Reply, Failure> {
        let answer = self.request(method, path, body).and_then(|request| {
            let Some(runtime) = &self.runtime else { return Err("the client is closed".into()) };
            runtime.block_on(async {
                match tokio::time::timeout(TIMEOUT, self.exchange(request)).await {
                    Ok(answer) => answer,
                    Err(_) => Err(format!("no answer within {} s", TIMEOUT.as_secs()).into()),
                }
            })
        });
        answer.map_err(|error| {
            Failure::new(format!("cannot ask the server at {}: {}", self.url, explained(&*error)))
        })
    }

    fn request(&self, method: Method, path: &str, body: Bytes) -> Result<Request<Full<Bytes>>, BoxError> {
        let mut parts = self.base.clone().into_parts();
        let prefix = self.base.path().trim_end_matches('/');
        parts.path_and_query = Some(PathAndQuery::try_from(format!("{prefix}{path}"))?);
        let mut request = Request::builder().method(&method).uri(Uri::from_parts(parts)?);
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, token);
        }
        if method == Method::POST {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        Ok(request.body(Full::new(body))?)
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<Reply, BoxError> {
        let (head, body) = self.pool.request(request).await?.into_parts();
        let body = Limited::new(body, MOST_BYTES).collect().await?.to_bytes();
        let body = String::from_utf8(body.into()).map_err(|_| "the answer is not text (UTF-8)")?;
        Ok(Reply { status: head.status.as_u16(), body })
    }
}

/// A name lookup that hangs does not hold up the end of the command.
impl Drop for Client {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

type BoxError = Box<dyn Error + Send + Sync>;

/// The server's address, checked.
fn base(url: &str) -> Result<Uri, &'static str> {
    const FORM: &str = "write it as http://127.0.0.1:8080 or https://limits.example.com";
    if url.chars().any(|letter| letter.is_whitespace() || letter.is_control()) {
        return Err("an address has no blanks in it");
    }
    let base: Uri = url.parse().map_err(|_| FORM)?;
    let is_http = [Some(&Scheme::HTTP), Some(&Scheme::HTTPS)].contains(&base.scheme());
    let has_more = base.query().is_some() || url.contains(['#', '@']);
    match base.host() {
        Some(host) if is_http && !has_more && !host.is_empty() => Ok(base),
        _ => Err(FORM),
    }
}

/// TLS by the authorities that the machine trusts. They are read only if they are needed.
fn tls(is_https: bool) -> Result<rustls::ClientConfig, BoxError> {
    let provider = rustls::crypto::ring::default_provider();
    let mut roots = rustls::RootCertStore::empty();
    if is_https {
        let found = rustls_native_certs::load_native_certs();
        roots.add_parsable_certificates(found.certs);
        if roots.is_empty() {
            let why = found.errors.first().map_or_else(String::new, |error| format!(": {error}"));
            return Err(
                format!("this machine trusts no authority for TLS{why}; install ca-certificates").into()
            );
        }
    }
    let config =
        rustls::ClientConfig::builder_with_provider(provider.into()).with_safe_default_protocol_versions()?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}

/// Why there is no answer, in words for the person who asked.
fn explained(error: &(dyn Error + 'static)) -> String {
    let chain = || std::iter::successors(Some(error), |error| (*error).source());
    // The innermost has the reason; those around it say where it came up.
    let inmost = chain().last().unwrap_or(error);
    if chain().any(|error| error.is::<LengthLimitError>()) {
        return "the answer is longer than 16 MiB".to_owned();
    }
    if let Some(error) = chain().find_map(|error| error.downcast_ref::<hyper::Error>()) {
        if error.is_parse() {
            return "what answers there does not speak HTTP/1; if it is behind TLS, write https://"
                .to_owned();
        }
        if error.is_incomplete_message() || error.is_body_write_aborted() {
            return "the answer ended early".to_owned();
        }
    }
    if let Some(rustls::Error::InvalidMessage(_)) = chain().find_map(tls_error) {
        return "what answers there does not speak TLS; if it is plain HTTP, as `tollgate serve` is, write http://"
            .to_owned();
    }
    match inmost.downcast_ref::<io::Error>() {
        Some(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            format!("{}; if the server speaks plain HTTP, write http://", reason(error))
        }
        Some(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            format!("{}; start one with `tollgate serve`, or name it with --server", reason(error))
        }
        Some(error) => reason(error),
        None => inmost.to_string(),
    }
}

/// The error of TLS in another one. I/O errors keep what they are made of beside the chain of sources, several deep.
fn tls_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a rustls::Error> {
    let inner = error.downcast_ref::<io::Error>().and_then(|error| error.get_ref());
    error.downcast_ref().or_else(|| inner.and_then(|inner| tls_error(inner)))
}

impl Reply {
    /// The JSON of an answer; what the server says is wrong becomes a failure.
    pub(crate) fn json(self) -> Result<Value, Failure> {
        let parsed: Option<Value> = serde_json::from_str(&self.body).ok();
        match parsed {
            Some(value) if self.status == 200 => Ok(value),
            Some(Value::Object(problem)) if problem.get("detail").is_some_and(Value::is_string) => {
                let detail = problem["detail"].as_str().unwrap_or_default();
                Err(Failure::new(format!("the server said {}: {}", self.status, visible(detail))))
            }
            _ => Err(Failure::new(format!(
                "the server answered with status {} and no JSON of ours; is it a Tollgate?",
                self.status
            ))),
        }
    }
}

/// What a server says, without what would move a terminal's cursor.
pub(crate) fn visible(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { '\u{fffd}' } else { letter }).collect()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpListener};
    use std::sync::Arc;

    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    use tollgate_testkit::tls::Certificates;

    use super::*;

    #[test]
    fn a_server_is_named_by_an_address() {
        for (url, expected) in [
            ("http://127.0.0.1:8080", Ok("http://127.0.0.1:8080/v1")),
            ("http://localhost", Ok("http://localhost/v1")),
            ("http://[::1]", Ok("http://[::1]/v1")),
            ("http://[::1]:81/a/", Ok("http://[::1]:81/a/v1")),
            ("https://a", Ok("https://a/v1")),
            ("HTTPS://a:444/b", Ok("https://a:444/b/v1")),
            ("ftp://a", Err("write it as http://")),
            ("127.0.0.1:8080", Err("write it as http://")),
            ("http://", Err("write it as http://")),
            ("http://user@a", Err("write it as http://")),
            ("http://a/?b", Err("write it as http://")),
            ("http://a/#b", Err("write it as http://")),
            ("http://a\r\nx: y", Err("no blanks")),
        ] {
            let request = Client::new(url).map(|client| client.request(Method::GET, "/v1", Bytes::new()));
            match (request, expected) {
                (Ok(request), Ok(uri)) => assert_eq!(request.unwrap().uri().to_string(), uri, "{url}"),
                (Err(failure), Err(why)) => assert!(failure.to_string().contains(why), "{url}: {failure}"),
                (found, expected) => panic!("{url}: {found:?} {expected:?}"),
            }
        }
        assert!(Client::new("http://a").and_then(|client| client.token(Some("a\r\nb: c"))).is_err());
    }

    /// A server that answers one request with these bytes.
    fn answering(bytes: &'static [u8]) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a caller");
            let _ = stream.read(&mut [0; 4_096]);
            let _ = stream.write_all(bytes);
        });
        address
    }

    #[test]
    fn answers_are_read_whole_or_not_at_all() {
        for (bytes, expected) in [
            ("HTTP/1.1 200 OK\r\n\r\nhi", Ok((200, "hi"))),
            ("HTTP/1.1 404 No\r\nContent-Length: 2\r\n\r\nhi", Ok((404, "hi"))),
            ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", Ok((200, "hi"))),
            ("HTTP/1.1 302 No\r\nlocation: http://a/\r\ncontent-length: 0\r\n\r\n", Ok((302, ""))),
            ("HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nhi", Err("")),
            ("HTTP/1.1 200 OK\r\n", Err("ended early")),
            ("HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n\u{80}", Err("not text")),
            ("220 mail\r\n\r\n", Err("does not speak HTTP/1; if it is behind TLS, write https://")),
            ("", Err("ended early")),
        ] {
            let client = Client::new(&format!("http://{}", answering(bytes.as_bytes()))).expect("an address");
            match (client.get("/"), expected) {
                (Ok(reply), Ok(parts)) => assert_eq!((reply.status, &*reply.body), parts, "{bytes}"),
                (Err(failure), Err(why)) => assert!(failure.to_string().contains(why), "{bytes}: {failure}"),
                (found, expected) => panic!("{bytes}: {found:?} {expected:?}"),
            }
        }
    }

    /// A server behind TLS is asked if its authority is trusted, and only then.
    #[test]
    fn a_server_behind_tls_is_verified() {
        let certificates = Certificates::generate();
        let chain = CertificateDer::pem_file_iter(certificates.server_certificate()).expect("a file");
        let chain = chain.collect::<Result<Vec<_>, _>>().expect("a certificate");
        let key = PrivateKeyDer::from_pem_file(certificates.server_key()).expect("a key");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .expect("a server");
        let config = Arc::new(config);
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { continue };
                let mut tls = rustls::ServerConnection::new(Arc::clone(&config)).expect("a connection");
                let mut stream = rustls::Stream::new(&mut tls, &mut stream);
                if stream.read(&mut [0; 4_096]).is_ok_and(|length| length > 0) {
                    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok");
                }
            }
        });
        let trusting = |authority: std::path::PathBuf| {
            let mut roots = rustls::RootCertStore::empty();
            roots
                .add(CertificateDer::from_pem_file(authority).expect("a certificate"))
                .expect("an authority");
            let mut client = Client::new("http://unused").expect("an address");
            client.base = base(&format!("https://localhost:{port}")).expect("an address");
            let tls =
                rustls::ClientConfig::builder_with_provider(rustls::crypto::ring::default_provider().into());
            let tls = tls.with_safe_default_protocol_versions().expect("versions");
            let tls = tls.with_root_certificates(roots).with_no_client_auth();
            let connector =
                HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1().build();
            client.pool = Pool::builder(TokioExecutor::new()).build(connector);
            client.get("/v1/limits")
        };
        assert_eq!(trusting(certificates.authority()).expect("an answer").body, "ok");
        let failure = trusting(certificates.other_authority()).expect_err("nobody trusts it");
        assert!(failure.to_string().contains("UnknownIssuer"), "{failure}");
    }

    #[test]
    fn what_a_server_says_is_shown_and_nothing_more() {
        for (status, body, expected) in [
            (404, r#"{"detail":"unknown \u001b[2J"}"#, "the server said 404: unknown \u{fffd}[2J"),
            (502, "<html>", "status 502 and no JSON of ours"),
            (200, "ok", "status 200 and no JSON of ours"),
        ] {
            let reply = Reply { status, body: body.to_owned() };
            let Err(failure) = reply.json() else { panic!("{body} is an answer") };
            assert!(failure.to_string().contains(expected), "{body}: {failure}");
        }
    }
}
