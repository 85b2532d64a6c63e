//! The report of a backtest, opened from the disk.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::browser::Browser;
use crate::{accessible, sound, text};

fn example(name: &str) -> String {
    format!("{}/../../examples/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// A file of this test.
fn temporary(name: &str) -> String {
    let (stem, end) = name.rsplit_once('.').expect("a name with an end");
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{stem}-{}.{end}", std::process::id()));
    path.to_str().expect("a path in UTF-8").to_owned()
}

fn written(name: &str, text: &str) -> String {
    let path = temporary(name);
    std::fs::write(&path, text).expect("it is written");
    path
}

/// A report of some policies on some logs.
fn report(name: &str, configs: &[String], logs: &[String]) -> String {
    let path = temporary(&format!("{name}.html"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command.args(["backtest", "--report", &path]);
    command.args(configs.iter().flat_map(|config| ["--config", config]));
    let done = command.args(logs).output().expect("it starts");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    path
}

/// By day and by night, on a wall and on a phone, with its tables closed and open.
fn looked_at(browser: &Browser, report: &str, path: &str) {
    for scheme in ["light", "dark"] {
        browser.media(scheme);
        for (name, width, height) in [("wall", 1440, 1100), ("phone", 360, 780)] {
            browser.size(width, height);
            browser.open(&format!("file://{path}"));
            let what = format!("{report}, {scheme}, {name}");
            sound(browser, &what);
            accessible(browser, &what);
            browser.picture(&format!("{report}-{name}-{scheme}"));
            // With all tables open it is as sound.
            browser.run("for (const one of document.querySelectorAll('details')) one.open = true");
            sound(browser, &what);
            accessible(browser, &what);
            browser.picture(&format!("{report}-{name}-{scheme}-open"));
        }
    }
}

/// Sixty limits of every strategy, with these numbers.
fn sixty(number: u32) -> String {
    let limit = |index: u32| {
        let numbers = match index % 4 {
            0 => format!("strategy = 'token_bucket'\nrate = '{number}/s'\nburst = {number}"),
            1 => format!("strategy = 'fixed_window'\nlimit = {number}\nwindow = '1s'"),
            2 => format!("strategy = 'sliding_window'\nlimit = {number}\nwindow = '1s'\nshadow = true"),
            _ => format!("strategy = 'sliding_window_counter'\nlimit = {number}\nwindow = '1s'"),
        };
        format!("[limits.\"tenant-{index:02}.requests\"]\n{numbers}\n")
    };
    (0..60).map(limit).collect()
}

/// Traffic of forty of them, most of it of the first ones; nothing is asked of the others.
fn traffic() -> String {
    let request = |n: u32| {
        let (one, other) = (n * 7_919 / 40 % 40, n * 7_919 % 40);
        let (limit, key) = (one * other / 40, n % 3);
        format!("{}.{:03},tenant-{limit:02}.requests,user:{key},1\n", 1_714_564_800 + n / 100, n % 100 * 10)
    };
    format!("time,limit,key,cost\n{}", (0..6_000).map(request).collect::<String>())
}

#[test]
fn a_report_of_sixty_limits_is_read_as_easily() {
    let [config, log] = [written("sixty.toml", &sixty(3)), written("sixty.csv", &traffic())];
    let path = report("sixty", std::slice::from_ref(&config), std::slice::from_ref(&log));
    let browser = Browser::start();
    looked_at(&browser, "report-sixty", &path);
    let shown = browser.run("return document.querySelectorAll('.limit').length").as_u64().unwrap_or_default();
    assert!((30..=60).contains(&shown), "{shown} limits are shown");
    let _ = [path, config, log].map(std::fs::remove_file);
}

#[test]
fn a_report_is_read_from_the_disk_by_day_and_by_night_on_a_wall_and_on_a_phone() {
    let key = format!("x:<img src=x onerror=\"document.title='pwned'\">{}", "y".repeat(200));
    let lines: String =
        (0..90).map(|n| format!("17145648{n:02},per-user,\"{}\",50\n", key.replace('"', "\"\""))).collect();
    let hostile = written("hostile.csv", &format!("time,limit,key,cost\n{lines}noon,api,<b>,1\n"));
    let logs = [example("access.log"), example("traffic.csv"), hostile.clone()];
    let path = report("report", &[example("tollgate.toml")], &logs);

    let browser = Browser::start();
    looked_at(&browser, "report", &path);
    // Its style is the one that its own policy knows, and it is drawn.
    assert_eq!(
        browser.run("return getComputedStyle(document.querySelector('.limit')).borderTopWidth"),
        json!("1px")
    );
    assert_eq!(browser.run("return performance.getEntriesByType('resource').length"), json!(0));
    assert_eq!(browser.run("return document.scripts.length + document.images.length"), json!(0));
    assert!(text(&browser, "title").starts_with("Backtest of "));
    let pictures =
        browser.run("return document.querySelectorAll('svg[role=img]').length").as_u64().unwrap_or_default();
    assert!(pictures >= 4, "{pictures}");
    let keys =
        browser.run("return [...document.querySelectorAll('.offenders bdi')].map(one => one.textContent)");
    let is_hostile = |key: &Value| key.as_str().is_some_and(|key| key.starts_with("x:<img src=x"));
    assert!(keys.as_array().is_some_and(|keys| keys.iter().any(is_hostile)), "{keys}");
    let _ = std::fs::remove_file(&path);
    let _ = std::fs::remove_file(&hostile);
}

/// Two policies on one log: what each would have done, beside each other and apart.
#[test]
fn a_report_of_two_policies_has_a_column_and_a_part_for_each() {
    let policy =
        |limit: u32| format!("[limits.api]\nstrategy = 'fixed_window'\nlimit = {limit}\nwindow = '1m'\n");
    let log = "time,limit,key\n1,api,a\n2,api,a\n3,api,b\n4,api,a\n5,api,a\n6,api,b\n7,api,c\n";
    let [two, one] = [written("two.toml", &policy(2)), written("one.toml", &policy(1))];
    let log = written("two-policies.csv", log);
    let path = report("two-policies", &[two.clone(), one.clone()], std::slice::from_ref(&log));
    let browser = Browser::start();
    looked_at(&browser, "report-two", &path);
    // What can be seen, as it is drawn.
    let cells = |selector: &str| {
        browser.run(&format!(
            "return [...document.querySelectorAll('section[aria-labelledby=compared] {selector}')].map(one => one.innerText.trim())"
        ))
    };
    assert_eq!(cells("thead th:not(:first-child)"), json!([two, one]));
    let row = |name: &str| {
        browser.run(&format!(
            "const row = [...document.querySelectorAll('section[aria-labelledby=compared] tbody tr')].find(one => one.cells[0].innerText === '{name}');
             return [...row.cells].slice(1).map(one => one.innerText)"
        ))
    };
    assert_eq!(row("requests"), json!(["7", "7"]));
    assert_eq!(row("allowed"), json!(["5", "3"]));
    assert_eq!(row("denied"), json!(["2 (28.6 %)", "4 (57.1 %)"]));
    assert_eq!(row("keys denied"), json!(["1 (33.3 %)", "2 (66.7 %)"]));
    let of_limit = ["2 per 1m window: 2 denied (28.6 %)", "1 per 1m window: 4 denied (57.1 %)"];
    assert_eq!(row("api"), json!(of_limit));
    assert_eq!(cells("li"), json!(["1 key is newly denied: b", "No key is no longer denied."]));
    // Each policy has its own part below, with its own chart, and both columns are on the screen.
    assert_eq!(browser.run("return document.querySelectorAll('section.sums').length"), json!(2));
    browser.size(1440, 1100);
    let width = "return [...document.querySelectorAll('section[aria-labelledby=compared] thead th')].slice(1).every(one => { const box = one.getBoundingClientRect(); return box.width > 40 && box.right <= innerWidth; })";
    assert_eq!(browser.run(width), json!(true));
    let _ = [path, two, one, log].map(std::fs::remove_file);
}
