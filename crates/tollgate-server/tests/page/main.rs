//! The page in a real Chromium, driven through chromedriver, against the real binary; and the report of a backtest, which is a file.
//!
//! Needs the feature `browser`, Debian's `chromium` and `chromium-driver`, and axe-core's script, whose path is in
//! `TOLLGATE_AXE`; `./test` sees to all of them. Pictures of the page are left under `target/screenshots`.

mod browser;
mod fleet;
mod jobs;
mod key;
mod models;
mod outage;
mod report;
mod server;

use std::net::TcpStream;

use serde_json::{Value, json};

use self::browser::Browser;

/// Limits that are soon used up and not soon refilled, and a token.
const POLICY: &str = r#"
[server]
admin_token = "open sesame"

[limits.login]
strategy = "fixed_window"
limit = 3
window = "1h"

[limits.mail]
strategy = "sliding_window"
limit = 2
window = "1h"
shadow = true
"#;

const HOSTILE: &str = "<img src=x onerror=alert(1)>";

/// What the console has of answers that the page itself tells of: a wrong token, a malformed key.
fn is_reported(line: &str) -> bool {
    line.contains("a status of 400") || line.contains("a status of 401")
}

/// What a visitor would notice of a page that is broken: errors, requests to other origins, a horizontal scroll bar.
fn sound(browser: &Browser, what: &str) {
    let errors: Vec<String> = browser.console().into_iter().filter(|line| !is_reported(line)).collect();
    assert!(errors.is_empty(), "{what}: {errors:#?}");
    let elsewhere = browser.run(
        "return performance.getEntriesByType('resource').map(e => e.name).filter(n => !n.startsWith(location.origin) && !n.startsWith('data:'))",
    );
    assert_eq!(elsewhere, json!([]), "{what}: it calls another origin");
    let too_wide =
        browser.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth");
    let widest = browser.run(
        "const most = document.documentElement.clientWidth;
         return [...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > most)
           .map(e => e.tagName + '.' + e.className + '#' + e.id).slice(0, 12)",
    );
    assert_eq!(too_wide, json!(0), "{what}: it scrolls sideways; beyond the edge: {widest}");
}

/// What axe-core has against the page as it is now.
fn accessible(browser: &Browser, what: &str) {
    let path =
        std::env::var("TOLLGATE_AXE").expect("TOLLGATE_AXE names axe.min.js of axe-core; ./test sets it");
    let axe = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("cannot read {path}: {error}"));
    browser.run(&axe);
    let violations = browser.wait_for(
        "const done = arguments[arguments.length - 1];
         // Colours that fade when the scheme changes are judged as they end.
         document.getAnimations().forEach(animation => animation.finish());
         axe.run({ resultTypes: ['violations'] }).then(found => done(found.violations.map(one =>
           `${one.id}: ${one.help}: ` + one.nodes.map(node => node.target + ' ' + node.failureSummary).join(' | '))));",
    );
    assert_eq!(violations, json!([]), "{what}");
}

fn text(browser: &Browser, selector: &str) -> String {
    let found =
        browser.run(&format!("return document.querySelector({})?.textContent ?? ''", json!(selector)));
    found.as_str().unwrap_or_default().to_owned()
}

/// Fills the form and presses a button of it.
fn try_key(browser: &Browser, limit: &str, key: &str, button: &str) {
    browser.run(&format!(
        "document.getElementById('answer').textContent = '';
         document.getElementById('try-limit').value = {};
         document.getElementById('try-key').value = {};",
        json!(limit),
        json!(key)
    ));
    browser.click(button);
}

/// Charges a key: asked for, and then said to be meant.
fn charge(browser: &Browser, limit: &str, key: &str) {
    try_key(browser, limit, key, "#charge");
    browser.until("document.getElementById('sure').open");
    browser.click("#sure-yes");
}

fn answered(browser: &Browser, words: &str) {
    browser.until(&format!("document.getElementById('answer').textContent.includes({})", json!(words)));
}

#[test]
fn the_demo_lives_by_day_and_by_night_on_a_wall_and_on_a_phone() {
    let server = server::demo();
    let browser = Browser::start();
    browser.media("light");
    browser.size(1440, 1000);
    browser.open(&format!("{}/", server.url()));
    browser.until("document.getElementById('link').dataset.state === 'live'");
    browser.until("document.querySelectorAll('#rows tr.l').length === 6");

    // Numbers move, and more than once.
    browser.until("Number(document.getElementById('sum-allowed').textContent) > 0");
    let chart = "document.querySelector('#limit-api .spark path').getAttribute('d')";
    browser.run(&format!("window.seen = {chart}"));
    browser.until(&format!("{chart} !== window.seen"));

    // A denied key shows up, and a hostile name is a text like any other.
    browser.click("#limit-login .name button");
    browser.until("document.querySelector('#card-login .plot svg')");
    browser.until(&format!(
        "[...document.querySelectorAll('#card-login .offenders button')].some(one => one.textContent === {})",
        json!(HOSTILE)
    ));
    assert_eq!(browser.run("return document.images.length"), json!(0));
    browser.until("/µs|ms|ns/.test(document.getElementById('p99').textContent)");

    // The key of a row can be tried.
    browser.run("document.querySelector('#card-login .offenders button').click()");
    assert_eq!(browser.run("return document.getElementById('try-limit').value"), json!("login"));
    browser.click("#look");
    answered(&browser, "used.");

    for (scheme, other) in [("light", "dark"), ("dark", "light")] {
        browser.media(scheme);
        for (name, width, height) in [("wall", 1440, 1100), ("phone", 360, 780)] {
            browser.size(width, height);
            sound(&browser, &format!("{scheme}, {name}"));
            accessible(&browser, &format!("{scheme}, {name}"));
            browser.picture(&format!("demo-{name}-{scheme}"));
        }
        // The button goes against what the system prefers.
        let paper = "getComputedStyle(document.body).backgroundColor";
        browser.run(&format!("window.paper = {paper}; document.getElementById('theme').click()"));
        browser.until(&format!("{paper} !== window.paper"));
        assert_eq!(browser.run("return document.documentElement.dataset.theme"), json!(other));
        browser.run("document.documentElement.removeAttribute('data-theme'); localStorage.clear()");
    }
}

#[test]
fn a_key_is_charged_denied_shown_by_its_hash_and_reset_with_the_token_alone() {
    let server = server::with_config(POLICY);
    let browser = Browser::start();
    browser.media("light");
    browser.size(1200, 900);
    browser.open(&format!("{}/", server.url()));
    browser.until("document.getElementById('link').dataset.state === 'live'");

    // Nothing was asked yet: the page says how.
    browser.until("document.querySelector('#card-login .empty code')");
    assert!(text(&browser, "#card-login .empty code").contains("\"limit\":\"login\""));
    sound(&browser, "empty");
    accessible(&browser, "empty");
    browser.picture("empty");

    // A charge counts, so the page asks first, and leaving the dialog charges nothing.
    try_key(&browser, "login", "user:secretive", "#charge");
    browser.until("document.getElementById('sure').open");
    assert_eq!(
        text(&browser, "#sure-words"),
        "1 is charged to user:secretive under login, as a request of a caller would be."
    );
    browser.click("#sure-no");
    browser.until("!document.getElementById('sure').open");
    for left in ["2 of 3 left", "1 of 3 left", "0 of 3 left"] {
        charge(&browser, "login", "user:secretive");
        answered(&browser, left);
    }
    charge(&browser, "login", "user:secretive");
    answered(&browser, "Denied. 0 of 3 left; try again in");
    for _ in 0..2 {
        charge(&browser, "mail", "campaign:spring");
        answered(&browser, "Allowed.");
    }
    charge(&browser, "mail", "campaign:spring");
    answered(&browser, "is in shadow mode and would have denied it.");
    charge(&browser, "login", "a:b:c:d");
    answered(&browser, "(400)");

    browser.until("document.querySelectorAll('#card-login .offenders tbody tr').length === 1");
    let shown = text(&browser, "#card-login .offenders tbody tr td button");
    assert!(
        shown.ends_with('…') && shown.trim_end_matches('…').chars().all(|c| c.is_ascii_hexdigit()),
        "{shown}"
    );
    let snapshot = server.get("/v1/snapshot").body;
    assert!(!snapshot.contains("secretive") && !snapshot.contains("sesame"), "{snapshot}");
    browser.until("document.querySelectorAll('#limit-mail .spark path')[1].getAttribute('d') !== ''");

    // The form still has the key; a wrong token is reported, and nothing is reset.
    let standing = || {
        try_key(&browser, "login", "user:secretive", "#look");
        browser.until("document.getElementById('answer').textContent.includes('used')");
        text(&browser, "#answer")
    };
    assert!(standing().starts_with("3 used."), "{}", standing());
    browser.click("#reset");
    browser.until("document.getElementById('sure').open");
    assert!(text(&browser, "#sure-words").starts_with("What user:secretive was charged under login"));
    accessible(&browser, "asking whether it is sure");
    browser.picture("sure");
    browser.type_in("#sure-token", "wrong");
    browser.click("#sure-yes");
    browser.until("document.getElementById('sure-problem').textContent.includes('not the admin token')");
    browser.click("#sure-no");
    assert!(standing().starts_with("3 used."));
    browser.click("#reset");
    browser.run("document.getElementById('sure-token').value = ''");
    browser.type_in("#sure-token", "open sesame");
    browser.click("#sure-yes");
    answered(&browser, "The key is full again.");
    assert!(standing().starts_with("0 used."));
    assert_eq!(browser.run("return JSON.stringify(localStorage) + document.cookie"), json!("{}"));
    // Regression: a look had the key in its address, which proxies log.
    let asked = browser.run("return performance.getEntriesByType('resource').map(one => one.name).join()");
    assert!(asked.to_string().contains("/v1/status") && !asked.to_string().contains("secretive"), "{asked}");
    sound(&browser, "after a reset");

    // A config with a mistake is reported until a better one comes.
    server.write_config(&POLICY.replace("limit = 3", "limit = 0"));
    browser.until(
        "document.querySelector('.alert[data-key=config]')?.textContent.includes('limits.login.limit')",
    );
    browser.until("document.getElementById('reloads').textContent.includes('refused')");
    accessible(&browser, "with a refused config");
    browser.picture("refused");
    server.write_config(&POLICY.replace("limit = 3", "limit = 4"));
    browser.until("!document.querySelector('.alert[data-key=config]')");
    browser.until("document.querySelector('#limit-login .pol').textContent.includes('4')");

    // The server ends though somebody looks, and the page says so.
    assert_eq!(server.stop().code, Some(0));
    browser.until("document.getElementById('link').dataset.state === 'lost'");
}

/// Regression: the line for a concurrency limit was a check, which is answered 400.
#[test]
fn the_command_of_an_idle_limit_charges_it() {
    let pool = "[limits.pool]\nstrategy = 'concurrency'\nlimit = 1\nlease = '1s'\n";
    let server = server::with_config(&format!("{POLICY}{pool}"));
    let browser = Browser::start();
    browser.size(1200, 900);
    browser.open(&format!("{}/", server.url()));
    browser.until("document.querySelectorAll('#rows tr.l').length === 3");
    for (limit, path) in [("login", "/v1/check"), ("pool", "/v1/reserve")] {
        browser.run(&format!(
            "document.querySelector('#card-{limit}') || document.querySelector('#limit-{limit} .name button').click()"
        ));
        browser.until(&format!("document.querySelector('#card-{limit} .empty code').textContent"));
        let line = text(&browser, &format!("#card-{limit} .empty code"));
        let start = format!("curl -s {}{path} -H 'content-type: application/json' -d '", server.url());
        let body = line.strip_prefix(&start).and_then(|body| body.strip_suffix('\''));
        let answer = server.post(path, body.unwrap_or_else(|| panic!("{line}")));
        assert_eq!(answer.status, 200, "{line}: {}", answer.body);
        let answer: Value = serde_json::from_str(&answer.body).expect("JSON");
        assert_eq!((&answer["allowed"], &answer["limits"][0]["limit"]), (&json!(true), &json!(limit)));
    }
}

#[test]
fn where_there_is_no_room_for_one_more_viewer_the_page_asks() {
    let server = server::with_config(POLICY);
    let viewers: Vec<TcpStream> = (0..100).map(|_| server::view(&server)).collect();
    let browser = Browser::start();
    browser.size(1200, 900);
    browser.open(&format!("{}/", server.url()));
    browser.until("document.getElementById('link').dataset.state === 'polling'");
    browser.until("document.querySelectorAll('#rows tr.l').length === 2");
    drop(viewers);
}

/// Sixty limits: those that deny first, idle ones folded, found by name, sorted as asked, and a longer range.
#[test]
fn sixty_limits_are_rows_of_which_those_that_deny_come_first() {
    let limit =
        |number: u32| format!("[limits.l{number:02}]\nstrategy = 'fixed_window'\nlimit = 1\nwindow = '1h'\n");
    let policy: String = (0..60).map(limit).collect();
    let server = server::with_config(&policy);
    let charge = |name: &str, times: u32| {
        for _ in 0..times {
            assert_eq!(
                server.post("/v1/check", &format!(r#"{{"limit":"{name}","key":"user:1"}}"#)).status,
                200
            );
        }
    };
    let browser = Browser::start();
    browser.media("light");
    browser.size(1400, 1000);
    browser.open(&format!("{}/", server.url()));
    browser.until("document.getElementById('link').dataset.state === 'live'");
    browser.until("document.getElementById('idle-count').textContent.startsWith('60 idle limits')");
    charge("l41", 1);
    charge("l07", 30);
    browser.until("document.getElementById('idle-count').textContent.startsWith('58 idle limits')");
    // Regression: what was allowed by counters in memory was shown as 0.
    browser.until("document.querySelector('#namespace-rows td:last-child').textContent === '2'");
    let names =
        "[...document.querySelectorAll('#rows tr.l .name button')].map(one => one.textContent).join()";
    browser.until(&format!("{names} === 'l07,l41'"));
    browser
        .until("[...document.getElementById('chips').children].some(one => one.textContent === 'Denying 1')");
    let tall = || browser.run("return document.documentElement.scrollHeight").as_u64().unwrap_or_default();
    let folded = tall();
    assert!(folded < 1_500, "{folded} px");

    // A card opens in place, with an axis, a legend and what happened; it is drawn over an hour and a day too.
    browser.click("#limit-l07 .name button");
    browser.until("document.querySelector('#card-l07 .plot svg text')");
    browser.until("document.querySelectorAll('#card-l07 .offenders tbody tr').length === 1");
    let rule = |count| format!("[limits.l07]\nstrategy = 'fixed_window'\nlimit = {count}\n");
    let changed = policy.replace(&rule(1), &rule(2));
    server.write_config(&format!("{changed}\n[limits.l60]\nunlimited = true\n"));
    browser.until(
        "[...document.querySelectorAll('#card-l07 .plot text.i')].some(one => one.textContent === 'reload')",
    );
    // The row has the mark too, and the card says what was changed.
    browser.until("document.querySelectorAll('#limit-l07 .spark rect.fi').length === 1");
    browser.until(
        "/^Changed .*1 per 1h.* → .*2 per 1h/.test(document.querySelector('#card-l07 .changed').textContent)",
    );
    for (range, words) in [("1h", "last hour"), ("24h", "last 24 h"), ("5m", "last 5 min")] {
        browser.click(&format!("#range [data-range=\"{range}\"]"));
        browser.until(&format!(
            "document.querySelector('#card-l07 .plot').getAttribute('aria-label').includes({})",
            json!(words)
        ));
        browser.until("document.querySelectorAll('#card-l07 .plot rect.fd').length > 0");
    }
    // By keyboard: the chart reads its values.
    browser.run("document.querySelector('#card-l07 .plot').focus()");
    browser.type_in("#card-l07 .plot", "\u{e010}");
    browser.until("/allowed/.test(document.querySelector('#card-l07 .plot p[aria-live]').textContent)");
    accessible(&browser, "a card of sixty");
    browser.picture("sixty-wall-light");

    // What is idle is found by name; `/` leads to the field.
    browser.run("document.activeElement.blur()");
    browser.type_in("body", "/");
    browser.until("document.activeElement.id === 'filter'");
    browser.type_in("#filter", "l5");
    browser.until(&format!("{names} === 'l50,l51,l52,l53,l54,l55,l56,l57,l58,l59'"));
    browser.run("document.getElementById('filter').value = 'zzz'; document.getElementById('filter').dispatchEvent(new Event('input'))");
    browser.until("!document.getElementById('none').hidden");
    browser.click("#clear");
    browser.run("document.getElementById('sort').value = 'name'; document.getElementById('sort').dispatchEvent(new Event('change'))");
    browser.until("document.querySelector('th[data-by=name]').getAttribute('aria-sort') === 'ascending'");
    browser.click("#heads th[data-by=name] button");
    browser.until(&format!("{names} === 'l41,l07'"));
    for (scheme, name, width, height) in [("dark", "phone", 390, 800), ("light", "narrow", 320, 700)] {
        browser.media(scheme);
        browser.size(width, height);
        sound(&browser, &format!("sixty, {name}"));
        accessible(&browser, &format!("sixty, {name}"));
        browser.picture(&format!("sixty-{name}-{scheme}"));
    }

    // Forty that are asked are forty rows; the mock has 1,929 px for sixty.
    browser.media("light");
    browser.size(1_400, 1_000);
    browser.run("document.getElementById('sort').value = 'denied'; document.getElementById('sort').dispatchEvent(new Event('change'))");
    browser.click("#limit-l07 .name button");
    for number in 0..40 {
        charge(&format!("l{number:02}"), 1 + number % 4);
    }
    browser.until("document.getElementById('idle-count').textContent.startsWith('20 idle limits')");
    browser.until("document.querySelectorAll('#rows tr.l').length === 41");
    browser.run("document.getElementById('sort').dispatchEvent(new Event('change'))");
    browser.until("document.querySelector('#rows tr.l .name button').textContent === 'l07'");
    let busy = tall();
    let row = (busy - folded) / 39;
    assert!((28..=44).contains(&row) && busy < 2_900, "{row} px for a row, {busy} px in all");
    sound(&browser, "forty of sixty");
    accessible(&browser, "forty of sixty");
    for (scheme, name, width, height) in [
        ("light", "wall", 1_400, 1_000),
        ("dark", "wall", 1_400, 1_000),
        ("dark", "phone", 390, 800),
        ("light", "narrow", 320, 700),
    ] {
        browser.media(scheme);
        browser.size(width, height);
        sound(&browser, &format!("forty of sixty, {name}"));
        browser.picture(&format!("forty-{name}-{scheme}"));
    }
    accessible(&browser, "forty of sixty, narrow");
}

/// Regression: the last bar of an hour or a day is not full, and was averaged and summed as if it were: 30 requests were shown as thousands.
#[test]
fn a_longer_range_shows_what_was_counted() {
    let server = server::with_config(POLICY);
    for number in 0..30 {
        let body = json!({ "limit": "mail", "key": format!("user:{}", number % 5) }).to_string();
        assert_eq!(server.post("/v1/check", &body).status, 200);
    }
    let browser = Browser::start();
    browser.size(1400, 1000);
    browser.open(&format!("{}/", server.url()));
    browser.until("document.getElementById('link').dataset.state === 'live'");
    let cells =
        "[...document.querySelector('#shadow-rows tr').cells].slice(1, 4).map(one => one.textContent).join()";
    for range in ["5m", "24h", "1h"] {
        // A second is counted in longer ranges when it is over for good; each click asks for them anew.
        let click = format!("document.querySelector('#range [data-range=\"{range}\"]').click()");
        browser.until(&format!("({click}, {cells} !== '0,0,0')"));
        assert_eq!(browser.run(&format!("return {cells}")), json!("30,0,20"), "{range}");
    }
    // The mean of a range is of all its seconds: five keys were allowed twice each.
    browser.click("#range [data-range=\"24h\"]");
    browser.run(
        "URL.createObjectURL = (blob) => { blob.text().then((text) => { window.saved = text; }); return '#'; };
         document.getElementById('csv').click();",
    );
    browser.until("window.saved?.includes('mail,')");
    let allowed = browser.run("return Number(window.saved.split('\\n').find(line => line.startsWith('mail,')).split(',')[5]) * 86400");
    assert!(allowed.as_f64().is_some_and(|allowed| (10.0..10.2).contains(&allowed)), "{allowed}");
}

#[test]
fn the_answers_have_the_fields_that_keep_a_page_safe() {
    let server = server::with_config(POLICY);
    for (path, kind) in [
        ("/", "text/html; charset=utf-8"),
        ("/page/page.css", "text/css; charset=utf-8"),
        ("/page/page.js", "text/javascript; charset=utf-8"),
    ] {
        let head = server.ask("HEAD", path, &[], "").lines.join("\n");
        for field in [
            &format!("content-type: {kind}"),
            "content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
             img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
            "x-content-type-options: nosniff",
            "referrer-policy: no-referrer",
            "cache-control: no-cache",
            "etag: \"",
        ] {
            assert!(head.contains(field), "{path} lacks {field}: {head}");
        }
    }
    for (path, kind) in [("/v1/events", "text/event-stream"), ("/v1/snapshot", "application/json")] {
        let head = server.ask("HEAD", path, &[], "").lines.join("\n");
        assert!(
            head.contains(&format!("content-type: {kind}")) && head.contains("cache-control: no-store"),
            "{head}"
        );
    }
    let snapshot: Value = serde_json::from_str(&server.get("/v1/snapshot").body).expect("JSON");
    assert_eq!(snapshot["limits"][0]["seconds"]["denied"].as_array().map(Vec::len), Some(300));
    assert_eq!((&snapshot["needs_token"], &snapshot["shows_keys"]), (&json!(true), &json!(false)));
}
