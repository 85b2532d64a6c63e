//! A real Envoy of one's own, on free ports, ended with the test.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::get;

const CONFIG: &str = include_str!("../../../../deploy/envoy/envoy.yaml");

pub(crate) struct Envoy {
    child: Child,
    _dir: TempDir,
    /// Where it listens for requests.
    pub(crate) listener: SocketAddr,
}

/// The program: the one that is named, or the one that `./test` has fetched.
fn program() -> PathBuf {
    match std::env::var_os("TOLLGATE_ENVOY") {
        Some(path) => path.into(),
        None => concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/envoy/envoy/_bin/envoy").into(),
    }
}

impl Envoy {
    /// Starts the Envoy of `deploy/envoy`, on ports of its own, before this service and asking there.
    pub(crate) fn start(
        service: SocketAddr,
        tollgate: SocketAddr,
        change: impl Fn(String) -> String,
    ) -> Envoy {
        let dir = tempfile::tempdir().expect("a directory");
        let (config, admin) = (dir.path().join("envoy.yaml"), dir.path().join("admin"));
        let mut text = change(CONFIG.to_owned());
        for (usual, ours) in [(9901, 0), (10000, 0), (9000, service.port()), (8081, tollgate.port())] {
            let (usual, ours) = (format!("port_value: {usual} "), format!("port_value: {ours} "));
            assert!(text.contains(&usual), "{usual}");
            text = text.replace(&usual, &ours);
        }
        std::fs::write(&config, text).expect("a file");
        let program = program();
        let child = Command::new(&program)
            .args(["--disable-hot-restart", "--concurrency", "1", "--log-level", "warn", "-c"])
            .arg(&config)
            .arg("--admin-address-path")
            .arg(&admin)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(dir.path().join("log")).expect("a file"))
            .spawn()
            .unwrap_or_else(|error| panic!("cannot run {}: {error}; ./test fetches it", program.display()));
        let mut envoy = Envoy { child, _dir: dir, listener: SocketAddr::from(([127, 0, 0, 1], 0)) };
        let end = Instant::now() + Duration::from_secs(30);
        // A real server tells nobody when it is ready.
        while envoy.listener.port() == 0 {
            let log = || std::fs::read_to_string(envoy._dir.path().join("log")).unwrap_or_default();
            assert!(Instant::now() < end, "it is not ready:\n{}", log());
            assert!(matches!(envoy.child.try_wait(), Ok(None)), "it ended:\n{}", log());
            thread::sleep(Duration::from_millis(5));
            let address = std::fs::read_to_string(&admin).ok().and_then(|text| text.trim().parse().ok());
            let Some(address) = address else { continue };
            if get(address, "/ready", "").0 != 200 {
                continue;
            }
            let listeners = get(address, "/listeners", "").1;
            let listener = listeners.lines().find_map(|line| line.strip_prefix("edge::")?.parse().ok());
            envoy.listener = listener.unwrap_or(envoy.listener);
        }
        envoy
    }
}

impl Drop for Envoy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
