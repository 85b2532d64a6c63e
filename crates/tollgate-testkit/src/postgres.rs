//! Real PostgreSQL servers.
//!
//! A server listens on a free loopback port and nowhere else: a socket file would block a restart after a kill. Its data
//! directory is a copy of one that `initdb` made once in this process. `fsync` stays on. PostgreSQL refuses to run as root;
//! when the tests do, it runs as the user `postgres`, who then owns the directory.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::process::Signal;

use crate::daemon::{Daemon, Readiness, children_of, freeze, is_alive, poll, send};
use crate::home::Home;
use crate::port::free_port;
use crate::tls::Certificates;

const MISSING: &str = "postgresql is not installed: run apt-get install -y postgresql";

/// How long a server may take to start, recovery after a kill included.
const START_LIMIT: Duration = Duration::from_secs(60);

/// How to start a [`PostgresServer`].
#[derive(Clone, Debug)]
pub struct PostgresBuilder {
    settings: Vec<String>,
    access: String,
    scram: bool,
    certificates: Option<[PathBuf; 3]>,
}

impl PostgresBuilder {
    /// Adds a setting, as `-c name=value`.
    #[must_use]
    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.settings.push(format!("{name}={value}"));
        self
    }

    /// Asks every client for [`PostgresServer::PASSWORD`], by SCRAM.
    #[must_use]
    pub fn scram(mut self) -> Self {
        self.scram = true;
        self.access("host all all 127.0.0.1/32 scram-sha-256\n")
    }

    /// Offers TLS, with the server certificate; client certificates are checked if one is sent. Who must use TLS is said by
    /// [`access`](Self::access).
    #[must_use]
    pub fn tls(mut self, certificates: &Certificates) -> Self {
        self.certificates =
            Some([certificates.server_certificate(), certificates.server_key(), certificates.authority()]);
        self
    }

    /// The whole text of `pg_hba.conf`, such as `hostssl all all 127.0.0.1/32 trust clientcert=verify-ca`. Who does not get
    /// in by plain TCP as `postgres` cannot use [`PostgresServer::psql`].
    #[must_use]
    pub fn access(mut self, text: &str) -> Self {
        text.clone_into(&mut self.access);
        self
    }

    /// Starts the server and waits until it answers.
    pub fn start(self) -> PostgresServer {
        let programs = Programs::find();
        let home = Home::new("postgres");
        programs.copy_template(&home);
        self.furnish(&home, &programs);
        let mut server = PostgresServer { builder: self, programs, port: 0, daemon: Mutex::new(None), home };
        for _ in 0..5 {
            server.port = free_port();
            server.launch();
            if server.wait_for_start() {
                return server;
            }
            server.kill();
        }
        panic!("postgres lost the race for its port five times")
    }

    /// Writes what makes this server different from others into its data directory.
    fn furnish(&self, home: &Home, programs: &Programs) {
        let data = home.path().join("data");
        std::fs::write(data.join("pg_hba.conf"), &self.access)
            .unwrap_or_else(|error| panic!("cannot write pg_hba.conf: {error}"));
        let names = ["server.pem", "server.key", "ca.pem"];
        for (from, name) in self.certificates.iter().flatten().zip(names) {
            // The copy keeps the mode, which for the key must be 0600.
            let to = data.join(name);
            let copied = std::fs::copy(from, &to).and_then(|_| programs.change_owner(&to));
            copied.unwrap_or_else(|error| panic!("cannot copy {}: {error}", from.display()));
        }
    }
}

/// Where PostgreSQL's programs are, and as whom the server runs.
#[derive(Clone, Debug)]
struct Programs {
    dir: PathBuf,
    /// User and group; `None` if we are not root and the server runs as we do.
    user: Option<(u32, u32)>,
}

impl Programs {
    fn find() -> Programs {
        let Some(dir) = newest_installed().or_else(on_the_path) else { panic!("{MISSING}") };
        let user = rustix::process::geteuid().is_root().then(|| {
            let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
            postgres_user(&passwd).unwrap_or_else(|| panic!("we are root, and there is no user `postgres`"))
        });
        Programs { dir, user }
    }

    /// A command that runs as the server's user.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.dir.join(program));
        if let Some((user, group)) = self.user {
            command.uid(user).gid(group);
        }
        command.env_remove("PGDATA").current_dir("/");
        command
    }

    fn change_owner(&self, path: &Path) -> std::io::Result<()> {
        match self.user {
            Some((user, group)) => std::os::unix::fs::chown(path, Some(user), Some(group)),
            None => Ok(()),
        }
    }

    /// Fills the home with a data directory: `initdb` takes half a second, a copy next to nothing.
    fn copy_template(&self, home: &Home) {
        // Never dropped: its caretaker removes it when this process ends.
        static TEMPLATE: OnceLock<Home> = OnceLock::new();
        let template = TEMPLATE.get_or_init(|| {
            let template = Home::new("postgres-template");
            self.init(&template);
            template
        });
        let given = self.change_owner(home.path());
        given.unwrap_or_else(|error| panic!("cannot give {} away: {error}", home.path().display()));
        let mut copy = Command::new("cp");
        copy.arg("-a").arg(template.path().join("data")).arg(home.path().join("data"));
        succeed(&mut copy);
    }

    fn init(&self, template: &Home) {
        let password = template.path().join("password");
        let prepared =
            std::fs::write(&password, PostgresServer::PASSWORD).and_then(|()| self.change_owner(&password));
        let prepared = prepared.and_then(|()| self.change_owner(template.path()));
        prepared.unwrap_or_else(|error| panic!("cannot prepare {}: {error}", template.path().display()));
        let mut initdb = self.command("initdb");
        initdb.args(["--no-sync", "-E", "UTF8", "--locale=C", "-U", "postgres", "--auth=scram-sha-256"]);
        initdb.arg("--pwfile").arg(password).arg("-D").arg(template.path().join("data"));
        succeed(&mut initdb);
    }
}

/// Debian keeps each version in a directory of its own.
fn newest_installed() -> Option<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").ok()?.filter_map(Result::ok);
    let numbered = versions.filter_map(|entry| {
        let version: u32 = entry.file_name().to_str()?.parse().ok()?;
        let dir = entry.path().join("bin");
        dir.join("initdb").is_file().then_some((version, dir))
    });
    numbered.max().map(|(_, dir)| dir)
}

fn on_the_path() -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?).find(|dir| dir.join("initdb").is_file())
}

/// `postgres:x:101:104:…` in `/etc/passwd`.
fn postgres_user(passwd: &str) -> Option<(u32, u32)> {
    let line = passwd.lines().find(|line| line.starts_with("postgres:"))?;
    let fields: Vec<&str> = line.split(':').collect();
    Some((fields.get(2)?.parse().ok()?, fields.get(3)?.parse().ok()?))
}

fn succeed(command: &mut Command) {
    match command.output() {
        Ok(output) if output.status.success() => {}
        Ok(output) => panic!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => panic!("cannot run {command:?}: {error}"),
    }
}

/// A running PostgreSQL server with one superuser, `postgres`. Dropping it ends all its processes and removes its directory.
pub struct PostgresServer {
    builder: PostgresBuilder,
    programs: Programs,
    port: u16,
    daemon: Mutex<Option<Daemon>>,
    home: Home,
}

impl PostgresServer {
    /// The password of `postgres`, for servers that ask for one.
    pub const PASSWORD: &'static str = "toll-gate";

    /// A server that lets everybody on this machine in.
    pub fn start() -> PostgresServer {
        PostgresServer::builder().start()
    }

    /// For servers with something special about them.
    pub fn builder() -> PostgresBuilder {
        let access = "host all all 127.0.0.1/32 trust\n".to_owned();
        PostgresBuilder { settings: Vec::new(), access, scram: false, certificates: None }
    }

    fn launch(&self) {
        let mut postgres = self.programs.command("postgres");
        postgres.arg("-D").arg(self.home.path().join("data")).args(["-p", &self.port.to_string()]);
        let ours = ["unix_socket_directories=", "listen_addresses=127.0.0.1", "logging_collector=off"];
        let tls = ["ssl=on", "ssl_cert_file=server.pem", "ssl_key_file=server.key", "ssl_ca_file=ca.pem"];
        let tls = if self.builder.certificates.is_some() { &tls[..] } else { &[] };
        let settings = self.builder.settings.iter().map(String::as_str);
        for setting in ours.iter().chain(tls).copied().chain(settings) {
            postgres.args(["-c", setting]);
        }
        postgres.env("LC_ALL", "C");
        *self.daemon.lock() = Some(Daemon::spawn(&mut postgres, &self.home));
    }

    /// Waits until the server accepts connections; false if somebody else has the port.
    fn wait_for_start(&self) -> bool {
        let mut daemon = self.daemon.lock();
        let Some(daemon) = daemon.as_mut() else { panic!("the PostgreSQL server is not running") };
        let taken = ["Address already in use", "could not bind IPv4 address"];
        match daemon.wait_until_ready("database system is ready to accept connections", &taken, START_LIMIT) {
            Readiness::Ready => true,
            Readiness::PortTaken => false,
            Readiness::Failed(why) => panic!("postgres did not start: {why}"),
        }
    }

    /// As whom the server runs: user and group, if we are root.
    pub(crate) fn user(&self) -> Option<(u32, u32)> {
        self.programs.user
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// `postgres://postgres@127.0.0.1:PORT/DATABASE`, with the password if the server asks for one. The database that is
    /// always there is `postgres`.
    pub fn url(&self, database: &str) -> String {
        let password = if self.builder.scram { format!(":{}", Self::PASSWORD) } else { String::new() };
        format!("postgres://postgres{password}@127.0.0.1:{}/{database}", self.port)
    }

    /// Runs SQL with `psql` in the database `postgres` and gives its output: unaligned, without headings. Panics if it fails.
    pub fn psql(&self, sql: &str) -> String {
        self.try_psql(sql).unwrap_or_else(|error| panic!("psql: {error}; the SQL was: {sql}"))
    }

    /// The same, giving the error back.
    pub fn try_psql(&self, sql: &str) -> Result<String, String> {
        let mut psql = Command::new(self.programs.dir.join("psql"));
        let options: [&OsStr; 7] = ["-X", "-A", "-t", "-q", "-v", "ON_ERROR_STOP=1", "-d"].map(OsStr::new);
        psql.args(options).arg(self.url("postgres")).args(["-c", sql]).env("PGCONNECT_TIMEOUT", "10");
        let output = psql.output().map_err(|error| format!("cannot run psql: {error}"))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    /// The number of the main process; `None` after [`kill`](Self::kill).
    pub fn pid(&self) -> Option<u32> {
        self.daemon.lock().as_ref().map(Daemon::pid)
    }

    /// What the server has logged since it was last started.
    pub fn log(&self) -> String {
        self.daemon.lock().as_ref().map(Daemon::log).unwrap_or_default()
    }

    /// Freezes all its processes (SIGSTOP): connections stay open and nothing is answered.
    pub fn stop(&self) {
        if let Some(pid) = self.pid() {
            // The main process first: it would start new ones.
            freeze(pid);
            children_of(pid).into_iter().for_each(freeze);
        }
    }

    /// Lets frozen processes go on (SIGCONT).
    pub fn resume(&self) {
        if let Some(pid) = self.pid() {
            children_of(pid).into_iter().chain([pid]).for_each(|pid| send(pid, Signal::CONT));
        }
    }

    /// Ends all its processes at once (SIGKILL), as if the machine had lost its power, and waits until they are gone.
    pub fn kill(&self) {
        let Some(daemon) = self.daemon.lock().take() else { return };
        let pid = daemon.pid();
        freeze(pid);
        let children = children_of(pid);
        children.iter().for_each(|&child| send(child, Signal::KILL));
        daemon.end(Signal::KILL, Duration::from_secs(10), &self.home);
        poll(Duration::from_secs(10), || children.iter().all(|&child| !is_alive(child)).then_some(()));
        self.clear_lock();
    }

    /// Removes what a killed server leaves: the lock file, and the shared memory whose number stands in its seventh line.
    fn clear_lock(&self) {
        let lock = self.home.path().join("data/postmaster.pid");
        let text = std::fs::read_to_string(&lock).unwrap_or_default();
        if let Some(id) = text.lines().nth(6).and_then(|line| line.split_whitespace().nth(1)) {
            let _ = Command::new("ipcrm").args(["-m", id]).output();
        }
        let _ = std::fs::remove_file(lock);
    }

    /// Starts the server again, on the same port and data; kills it first if it runs.
    pub fn restart(&self) {
        self.kill();
        for _ in 0..50 {
            self.launch();
            if self.wait_for_start() {
                return;
            }
            self.kill();
        }
        panic!("somebody else listens on port {}, which a PostgreSQL server has just left", self.port);
    }

    /// Kills the process that serves some client, if there is one, and gives its number. The server then ends the processes
    /// of all other clients too and recovers; see [`wait_until_ready`](Self::wait_until_ready).
    pub fn kill_one_backend(&self) -> Option<u32> {
        let backend = self.psql(
            "select pid from pg_stat_activity \
             where backend_type = 'client backend' and pid <> pg_backend_pid() order by backend_start limit 1",
        );
        let pid = backend.parse().ok()?;
        send(pid, Signal::KILL);
        poll(Duration::from_secs(10), || (!is_alive(pid)).then_some(()));
        Some(pid)
    }

    /// Waits until the server answers queries.
    pub fn wait_until_ready(&self) {
        let answer = poll(START_LIMIT, || self.try_psql("select 1").ok());
        assert!(answer.is_some(), "PostgreSQL does not answer; its log:\n{}", self.log());
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        self.resume();
        if let Some(daemon) = self.daemon.lock().take() {
            // An immediate shutdown: it waits for nobody, but frees the shared memory.
            daemon.end(Signal::QUIT, Duration::from_secs(10), &self.home);
        }
        self.clear_lock();
    }
}

#[cfg(test)]
mod tests {
    use super::postgres_user;

    #[test]
    fn the_user_is_found_among_others() {
        let passwd = "root:x:0:0:root:/root:/bin/bash\npostgres:x:101:104:PostgreSQL administrator,,,:/var/lib:/bin/bash\n";
        assert_eq!(postgres_user(passwd), Some((101, 104)));
        assert_eq!(postgres_user("root:x:0:0:root:/root:/bin/bash\n"), None);
    }
}
