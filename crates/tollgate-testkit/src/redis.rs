//! Real Redis servers: one, or a cluster of six.
//!
//! A server listens on a free loopback port, keeps its files in a directory of its own and persists nothing. It can be frozen,
//! killed and restarted on the same port. The binary is `redis-server` from the path, or the one that the environment variable
//! `TOLLGATE_REDIS_SERVER` names, so that a whole suite can be run against another version.

mod cluster;
mod resp;

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::process::Signal;

pub use cluster::{RedisCluster, slot_of};
pub use resp::{Client, Value};

use crate::daemon::{Daemon, Readiness, freeze, poll};
use crate::home::Home;
use crate::port::free_port;
use crate::tls::Certificates;

const MISSING: &str = "redis-server is not installed: run apt-get install -y redis-server";

/// How long a server may take to start, on a machine that is busy with other tests.
const START_LIMIT: Duration = Duration::from_secs(20);

/// How long [`RedisServer::command`] waits for a reply.
const REPLY_LIMIT: Duration = Duration::from_secs(5);

/// How to start a [`RedisServer`].
#[derive(Clone, Debug)]
pub struct RedisBuilder {
    binary: PathBuf,
    arguments: Vec<String>,
    credentials: Vec<String>,
    tls: bool,
}

impl RedisBuilder {
    /// Uses another binary, such as one of an older version.
    #[must_use]
    pub fn binary(mut self, path: impl Into<PathBuf>) -> Self {
        self.binary = path.into();
        self
    }

    /// Adds arguments as `redis-server` takes them: `["--maxmemory", "1mb"]`. Later ones win over earlier ones and over our own.
    #[must_use]
    pub fn arguments<A: Into<String>>(mut self, arguments: impl IntoIterator<Item = A>) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Asks every client for this password. [`RedisServer::command`] gives it.
    #[must_use]
    pub fn password(mut self, password: &str) -> Self {
        self.credentials = vec![password.to_owned()];
        self.arguments(["--requirepass", password])
    }

    /// Adds a user with access rules: `user("alice", "on >secret ~* +@all")`.
    #[must_use]
    pub fn user(self, name: &str, rules: &str) -> Self {
        self.arguments(["--user", name]).arguments(rules.split_whitespace())
    }

    /// Lets [`RedisServer::command`] log in as this user, for servers whose default user may not do everything.
    #[must_use]
    pub fn commands_as(mut self, user: &str, password: &str) -> Self {
        self.credentials = vec![user.to_owned(), password.to_owned()];
        self
    }

    /// Opens a second port for TLS, with the server certificate. A client certificate is checked if one is sent; ask for one
    /// with `arguments(["--tls-auth-clients", "yes"])`. The plain port stays open for [`RedisServer::command`].
    #[must_use]
    pub fn tls(mut self, certificates: &Certificates) -> Self {
        self.tls = true;
        let path = |path: PathBuf| path.to_string_lossy().into_owned();
        self.arguments(["--tls-cert-file".to_owned(), path(certificates.server_certificate())])
            .arguments(["--tls-key-file".to_owned(), path(certificates.server_key())])
            .arguments(["--tls-ca-cert-file".to_owned(), path(certificates.authority())])
            // For what the server connects to itself: its primary, and the other nodes of a cluster.
            .arguments(["--tls-client-cert-file".to_owned(), path(certificates.client_certificate())])
            .arguments(["--tls-client-key-file".to_owned(), path(certificates.client_key())])
            .arguments(["--tls-auth-clients", "optional"])
    }

    /// Starts the server and waits until it answers.
    pub fn start(self) -> RedisServer {
        let version = version_of(&self);
        for _ in 0..5 {
            let (port, tls_port) = (free_port(), self.tls.then(free_port));
            let server = RedisServer::spawn(self.clone(), version, port, tls_port);
            if server.wait_for_start() {
                return server;
            }
        }
        panic!("redis-server lost the race for its port five times")
    }
}

fn version_of(builder: &RedisBuilder) -> (u32, u32, u32) {
    let output = match Command::new(&builder.binary).arg("--version").output() {
        Ok(output) => String::from_utf8_lossy(&output.stdout).into_owned(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => panic!("{MISSING}"),
        Err(error) => panic!("cannot run {}: {error}", builder.binary.display()),
    };
    parse_version(&output).unwrap_or_else(|| panic!("{} says: {output}", builder.binary.display()))
}

/// From `Redis server v=7.0.15 sha=…`.
fn parse_version(text: &str) -> Option<(u32, u32, u32)> {
    let mut parts = text.split_once("v=")?.1.split_whitespace().next()?.split('.');
    let mut next = || parts.next()?.parse().ok();
    Some((next()?, next()?, next()?))
}

/// A running Redis server. Dropping it ends the process and removes its directory.
pub struct RedisServer {
    builder: RedisBuilder,
    version: (u32, u32, u32),
    port: u16,
    tls_port: Option<u16>,
    daemon: Mutex<Option<Daemon>>,
    client: Mutex<Option<Client>>,
    home: Home,
}

impl RedisServer {
    /// A server with nothing special about it.
    pub fn start() -> RedisServer {
        RedisServer::builder().start()
    }

    /// For servers with something special about them.
    pub fn builder() -> RedisBuilder {
        let binary = std::env::var_os("TOLLGATE_REDIS_SERVER").unwrap_or_else(|| "redis-server".into());
        RedisBuilder { binary: binary.into(), arguments: Vec::new(), credentials: Vec::new(), tls: false }
    }

    /// Starts the process without waiting for it.
    fn spawn(
        builder: RedisBuilder,
        version: (u32, u32, u32),
        port: u16,
        tls_port: Option<u16>,
    ) -> RedisServer {
        let (home, client) = (Home::new("redis"), Mutex::new(None));
        let server = RedisServer { builder, version, port, tls_port, daemon: Mutex::new(None), client, home };
        server.launch();
        server
    }

    fn launch(&self) {
        let mut command = Command::new(&self.builder.binary);
        let port = self.port.to_string();
        command.current_dir(self.home.path()).args(["--port", &port, "--bind", "127.0.0.1"]);
        command.args(["--save", "", "--appendonly", "no"]);
        // Before 7.0 the command was always there, and the option is an error.
        if self.version >= (7, 0, 0) {
            command.args(["--enable-debug-command", "yes"]);
        }
        if let Some(tls_port) = self.tls_port {
            command.args(["--tls-port", &tls_port.to_string()]);
        }
        command.args(&self.builder.arguments);
        *self.daemon.lock() = Some(Daemon::spawn(&mut command, &self.home));
    }

    /// Waits until the server answers; false if somebody else has the port.
    fn wait_for_start(&self) -> bool {
        let mut daemon = self.daemon.lock();
        let Some(daemon) = daemon.as_mut() else { panic!("the Redis server is not running") };
        let taken = ["Address already in use", "Failed listening on port"];
        match daemon.wait_until_ready("Ready to accept connections", &taken, START_LIMIT) {
            Readiness::PortTaken => return false,
            Readiness::Failed(why) => panic!("redis-server did not start: {why}"),
            Readiness::Ready => {}
        }
        // A server that wants a password answers too, in its own way; and so does one that is loading its data.
        let answers = || Client::connect(self.port, REPLY_LIMIT).ok()?.call(&["PING"]).ok();
        assert!(poll(START_LIMIT, answers).is_some(), "Redis does not answer; its log:\n{}", daemon.log());
        true
    }

    /// The port of plain connections.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The port of TLS connections, if there is one.
    pub fn tls_port(&self) -> Option<u16> {
        self.tls_port
    }

    /// `redis://127.0.0.1:PORT`, without credentials.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// `rediss://localhost:PORT`, without credentials.
    pub fn tls_url(&self) -> String {
        let Some(port) = self.tls_port else { panic!("this Redis server was started without TLS") };
        format!("rediss://localhost:{port}")
    }

    /// The version, such as `(7, 0, 15)`.
    pub fn version(&self) -> (u32, u32, u32) {
        self.version
    }

    /// A connection of the caller's own, logged in.
    pub fn connect(&self) -> Result<Client, String> {
        let fail = |error: std::io::Error| format!("Redis on port {}: {error}", self.port);
        let mut client = Client::connect(self.port, REPLY_LIMIT).map_err(fail)?;
        if !self.builder.credentials.is_empty() {
            let mut login = vec!["AUTH"];
            login.extend(self.builder.credentials.iter().map(String::as_str));
            client.call(&login).map_err(fail)??;
        }
        Ok(client)
    }

    /// Asks the server, over one connection that is kept. An error is the server's word or the connection's; after the
    /// latter, whether the command was carried out is not known, and the next command connects afresh.
    pub fn command(&self, arguments: &[&str]) -> Result<Value, String> {
        let mut kept = self.client.lock();
        let mut client = match kept.take() {
            Some(client) => client,
            None => self.connect()?,
        };
        match client.call(arguments) {
            Ok(reply) => {
                *kept = Some(client);
                reply
            }
            Err(error) => Err(format!("Redis on port {}: {error}", self.port)),
        }
    }

    /// A field of `INFO`, such as `("replication", "role")`.
    pub fn info(&self, section: &str, field: &str) -> Option<String> {
        let text = self.command(&["INFO", section]).ok()?.text();
        text.lines().find_map(|line| Some(line.strip_prefix(field)?.strip_prefix(':')?.trim().to_owned()))
    }

    /// The number of the process; `None` after [`kill`](Self::kill).
    pub fn pid(&self) -> Option<u32> {
        self.daemon.lock().as_ref().map(Daemon::pid)
    }

    /// What the server has logged since it was last started.
    pub fn log(&self) -> String {
        self.daemon.lock().as_ref().map(Daemon::log).unwrap_or_default()
    }

    /// Freezes the process (SIGSTOP): connections stay open and nothing is answered.
    pub fn stop(&self) {
        self.pid().into_iter().for_each(freeze);
    }

    /// Lets a frozen process go on (SIGCONT).
    pub fn resume(&self) {
        if let Some(daemon) = self.daemon.lock().as_ref() {
            daemon.signal(Signal::CONT);
        }
    }

    /// Ends the process at once (SIGKILL) and waits until it is gone. Nothing that it knew is saved.
    pub fn kill(&self) {
        *self.client.lock() = None;
        if let Some(daemon) = self.daemon.lock().take() {
            daemon.end(Signal::KILL, Duration::from_secs(10), &self.home);
        }
    }

    /// Starts the server again, on the same port, in the same directory, with the same arguments; kills it first if it runs.
    pub fn restart(&self) {
        self.kill();
        // The port is ours and lies outside the range of outgoing connections, but another test may look at it just now.
        for _ in 0..50 {
            self.launch();
            if self.wait_for_start() {
                return;
            }
            self.kill();
        }
        panic!("somebody else listens on port {}, which a Redis server has just left", self.port);
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}

#[cfg(test)]
mod tests {
    use super::parse_version;

    #[test]
    fn versions_are_read() {
        assert_eq!(
            parse_version("Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0"),
            Some((7, 0, 15))
        );
        assert_eq!(parse_version("Redis server v=6.2.14 sha=0"), Some((6, 2, 14)));
        assert_eq!(parse_version("another program 3.1"), None);
    }
}
