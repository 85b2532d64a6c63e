//! Access logs: which of their requests meet which limit, with answers worked out by hand, and the same traffic as CSV.

use serde_json::Value;

use crate::binary::Scratch;

/// Three tokens for each client and a new one every ten seconds; two logins a minute; ten units a minute for each user.
const POLICY: &str = r#"
[limits.api]
strategy = "token_bucket"
rate = "1/10s"
burst = 3

[limits.login]
strategy = "fixed_window"
limit = 2
window = "1m"

[limits.users]
strategy = "sliding_window"
limit = 10
window = "1m"

[limits.watched]
strategy = "fixed_window"
limit = 1
window = "1m"
shadow = true

[[routes]]
path = "/api/*"
limit = "api"

[[routes]]
path = "/login"
method = "POST"
limit = "login"

[[routes]]
path = "/api/export"
limit = "users"
key = "user"
if_missing = "skip"
cost = 6

[[routes]]
clients = ["192.0.2.0/24"]
limit = "watched"
key = "all"
"#;

/// 10/Oct/2000:13:55:36 -0700 in microseconds.
const START: u64 = 971_211_336_000_000;

/// A line so many seconds after the start, in one zone or another.
fn line(client: &str, user: &str, seconds: u64, request: &str) -> String {
    let (time, zone) = if seconds.is_multiple_of(2) { ("13:55", "-0700") } else { ("22:55", "+0200") };
    assert!(seconds < 24);
    format!(
        "{client} - {user} [10/Oct/2000:{time}:{:02} {zone}] \"{request}\" 200 9 \"-\" \"-\"\n",
        36 + seconds
    )
}

/// Every decision as `line limit key cost allowed remaining retry_after reset_after`, times in seconds, `!` where it is a shadow's
/// refusal.
fn decisions(text: &str) -> Vec<String> {
    let shown = |line: &str| {
        let one: Value = serde_json::from_str(line).expect("JSON");
        let seconds =
            |field: &str| one[field].as_u64().map_or("never".to_owned(), |us| format!("{}", us as f64 / 1e6));
        format!(
            "{} {} {} {} {} {} {} {}{}",
            one["line"],
            one["limit"].as_str().unwrap_or_default(),
            one["key"].as_str().unwrap_or_default(),
            one["cost"],
            if one["allowed"] == true { "yes" } else { "no" },
            one["remaining"],
            seconds("retry_after_us"),
            seconds("reset_after_us"),
            if one["would_deny"] == true { " !" } else { "" },
        )
    };
    text.lines().map(shown).collect()
}

fn run(scratch: &Scratch, logs: &[&str]) -> Value {
    let mut args = vec!["backtest", "--config", "policy.toml", "--decisions", "out.jsonl", "--json"];
    args.extend(logs);
    let ended = scratch.run(&args);
    ended.done(&logs.join(" "));
    assert_eq!(ended.stderr, "");
    serde_json::from_str(&ended.stdout).expect("a summary")
}

#[test]
fn requests_meet_their_limits_all_or_none() {
    let scratch = Scratch::new("combined");
    scratch.write("policy.toml", POLICY);
    let log = [
        // Out of order by a second, as servers write them that log when they are done.
        line("203.0.113.7", "-", 1, "GET /api/a?x=1 HTTP/1.1"),
        line("203.0.113.7", "-", 0, "GET /api HTTP/1.1"),
        // The same client in other clothes, and another spelling of the path.
        line("::ffff:203.0.113.7", "-", 1, "GET //api/./b HTTP/1.1"),
        line("203.0.113.7", "-", 2, "GET /api/c HTTP/1.1"),
        // Two addresses of one /64.
        line("2001:db8::1", "-", 3, "POST /login HTTP/1.1"),
        line("2001:db8::2", "-", 3, "POST /login HTTP/1.1"),
        line("2001:db8::3", "-", 4, "POST /login HTTP/1.1"),
        line("2001:db8::3", "-", 4, "GET /login HTTP/1.1"),
        // Two limits in one charge: six units of alice's ten, and then no more, so the client's tokens stay.
        line("198.51.100.1", "alice", 10, "GET /api/export HTTP/1.1"),
        line("198.51.100.1", "alice", 12, "GET /api/export HTTP/1.1"),
        line("198.51.100.1", "-", 12, "GET /api/export HTTP/1.1"),
        // What is no request meets what asks for none; the shadow counts one for all and would deny the second.
        line("192.0.2.1", "-", 20, "\\x16\\x03\\x01"),
        line("192.0.2.2", "-", 21, "-"),
        line("10.0.0.1", "-", 22, "GET /index.html HTTP/1.1"),
    ]
    .concat();
    scratch.write("access.log", &log);
    let summary = run(&scratch, &["access.log"]);
    let found = decisions(&scratch.read("out.jsonl"));
    let expected = [
        "2 api ip:203.0.113.7 1 yes 2 0 10",
        "1 api ip:203.0.113.7 1 yes 1 0 19",
        "3 api ip:203.0.113.7 1 yes 0 0 29",
        "4 api ip:203.0.113.7 1 no 0 8 28",
        "5 login ip:2001%3Adb8%3A%3A/64 1 yes 1 0 60",
        "6 login ip:2001%3Adb8%3A%3A/64 1 yes 0 0 60",
        "7 login ip:2001%3Adb8%3A%3A/64 1 no 0 59 59",
        "9 api ip:198.51.100.1 1 yes 2 0 10",
        "9 users user:alice 6 yes 4 0 60",
        // It had room and was not charged: two tokens are left, and there are still two and a fifth after it.
        "10 api ip:198.51.100.1 1 no 2 0 8",
        "10 users user:alice 6 no 4 58 58",
        "11 api ip:198.51.100.1 1 yes 1 0 18",
        "12 watched all:all 1 yes 0 0 60",
        "13 watched all:all 1 yes 0 59 59 !",
    ];
    assert_eq!(found, expected);
    for (field, count) in
        [("requests", 12), ("keys", 5), ("allowed", 9), ("denied", 3), ("would_deny", 1), ("unmet", 2)]
    {
        assert_eq!(summary[field], count, "{field}: {summary}");
    }
    let limits: Vec<_> = summary["limits"]
        .as_array()
        .expect("limits")
        .iter()
        .map(|limit| {
            let of = |field: &str| limit[field].as_u64().expect("a number");
            (of("requests"), of("allowed"), of("denied"), of("denied_by_others"))
        })
        .collect();
    assert_eq!(limits, [(7, 5, 1, 1), (3, 2, 1, 0), (2, 1, 1, 0), (2, 2, 0, 0)]);
    assert_eq!(summary["from_us"], START);
    let ended = scratch.run(&["backtest", "--config", "policy.toml", "access.log"]);
    assert!(ended.stdout.contains("\n2 requests met no route\n"), "{}", ended.stdout);
    // Of the seven requests of `api` five are allowed, one is denied, and one is denied by another limit.
    let words = |start: &str| {
        let line = ended.stdout.lines().find(|line| line.starts_with(start)).expect("a line");
        line.split_whitespace().take(8).map(str::to_owned).collect::<Vec<_>>()
    };
    assert!(ended.stdout.contains("  SHARE  DENIED BY OTHERS  RULE\n"), "{}", ended.stdout);
    assert_eq!(words("api")[..5], ["api", "7", "2", "5", "1"]);
    assert_eq!(words("api")[7], "1", "{}", ended.stdout);
}

#[test]
fn the_same_traffic_as_csv_gets_the_same_decisions() {
    let scratch = Scratch::new("combined-csv");
    scratch.write("policy.toml", POLICY);
    let (mut log, mut csv) = (String::new(), "time,limit,key,cost\n".to_owned());
    // One limit a line, so that a line of one is a line of the other: ties and all.
    for n in 0..200_u64 {
        let (seconds, client) = (n / 9, 1 + n * n % 5);
        let at = START / 1_000_000 + seconds;
        let (request, limit) = if n % 3 == 0 { ("POST /login", "login") } else { ("GET /api/x", "api") };
        log += &line(&format!("10.0.0.{client}"), "-", seconds, &format!("{request} HTTP/1.1"));
        csv += &format!("{at},{limit},ip:10.0.0.{client},\n");
    }
    scratch.write("access.log", log);
    scratch.write("traffic.csv", csv);
    let of_log = run(&scratch, &["access.log"]);
    let from_log = decisions(&scratch.read("out.jsonl"));
    let mut of_csv = run(&scratch, &["traffic.csv"]);
    for key in of_csv["most_denied"].as_array_mut().expect("keys") {
        key["first_denied_line"] = (key["first_denied_line"].as_u64().expect("a line") - 1).into();
    }
    // The header takes a line.
    let less = |line: &String| {
        let (number, rest) = line.split_once(' ').expect("a line");
        format!("{} {rest}", number.parse::<u64>().expect("a number") - 1)
    };
    let from_csv: Vec<String> = decisions(&scratch.read("out.jsonl")).iter().map(less).collect();
    assert_eq!(from_log, from_csv);
    assert!(from_log.iter().any(|line| line.contains(" no ")) && from_log.len() == 200);
    assert_eq!(of_log, of_csv);
}

#[test]
fn an_access_log_needs_routes() {
    let scratch = Scratch::new("combined-routes");
    scratch.write("policy.toml", "[limits.api]\nunlimited = true\n");
    scratch.write("access.log", line("10.0.0.1", "-", 0, "GET / HTTP/1.1"));
    for args in [&["access.log"][..], &["--format", "combined", "access.log"]] {
        let args = [&["backtest", "--config", "policy.toml"], args].concat();
        let ended = scratch.run(&args);
        ended.could_not("no routes");
        assert!(ended.stderr.starts_with("[[routes]]\npath = \"/api/*\""), "{}", ended.stderr);
        let reported = "tollgate: error: cannot replay access.log: an access log does not say which limits its requests meet, and \
                    policy.toml has no routes for that; add some, such as the one above\n";
        assert!(ended.stderr.ends_with(reported), "{}", ended.stderr);
    }
    // The example that is shown is one that works.
    let example: String = scratch.run(&["backtest", "--config", "policy.toml", "access.log"]).stderr;
    let rule = example.split_once("tollgate: error").expect("an error").0;
    scratch.write("policy.toml", format!("[limits.api]\nunlimited = true\n{rule}"));
    let ended = scratch.run(&["validate", "policy.toml"]);
    ended.done("the example");
    assert!(ended.stdout.contains("valid: 1 limit, 1 route\n"), "{}", ended.stdout);
}

#[test]
fn bad_lines_are_told_or_counted() {
    let scratch = Scratch::new("combined-bad");
    scratch.write("policy.toml", POLICY);
    let good = line("10.0.0.1", "-", 0, "GET /api HTTP/1.1");
    for (bad, reported) in [
        ("10.0.0.1 - - nonsense", "access.log:2: line = \"10.0.0.1 - - nonsense\": write host ident user ["),
        (
            "10.0.0.1 - - [30/Feb/2000:13:55:36 -0700] \"GET /\" 200 1",
            "access.log:2: time = \"30/Feb/2000:13:55:36 -0700\": write a day",
        ),
        (
            "10.0.0.1 - - [10/Oct/2000:13:55:36 -0700] \"GET /",
            "a quote that is never closed; is the line cut off?",
        ),
        (
            "10.0.0.1 - - [10/Oct/2000:13:55:36 -0700] \"GET /\" 200 x",
            "access.log:2: bytes = \"x\": write a whole number",
        ),
    ] {
        scratch.write("access.log", format!("{good}{bad}\n\n{good}"));
        let ended = scratch.run(&["backtest", "--strict", "--config", "policy.toml", "access.log"]);
        ended.could_not(bad);
        assert!(ended.stderr.contains(reported), "{bad}: {}", ended.stderr);
        let ended = scratch.run(&["backtest", "--config", "policy.toml", "access.log", "--json"]);
        ended.done(bad);
        let summary: Value = serde_json::from_str(&ended.stdout).expect("a summary");
        assert_eq!((&summary["requests"], &summary["skipped_lines"]), (&2.into(), &1.into()));
    }
}

/// A missing key means the same as in the tower layer and at the gate: the request is denied, and nothing is charged.
#[test]
fn a_request_without_a_key_is_denied() {
    let scratch = Scratch::new("combined-no-key");
    let of = |table: &str, missing: &str| {
        format!(
            "[limits.users]\nstrategy = \"fixed_window\"\nlimit = 2\nwindow = \"1h\"\n\
             [limits.all]\nstrategy = \"fixed_window\"\nlimit = 9\nwindow = \"1h\"\n\
             [[{table}]]\nlimit = \"users\"\nkey = \"user\"\n{missing}\n[[{table}]]\nlimit = \"all\"\nkey = \"all\"\n"
        )
    };
    let log = [("ann", 0), ("-", 0), ("-", 1), ("bob", 1)]
        .map(|(user, seconds)| line("10.0.0.1", user, seconds, "GET / HTTP/1.1"));
    scratch.write("access.log", log.concat());
    let denied = [
        "1 users user:ann 1 yes 1 0 3600",
        "1 all all:all 1 yes 8 0 3600",
        "2 users  1 no 0 never 0",
        "2 all all:all 1 no 8 0 3600",
        "3 users  1 no 0 never 0",
        "3 all all:all 1 no 8 0 3599",
        "4 users user:bob 1 yes 1 0 3600",
        "4 all all:all 1 yes 7 0 3599",
    ];
    for (table, missing) in [("routes", ""), ("routes", "if_missing = \"deny\""), ("rules", "")] {
        scratch.write("policy.toml", of(table, missing));
        let summary = run(&scratch, &["access.log"]);
        assert_eq!(decisions(&scratch.read("out.jsonl")), denied, "{table} {missing}");
        let counts =
            ["requests", "allowed", "denied", "keys"].map(|field| summary[field].as_u64().expect("a number"));
        assert_eq!(counts, [4, 2, 2, 3], "{summary}");
        assert_eq!(summary["most_denied"][0]["key"], "(no key)", "{summary}");
    }
    // The same older words mean the same.
    for (table, missing) in [("routes", "if_missing = \"ip\""), ("rules", "otherwise = \"ip\"")] {
        scratch.write("policy.toml", of(table, missing));
        run(&scratch, &["access.log"]);
        let found = decisions(&scratch.read("out.jsonl"));
        assert_eq!(found[2], "2 users ip:10.0.0.1 1 yes 1 0 3600", "{table} {missing}");
    }
}

/// What a log does not have is no reason to deny everything: such routes are left out, and named.
#[test]
fn routes_that_need_more_than_a_log_has_are_left_out() {
    let scratch = Scratch::new("combined-left-out");
    let limits = "[limits.api]\nstrategy = \"fixed_window\"\nlimit = 1\nwindow = \"1h\"\n\
                  [limits.pool]\nstrategy = \"concurrency\"\nlimit = 1\nlease = \"1m\"\n";
    scratch.write(
        "access.log",
        [line("10.0.0.1", "-", 0, "GET / HTTP/1.1"), line("10.0.0.1", "-", 1, "GET / HTTP/1.1")].concat(),
    );
    for (route, why) in [
        ("limit = \"api\"\nkey = \"header:x-api-key\"", "an access log does not have the header `x-api-key`"),
        ("limit = \"api\"\nkey = \"bearer\"", "an access log does not have the header `authorization`"),
        ("limit = \"api\"\nkey = \"peer\"", "an access log does not have the peer's address"),
        ("limit = \"api\"\nhost = \"a.example\"", "an access log does not have the host"),
        ("limit = \"api\"\nheaders.x-plan = \"free\"", "an access log does not have the header `x-plan`"),
        ("limit = \"api\"\ncount_if_status = [401]", "it counts by the status of the response"),
        ("limit = \"pool\"", "a log does not say when a request is done"),
    ] {
        scratch.write("policy.toml", format!("{limits}[[routes]]\nlimit = \"api\"\n[[routes]]\n{route}\n"));
        let ended = scratch.run(&["backtest", "--config", "policy.toml", "access.log", "--json"]);
        ended.done(route);
        let limit = if route.contains("pool") { "pool" } else { "api" };
        assert_eq!(
            ended.stderr,
            format!("tollgate: note: left out routes[2] (limit {limit}): {why}\n"),
            "{route}"
        );
        let summary: Value = serde_json::from_str(&ended.stdout).expect("a summary");
        assert_eq!((&summary["requests"], &summary["denied"]), (&2.into(), &1.into()), "{route}");
    }
}
