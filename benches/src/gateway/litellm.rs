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

const VERSION: &str = "1.106.2";
const WINDOW: Duration = Duration::from_secs(6);
const TOKENS: u64 = 1_000;

pub(super) struct LiteLlm {
    child: Child,
    address: SocketAddr,
    home: PathBuf,
}

fn install() -> Result<PathBuf, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let target = program.ancestors().nth(2).ok_or("this program is nowhere")?;
    let home = target.join("peers/litellm");
    let proxy = home.join("bin/litellm");
    if !proxy.exists() {
        let run = |program: &Path, args: &[&str]| match Command::new(program).args(args).status() {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(format!("{} {args:?}: {status}", program.display())),
            Err(error) => Err(format!("{}: {error}", program.display())),
        };
        let place = home.to_string_lossy().into_owned();
        run(Path::new("python3"), &["-m", "venv", &place])?;
        let package = format!("litellm[proxy]=={VERSION}");
        let args = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", &package];
        run(&home.join("bin/python"), &args)?;
    }
    Ok(proxy)
}

impl LiteLlm {
    /// Before this upstream, with a limit of tokens or none.
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
             api_base: http://{upstream}/v1\n      api_key: x\n\
             general_settings:\n  custom_auth: tollgate_auth.check\n"
        );
        let write = |name: &str, text: String| {
            std::fs::write(home.join(name), text).map_err(|error| format!("{name}: {error}"))
        };
        write("tollgate_auth.py", auth)?;
        write("config.yaml", config)?;
        let address = crate::server::free_address()?;
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
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("litellm: {error}"))?;
        let mut proxy = LiteLlm { child, address, home };
        let began = Instant::now();
        let body = r#"{"model":"gpt-4o","messages":[{"role":"user","content":"hi"}],"max_tokens":1}"#;
        loop {
            if TcpStream::connect(address).is_ok()
                && ask(&mut connect(address), &request(body)).is_ok_and(|status| status == 200)
            {
                break;
            }
            let has_ended = proxy.child.try_wait().ok().flatten();
            if has_ended.is_some() || began.elapsed() > Duration::from_secs(120) {
                return Err(format!("LiteLLM's proxy does not answer: {has_ended:?}"));
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        // What it was tried with leaves its window.
        if tokens.is_some() {
            std::thread::sleep(WINDOW + Duration::from_millis(500));
        }
        Ok(proxy)
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

/// A call that says what its answer is to report.
fn call(cap: u64, output: u64, pause_ms: u64) -> Vec<u8> {
    request(&format!(
        r#"{{"model":"gpt-4o","messages":[{{"role":"user","content":"hi"}}],"max_tokens":{cap},"metadata":{{"input_tokens":"8","output_tokens":"{output}"}},"user":"{pause_ms}"}}"#
    ))
}

/// The most tokens that arrived within any window, by what was used.
fn most(provider: &Provider) -> u64 {
    let arrivals = provider.arrivals();
    let within = |last: &Arrival| {
        let counts = arrivals.iter().filter(|one| one.at <= last.at && last.at - one.at < WINDOW);
        counts.map(|one| one.tokens).sum()
    };
    arrivals.iter().map(within).max().unwrap_or(0)
}

/// Scenarios A2 (a burst at the end of a window and one at the beginning of the next) and B2 (a settlement after its window), of both.
pub(super) fn judged(program: &Path) -> Result<(), String> {
    for scenario in [a2, b2] {
        let provider = provider();
        let proxy = LiteLlm::start(provider.address(), Some(TOKENS))?;
        scenario(&format!("LiteLLM {VERSION}"), &provider, proxy.address())?;
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
        scenario("tollgate", &provider, gateway.http())?;
    }
    Ok(())
}

/// One that takes as long as a call says.
fn provider() -> Provider {
    Provider::start(|arrival| {
        let pause = arrival.body["user"].as_str().and_then(|ms| ms.parse().ok()).unwrap_or(0);
        std::thread::sleep(Duration::from_millis(pause));
        openai(arrival)
    })
}

fn a2(name: &str, provider: &Provider, address: SocketAddr) -> Result<(), String> {
    let tried = provider.arrivals().len();
    let mut connection = connect(address);
    // A small call begins the window; the burst comes at its end, and again after it.
    let mut statuses = vec![ask(&mut connection, &call(1, 1, 0)).map_err(|error| error.to_string())?];
    std::thread::sleep(WINDOW - Duration::from_millis(600));
    statuses.push(ask(&mut connection, &call(980, 980, 0)).map_err(|error| error.to_string())?);
    std::thread::sleep(Duration::from_millis(700));
    statuses.push(ask(&mut connection, &call(980, 980, 0)).map_err(|error| error.to_string())?);
    println!(
        "{name}, A2: {} tokens in a window of {TOKENS} ({statuses:?}, {} calls sent)",
        most(provider),
        provider.arrivals().len() - tried
    );
    Ok(())
}

fn b2(name: &str, _: &Provider, address: SocketAddr) -> Result<(), String> {
    std::thread::scope(|scope| {
        let late = u64::try_from(WINDOW.as_millis()).unwrap_or(6_000) + 1_500;
        scope.spawn(move || ask(&mut connect(address), &call(900, 12, late)));
        std::thread::sleep(WINDOW + Duration::from_millis(500));
        let _ = ask(&mut connect(address), &call(1, 1, 0));
        std::thread::sleep(Duration::from_millis(1_500));
        let mut admitted = 0;
        for _ in 0..6 {
            admitted +=
                u32::from(ask(&mut connect(address), &call(400, 400, 0)).is_ok_and(|status| status == 200));
        }
        println!(
            "{name}, B2: {admitted} of 6 calls of 400 tokens admitted in one window of {TOKENS} (2 fit)"
        );
    });
    Ok(())
}
