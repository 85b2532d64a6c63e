//! A real pgbouncer in transaction mode, in front of a [`PostgresServer`].
//!
//! It listens on a free loopback port and lets everybody in. pgbouncer refuses to run as root; when the tests do, it runs as the
//! user `postgres`, who then owns its directory.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;

use crate::daemon::{Daemon, Readiness};
use crate::home::Home;
use crate::port::free_port;
use crate::postgres::PostgresServer;

const MISSING: &str = "pgbouncer is not installed: run apt-get install -y pgbouncer";

/// How long pgbouncer may take to start, on a machine that is busy with other tests.
const START_LIMIT: Duration = Duration::from_secs(20);

/// How to start a [`Pgbouncer`].
#[derive(Clone, Debug)]
pub struct PgbouncerBuilder {
    settings: Vec<String>,
}

impl PgbouncerBuilder {
    /// Adds a line to the section `[pgbouncer]`. Later lines win over earlier ones and over our own.
    #[must_use]
    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.settings.push(format!("{name} = {value}"));
        self
    }

    /// Starts pgbouncer in front of a server and waits until it listens.
    pub fn start(self, server: &PostgresServer) -> Pgbouncer {
        let program = find();
        for _ in 0..5 {
            let (home, port) = (Home::new("pgbouncer"), free_port());
            let user = server.user();
            let write = |name: &str, text: &str| {
                let path = home.path().join(name);
                let written = std::fs::write(&path, text).and_then(|()| change_owner(&path, user));
                written.unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
                path
            };
            let users = write("users", "\"postgres\" \"\"\n");
            let text = format!(
                "[databases]\n* = host=127.0.0.1 port={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
                 unix_socket_dir =\nauth_type = trust\nauth_file = {}\npool_mode = transaction\n{}\n",
                server.port(),
                users.display(),
                self.settings.join("\n"),
            );
            let config = write("pgbouncer.ini", &text);
            change_owner(home.path(), user)
                .unwrap_or_else(|error| panic!("cannot give {} away: {error}", home.path().display()));
            let mut command = Command::new(&program);
            command.arg(config).current_dir("/");
            if let Some((user, group)) = user {
                command.uid(user).gid(group);
            }
            let mut daemon = Daemon::spawn(&mut command, &home);
            let taken = ["Address already in use", "address already in use"];
            match daemon.wait_until_ready("process up", &taken, START_LIMIT) {
                Readiness::Ready => return Pgbouncer { port, daemon: Some(daemon), home },
                Readiness::PortTaken => daemon.end(Signal::KILL, START_LIMIT, &home),
                Readiness::Failed(why) => panic!("pgbouncer did not start: {why}"),
            }
        }
        panic!("pgbouncer lost the race for its port five times")
    }
}

/// A running pgbouncer. Dropping it ends the process and removes its directory.
pub struct Pgbouncer {
    port: u16,
    daemon: Option<Daemon>,
    home: Home,
}

impl Pgbouncer {
    /// A pgbouncer in transaction mode with nothing special about it.
    pub fn start(server: &PostgresServer) -> Pgbouncer {
        Pgbouncer::builder().start(server)
    }

    /// For a pgbouncer with something special about it.
    pub fn builder() -> PgbouncerBuilder {
        PgbouncerBuilder { settings: Vec::new() }
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// `postgres://postgres@127.0.0.1:PORT/DATABASE`.
    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port)
    }

    /// What pgbouncer has logged.
    pub fn log(&self) -> String {
        self.daemon.as_ref().map(Daemon::log).unwrap_or_default()
    }
}

impl Drop for Pgbouncer {
    fn drop(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            daemon.end(Signal::QUIT, Duration::from_secs(10), &self.home);
        }
    }
}

/// Debian keeps the program in `/usr/sbin`, which is not on everybody's path.
fn find() -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::env::split_paths(&path).chain(["/usr/sbin".into()]);
    let found = dirs.map(|dir| dir.join("pgbouncer")).find(|program| program.is_file());
    found.unwrap_or_else(|| panic!("{MISSING}"))
}

fn change_owner(path: &Path, user: Option<(u32, u32)>) -> std::io::Result<()> {
    match user {
        Some((user, group)) => std::os::unix::fs::chown(path, Some(user), Some(group)),
        None => Ok(()),
    }
}
