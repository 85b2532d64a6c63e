//! The servers: real processes, each tied to the core that servers have, and what they have used of it.

use std::io::{BufRead, BufReader, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::machine::{Core, pin_to};

/// The version of throttlecrab-server that is measured.
pub(crate) const THROTTLECRAB: &str = "0.4.40";

/// A server takes longer to start only if it does not.
const LONGEST_START: Duration = Duration::from_secs(20);

/// A process that ends with this.
pub(crate) struct Process {
    child: Child,
    name: String,
}

impl Process {
    /// Starts a command on a core: what a thread starts may run where the thread may.
    pub(crate) fn start(core: Option<Core>, command: &mut Command) -> Result<Process, String> {
        let name = command.get_program().to_string_lossy().into_owned();
        let child = on(core, || command.stdin(Stdio::null()).spawn());
        Ok(Process { child: child.map_err(|error| format!("starting {name}: {error}"))?, name })
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// The lines of a server until it has announced all its addresses, each after one of these words. What it says
    /// later is read as well, so that it never waits for a reader.
    pub(crate) fn addresses<const N: usize>(
        &self,
        output: impl Read + Send + 'static,
        faces: [&str; N],
    ) -> Result<[SocketAddr; N], String> {
        let mut found = [None; N];
        let mut lines = BufReader::new(output).lines();
        while found.iter().any(Option::is_none) {
            let Some(Ok(line)) = lines.next() else {
                return Err(format!("{} ended before it announced its address", self.name));
            };
            for (face, found) in faces.iter().zip(&mut found) {
                *found = found.or_else(|| address_after(&line, face));
            }
        }
        std::thread::spawn(move || lines.for_each(drop));
        Ok(found.map(|found| found.unwrap_or_else(|| unreachable!("all were found"))))
    }

    /// Waits until somebody listens there.
    pub(crate) fn until_listening(&mut self, address: SocketAddr) -> Result<(), String> {
        let started = Instant::now();
        while TcpStream::connect(address).is_err() {
            let has_ended = self.child.try_wait().ok().flatten().is_some();
            if has_ended || started.elapsed() > LONGEST_START {
                return Err(format!("{} does not listen on {address}", self.name));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    pub(crate) fn take_stderr(&mut self) -> impl Read + Send + 'static {
        self.child.stderr.take().unwrap_or_else(|| unreachable!("it was asked for"))
    }

    pub(crate) fn take_stdout(&mut self) -> impl Read + Send + 'static {
        self.child.stdout.take().unwrap_or_else(|| unreachable!("it was asked for"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Works on a core, on a thread that is gone afterwards.
pub(crate) fn on<T: Send>(core: Option<Core>, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let working = scope.spawn(move || {
            core.into_iter().for_each(pin_to);
            work()
        });
        working.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn address_after(line: &str, face: &str) -> Option<SocketAddr> {
    let rest = line.split_once(face)?.1;
    rest.split(|character: char| character == '/' || character.is_whitespace()).next()?.parse().ok()
}

/// An address that nobody has.
pub(crate) fn free_address() -> Result<SocketAddr, String> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let address = listener.and_then(|listener| listener.local_addr());
    address.map_err(|error| format!("looking for a free port: {error}"))
}

/// What all threads of a process have used so far, to the nanosecond. Threads that have ended are not in it; none of the servers
/// here ends threads while it is asked.
pub(crate) fn used(process: u32) -> Duration {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{process}/task")) else { return Duration::ZERO };
    let of_task = |task: std::io::Result<std::fs::DirEntry>| {
        let text = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
    };
    tasks.filter_map(of_task).sum()
}

/// Where cargo builds, from where this program is: `target/release/tollgate-benches`.
pub(crate) fn target() -> Result<PathBuf, String> {
    let program = std::env::current_exe().map_err(|error| format!("looking for this program: {error}"))?;
    program.ancestors().nth(2).map(Path::to_path_buf).ok_or_else(|| "this program is nowhere".into())
}

/// The server of this tree, built as it is released.
pub(crate) fn build_tollgate() -> Result<PathBuf, String> {
    let target = target()?;
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml");
    let arguments =
        ["build", "--release", "-p", "tollgate-server", "--manifest-path", manifest, "--target-dir"];
    cargo(Command::new(name_of_cargo()).args(arguments).arg(&target))?;
    Ok(target.join("release/tollgate"))
}

/// The peer, installed beside what cargo builds.
pub(crate) fn install_throttlecrab() -> Result<PathBuf, String> {
    let root = target()?.join("peers");
    let program = root.join("bin/throttlecrab-server");
    if !program.exists() {
        let protoc = Command::new("protoc").arg("--version").stdout(Stdio::null()).status();
        protoc.map_err(
            |_| "throttlecrab-server is built with protoc: run apt-get install -y protobuf-compiler",
        )?;
        let arguments = ["install", "throttlecrab-server", "--locked", "--version", THROTTLECRAB, "--root"];
        cargo(Command::new(name_of_cargo()).args(arguments).arg(&root))?;
    }
    Ok(program)
}

fn name_of_cargo() -> std::ffi::OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

fn cargo(command: &mut Command) -> Result<(), String> {
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{command:?} ended with {status}")),
        Err(error) => Err(format!("{command:?}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_from_what_a_server_says() {
        let text =
            "tollgate serves x\n  API    http://127.0.0.1:8080/v1/check\n  RESP   redis://127.0.0.1:6380\n";
        let process = Process::start(None, &mut Command::new("true")).unwrap();
        let faces = process.addresses(text.as_bytes(), ["API    http://", "redis://"]).unwrap();
        assert_eq!(faces.map(|face| face.port()), [8080, 6380]);
        assert!(process.addresses(text.as_bytes(), ["grpc://"]).is_err());
    }

    #[test]
    fn a_process_that_works_uses_time() {
        assert!(used(std::process::id()) > Duration::ZERO);
        assert_eq!(used(u32::MAX), Duration::ZERO);
    }
}
