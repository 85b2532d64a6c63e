//! Programs that people have already: redis-cli, redis-py, and a store that is Redis itself.
//!
//! `./test` installs them; `cargo test -p tollgate-server --features services --test resp` runs them.

use std::io::Write;
use std::process::{Command, Stdio};

use tollgate_testkit::redis::RedisServer;

use crate::server::{self, command};

fn said(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}; ./test installs it"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn redis_cli_speaks_to_it() {
    let server = server::start("");
    let port = server.resp().port().to_string();
    for version in ["-2", "-3"] {
        let cli = |arguments: &str| {
            said(Command::new("redis-cli").args([version, "-p", &port]).args(arguments.split(' ')))
        };
        let key = format!("user{version}");
        assert_eq!(cli(&format!("CL.THROTTLE {key} 15 30 60 1")), "0\n16\n15\n-1\n2\n");
        assert_eq!(cli(&format!("CL.THROTTLE slow{key} 15 30 60000 16")), "0\n16\n0\n-1\n32000\n");
        assert!(cli(&format!("CL.THROTTLE slow{key} 15 30 60000")).starts_with("1\n16\n0\n"));
        assert_eq!(cli("PING"), "PONG\n");
        assert!(cli("CL.THROTTLE k").starts_with("ERR Usage: cl.throttle"));
    }
}

/// Commands out of a file, as people load many.
#[test]
fn redis_cli_pipes_to_it() {
    let redis = RedisServer::start();
    let elsewhere =
        format!("[store]\nmode = 'redis'\ntimeout = '5s'\nredis = {{ url = '{}' }}\n", redis.url());
    for config in ["", &elsewhere] {
        let server = server::start(config);
        let port = server.resp().port().to_string();
        let mut cli = Command::new("redis-cli");
        cli.args(["-p", &port, "--pipe"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut cli = cli.spawn().unwrap_or_else(|error| panic!("redis-cli: {error}; ./test installs it"));
        let mut commands = Vec::new();
        for number in 0..500 {
            commands.extend(command(["CL.THROTTLE", &format!("k{}", number % 100), "9", "1", "1000"]));
        }
        commands.extend(command(["CL.THROTTLE", "k0"]));
        cli.stdin.take().unwrap().write_all(&commands).unwrap();
        let output = cli.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains("errors: 1, replies: 501"), "{said}");
        let mut client = server::client(&server);
        client.send(&command(["CL.THROTTLE", "k7", "9", "1", "1000", "0"]));
        let lines = [(); 6].map(|()| client.line());
        assert_eq!(lines[3], ":5", "{lines:?}");
    }
}

#[test]
fn redis_py_speaks_to_it() {
    let server = server::start("[server]\nresp_password = 'open sesame'\n");
    let python = std::env::var("TOLLGATE_REDIS_PY").unwrap_or_else(|_| "python3".to_owned());
    let script = "
import sys, redis
for protocol in (2, 3):
    client = redis.Redis(port=int(sys.argv[1]), password='open sesame', protocol=protocol, client_name='test')
    key = f'user{protocol}'
    assert client.ping()
    assert client.execute_command('CL.THROTTLE', key, 15, 30, 60, 1) == [0, 16, 15, -1, 2]
    for transaction in (False, True):
        pipeline = client.pipeline(transaction=transaction)
        for _ in range(17):
            pipeline.execute_command('CL.THROTTLE', f'slow{transaction}' + key, 15, 30, 60000)
        answers = pipeline.execute()
        assert [answer[0] for answer in answers] == [0] * 16 + [1], answers
    pipeline = client.pipeline()
    pipeline.execute_command('CL.THROTTLE', 'none' + key, 15, 30, 60000)
    pipeline.execute_command('FLUSHALL')
    try:
        pipeline.execute()
        raise SystemExit('it was accepted')
    except redis.ResponseError as error:
        assert 'unknown command' in str(error), error
    assert client.execute_command('CL.THROTTLE', 'none' + key, 15, 30, 60000, 0)[2] == 16
    assert client.execute_command('CL.THROTTLE', b'\\xff\\x00', 0, 1, 100000)[:3] == [protocol - 2, 1, 0]
    try:
        client.execute_command('CL.THROTTLE', key)
        raise SystemExit('it was accepted')
    except redis.ResponseError as error:
        assert str(error).startswith('Usage: cl.throttle'), error
try:
    redis.Redis(port=int(sys.argv[1]), password='guess').ping()
    raise SystemExit('it was accepted')
except redis.AuthenticationError:
    print('done')
";
    let port = server.resp().port().to_string();
    assert_eq!(said(Command::new(python).args(["-c", script, &port])), "done\n");
}

#[test]
fn counters_that_are_elsewhere_answer_alike_and_in_order() {
    let redis = RedisServer::start();
    let server = server::start(&format!(
        "[store]\nmode = 'redis'\ntimeout = '5s'\nfallback = 'closed'\nredis = {{ url = '{}' }}\n\
         [limits.api]\nstrategy = 'token_bucket'\nrate = '1/1000s'\nburst = 5\n",
        redis.url()
    ));
    let mut client = server::client(&server);
    let mut sent = Vec::new();
    for key in 0..100 {
        sent.extend(command(["CL.THROTTLE", &format!("k{key}"), &key.to_string(), "1", "1000"]));
    }
    sent.extend(command(["PING"]));
    for _ in 0..2 {
        sent.extend(command(["CL.THROTTLE", "k0", "0", "1", "1000"]));
        sent.extend(command(["TOLLGATE.CHECK", "api", "user:42", "3"]));
    }
    sent.extend(command(["CL.THROTTLE", "k1", "1", "1", "1000", "0"]));
    sent.extend(command(["CL.THROTTLE", "k1", "4", "1", "1000", "1"]));
    client.send(&sent);
    // Times are left out: some may have passed.
    let mut answer = |size: usize, reported: usize| {
        let lines: Vec<String> = (0..size).map(|_| client.line()).collect();
        lines[..reported].join(" ")
    };
    for key in 0..100 {
        assert_eq!(answer(6, 6), format!("*5 :0 :{} :{key} :-1 :1000", key + 1));
    }
    assert_eq!(answer(1, 1), "+PONG");
    for check in ["*6 :1 :2 :0", "*6 :0 :2"] {
        assert_eq!(answer(6, 4), "*5 :1 :1 :0");
        assert_eq!(answer(8, check.split(' ').count()), check);
    }
    assert_eq!(answer(6, 5), "*5 :0 :2 :1 :-1");
    assert_eq!(answer(6, 5), "*5 :0 :5 :3 :-1");
}
