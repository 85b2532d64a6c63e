//! LiteLLM's proxy, installed from PyPI into an environment beside what cargo builds, and judged as the gateway is.
//!
//! Its limits belong to keys, which it keeps in a database; a hook of its own (`custom_auth`) gives the limits without one.

use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tollgate_testkit::provider::{Arrival, Provider, openai};
use tollgate_testkit::tollgate::Tollgate;

use super::{ask, connect, request};
use crate::goals::{Goal, Wanted};

const VERSION: &str = "1.106.2";
const WINDOW: Duration = Duration::from_secs(6);
const TOKENS: u64 = 1_000;

/// How long it may take until its first answer.
const START: Duration = Duration::from_secs(600);

pub(super) struct LiteLlm {
    child: Child,
    address: SocketAddr,
    home: PathBuf,
}

fn install() -> Result<PathBuf, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let target = program.ancestors().nth(2).ok_or("this program is nowhere")?;
    let home = target.join(format!("peers/litellm-{VERSION}"));
    // Written last, so that an installation that was broken off is done again.
    let is_whole = home.join("installed");
    if !is_whole.exists() {
        let run = |program: &Path, args: &[&str]| match Command::new(program).args(args).status() {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(format!("{} {args:?}: {status}", program.display())),
            Err(error) => Err(format!("{}: {error}", program.display())),
        };
        let place = home.to_string_lossy().into_owned();
        run(Path::new("python3"), &["-m", "venv", "--clear", &place])?;
        let package = format!("litellm[proxy]=={VERSION}");
        let args = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", &package];
        run(&home.join("bin/python"), &args)?;
        std::fs::write(&is_whole, VERSION).map_err(|error| error.to_string())?;
    }
    Ok(home.join("bin/litellm"))
}

impl LiteLlm {
    /// Before this upstream, with a limit of tokens or none. It sends every call once, as the gateway does here.
    pub(super) fn start(upstream: SocketAddr, tokens: Option<u64>) -> Result<LiteLlm, String> {
        let program = install()?;
        let home = std::env::temp_dir().join(format!("tollgate-litellm-{}", std::process::id()));
        std::fs::create_dir_all(&home).map_err(|error| error.to_string())?;
        let limit = tokens.map_or_else(|| "None".to_owned(), |tokens| tokens.to_string());
        let auth = format!(
            "from litellm.proxy._types import UserAPIKeyAuth\n\
             async def check(request, api_key):\n    return UserAPIKeyAuth(api_key=api_key, tpm_limit={limit})\n"
        );
        let config = format!(
            "model_list:\n  - model_name: gpt-4o\n    litellm_params:\n      model: openai/gpt-4o\n      \
             api_base: http://{upstream}/v1\n      api_key: x\n      max_retries: 0\n\
             router_settings:\n  num_retries: 0\n  disable_cooldowns: true\n\
             general_settings:\n  custom_auth: tollgate_auth.check\n"
        );
        let write = |name: &str, text: String| {
            std::fs::write(home.join(name), text).map_err(|error| format!("{name}: {error}"))
        };
        write("tollgate_auth.py", auth)?;
        write("config.yaml", config)?;
        let address = crate::server::free_address()?;
        let log = std::fs::File::create(home.join("log")).map_err(|error| error.to_string())?;
        let errors = log.try_clone().map_err(|error| error.to_string())?;
        let child = Command::new(program)
            .args(["--config", "config.yaml", "--host", "127.0.0.1", "--port", &address.port().to_string()])
            .current_dir(&home)
            .env("LITELLM_LOG", "ERROR")
            // It serves this machine alone, and its keys are checked by the hook above.
            .env("LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY", "true")
            .env("LITELLM_LOCAL_MODEL_COST_MAP", "True")
            .env("LITELLM_RATE_LIMIT_WINDOW_SIZE", WINDOW.as_secs().to_string())
            .env("LITELLM_TELEMETRY", "False")
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors)
            .spawn()
            .map_err(|error| format!("litellm: {error}"))?;
        let mut proxy = LiteLlm { child, address, home };
        proxy.until_it_answers()?;
        // What it was tried with leaves its window.
        if tokens.is_some() {
            std::thread::sleep(WINDOW + Duration::from_millis(500));
        }
        Ok(proxy)
    }

    /// It imports for a quarter of a minute, and for longer on a busy machine.
    fn until_it_answers(&mut self) -> Result<(), String> {
        let began = Instant::now();
        let body = r#"{"model":"gpt-4o","messages":[{"role":"user","content":"hi"}],"max_tokens":1}"#;
        let mut last = None;
        while last != Some(200) {
            if TcpStream::connect(self.address).is_ok() {
                let mut connection = connect(self.address);
                connection.get_ref().set_read_timeout(Some(START)).map_err(|error| error.to_string())?;
                last = ask(&mut connection, &request(body)).ok();
            }
            let has_ended = self.child.try_wait().ok().flatten();
            if has_ended.is_some() || began.elapsed() > START {
                let log = std::fs::read_to_string(self.home.join("log")).unwrap_or_default();
                let lines: Vec<&str> = log.lines().collect();
                let end = lines[lines.len().saturating_sub(20)..].join("\n");
                return Err(format!(
                    "LiteLLM's proxy does not answer within {START:?} (ended: {has_ended:?}, status: {last:?}); its log:\n{end}"
                ));
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for LiteLlm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.home);
    }
}

/// What a call's answer is to report, and after how long. It is text in `user`, because LiteLLM passes no `metadata` on.
struct Asked {
    input: u64,
    output: u64,
    pause: Duration,
}

impl Asked {
    fn of(arrival: &Arrival) -> Asked {
        let user = arrival.body["user"].as_str().unwrap_or_default();
        let mut numbers = user.split('-').filter_map(|part| part.parse::<u64>().ok());
        let mut next = || numbers.next().unwrap_or(0);
        Asked { input: next(), output: next(), pause: Duration::from_millis(next()) }
    }
}

fn call(cap: u64, output: u64, pause_ms: u64) -> Vec<u8> {
    request(&format!(
        r#"{{"model":"gpt-4o","messages":[{{"role":"user","content":"hi"}}],"max_tokens":{cap},"user":"8-{output}-{pause_ms}"}}"#
    ))
}

/// The most tokens that arrived within any window, by what was used.
fn most(provider: &Provider) -> u64 {
    let arrivals = provider.arrivals();
    let within = |last: &Arrival| {
        let counts = arrivals.iter().filter(|one| one.at <= last.at && last.at - one.at < WINDOW);
        counts.map(Asked::of).map(|asked| asked.input + asked.output).sum()
    };
    arrivals.iter().map(within).max().unwrap_or(0)
}

/// A scenario: before this provider, at this address; what came of it in words.
type Scenario = fn(&Provider, SocketAddr) -> Result<String, String>;

/// Scenarios A2 (a burst at the end of a window and one at the beginning of the next) and B2 (a settlement after its window), of both.
pub(super) fn judged(program: &Path) -> Result<Vec<Goal>, String> {
    let scenarios: [(&str, Scenario); 2] = [("A2", a2), ("B2", b2)];
    println!(
        "\n{TOKENS} tokens in any {} s; both refuse what does not fit, and a judge counts what arrives:\n",
        WINDOW.as_secs()
    );
    println!("| | | most tokens in a window | |\n|---|---|--:|---|");
    let mut goals = Vec::new();
    for (name, scenario) in scenarios {
        let provider = provider();
        let proxy = LiteLlm::start(provider.address(), Some(TOKENS))?;
        let text = scenario(&provider, proxy.address())?;
        println!("| {name} | LiteLLM {VERSION} | {} | {text} |", most(&provider));
        drop(proxy);
        let provider = self::provider();
        // It refuses at once, as LiteLLM does: waiting would keep the calls apart by itself.
        let config = format!(
            "[server]\nlog = 'off'\n[llm]\nwindow = '{}s'\nmax_wait = '1ms'\n[llm.models.gpt-4o]\ntpm = {TOKENS}\n[llm.upstreams.up]\n\
             kind = 'openai'\nbase_url = 'http://{}/v1'\napi_key = 'x'\n[limits.x]\nunlimited = true\n",
            WINDOW.as_secs(),
            provider.address()
        );
        let gateway = Tollgate::builder(program).config(&config).start();
        let text = scenario(&provider, gateway.http())?;
        println!("| {name} | tollgate | {} | {text} |", most(&provider));
        goals.push(Goal {
            what: format!("gateway: {name}, most tokens in a window, of the limit"),
            wanted: Wanted::AtMost(1.0),
            measured: Some(most(&provider) as f64 / TOKENS as f64),
            beside: String::new(),
        });
    }
    Ok(goals)
}

/// One that takes as long as a call says, and reports what it says.
fn provider() -> Provider {
    Provider::start(|arrival| {
        let Asked { input, output, pause } = Asked::of(arrival);
        std::thread::sleep(pause);
        let mut arrival = arrival.clone();
        arrival.body["metadata"] = serde_json::json!({ "input_tokens": input, "output_tokens": output });
        openai(&arrival)
    })
}

fn a2(_: &Provider, address: SocketAddr) -> Result<String, String> {
    let mut connection = connect(address);
    // A small call begins the window; the burst comes at its end, and again after it.
    let mut statuses = vec![ask(&mut connection, &call(1, 1, 0)).map_err(|error| error.to_string())?];
    std::thread::sleep(WINDOW - Duration::from_millis(600));
    statuses.push(ask(&mut connection, &call(980, 980, 0)).map_err(|error| error.to_string())?);
    std::thread::sleep(Duration::from_millis(700));
    statuses.push(ask(&mut connection, &call(980, 980, 0)).map_err(|error| error.to_string())?);
    Ok(format!("calls of 9, 988 and 988 tokens: {statuses:?}"))
}

fn b2(_: &Provider, address: SocketAddr) -> Result<String, String> {
    std::thread::scope(|scope| {
        let late = u64::try_from(WINDOW.as_millis()).unwrap_or(6_000) + 1_500;
        let first = scope.spawn(move || ask(&mut connect(address), &call(900, 12, late)));
        std::thread::sleep(WINDOW + Duration::from_millis(500));
        ask(&mut connect(address), &call(1, 1, 0)).map_err(|error| error.to_string())?;
        let first = first.join().map_err(|_| "the late call panicked".to_owned())?;
        let first = first.map_err(|error| error.to_string())?;
        // What becomes of the reservation is written after the answer.
        std::thread::sleep(Duration::from_millis(500));
        let mut admitted = 0;
        for _ in 0..6 {
            admitted +=
                u32::from(ask(&mut connect(address), &call(400, 400, 0)).is_ok_and(|status| status == 200));
        }
        Ok(format!(
            "a call that reserved 908 tokens, used 20 and was answered after its window ({first}); then {admitted} of 6 calls of 408 tokens were let in (2 fit)"
        ))
    })
}
