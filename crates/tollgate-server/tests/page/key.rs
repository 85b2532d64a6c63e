//! The page of one key: its limits with bars, the last decisions, an override that is set and removed with the token, and what was changed.

use serde_json::json;

use crate::browser::Browser;
use crate::server::{self, Tollgate};
use crate::{accessible, sound, text};

const POLICY: &str = r#"
[server]
admin_token = "open sesame"
[limits.login]
strategy = "fixed_window"
limit = 3
window = "1h"
[limits.api]
strategy = "token_bucket"
rate = "1/h"
burst = 20
overrides = { "tenant:initech" = { burst = 40 } }
[limits.mail]
strategy = "sliding_window"
limit = 2
window = "1h"
shadow = true
[limits.uploads]
strategy = "concurrency"
limit = 3
lease = "1h"
[limits.free]
unlimited = true
"#;

const KEY: &str = "tenant:initech";

fn charge(server: &Tollgate, limit: &str, times: usize) {
    for _ in 0..times {
        let body = json!({ "limit": limit, "key": KEY }).to_string();
        assert_eq!(server.post("/v1/check", &body).status, 200);
    }
}

fn open(server: &Tollgate) -> Browser {
    let browser = Browser::start();
    browser.media("light");
    browser.size(1400, 1000);
    browser.open(&format!("{}/key", server.url()));
    browser.until("document.getElementById('link').dataset.state === 'live'");
    sound(&browser, "no key");
    accessible(&browser, "no key");
    browser.type_in("#key-text", KEY);
    browser.click("#key-open button");
    browser.until("document.getElementById('key-problem').textContent === 'This needs the admin token.'");
    browser.type_in("#key-token", "open sesame");
    browser.click("#key-open button");
    browser.until(&format!("document.getElementById('key-name').textContent === {}", json!(KEY)));
    browser
}

/// Chooses in the form of the override.
fn choose(browser: &Browser, limit: &str, what: &str, ends: &str) {
    browser.run(&format!(
        "const limit = document.getElementById('key-limit');
         limit.value = {}; limit.dispatchEvent(new Event('change'));
         document.querySelector('#key-override [name=do][value={what}]').click();
         document.querySelector('#key-override [name=ends][value=\"{ends}\"]').click();",
        json!(limit)
    ));
}

/// Says that it is meant.
fn agree(browser: &Browser) {
    browser.until("document.getElementById('sure').open");
    browser.click("#sure-yes");
    browser.until("!document.getElementById('sure').open");
}

/// A look changes nothing, a charge asks first and counts.
fn tried_and_charged(browser: &Browser, server: &Tollgate) {
    let used = || server.get(&format!("/v1/status?limit=api&key={KEY}")).body;
    browser.until("document.getElementById('key-try-limit').value === 'login'");
    browser.click("#key-try button[type=submit]");
    browser.until("document.getElementById('key-answer').textContent.startsWith('Would be denied. 0 of 3 left; try again in')");
    browser.run("document.getElementById('key-try-limit').value = 'api'; document.getElementById('key-try-cost').value = '2'");
    browser.click("#key-try button[type=submit]");
    browser.until("document.getElementById('key-answer').textContent.startsWith('Would be allowed. ')");
    assert!(used().contains("\"used\":7"), "{}", used());
    browser.click("#key-charge");
    agree(browser);
    browser.until("document.getElementById('key-answer').textContent.startsWith('Allowed. 31 of 40 left')");
    assert!(used().contains("\"used\":9"), "{}", used());
    browser.until("document.getElementById('key-limits').textContent.includes('9 of 40')");
}

#[test]
fn a_key_is_looked_at_blocked_raised_and_as_before() {
    let server = server::with_config(POLICY);
    charge(&server, "login", 5);
    charge(&server, "mail", 3);
    charge(&server, "api", 7);
    let browser = open(&server);

    // Fullest first, shadow after what truly denies, and the override of the config is named.
    browser.until(
        "document.getElementById('key-says').textContent.startsWith('Being denied by login: 0 of 3 left')",
    );
    let names = "[...document.querySelectorAll('#key-limits b.mono')].map(one => one.textContent).join()";
    browser.until(&format!("{names} === 'login,api,mail'"));
    assert!(text(&browser, "#key-limits tr:nth-child(2)").contains("7 of 40"));
    assert!(text(&browser, "#key-limits tr:nth-child(2)").contains("override of the config"));
    assert!(text(&browser, "#key-others").starts_with("Under 2 other limits"));
    assert_eq!(text(&browser, "#key-limits tr:nth-child(1) td:nth-child(7)"), "here");
    tried_and_charged(&browser, &server);
    browser.until("[...document.querySelectorAll('#key-decisions tr')].filter(one => one.textContent.includes('denied')).length >= 3");
    browser.click("#key-which [data-which=denied]");
    browser.until("document.querySelectorAll('#key-decisions tr').length === 2");
    browser.click("#key-which [data-which=all]");
    browser.run("document.getElementById('key-of').value = 'login'; document.getElementById('key-of').dispatchEvent(new Event('change'))");
    browser.until("document.querySelectorAll('#key-chart rect.fd').length > 0");

    // A sentence first, then the token; the key passes again, and what it used stays counted.
    choose(&browser, "login", "raise", "3600");
    browser.run("const limit = document.getElementById('key-limit-value'); limit.value = '9'; limit.dispatchEvent(new Event('input', { bubbles: true }))");
    browser.type_in("#key-reason", "ticket 4711");
    browser.until("/login for tenant:initech: limit 9 instead of 3 per 1h window, until .*What it has used stays counted/.test(document.getElementById('key-sentence').textContent)");
    browser.click("#key-set");
    browser.until("document.getElementById('sure').open");
    assert!(text(&browser, "#sure-words").contains("limit 9 instead of 3 per 1h window"));
    accessible(&browser, "asking whether it is sure");
    agree(&browser);
    browser.until("document.getElementById('key-limits').textContent.includes('3 of 9')");
    browser.until("document.getElementById('key-limits').textContent.includes('ticket 4711')");
    browser.until("document.getElementById('key-changes').textContent.includes('page set login to limit 9')");
    browser.until("document.getElementById('key-says').textContent.startsWith('No limit denies it now.')");
    let status = server.get("/v1/status?limit=login&key=tenant:initech").body;
    assert!(status.contains("\"capacity\":9") && status.contains("\"used\":3"), "{status}");

    choose(&browser, "free", "raise", "3600");
    browser.until("document.getElementById('key-set').disabled");
    choose(&browser, "free", "block", "");
    browser.until("document.getElementById('key-sentence').textContent.includes('every request is denied instead of unlimited, with no end')");
    browser.click("#key-set");
    agree(&browser);
    browser
        .until("document.getElementById('key-says').textContent.startsWith('Being denied by free: blocked')");
    for (scheme, name, width, height) in [
        ("light", "wall", 1400, 1000),
        ("dark", "phone", 390, 800),
        ("light", "narrow", 320, 700),
        ("dark", "wall", 1400, 1000),
    ] {
        browser.media(scheme);
        browser.size(width, height);
        sound(&browser, &format!("key, {name}"));
        accessible(&browser, &format!("key, {name} {scheme}"));
        browser.picture(&format!("key-{name}-{scheme}"));
    }
    browser.size(1400, 1000);
    choose(&browser, "free", "none", "");
    browser.click("#key-set");
    agree(&browser);
    browser.until(
        "document.getElementById('key-changes').textContent.includes('page removed the override of free')",
    );
    assert!(
        server
            .post("/v1/check", &json!({ "limit": "free", "key": KEY }).to_string())
            .body
            .contains("\"allowed\":true")
    );

    // A reset needs to be meant too.
    choose(&browser, "login", "raise", "3600");
    browser.click("#key-reset");
    agree(&browser);
    browser.until("document.getElementById('key-limits').textContent.includes('0 of 9')");

    // The key is in no address, nothing is kept in the browser, and the log does not have it.
    assert!(browser.run("return location.href").as_str().is_some_and(|url| url.ends_with("/key")));
    let asked = browser.run("return performance.getEntriesByType('resource').map(e => e.name).join()");
    assert!(!asked.to_string().contains("initech"), "{asked}");
    assert_eq!(browser.run("return JSON.stringify(localStorage) + document.cookie"), json!("{}"));
    server.stop();
    assert!(!server.output().contains("initech"), "{}", server.output());
}

/// Regression: the chart showed 0 where decisions were not kept any more, as if nothing had been asked.
#[test]
fn a_chart_says_where_the_decisions_of_a_key_end() {
    let server = server::with_config(POLICY);
    // Denials of other costs have rows of their own, of which so many are kept.
    for cost in 1..=250 {
        let body = json!({ "limit": "login", "key": KEY, "cost": 3 + cost }).to_string();
        assert_eq!(server.post("/v1/check", &body).status, 200);
    }
    let browser = open(&server);
    browser.until("document.querySelectorAll('#key-chart rect.band.n').length === 1");
    browser.until(
        "[...document.querySelectorAll('#key-chart text.n')].some(one => one.textContent === 'not kept')",
    );
    let says = text(&browser, "#key-kept");
    assert!(says.contains("at most 200 of all limits together, none missing since"), "{says}");
    assert!(says.contains("counts in memory"), "{says}");
    browser.click("#key-range [data-range=\"24h\"]");
    browser.click("#key-numbers summary");
    // Of the oldest bar nothing is known; the newest has the denials.
    browser.until(
        "document.querySelector('#key-numbers tbody tr:last-child td:last-child').textContent === '–'",
    );
    browser.until(
        "document.querySelector('#key-numbers tbody tr:first-child td:last-child').textContent !== '–'",
    );
    sound(&browser, "a key of which not all is kept");
    accessible(&browser, "a key of which not all is kept");
    browser.picture("key-not-kept-light");
}

/// An operator who sees only hashes gets from a denied key to its page. The key is in no address there either.
#[test]
fn a_denied_key_is_opened_by_its_hash() {
    let server = server::with_config(POLICY);
    charge(&server, "login", 5);
    let browser = Browser::start();
    browser.media("light");
    browser.size(1400, 1000);
    browser.open(&format!("{}/", server.url()));
    browser.until("document.querySelector('#limit-login .d b')");
    browser.run("document.querySelector('#card-login') || document.querySelector('#limit-login .name button').click()");
    browser.until("document.querySelector('#card-login .offenders a[href]')");
    accessible(&browser, "a denied key with a link");
    browser.click("#card-login .offenders a");
    browser.until("document.getElementById('key-problem').textContent === 'This needs the admin token.'");
    browser.type_in("#key-token", "open sesame");
    browser.click("#key-open button");
    browser.until(&format!("document.getElementById('key-name').textContent === {}", json!(KEY)));
    let address = browser.run("return location.pathname + location.hash");
    let address = address.as_str().expect("a text");
    let hash = address.strip_prefix("/key#").unwrap_or_else(|| panic!("{address}"));
    assert!(hash.len() == 32 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()), "{address}");
    assert_eq!(text(&browser, "#key-hash"), format!("hash {}…", &hash[..12]));
    // What only looks like a hash is a key.
    let digits = "0123456789abcdef".repeat(2);
    browser.run("document.getElementById('key-text').value = ''");
    browser.type_in("#key-text", &digits);
    browser.click("#key-open button");
    browser.until(&format!("document.getElementById('key-name').textContent === '{digits}'"));
    browser.until("document.getElementById('key-problem').textContent.startsWith('no key with this hash')");
}

/// Sixty limits: only those that the key meets are rows.
#[test]
fn a_key_that_meets_few_of_sixty_limits_has_few_rows() {
    let limit =
        |number: u32| format!("[limits.l{number:02}]\nstrategy = 'fixed_window'\nlimit = 5\nwindow = '1m'\n");
    let policy: String = (0..60).map(limit).collect();
    let server = server::with_config(&format!("[server]\nadmin_token = \"open sesame\"\n{policy}"));
    charge(&server, "l41", 2);
    charge(&server, "l07", 40);
    let browser = open(&server);
    let names = "[...document.querySelectorAll('#key-limits b.mono')].map(one => one.textContent).join()";
    browser.until(&format!("{names} === 'l07,l41'"));
    assert!(text(&browser, "#key-others").starts_with("Under 58 other limits"));

    // The limit is a line in the chart, which has a range, and all that is kept can be listed.
    browser.until("document.querySelector('#key-chart path.cap')");
    browser.until("document.querySelectorAll('#key-decisions tr').length === 20");
    browser.click("#key-more");
    browser.until("document.querySelectorAll('#key-decisions tr').length >= 30");
    browser.run("window.scrollTo(0, 0)"); // or the bar that stays covers it
    browser.click("#key-range [data-range=\"24h\"]");
    browser.until("document.getElementById('key-chart').getAttribute('aria-label').includes('last 24 h')");
    browser.until("document.querySelectorAll('#key-chart rect.fd').length > 0");
    accessible(&browser, "a key of sixty limits");
    browser.picture("key-sixty");
}
