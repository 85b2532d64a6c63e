//! The protocol of Redis as a real server speaks it: bytes in, bytes out.
//!
//! `clients.rs` needs redis-cli, redis-py and redis-server, and is run by `./test` alone.

#[cfg(feature = "services")]
mod clients;
mod hostile;
mod server;

use serde_json::json;

use crate::server::{Client, Tollgate, command};

/// What goes in, with `|` between arguments and a space between commands; and what comes out, with `/` for the end of a line. A
/// number after `~` is a time that may have begun to pass.
fn check(server: &Tollgate, asked: &str, said: &str) {
    check_on(&mut server::client(server), asked, said);
}

fn check_on(client: &mut Client, asked: &str, said: &str) {
    client.send(&asked.split(' ').flat_map(|one| command(one.split('|'))).collect::<Vec<u8>>());
    check_reply(client, said, asked);
}

fn check_reply(client: &mut Client, said: &str, about: &str) {
    for (index, expected) in said.strip_suffix('/').unwrap_or(said).split('/').enumerate() {
        let line = client.line();
        match expected.strip_prefix(":~").map(|most| most.parse::<u64>().unwrap()) {
            None => assert_eq!(line, expected, "{about}, line {index}"),
            Some(most) => {
                let number: u64 = line.strip_prefix(':').unwrap_or_default().parse().unwrap_or_default();
                assert!((most / 2..=most).contains(&number), "{about}, line {index}: {line}, not {expected}");
            }
        }
    }
}

#[test]
fn throttle_answers_as_redis_cell_does() {
    let server = server::start("");
    for (asked, said) in [
        // The example of redis-cell's own documentation: 15 and one more, 30 every 60 seconds.
        ("CL.THROTTLE|user123|15|30|60|1", "*5/:0/:16/:15/:-1/:2/"),
        // The same a thousand times slower, so that no test sees time pass.
        ("CL.THROTTLE|slow|15|30|60000|1", "*5/:0/:16/:15/:-1/:2000/"),
        ("cl.throttle|slow|15|30|60000|0", "*5/:0/:16/:15/:-1/:~2000/"),
        ("CL.THROTTLE|slow|15|30|60000|15", "*5/:0/:16/:0/:-1/:~32000/"),
        ("CL.THROTTLE|slow|15|30|60000", "*5/:1/:16/:0/:~2000/:~32000/"),
        ("CL.THROTTLE|slow|15|30|60000|3", "*5/:1/:16/:0/:~6000/:~32000/"),
        ("CL.THROTTLE|slow|15|30|60000|17", "*5/:1/:16/:0/:-1/:~32000/"),
        ("CL.THROTTLE|slow|15|30|60000|0", "*5/:0/:16/:0/:-1/:~32000/"),
        // Others are not concerned, and a key that was never charged is full again.
        ("CL.THROTTLE|other|15|30|60|0", "*5/:0/:16/:16/:-1/:0/"),
        ("CL.THROTTLE||0|1|100000", "*5/:0/:1/:0/:-1/:100000/"),
        ("CL.THROTTLE||0|1|100000", "*5/:1/:1/:0/:~100000/:~100000/"),
        ("CL.THROTTLE|%|0|1|100000", "*5/:0/:1/:0/:-1/:100000/"),
        ("CL.THROTTLE|a:b:c:d:e|0|1|100000", "*5/:0/:1/:0/:-1/:100000/"),
        // Other numbers, the same key: what was consumed stays consumed.
        ("CL.THROTTLE|plan|9|1|1000|4", "*5/:0/:10/:6/:-1/:4000/"),
        ("CL.THROTTLE|plan|19|1|1000|1", "*5/:0/:20/:15/:-1/:~5000/"),
        ("CL.THROTTLE|plan|4|1|1000|1", "*5/:1/:5/:0/:~1000/:~5000/"),
        ("CL.THROTTLE|plan|19|7|10000|0", "*5/:0/:20/:16/:-1/:~5000/"),
        (
            "CL.THROTTLE",
            "-ERR Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]/",
        ),
        (
            "CL.THROTTLE|k|1|1",
            "-ERR Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]/",
        ),
        (
            "CL.THROTTLE|k|1|1|1|1|1",
            "-ERR Usage: cl.throttle <key> <max_burst> <count per period> <period> [<quantity>]/",
        ),
        (
            "CL.THROTTLE|k|x|1|1",
            "-ERR max_burst must be a whole number from 0 to 9223372036854775807, not 'x'/",
        ),
        (
            "CL.THROTTLE|k|-1|1|1",
            "-ERR max_burst must be a whole number from 0 to 9223372036854775807, not '-1'/",
        ),
        ("CL.THROTTLE|k|1|0|1", "-ERR count must be a whole number from 1 to 9223372036854775807, not '0'/"),
        ("CL.THROTTLE|k|1|1|0", "-ERR period must be a whole number from 1 to 9223372036854775807, not '0'/"),
        (
            "CL.THROTTLE|k|1|1|1|-1",
            "-ERR quantity must be a whole number from 0 to 9223372036854775807, not '-1'/",
        ),
    ] {
        check(&server, asked, said);
    }
    // What cannot be kept exactly is refused, and the connection goes on.
    let mut client = server::client(&server);
    for numbers in ["9223372036854775807|1|1", "1|9223372036854775807|1", "1|1|9223372036854775807"] {
        client.send(&command(format!("CL.THROTTLE|k|{numbers}").split('|')));
        let line = client.line();
        assert!(line.starts_with("-ERR burst = ") || line.starts_with("-ERR rate = "), "{line}");
    }
    check_on(&mut client, "PING", "+PONG/");
}

#[test]
fn checks_are_charged_to_limits_of_the_policy() {
    let server = server::start(POLICY);
    for (asked, said) in [
        ("TOLLGATE.CHECK|api|user:42", "*6/:1/:4/:0/:100000/:0/$3/api/"),
        ("tollgate.check|api|user:42|4", "*6/:1/:0/:0/:~500000/:0/$3/api/"),
        ("TOLLGATE.CHECK|api|user:42", "*6/:0/:0/:~100000/:~500000/:0/$3/api/"),
        ("TOLLGATE.CHECK|api|user:42|6", "*6/:0/:0/:-1/:~500000/:0/$3/api/"),
        ("TOLLGATE.CHECK|free|user:42", "*6/:1/:-1/:0/:0/:0/$4/free/"),
        ("TOLLGATE.CHECK|shut|user:42", "*6/:0/:0/:-1/:0/:0/$4/shut/"),
        ("TOLLGATE.CHECK|queue|user:42", "*6/:1/:1/:0/:100000/:0/$5/queue/"),
        ("TOLLGATE.CHECK|queue|user:42", "*6/:1/:0/:0/:~200000/:~100000/$5/queue/"),
        ("TOLLGATE.CHECK|watch|user:42", "*6/:1/:0/:0/:~100000/:0/$5/watch/"),
        ("TOLLGATE.CHECK|watch|user:42", "*6/:1/:0/:0/:~100000/:0/$5/watch/"),
        ("TOLLGATE.CHECK|api", "-ERR Usage: tollgate.check <limit> <key> [<cost>]/"),
        (
            "TOLLGATE.CHECK|api|k|0",
            "-ERR cost must be a whole number from 1 to 9223372036854775807, not '0'/",
        ),
    ] {
        check(&server, asked, said);
    }
    for (asked, said) in [
        (command(["TOLLGATE.CHECK", "apy", "user:42"]), "-ERR unknown limit `apy`; known: api, "),
        (command(["TOLLGATE.CHECK", "api", "a:b:c:d"]), "-ERR malformed key: "),
        (command(["TOLLGATE.CHECK", "api", ""]), "-ERR malformed key: "),
        (command([&b"TOLLGATE.CHECK"[..], b"api", b"\xff"]), "-ERR the key is not text"),
    ] {
        let mut client = server::client(&server);
        client.send(&asked);
        let line = client.line();
        assert!(line.starts_with(said), "{line}");
    }
}

/// Limits that change so slowly that no test sees it.
const POLICY: &str = "
[limits.api]
strategy = 'token_bucket'
rate = '1/100s'
burst = 5
[limits.free]
unlimited = true
[limits.shut]
blocked = true
[limits.queue]
strategy = 'leaky_bucket'
rate = '1/100s'
capacity = 2
[limits.watch]
strategy = 'token_bucket'
rate = '1/100s'
burst = 1
shadow = true
";

#[test]
fn the_page_is_told_of_limits_that_come_with_calls() {
    let server = server::start("[limits]\n");
    check(&server, "CL.THROTTLE|user123|0|1|60000", "*5/:0/:1/:0/:-1/:60000/");
    check(&server, "CL.THROTTLE|user123|0|1|60000", "*5/:1/:1/:0/:~60000/:~60000/");
    let snapshot = serde_json::from_str::<serde_json::Value>(&server.get("/v1/snapshot").body).expect("JSON");
    let reported = &snapshot["limits"][0];
    assert_eq!(
        (&reported["limit"], &reported["ad_hoc"]),
        (&json!("cl.throttle"), &json!(true)),
        "{reported}"
    );
    assert_eq!(reported["offenders"][0]["denials"], json!(1), "{reported}");
}

#[test]
fn clients_can_connect_and_look_around() {
    let server = server::start("");
    let hello = |proto: &str, map: &str, id: u32| {
        let version = env!("CARGO_PKG_VERSION");
        format!(
            "{map}/$6/server/$8/tollgate/$7/version/${}/{version}/$5/proto/:{proto}/$2/id/:{id}/$4/mode/$10/standalone/$4/role/\
             $6/master/$7/modules/*0/",
            version.len()
        )
    };
    for (asked, said) in [
        ("PING", "+PONG/"),
        ("ping|hello", "$5/hello/"),
        ("PING|a|b", "-ERR wrong number of arguments for 'ping' command/"),
        ("ECHO|x", "$1/x/"),
        ("SELECT|0", "+OK/"),
        ("SELECT|1", "-ERR DB index is out of range/"),
        ("CLIENT|SETINFO|LIB-NAME|x CLIENT|SETNAME|y CLIENT|GETNAME", "+OK/+OK/$-1/"),
        ("CLIENT|KILL", "-ERR unknown subcommand 'KILL' of 'client'/"),
        ("COMMAND|COUNT COMMAND|DOCS", ":16/*0/"),
        ("COMMAND|INFO|cl.throttle|x", "*2/*6/$11/cl.throttle/:-5/*1/+fast/:1/:1/:1/$-1/"),
        ("FLUSHALL", "-ERR unknown command 'FLUSHALL'/"),
        (
            "AUTH|x",
            "-ERR AUTH <password> called without any password configured for the default user. Are you sure your \
                    configuration is correct?/",
        ),
        ("HELLO|4", "-NOPROTO unsupported protocol version/"),
        ("HELLO|x", "-ERR Protocol version is not an integer or out of range/"),
        ("HELLO|3|FOO", "-ERR Syntax error in HELLO option 'FOO'/"),
        ("QUIT PING", "+OK/"),
    ] {
        check(&server, asked, said);
    }
    let id = 17;
    check(&server, "HELLO|3|SETNAME|x CLIENT|GETNAME COMMAND|DOCS", &(hello("3", "%7", id) + "_/%0/"));
    check(&server, "HELLO HELLO|2", &hello("2", "*14", id + 1).repeat(2));
    check(
        &server,
        "INFO COMMAND|LIST",
        &format!(
            "${}/# Server/server_name:tollgate/tollgate_version:{}/redis_mode:standalone//*16/$4/auth/",
            74 + env!("CARGO_PKG_VERSION").len(),
            env!("CARGO_PKG_VERSION")
        ),
    );
}

#[test]
fn whoever_has_not_shown_the_password_gets_no_decision() {
    let server = server::start("[server]\nresp_password = 'open sesame'\n");
    let mut client = server::client(&server);
    client.send(&command(["CL.THROTTLE", "k", "0", "1", "100000"]));
    assert_eq!(client.line(), "-NOAUTH Authentication required.");
    client.send(&command(["HELLO", "3"]));
    assert!(client.line().starts_with("-NOAUTH HELLO must be called"));
    client.send(&command(["AUTH", "open"]));
    assert!(client.line().starts_with("-WRONGPASS"));
    client.send(&command(["AUTH", "admin", "open sesame"]));
    assert!(client.line().starts_with("-WRONGPASS"));
    client.send(&command(["AUTH", "open sesame"]));
    assert_eq!(client.line(), "+OK");
    check_on(&mut client, "CL.THROTTLE|k|0|1|100000", "*5/:0/:1/:0/:-1/:100000/");
    let mut client = server::client(&server);
    client.send(&command(["HELLO", "3", "AUTH", "default", "open sesame"]));
    assert_eq!(client.line(), "%7");
    // Guessing comes to an end.
    let mut client = server::client(&server);
    client.send(&command(["AUTH", "x"]).repeat(20));
    assert_eq!(
        client.rest().split(|byte| *byte == b'\n').filter(|line| line.starts_with(b"-WRONGPASS")).count(),
        8
    );
}

#[test]
fn a_pipeline_may_be_cut_anywhere() {
    let server = server::start("[server]\nmax_period = '365d'\n");
    let pipeline = |key: usize| {
        let key = format!("k{key}");
        [
            command(["CL.THROTTLE", &key, "1", "1", "100000"]),
            command([b"CL.THROTTLE".as_slice(), b"\r\n$1\r\n", b"99", b"1", b"1", b"0"]),
            command(["NOPE", "\r\n+OK"]),
            command(["CL.THROTTLE", &key, "1", "1", "100000", "2"]),
            command(["PING", ""]),
        ]
        .concat()
    };
    let said = "*5/:0/:2/:1/:-1/:100000/*5/:0/:100/:100/:-1/:0/-ERR unknown command 'NOPE'/\
                *5/:1/:2/:1/:~100000/:~100000/$0//";
    let mut client = server::client(&server);
    for cut in 0..=pipeline(100).len() {
        let whole = pipeline(100 + cut);
        // The answer to what goes before shows that the first part was read by itself.
        client.send(&[&command(["PING"])[..], &whole[..cut]].concat());
        assert_eq!(client.line(), "+PONG");
        client.send(&whole[cut..]);
        check_reply(&mut client, said, &format!("cut at {cut}"));
    }
    // Many at once, more than one read brings and one write takes.
    client.send(&command(["CL.THROTTLE", "many", "9999", "1", "1000"]).repeat(5_000));
    for remaining in (5_000..=9_999).rev() {
        assert_eq!(client.line(), "*5");
        let line = [(); 5].map(|()| client.line());
        assert_eq!((&*line[0], &*line[2]), (":0", &*format!(":{remaining}")));
    }
}

/// What redis-py sends by default where a program asks for a pipeline.
#[test]
fn a_transaction_is_answered_in_one_piece() {
    let server = server::start(POLICY);
    for (asked, said) in [
        (
            "MULTI CL.THROTTLE|t|9|1|1000 CL.THROTTLE|t|9|1|1000|2 TOLLGATE.CHECK|api|user:7 PING|x EXEC PING",
            "+OK/+QUEUED/+QUEUED/+QUEUED/+QUEUED/*4/*5/:0/:10/:9/:-1/:1000/*5/:0/:10/:7/:-1/:~3000/\
             *6/:1/:4/:0/:100000/:0/$3/api/$1/x/+PONG/",
        ),
        ("MULTI EXEC", "+OK/*0/"),
        ("multi ping exec", "+OK/+QUEUED/*1/+PONG/"),
        (
            "MULTI CL.THROTTLE|u|9|1|1000 DISCARD CL.THROTTLE|u|9|1|1000|0",
            "+OK/+QUEUED/+OK/*5/:0/:10/:10/:-1/:0/",
        ),
        ("EXEC DISCARD", "-ERR EXEC without MULTI/-ERR DISCARD without MULTI/"),
        ("MULTI MULTI EXEC", "+OK/-ERR MULTI calls can not be nested/*0/"),
        ("MULTI WATCH|a EXEC", "+OK/-ERR WATCH inside MULTI is not allowed/*0/"),
        ("WATCH|a|b UNWATCH MULTI UNWATCH EXEC", "+OK/+OK/+OK/+QUEUED/*1/+OK/"),
        // What fails when it is answered has its error in its place, and takes nothing back of the others.
        ("MULTI SELECT|1 PING EXEC", "+OK/+QUEUED/+QUEUED/*2/-ERR DB index is out of range/+PONG/"),
        // What cannot be answered is refused at once, and then nothing is.
        (
            "MULTI CL.THROTTLE|v|9|1|1000 FLUSHALL CL.THROTTLE|v|9|1|1000 EXEC CL.THROTTLE|v|9|1|1000|0",
            "+OK/+QUEUED/-ERR unknown command 'FLUSHALL'/+QUEUED/\
             -EXECABORT Transaction discarded because of previous errors./*5/:0/:10/:10/:-1/:0/",
        ),
        (
            "MULTI CL.THROTTLE|v|x|1|1000 EXEC PING",
            "+OK/-ERR max_burst must be a whole number from 0 to 9223372036854775807, not 'x'/\
             -EXECABORT Transaction discarded because of previous errors./+PONG/",
        ),
        (
            "MULTI ECHO EXEC",
            "+OK/-ERR wrong number of arguments for 'echo' command/\
             -EXECABORT Transaction discarded because of previous errors./",
        ),
        (
            "MULTI HELLO|3 EXEC",
            "+OK/-ERR Command not allowed inside a transaction/\
             -EXECABORT Transaction discarded because of previous errors./",
        ),
        ("MULTI PING QUIT", "+OK/+QUEUED/+OK/"),
    ] {
        check(&server, asked, said);
    }
    // A transaction may be cut anywhere, and its queue has an end.
    let whole: Vec<u8> =
        ["MULTI", "PING", "EXEC"].iter().flat_map(|name| command([*name])).collect::<Vec<u8>>();
    let mut client = server::client(&server);
    for cut in 0..=whole.len() {
        client.send(&whole[..cut]);
        client.send(&whole[cut..]);
        check_reply(&mut client, "+OK/+QUEUED/*1/+PONG/", &format!("cut at {cut}"));
    }
    client.send(&[command(["MULTI"]), command(["PING"]).repeat(1_025), command(["EXEC"])].concat());
    check_reply(&mut client, &format!("+OK/{}", "+QUEUED/".repeat(1_024)), "as many as there may be");
    check_reply(
        &mut client,
        "-ERR a transaction has at most 1024 commands and 131072 bytes/\
         -EXECABORT Transaction discarded because of previous errors./",
        "one more",
    );
    client.send(&[command(["MULTI"]), command(["ECHO", &"x".repeat(60_000)]).repeat(3)].concat());
    check_reply(
        &mut client,
        "+OK/+QUEUED/+QUEUED/-ERR a transaction has at most 1024 commands and 131072 bytes/",
        "long",
    );
    check_on(&mut client, "DISCARD PING", "+OK/+PONG/");
}

/// What `redis-cli --pipe` sends at the end: an empty line, and an echo by which it knows that all was answered.
#[test]
fn empty_lines_between_commands_are_passed_over() {
    let server = server::start("");
    let mut client = server::client(&server);
    client.send(b"\r\n\r\n*1\r\n$4\r\nPING\r\n\r\n*2\r\n$4\r\nECHO\r\n$20\r\n01234567890123456789\r\n\r");
    check_reply(&mut client, "+PONG/$20/01234567890123456789/", "with empty lines");
    client.send(b"\n*1\r\n$4\r\nPING\r\n");
    check_reply(&mut client, "+PONG/", "after half a line");
    client.send(b"\rPING\r\n");
    assert!(client.line().starts_with("-ERR Protocol error"), "a line is no command");
}

/// Keys that a caller made up, with a period of a year, filled the store for a year.
#[test]
fn a_period_has_a_bound_that_the_config_says() {
    let server = server::start("");
    let refused = |client: &mut Client, numbers: &str, lasts: &str, most: &str| {
        client.send(&command(format!("CL.THROTTLE|k|{numbers}").split('|')));
        let expected = format!(
            "-ERR the period is too long: its keys would be kept for {lasts}, and a limit that comes with a call may last \
             {most} (server.max_period)"
        );
        assert_eq!(client.line(), expected, "{numbers}");
    };
    let mut client = server::client(&server);
    // What people write: so many an hour, so many a day.
    check_on(&mut client, "CL.THROTTLE|hour|99|100|3600", "*5/:0/:100/:99/:-1/:36/");
    check_on(&mut client, "CL.THROTTLE|day|1000|1000|86400", "*5/:0/:1001/:1000/:-1/:87/");
    check_on(&mut client, "CL.THROTTLE|week|0|1|604800", "*5/:0/:1/:0/:-1/:604800/");
    refused(&mut client, "0|1|31536000", "365d", "7d");
    refused(&mut client, "0|1|604801", "7d1s", "7d");
    // A short period is no shorter life where the bucket takes long to fill.
    refused(&mut client, "864000|1|1", "10d1s", "7d");
    refused(&mut client, "0|1|31536000|0", "365d", "7d");
    let server = server::start("[server]\nmax_period = '1h'\n");
    let mut client = server::client(&server);
    check_on(&mut client, "CL.THROTTLE|hour|0|1|3600", "*5/:0/:1/:0/:-1/:3600/");
    refused(&mut client, "0|1|3601", "1h1s", "1h");
}

#[test]
fn a_connection_follows_a_reload_and_keeps_what_was_consumed() {
    let server = server::start(POLICY);
    let mut client = server::client(&server);
    check_on(&mut client, "TOLLGATE.CHECK|api|user:42", "*6/:1/:4/:0/:100000/:0/$3/api/");
    check_on(&mut client, "CL.THROTTLE|k|1|1|1000", "*5/:0/:2/:1/:-1/:1000/");
    server.reload(&POLICY.replace("burst = 5", "burst = 9"));
    check_on(&mut client, "TOLLGATE.CHECK|api|user:42", "*6/:1/:7/:0/:~200000/:0/$3/api/");
    check_on(&mut client, "CL.THROTTLE|k|1|1|1000", "*5/:0/:2/:0/:-1/:~2000/");
}

/// A connection that is idle keeps the registry that it asked last, and used to keep its counts with it.
#[test]
fn counts_do_not_wait_for_an_idle_connection_after_a_reload() {
    let server = server::start(POLICY);
    let mut client = server::client(&server);
    check_on(&mut client, "TOLLGATE.CHECK|api|user:42", "*6/:1/:4/:0/:100000/:0/$3/api/");
    check_on(&mut client, "CL.THROTTLE|k|1|1|1000", "*5/:0/:2/:1/:-1/:1000/");
    server.reload(&POLICY.replace("burst = 5", "burst = 9"));
    let metrics = server.get("/metrics").body;
    let decided = |limiter: &str| {
        let name = format!("limiter=\"{limiter}\"");
        let is_count =
            |line: &&str| line.starts_with("rate_limiter_decisions_total{") && line.contains(&name);
        metrics
            .lines()
            .filter(is_count)
            .filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
            .sum::<u64>()
    };
    assert_eq!((decided("api"), decided("cl.throttle")), (1, 1), "{metrics}");
    drop(client);
}

#[test]
fn what_was_read_is_answered_before_the_server_ends() {
    let server = server::start("");
    let mut client = server::client(&server);
    check_on(&mut client, "PING", "+PONG/");
    client.send(&command(["CL.THROTTLE", "k", "1", "1", "1000"])[..10]);
    assert_eq!(server.stop().code, Some(0));
    assert_eq!(client.rest(), b"");
}

/// Nobody answers there. Who asks was reported where that is; it is the log that is.
#[test]
fn a_fault_does_not_tell_where_the_store_is() {
    let server = server::start(
        "[store]\nmode = 'redis'\nfallback = 'closed'\nredis = { url = 'redis://127.0.0.1:9' }\n[limits.api]\nblocked = true\n",
    );
    let mut client = server::client(&server);
    // A look has nobody to stand in for the store. The first are sent there, the last are not any more.
    for turn in 0..20 {
        client.send(&command(["CL.THROTTLE", "k", "1", "1", "1000", "0"]));
        let said = client.line();
        assert!(said.starts_with("-TRYAGAIN the store could not answer ("), "turn {turn}: {said}");
        assert!(!said.contains("127.0.0.1"), "turn {turn}: {said}");
    }
    let ended = server.stop();
    assert!(
        ended.output.lines().any(|line| line.starts_with('{') && line.contains("127.0.0.1:9")),
        "{ended:?}"
    );
}

#[test]
fn a_port_that_is_taken_is_said_to_be() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let said = server::refused(&["serve", "--listen", "127.0.0.1:0", "--resp", &address]);
    assert!(said.contains(&format!("cannot listen on {address} for resp: ")), "{said}");
    assert!(said.contains("name another with --resp"), "{said}");
}
