//! Chromium without a window, reported what to do by the WebDriver protocol: JSON over HTTP, of which this is all we need.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use base64::prelude::{BASE64_STANDARD, Engine};
use serde_json::{Value, json};

/// How long the page has to become as expected. Generous: it is the limit of a failing test, not the length of a passing one.
const TIMEOUT_MS: u32 = 60_000;

/// One browser with one window. Ends when dropped.
pub(crate) struct Browser {
    driver: Child,
    port: u16,
    session: String,
}

impl Browser {
    pub(crate) fn start() -> Browser {
        let mut driver = Command::new("chromedriver")
            .arg("--port=0")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("chromedriver starts; ./test installs chromium and chromium-driver");
        let mut lines = BufReader::new(driver.stdout.take().expect("piped")).lines().map_while(Result::ok);
        let port = lines
            .find_map(|line| line.split_once("successfully on port ")?.1.trim_end_matches('.').parse().ok())
            .expect("chromedriver says its port");
        std::thread::spawn(move || lines.for_each(drop));
        let mut browser = Browser { driver, port, session: String::new() };
        let opened = browser.call(
            "POST",
            "",
            &json!({ "capabilities": { "alwaysMatch": {
                "goog:chromeOptions": { "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"] },
                "goog:loggingPrefs": { "browser": "ALL" },
                "timeouts": { "script": 2 * TIMEOUT_MS },
            } } }),
        );
        browser.session = format!("/{}", opened["sessionId"].as_str().expect("a session"));
        browser
    }

    pub(crate) fn open(&self, url: &str) {
        self.call("POST", "/url", &json!({ "url": url }));
    }

    /// What a script returns.
    pub(crate) fn run(&self, script: &str) -> Value {
        self.call("POST", "/execute/sync", &json!({ "script": script, "args": [] }))
    }

    /// What a script hands to its last argument.
    pub(crate) fn wait_for(&self, script: &str) -> Value {
        self.call("POST", "/execute/async", &json!({ "script": script, "args": [] }))
    }

    /// Waits until an expression is true in the page.
    pub(crate) fn until(&self, expression: &str) {
        let script = format!(
            "const done = arguments[arguments.length - 1], end = Date.now() + {TIMEOUT_MS};
             const look = () => {{
               let is = false;
               try {{ is = Boolean({expression}); }} catch {{}}
               if (is || Date.now() > end) done(is); else setTimeout(look, 50);
             }};
             look();"
        );
        if self.wait_for(&script) != json!(true) {
            self.picture("failed");
            let page = self.run("return document.body.innerText");
            panic!("it does not come true: {expression}\n{}", page.as_str().unwrap_or_default());
        }
    }

    fn find(&self, selector: &str) -> String {
        let found = self.call("POST", "/element", &json!({ "using": "css selector", "value": selector }));
        let id = found.as_object().and_then(|found| found.values().next()).and_then(Value::as_str);
        id.expect("an element").to_owned()
    }

    /// Clicks as people do: on what is to be seen.
    pub(crate) fn click(&self, selector: &str) {
        let element = self.find(selector);
        self.call("POST", &format!("/element/{element}/click"), &json!({}));
    }

    pub(crate) fn type_in(&self, selector: &str, text: &str) {
        let element = self.find(selector);
        self.call("POST", &format!("/element/{element}/value"), &json!({ "text": text }));
    }

    fn devtools(&self, command: &str, params: &Value) -> Value {
        self.call("POST", "/goog/cdp/execute", &json!({ "cmd": command, "params": params }))
    }

    /// The size of what is seen, down to that of a phone.
    pub(crate) fn size(&self, width: u32, height: u32) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600 });
        self.devtools("Emulation.setDeviceMetricsOverride", &size);
    }

    /// What the system prefers: `light` or `dark`.
    pub(crate) fn media(&self, scheme: &str) {
        let features = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.devtools("Emulation.setEmulatedMedia", &features);
    }

    /// What went wrong, as the console has it.
    pub(crate) fn console(&self) -> Vec<String> {
        let log = self.call("POST", "/se/log", &json!({ "type": "browser" }));
        let bad = |line: &&Value| line["level"] == "SEVERE" || line["level"] == "WARNING";
        let lines = log.as_array().into_iter().flatten().filter(bad);
        lines.map(|line| line["message"].to_string()).collect()
    }

    /// A picture of the whole page, for people.
    pub(crate) fn picture(&self, name: &str) {
        let taken = self.devtools("Page.captureScreenshot", &json!({ "captureBeyondViewport": true }));
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("screenshots");
        std::fs::create_dir_all(&dir).expect("a directory");
        let data = taken["data"].as_str().expect("a picture");
        std::fs::write(dir.join(format!("{name}.png")), BASE64_STANDARD.decode(data).expect("base64"))
            .expect("a file");
    }

    fn call(&self, method: &str, path: &str, body: &Value) -> Value {
        let body = body.to_string();
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("chromedriver listens");
        let (port, session, size) = (self.port, &self.session, body.len());
        let head = format!(
            "{method} /session{session}{path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n\
             Content-Length: {size}\r\nConnection: close\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes())).expect("it reads");
        let mut answer: Value = serde_json::from_slice(&read(&stream)).expect("JSON");
        let value = answer["value"].take();
        assert!(value.get("error").is_none(), "{method} {path}: {value}");
        value
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // It ends its browser with it, if it is asked to; a panic here would hide why the test failed.
        let asked = TcpStream::connect(("127.0.0.1", self.port)).and_then(|mut stream| {
            let (port, session) = (self.port, &self.session);
            write!(
                stream,
                "DELETE /session{session} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n"
            )?;
            stream.read(&mut [0; 16])
        });
        drop(asked);
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}

/// The body of an answer. Its length is gone by: chromedriver does not hang up.
fn read(stream: &TcpStream) -> Vec<u8> {
    let mut stream = BufReader::new(stream);
    let mut length = 0;
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).expect("an answer");
        let Some((name, value)) = line.split_once(':') else {
            if line.trim().is_empty() {
                break;
            }
            continue;
        };
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().expect("a number");
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).expect("a body");
    body
}
