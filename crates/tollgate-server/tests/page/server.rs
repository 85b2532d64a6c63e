//! The binary, serving on a free port.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// A running server. Ends when dropped.
pub(crate) struct Server {
    child: RefCell<Child>,
    pub(crate) url: String,
    config: Option<PathBuf>,
}

impl Server {
    /// Starts the binary and waits until it says where its page is.
    pub(crate) fn start(args: &[&str]) -> Server {
        let mut child = Command::new(env!("CARGO_BIN_EXE_tollgate"))
            .args(args)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines();
        let url = lines
            .by_ref()
            .map_while(Result::ok)
            .find_map(|line| line.trim().strip_prefix("page").map(|url| url.trim().to_owned()))
            .expect("it says where its page is");
        // Whatever else it says is read, so that it is never held up.
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
        Server { child: RefCell::new(child), url, config: None }
    }

    /// Serves a policy of its own.
    pub(crate) fn with_config(policy: &str) -> Server {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("page-{}-{}.toml", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let config = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::write(&config, policy).expect("a config");
        let path = config.to_str().expect("text");
        let mut server = Server::start(&["serve", "--config", path, "--listen", "127.0.0.1:0"]);
        server.config = Some(config);
        server
    }

    pub(crate) fn write_config(&self, policy: &str) {
        let path = self.config.as_ref().expect("it has a config");
        std::fs::write(path, policy).expect("a config");
    }

    fn address(&self) -> &str {
        self.url.trim_start_matches("http://").trim_end_matches('/')
    }

    fn ask(&self, method: &str, path: &str) -> String {
        let mut stream = TcpStream::connect(self.address()).expect("it listens");
        let address = self.address();
        write!(stream, "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")
            .expect("it reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer
    }

    /// The fields of an answer, in small letters.
    pub(crate) fn head(&self, path: &str) -> String {
        self.ask("HEAD", path)
    }

    /// The body of an answer.
    pub(crate) fn get(&self, path: &str) -> String {
        let answer = self.ask("GET", path);
        answer.split_once("\r\n\r\n").expect("a head").1.to_owned()
    }

    /// A viewer who has been let in.
    pub(crate) fn view(&self) -> TcpStream {
        let mut stream = TcpStream::connect(self.address()).expect("it listens");
        write!(stream, "GET /v1/events HTTP/1.1\r\nHost: {}\r\n\r\n", self.address()).expect("it reads");
        let mut start = [0; 15];
        stream.read_exact(&mut start).expect("an answer");
        assert_eq!(&start, b"HTTP/1.1 200 OK");
        stream
    }

    /// Asks it to end, and waits until it has; its exit code.
    pub(crate) fn stop(&self) -> Option<i32> {
        let mut child = self.child.borrow_mut();
        let asked = Command::new("kill").arg("-TERM").arg(child.id().to_string()).status();
        assert!(asked.expect("a signal").success());
        child.wait().expect("it ends").code()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let mut child = self.child.borrow_mut();
        let _ = child.kill();
        let _ = child.wait();
    }
}
