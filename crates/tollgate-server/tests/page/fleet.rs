//! The overview of several servers on one Redis: who is up, whether they have the same limits, latency over time, shadow limits, and the rows as a file.

use serde_json::json;
use tollgate_testkit::redis::RedisServer;

use crate::browser::Browser;
use crate::server::{self, Tollgate};
use crate::{accessible, sound, text};

fn start(redis: &RedisServer, name: &str, more: &str) -> Tollgate {
    server::with_config(&format!(
        r#"
[server]
name = "{name}"
grafana = "https://grafana.example.com/d/tollgate"
namespaces = ["user"]
[store]
mode = "redis"
timeout = "2s"
redis = {{ url = "{}" }}
[limits.login]
strategy = "fixed_window"
limit = 2
window = "1h"
[limits.mail]
strategy = "fixed_window"
limit = 1
window = "1h"
shadow = true
{more}"#,
        redis.url()
    ))
}

#[test]
fn all_servers_on_a_store_are_in_one_view() {
    let redis = RedisServer::start();
    let (one, two) =
        (start(&redis, "gate-1", ""), start(&redis, "gate-2", "[limits.more]\nunlimited = true\n"));
    for limit in ["login", "mail"] {
        for _ in 0..4 {
            one.post("/v1/check", &json!({ "limit": limit, "key": "user:1" }).to_string());
        }
    }
    let browser = Browser::start();
    browser.media("light");
    browser.size(1400, 1000);
    browser.open(&format!("{}/", one.url()));
    browser.until("document.getElementById('link').dataset.state === 'live'");
    browser.until("document.querySelectorAll('#fleet-rows tr').length === 2");
    assert_eq!(text(&browser, "#servers"), "2 servers");
    assert!(text(&browser, "#fleet-rows tr").starts_with("gate-1 this one"));
    browser.until("document.querySelector('.alert[data-key=revisions]')?.textContent.includes('gate-2')");
    browser.until("document.querySelector('#latency-chart path.line')");
    browser.until("document.getElementById('namespace-rows').textContent.includes('user')");
    browser.until("document.querySelector('#shadow-rows tr td:nth-child(4)')?.textContent === '3'");
    assert_eq!(
        browser.run("return document.getElementById('grafana').href"),
        json!("https://grafana.example.com/d/tollgate")
    );
    // Who decides what under a limit: this server denies, the other one does nothing.
    browser.click("#limit-login .name button");
    let by_server = "[...document.querySelectorAll('#card-login .by-server tbody tr')].map(row => [...row.cells].map(one => one.textContent).join()).join(' ')";
    browser.run("setInterval(() => fetch('/v1/check', { method: 'POST', headers: { 'content-type': 'application/json' }, body: '{\"limit\":\"login\",\"key\":\"user:1\"}' }), 200)");
    browser.until(&format!("/^gate-1 this one,[1-9][0-9.]*,0 gate-2,0,0$/.test({by_server})"));
    // All servers together, in a row below them and, if asked for, in the rows of the limits.
    let ask = |server: &Tollgate| {
        server.post("/v1/check", &json!({ "limit": "login", "key": "user:1" }).to_string());
    };
    let together = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Not for ever: what fails beside it waits for its end.
            for _ in (0..1_200).take_while(|_| !together.load(std::sync::atomic::Ordering::Relaxed)) {
                (0..4).for_each(|_| ask(&two));
                std::thread::sleep(std::time::Duration::from_millis(100));
            }
        });
        let number = |selector: &str| {
            format!("Number(document.querySelector('{selector}').textContent.replace(',', ''))")
        };
        let (own, all) = ("#fleet-rows tr:nth-child(1) td:nth-child(4)", "#fleet-all td:nth-child(4)");
        browser.until(&format!("{} > 1 && {} > 3 * {}", number(own), number(all), number(own)));
        let (row, sum) = ("#limit-login .d b", "#sum-denied");
        browser.until(&format!("{} < 10 && {} < 10", number(row), number(sum)));
        browser.click("#scope [data-scope=all]");
        browser.until(&format!("{} > 15 && {} > 15", number(row), number(sum)));
        browser.click("#scope [data-scope=this]");
        browser.until(&format!("{} < 10 && {} < 10", number(row), number(sum)));
        browser.click("#scope [data-scope=all]");
        together.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    browser.run(
        "URL.createObjectURL = (blob) => { blob.text().then((text) => { window.saved = text; }); return '#'; };
         document.getElementById('csv').click();",
    );
    browser.until(
        "window.saved?.startsWith('limit,policy,strategy') && window.saved.includes('login,2 per 1h window')",
    );
    for (scheme, name, width, height) in
        [("light", "wall", 1400, 1000), ("dark", "phone", 390, 800), ("light", "narrow", 320, 700)]
    {
        browser.media(scheme);
        browser.size(width, height);
        sound(&browser, &format!("fleet, {name}"));
        accessible(&browser, &format!("fleet, {name}"));
        browser.picture(&format!("fleet-{name}-{scheme}"));
    }
    two.stop();
    browser.until("document.querySelectorAll('#fleet-rows tr').length === 1");
    browser.until("!document.querySelector('.alert[data-key=revisions]')");
}
