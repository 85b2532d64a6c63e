//! The report of a backtest, opened from the disk.

use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::browser::Browser;
use crate::{accessible, sound, text};

/// A report of one of the repository's examples, or of made-up traffic.
fn report(name: &str, logs: &[String]) -> String {
    let example = |name: &str| format!("{}/../../examples/{name}", env!("CARGO_MANIFEST_DIR"));
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}.html", std::process::id()));
    let path = path.to_str().expect("a path in UTF-8").to_owned();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command.args(["backtest", "--config", &example("tollgate.toml"), "--report", &path]);
    let done = command.args(logs).output().expect("it starts");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    path
}

#[test]
fn a_report_is_read_from_the_disk_by_day_and_by_night_on_a_wall_and_on_a_phone() {
    let example = |name: &str| format!("{}/../../examples/{name}", env!("CARGO_MANIFEST_DIR"));
    let hostile = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("hostile-{}.csv", std::process::id()));
    let key = format!("x:<img src=x onerror=\"document.title='pwned'\">{}", "y".repeat(200));
    let lines: String =
        (0..90).map(|n| format!("17145648{n:02},per-user,\"{}\",50\n", key.replace('"', "\"\""))).collect();
    std::fs::write(&hostile, format!("time,limit,key,cost\n{lines}noon,api,<b>,1\n")).expect("it is written");
    let hostile = hostile.to_str().expect("a path in UTF-8").to_owned();
    let logs = [example("access.log"), example("traffic.csv"), hostile.clone()];
    let path = report("report", &logs);

    let browser = Browser::start();
    for scheme in ["light", "dark"] {
        browser.media(scheme);
        for (name, width, height) in [("wall", 1440, 1100), ("phone", 360, 780)] {
            browser.size(width, height);
            browser.open(&format!("file://{path}"));
            let what = format!("report, {scheme}, {name}");
            sound(&browser, &what);
            accessible(&browser, &what);
            browser.picture(&format!("report-{name}-{scheme}"));
            // With all tables open it is as sound.
            browser.run("for (const one of document.querySelectorAll('details')) one.open = true");
            sound(&browser, &what);
            accessible(&browser, &what);
            browser.picture(&format!("report-{name}-{scheme}-open"));
        }
    }
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
