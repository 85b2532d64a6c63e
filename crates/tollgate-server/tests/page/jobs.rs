//! The view of background jobs, on a real PostgreSQL whose rows were made by the gate that workers go through.

use serde_json::{Value, json};
use tollgate::config::Config;
use tollgate_jobs::{Job, JobDecision, JobGate, JobsConfig, RunPermit};
use tollgate_testkit::postgres::PostgresServer;

use crate::browser::Browser;
use crate::server::{self, Tollgate};
use crate::{accessible, sound, text};

fn policy(url: &str) -> String {
    format!(
        r#"
[server]
admin_token = "open sesame"
[store]
mode = "postgres"
timeout = "2s"
postgres = {{ url = "{url}" }}
[jobs]
global = {{ limit = 1000, window = "1h" }}
[jobs.queues.mail]
limit = 10
window = "1h"
[jobs.types.send_email]
limit = 2
window = "1h"
[jobs.types.sync_crm]
concurrency = 1
lease = "1h"
[jobs.types.per_tenant]
limit = 1
window = "1h"
key = "tenant"
"#
    )
}

/// Workers' side: so many runs, and all others wait. What runs at once is held.
struct Workers {
    gate: JobGate,
    runtime: tokio::runtime::Runtime,
    running: Vec<RunPermit>,
}

impl Workers {
    fn new(config: &str) -> Workers {
        let mut jobs = JobsConfig::default();
        let config = Config::parse_with(config, [], &mut [&mut jobs]).expect("a config");
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let gate = runtime.block_on(async {
            JobGate::from_config(&config, &jobs).await.expect("a database").connect().await.expect("tables")
        });
        Workers { gate, runtime, running: Vec::new() }
    }

    /// Jobs of a type come in; answers how many run.
    fn come(&mut self, job_type: &str, count: usize, tenant: &str) -> usize {
        let arguments = || json!({ "tenant": tenant });
        let before = self.running.len();
        for number in 0..count {
            let id = format!("{job_type}-{tenant}{number}");
            let job = Job::new(&id, job_type, "mail").with_arguments(&arguments);
            let plan = self.gate.plan(&job).expect("a policy");
            match self.runtime.block_on(self.gate.enter(&plan)) {
                JobDecision::Run(permit) => self.running.push(permit),
                JobDecision::Delay(_) => {}
                other => panic!("{other:?}"),
            }
        }
        self.running.len() - before
    }
}

fn open(server: &Tollgate) -> Browser {
    let browser = Browser::start();
    browser.media("light");
    browser.size(1400, 1000);
    browser.open(&format!("{}/jobs", server.url()));
    browser.until("document.getElementById('link').dataset.state === 'live'");
    browser
}

/// What the cells of a key say.
fn cells(browser: &Browser, key: &str) -> Vec<String> {
    let row = browser.run(&format!(
        "return [...document.querySelector('#jobs-keys tr[data-key={}]').cells].map(cell => cell.textContent)",
        json!(key)
    ));
    let cell = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    row.as_array().expect("a row").iter().map(cell).collect()
}

fn number(text: &str) -> u64 {
    text.trim().parse().unwrap_or_else(|_| panic!("{text:?} is no number"))
}

/// Each window of a type has a bar of its own, and when it resets is that of the one that holds jobs up.
#[test]
fn every_limit_of_a_key_has_a_bar() {
    let database = PostgresServer::start();
    let also = "[jobs.types.report]\nlimit = 8\nwindow = \"1h\"\nalso = [{ limit = 2, window = \"1m\" }]\n";
    let config = format!("{}{also}", policy(&database.url("postgres")));
    let mut workers = Workers::new(&config);
    let server = server::with_config(&config);
    let browser = open(&server);
    assert_eq!(workers.come("report", 3, ""), 2);
    let bars = "[...document.querySelectorAll('#jobs-keys tr[data-key=\"job:report\"] .meter')]";
    browser.until(&format!("{bars}.map(bar => bar.textContent).join() === '2 of 8,2 of 2'"));
    let labels = browser.run(&format!("return {bars}.map(bar => bar.firstChild.getAttribute('aria-label'))"));
    assert_eq!(labels, json!(["8 in any 1h: 2 of 8 used", "2 in any 1m: 2 of 2 used"]));
    let resets = cells(&browser, "job:report")[2].clone();
    assert!(resets.ends_with(" s") || resets == "1 min", "the full window resets within a minute: {resets}");
    sound(&browser, "jobs, two windows");
    accessible(&browser, "jobs, two windows");
}

#[test]
fn s28_status_and_page_equal_the_database() {
    let database = PostgresServer::start();
    let config = policy(&database.url("postgres"));
    let mut workers = Workers::new(&config);
    let server = server::with_config(&config);
    let browser = open(&server);

    // Nobody waits yet.
    browser.until("document.getElementById('jobs-done-at').textContent === 'nothing waits'");
    browser.until("document.querySelectorAll('#jobs-keys tr[data-key]').length === 5");
    sound(&browser, "jobs, empty");
    accessible(&browser, "jobs, empty");
    browser.picture("jobs-empty");

    assert_eq!(workers.come("send_email", 7, ""), 2);
    assert_eq!(workers.come("sync_crm", 3, ""), 1);
    assert_eq!(workers.come("per_tenant", 2, "secretive"), 1);
    browser.until("document.getElementById('jobs-sum-waiting').textContent === '8'");

    // Each number of the page is that of the tables.
    let value = |sql: &str| number(&database.psql(sql));
    assert_eq!(value("select count(*) from tollgate_job_waiting"), 8);
    for (key, count, waiting) in [
        ("job:send_email", "2 of 2", 5),
        ("job:sync_crm", "1 of 1", 2),
        ("queue:mail", "4 of 10", 0),
        ("global", "4 of 1,000", 0),
    ] {
        browser.until(&format!(
            "document.querySelector('#jobs-keys tr[data-key={}]').cells[1].textContent === {}",
            json!(key),
            json!(count)
        ));
        let cells = cells(&browser, key);
        assert_eq!(number(&cells[4]), waiting, "{key}: {cells:?}");
        let in_table = format!("select count(distinct job) from tollgate_job_line where label = '{key}'");
        assert_eq!(value(&in_table), waiting, "{key}");
    }
    // What became of jobs in the last hour, which workers write down every five seconds.
    browser.until("document.querySelector('#jobs-keys tr[data-key=\"job:send_email\"]').cells[8].textContent === '5 delayed'");
    let hour = |what: &str, label: &str| {
        value(&format!("select sum({what}) from tollgate_job_history where label = '{label}'"))
    };
    assert_eq!((hour("delayed", "job:send_email"), hour("started", "job:send_email")), (5, 2));
    assert_eq!(cells(&browser, "job:sync_crm")[8], "2 delayed");
    assert_eq!(cells(&browser, "global")[8], "0");
    let facts = browser.run(
        "return [...document.querySelectorAll('#jobs-facts dd')].slice(0, 4).map(fact => fact.textContent)",
    );
    assert_eq!(facts, json!(["4", "8", "0", "0"]), "started, delayed, failed, skipped");
    assert_eq!((hour("started", ""), hour("delayed", ""), hour("started", "queue:mail")), (4, 8, 4));
    // And the last that were held up, the newest first.
    browser.until("document.querySelectorAll('#jobs-lately tr').length === 8");
    let lately = browser.run(
        "return [...document.querySelectorAll('#jobs-lately tr')].map(row => [...row.cells].slice(1).map(cell => cell.textContent))",
    );
    let newest = "select job_type || ' ' || label from tollgate_job_lately order by at_us desc, id desc";
    let in_table = database.psql(newest);
    for (row, line) in lately.as_array().expect("rows").iter().zip(in_table.lines()) {
        let (job_type, label) = line.split_once(' ').expect("two words");
        assert_eq!(row[0], job_type, "{lately} and {in_table}");
        let what = row[1].as_str().unwrap_or_default();
        assert!(what.starts_with("delayed ") && what.ends_with(&format!(" by {label}")), "{what} and {line}");
    }
    assert_eq!(lately[0][0], "per_tenant");
    assert!(lately[7][1].as_str().is_some_and(|what| what.contains("min")), "{lately}");
    assert_eq!(cells(&browser, "job:sync_crm")[3], "1", "as many run as hold a lease");
    assert_eq!(cells(&browser, "job:sync_crm")[2], "as they end");
    let resets = cells(&browser, "job:send_email")[2].clone();
    assert!(resets.starts_with("59 min") || resets == "1 h", "{resets}");
    assert_eq!(cells(&browser, "job:per_tenant")[1], "each tenant is counted by itself");
    // Slots, by the database's clock. A browser shows seconds, and rounding up may add a millisecond.
    let shown = |us: u64, options: &str| {
        let at = format!("new Date({us} / 1000).toLocaleTimeString([], {{ hour12: false, {options} }})");
        browser.run(&format!("return {at}")).as_str().unwrap_or_default().to_owned()
    };
    let (hours, seconds) =
        ("hour: '2-digit', minute: '2-digit'", "hour: '2-digit', minute: '2-digit', second: '2-digit'");
    let equal = |cell: &str, us: u64, options: &str| {
        let is_so = [us, us + 1_000].iter().any(|us| cell.contains(&shown(*us, options)));
        assert!(is_so, "{cell:?} has not {}", shown(us, options));
    };
    for key in ["job:send_email", "job:per_tenant"] {
        let cells = cells(&browser, key);
        let slot = |which: &str| {
            value(&format!("select {which}(slot_us) from tollgate_job_line where label = '{key}'"))
        };
        equal(&cells[5], slot("min"), seconds);
        equal(&cells[6], slot("max"), hours);
    }
    equal(&text(&browser, "#jobs-done-at"), value("select max(slot_us) from tollgate_job_waiting"), hours);
    let line = || {
        browser.run("return [...document.querySelectorAll('#jobs-line tr')].map(row => row.cells[1].title)")
    };
    let in_table = database.psql("select job from tollgate_job_waiting order by slot_us, job");
    let in_table: Vec<&str> = in_table.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    // Without the token, no id of a job is shown, and as many hashes.
    let everything = browser.run("return document.documentElement.outerHTML").to_string();
    let public = server.get("/v1/jobs").body;
    assert!(in_table.iter().all(|job| !everything.contains(job) && !public.contains(job)), "{public}");
    assert_eq!(line().as_array().map(Vec::len), Some(in_table.len()));
    browser.click("#jobs-ids");
    browser.until("document.getElementById('sure').open");
    browser.type_in("#sure-token", "wrong");
    browser.click("#sure-yes");
    browser.until("document.getElementById('sure-problem').textContent.includes('not the admin token')");
    browser.run("document.getElementById('sure-token').value = ''");
    browser.type_in("#sure-token", "open sesame");
    browser.click("#sure-yes");
    browser.until("document.getElementById('jobs-ids').hidden && !document.getElementById('sure').open");
    assert_eq!(line(), json!(in_table));
    browser.run("document.getElementById('sure-token').value = ''");
    // And so does the API, and the gate that the workers have.
    let answer = server.ask("GET", "/v1/jobs", &["authorization: Bearer open sesame"], "");
    assert!(in_table.iter().all(|job| answer.body.contains(job)), "{}", answer.body);
    let answer: Value = serde_json::from_str(&answer.body).expect("JSON");
    assert_eq!(server.ask("GET", "/v1/jobs", &["authorization: Bearer wrong"], "").status, 401);
    let email = &answer["keys"][0];
    assert_eq!(
        (&email["key"], &email["waiting"], &email["limits"][0]["count"]),
        (&json!("job:send_email"), &json!(5), &json!(2))
    );
    let forecast = answer["forecast"]["waiting"].as_array().expect("points");
    assert_eq!((forecast.first(), forecast.last()), (Some(&json!(8)), Some(&json!(0))));
    assert!(forecast.windows(2).all(|two| two[0].as_u64() >= two[1].as_u64()), "{forecast:?}");
    let status = workers.runtime.block_on(workers.gate.status("job:send_email")).expect("a status");
    assert_eq!((status.count, status.limit, status.waiting), (2, 2, 5));

    for (scheme, name, width, height) in
        [("light", "wall", 1400, 1000), ("dark", "phone", 390, 800), ("light", "narrow", 320, 700)]
    {
        browser.media(scheme);
        browser.size(width, height);
        sound(&browser, &format!("jobs, {scheme}, {name}"));
        accessible(&browser, &format!("jobs, {scheme}, {name}"));
        browser.picture(&format!("jobs-{name}-{scheme}"));
    }
    browser.size(1400, 1000);
    browser.media("light");
    let everything = browser.run("return document.documentElement.outerHTML");
    let everything = everything.as_str().unwrap_or_default();
    assert!(!everything.contains("job:per_tenant:") && !answer.to_string().contains("job:per_tenant:"));

    closes_and_opens(&browser, &server, &database);

    // A database that is gone is shown as such; when it is back, so is all else.
    database.stop();
    browser.until("document.querySelector('.alert[data-key=jobs-database]')?.textContent.includes('it does not answer')");
    accessible(&browser, "without the jobs' database");
    browser.picture("jobs-down");
    database.resume();
    browser.until("!document.querySelector('.alert[data-key=jobs-database]')");
}

/// A key is closed and opened on the page, with the token alone, after the page has said what that does.
fn closes_and_opens(browser: &Browser, server: &Tollgate, database: &PostgresServer) {
    let closed =
        || number(&database.psql("select count(*) from tollgate_job_closed where label = 'queue:mail'"));
    browser.click("#jobs-close");
    browser.until("document.getElementById('sure').open");
    assert!(text(browser, "#sure-words").starts_with("No job that is charged to it starts, on any worker"));
    browser.run("document.getElementById('close-key').value = 'queue:mail'");
    browser.type_in("#close-reason", "maintenance <b>");
    accessible(browser, "asking whether to close");
    browser.picture("jobs-close");
    browser.type_in("#sure-token", "wrong");
    browser.click("#sure-yes");
    browser.until("document.getElementById('sure-problem').textContent.includes('not the admin token')");
    assert_eq!(closed(), 0);
    browser.run("document.getElementById('sure-token').value = ''");
    browser.type_in("#sure-token", "open sesame");
    browser.click("#sure-yes");
    browser.until("document.getElementById('jobs-said').textContent === 'queue:mail is closed for 5 min.'");
    assert_eq!(closed(), 1);
    browser.until(
        "document.querySelector('#jobs-closed tr')?.textContent.includes('by an admin: maintenance <b>')",
    );
    browser.until("document.querySelector('.alert[data-key=jobs-closed]')?.textContent.startsWith('queue:mail is closed until')");
    browser.until(
        "document.querySelector('#jobs-keys tr[data-key=\"queue:mail\"] .tag')?.textContent === 'closed'",
    );
    accessible(browser, "with a closed key");
    let public = server.get("/v1/jobs").body;
    assert!(public.contains("by an admin") && !public.contains("maintenance"), "{public}");

    browser.click("#jobs-closed button");
    browser.until("document.getElementById('sure').open");
    assert!(text(browser, "#sure-title") == "Open queue:mail now?");
    browser.click("#sure-yes");
    // No framework is there that could be asked to call them.
    browser.until("document.getElementById('jobs-said').textContent === 'queue:mail is open. Its jobs look again when their slot or their longest sleep has passed.'");
    assert_eq!(closed(), 0);
    browser.until("!document.querySelector('.alert[data-key=jobs-closed]')");
    sound(browser, "after closing and opening");
    for audit in ["jobs_close", "jobs_open"] {
        let log = server.output();
        assert!(
            log.lines().any(|line| line.contains(audit) && line.contains("queue:mail")),
            "{audit}: {log}"
        );
    }
}

#[test]
fn a_jobs_database_that_does_not_answer_is_shown_and_changes_no_decision() {
    // A port at which nobody listens.
    let port =
        std::net::TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port();
    let server = server::with_config(&format!(
        "[limits.api]\nstrategy = 'fixed_window'\nlimit = 3\nwindow = '1h'\n\
         [jobs]\ndatabase = 'postgres://nobody:hush@127.0.0.1:{port}/none'\n[jobs.types.a]\nlimit = 1\nwindow = '1h'\n"
    ));
    let browser = open(&server);
    browser.until("document.querySelector('.alert[data-key=jobs-database]')?.textContent.includes('it does not answer')");
    sound(&browser, "no jobs' database");
    accessible(&browser, "no jobs' database");
    let answer = server.get("/v1/jobs");
    assert!(!answer.body.contains("hush") && !answer.body.contains("nobody"), "{}", answer.body);
    let answer: Value = serde_json::from_str(&answer.body).expect("JSON");
    assert_eq!((&answer["configured"], &answer["database"]["state"]), (&json!(true), &json!("down")));
    let check = server.post("/v1/check", r#"{"limit":"api","key":"user:1"}"#);
    assert!(check.status == 200 && check.body.contains("\"allowed\":true"), "{}", check.body);
    let closing = server.post("/v1/jobs/close", r#"{"key":"job:a","for_ms":1000}"#);
    assert_eq!(closing.status, 503, "{}", closing.body);
    let unknown = server.post("/v1/jobs/close", r#"{"key":"job:b","for_ms":1000}"#);
    assert!(unknown.status == 404 && unknown.body.contains("job:a"), "{}", unknown.body);
    assert_eq!(server.post("/v1/jobs/close", r#"{"key":"job:a","for_ms":0}"#).status, 400);
}

#[test]
fn there_is_no_link_to_jobs_without_any() {
    let server = server::with_config("[limits.api]\nblocked = true\n");
    let browser = Browser::start();
    browser.size(1200, 900);
    browser.open(&format!("{}/", server.url()));
    browser.until("document.getElementById('link').dataset.state === 'live'");
    let hidden =
        browser.run("return ['nav-jobs', 'nav-models'].map(id => document.getElementById(id).hidden)");
    assert_eq!(hidden, json!([true, true]));
    let answer: Value = serde_json::from_str(&server.get("/v1/jobs").body).expect("JSON");
    assert_eq!((&answer["configured"], &answer["database"]["state"]), (&json!(false), &json!("none")));
    assert_eq!(server.post("/v1/jobs/open", r#"{"key":"job:a"}"#).status, 404);
}
