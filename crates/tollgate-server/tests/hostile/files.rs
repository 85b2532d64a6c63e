//! How many files the server may open: as many as it is granted, though it was started with fewer.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use crate::server::{self, POLICY, home};

/// A process that is ended with the test.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The soft and the hard limit that a server has after it was started with these, and whether it reported that they are too small for
/// so many connections at each of its three faces.
fn check(connections: usize, limits: &str, expected: [u64; 2], is_reported: bool) {
    let home = home();
    let config = format!("[server]\nmax_connections = {connections}\n{POLICY}");
    std::fs::write(home.join("tollgate.toml"), config).unwrap();
    let listen = ["--listen", "127.0.0.1:0", "--resp", "127.0.0.1:0", "--grpc", "127.0.0.1:0"];
    let server = server::command(&home, &["serve", "--config", "tollgate.toml"], &[]);
    let mut shell = Command::new("sh");
    shell
        .args(["-c", &format!("{limits} && exec \"$0\" \"$@\"")])
        .arg(server.get_program())
        .args(server.get_args());
    let mut started = Started(
        shell
            .args(listen)
            .current_dir(&home)
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    let mut lines = BufReader::new(started.0.stderr.take().unwrap()).lines().map(Result::unwrap);
    let api = lines.find_map(|line| line.split_once("API    http://").map(|(_, rest)| rest.to_owned()));
    let address = api.and_then(|rest| rest.split('/').next()?.parse().ok()).expect("it says where it is");
    // Who is answered was let in, which is after it was settled for how many there is room.
    assert_eq!(tollgate_testkit::http::Connection::open(address).ask("GET", "/healthz", &[]).status, 200);
    let reported = std::fs::read_to_string(format!("/proc/{}/limits", started.0.id())).unwrap();
    let line = reported.lines().find_map(|line| line.strip_prefix("Max open files")).expect("a line");
    let numbers: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    assert_eq!(numbers, expected, "{limits}");
    rustix::process::kill_process(
        rustix::process::Pid::from_child(&started.0),
        rustix::process::Signal::TERM,
    )
    .unwrap();
    let log = BufReader::new(started.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    let about_files = log
        .filter(|line| {
            line.starts_with('{') && line.contains("fewer connections than server.max_connections")
        })
        .count();
    assert_eq!(about_files, usize::from(is_reported), "{limits}");
    let _ = std::fs::remove_dir_all(home);
}

/// It stayed with the 1,024 that most systems begin with, and had room for 298 connections at each face.
#[test]
fn as_many_files_as_are_granted() {
    check(1_000, "ulimit -Sn 256 && ulimit -Hn 4000", [4_000, 4_000], false);
    check(1_000, "ulimit -Sn 256 && ulimit -Hn 900", [900, 900], true);
    check(1_000, "ulimit -Sn 900 && ulimit -Hn 900", [900, 900], true);
}
