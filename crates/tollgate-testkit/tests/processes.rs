//! A test that runs in four processes, and one whose children fail.

use tollgate_testkit::processes::{Child, run};
use tollgate_testkit::redis::{Client, RedisServer};

#[test]
fn four_processes_count_together() {
    if let Some(child) = Child::here() {
        let patience = std::time::Duration::from_secs(10);
        let mut client = Client::connect(child.parameters().parse().unwrap(), patience).unwrap();
        child.wait_for_start();
        // All four have connected before any of them counts.
        assert_eq!(client.call(&["SCARD", "never"]).unwrap().unwrap().int(), Some(0));
        for _ in 0..250 {
            let count = client.call(&["INCR", "count"]).unwrap().unwrap().int().unwrap();
            child.report(&format!("{} {count}", child.index()));
        }
        return;
    }
    let server = RedisServer::start();
    let reports = run("four_processes_count_together", 4, &server.port().to_string());
    let mut counts = Vec::new();
    for (index, lines) in reports.iter().enumerate() {
        assert_eq!(lines.len(), 250);
        for line in lines {
            let (child, count) = line.split_once(' ').unwrap();
            assert_eq!(child, index.to_string());
            counts.push(count.parse::<usize>().unwrap());
        }
    }
    counts.sort_unstable();
    assert_eq!(counts, (1..=1000).collect::<Vec<_>>());
}

#[test]
fn a_child_that_fails_fails_the_test_and_holds_up_nobody() {
    if let Some(child) = Child::here() {
        assert_ne!(child.index(), 1, "the second child fails on purpose");
        return child.wait_for_start();
    }
    let failed =
        std::panic::catch_unwind(|| run("a_child_that_fails_fails_the_test_and_holds_up_nobody", 3, ""));
    let message = failed.unwrap_err().downcast::<String>().unwrap();
    assert!(message.contains("child 1 of") && message.contains("fails on purpose"), "{message}");
}

/// A process that is killed drops nothing; its servers must end all the same.
#[test]
fn servers_of_a_killed_process_end_too() {
    if Child::here().is_some() {
        let redis = RedisServer::start();
        let postgres = tollgate_testkit::postgres::PostgresServer::start();
        let child = Child::here().unwrap();
        let dir = redis.command(&["CONFIG", "GET", "dir"]).unwrap().items()[1].text();
        child.report(&format!("{} {dir}", redis.pid().unwrap()));
        child.report(&format!("{} {}", postgres.pid().unwrap(), postgres.psql("show data_directory")));
        postgres.stop();
        std::process::abort();
    }
    // The child aborts, so its report comes by way of the failure.
    let failed = std::panic::catch_unwind(|| run("servers_of_a_killed_process_end_too", 1, ""));
    let message = failed.unwrap_err().downcast::<String>().unwrap();
    let reported = message.split_once("it reported: ").unwrap().1;
    let servers: Vec<&str> = reported.split('"').filter(|part| part.contains(" /")).collect();
    assert_eq!(servers.len(), 2, "{message}");
    for server in servers {
        let (pid, dir) = server.split_once(' ').unwrap();
        let start = std::time::Instant::now();
        while std::path::Path::new(dir).exists() || std::path::Path::new(&format!("/proc/{pid}")).exists() {
            assert!(start.elapsed().as_secs() < 10, "{server} is still there");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }
}
