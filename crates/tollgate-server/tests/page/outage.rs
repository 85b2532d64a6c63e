//! The page while the store is down: what is wrong in one line, which limits fall back, the time of it in the charts, and a bar that stays in view.

use serde_json::json;
use tollgate_testkit::redis::RedisServer;

use crate::browser::Browser;
use crate::server;
use crate::{accessible, sound, text};

/// Whether a chart has a band with these words.
fn band(chart: &str) -> String {
    format!(
        "document.querySelector('{chart} rect.band') && [...document.querySelectorAll('{chart} text')].some(one => one.textContent === 'store down')"
    )
}

#[test]
fn an_outage_is_an_alert_a_tag_a_band_and_a_state_that_stays_in_view() {
    let redis = RedisServer::start();
    let server = server::with_config(&format!(
        "[store]\nmode = \"redis\"\nredis = {{ url = \"{}\" }}\n\
         [limits.login]\nstrategy = \"fixed_window\"\nlimit = 2\nwindow = \"1h\"\nfallback = \"local\"\n\
         [limits.mail]\nstrategy = \"fixed_window\"\nlimit = 5\nwindow = \"1h\"\nfallback = \"closed\"\n",
        redis.url()
    ));
    let browser = Browser::start();
    browser.media("light");
    browser.size(1400, 700);
    browser.open(&format!("{}/", server.url()));
    browser.until("document.getElementById('link').dataset.state === 'live'");
    browser.until("document.getElementById('store').textContent === 'redis: up'");
    // Traffic for as long as the page is open.
    browser.run(
        "const body = JSON.stringify({ limit: 'login', key: 'user:1' });
         setInterval(() => fetch('/v1/check', { method: 'POST', headers: { 'content-type': 'application/json' }, body }), 100)",
    );
    browser.until("document.querySelector('#limit-login td:last-child').textContent === 'remote'");
    assert_eq!(browser.run("return document.querySelectorAll('.alert').length"), json!(0));
    assert_eq!(browser.run("return document.querySelectorAll('#all-chart rect.band').length"), json!(0));

    redis.kill();
    browser.until("document.querySelector('.alert[data-key=store]')");
    let alert = text(&browser, ".alert[data-key=store]");
    assert!(alert.starts_with("The store is down, and limits fall back."), "{alert}");
    assert!(alert.contains("redis since ") && alert.contains("local: login"), "{alert}");
    assert!(alert.contains("closed: mail"), "{alert}");
    browser.until("document.getElementById('store').dataset.state === 'down'");
    browser.until(
        "document.querySelector('#limit-login td:last-child .tag.warn')?.textContent === 'fallback: local'",
    );
    assert_eq!(text(&browser, "#limit-mail td:last-child"), "remote", "nothing was asked of it");
    browser
        .until("[...document.getElementById('chips').children].some(one => one.textContent === 'Fallback 1' && !one.hidden)");
    browser.until(&band("#all-chart"));
    browser.until("document.querySelector('#limit-login .spark rect.band')");
    // The card of the first of few idle limits is open from the start.
    browser.until("document.querySelector('#card-login .plot svg')");
    browser.until(&band("#card-login .plot"));
    sound(&browser, "an outage");
    accessible(&browser, "an outage");
    browser.picture("outage-wall-light");

    // The bar stays when the rest is scrolled away, with the state of the store, of the connection and the totals.
    for (scheme, name, width, height) in [("light", "wall", 1400, 500), ("dark", "phone", 390, 800)] {
        browser.media(scheme);
        browser.size(width, height);
        browser.run("window.scrollTo(0, document.documentElement.scrollHeight)");
        browser.until("window.scrollY > 100");
        let is_in_view = |id: &str| {
            format!(
                "(() => {{ const box = document.getElementById('{id}').getBoundingClientRect();
                   return box.height > 0 && box.top >= 0 && box.bottom <= innerHeight
                     && document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2)?.closest('.bar') !== null; }})()"
            )
        };
        browser.until(&is_in_view("store"));
        browser.until(&is_in_view("link"));
        assert!(text(&browser, "#store").starts_with("redis: "), "{}", text(&browser, "#store"));
        assert_eq!(text(&browser, "#link"), "live");
        sound(&browser, &format!("an outage, {name}"));
        browser.picture(&format!("outage-{name}-{scheme}-scrolled"));
    }
    browser.size(1400, 500);
    browser.until("!document.getElementById('totals').hidden");

    // It ends: the alert and the tag go, the band stays where it was.
    redis.restart();
    browser.until("!document.querySelector('.alert[data-key=store]')");
    browser.until("document.getElementById('store').textContent === 'redis: up'");
    browser.until("document.querySelector('#limit-login td:last-child').textContent === 'remote'");
    browser.until(&band("#all-chart"));
}
