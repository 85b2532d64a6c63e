//! Limits of language models: requests and tokens a minute that hold, before a call is sent.
//!
//! A call walks through this crate once. `request.rs` reads it, `count.rs` counts its tokens, `plan.rs` says which ordinary limits it
//! charges and how much, `line.rs` keeps those in order who must wait, and `limits.rs` ([`ModelLimits`]) reserves all of it in one charge
//! and settles it with what the provider reports (`usage.rs`, `stream.rs`). `trail.rs` writes what became of it. [`executor`] does all of that
//! for many calls, with retries; [`provider`] reads what providers say about waiting and refusals.
//!
//! Nothing here counts quota: limits are ordinary limits of a [`Tollgate`](tollgate::Tollgate), which decides.
//!
//! ```
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! use tollgate::Tollgate;
//! use tollgate::config::Config;
//! use tollgate_llm::{Api, Caller, LlmSection, ModelLimits, ModelRequest, Usage};
//!
//! let text = "[llm.upstreams.openai]\nkind = 'openai'\nbase_url = 'https://api.openai.com/v1'\n\
//!             [llm.models.gpt-4o]\nrpm = 500\ntpm = 30_000\n";
//! let mut llm = LlmSection::default();
//! let config = Config::parse_with(text, std::env::vars(), &mut [&mut llm])?;
//! let gate = Tollgate::open(&config).await?;
//! let limits = ModelLimits::new(gate, llm.config.unwrap_or_default());
//!
//! let body = br#"{"model":"gpt-4o","messages":[{"role":"user","content":"Hello"}],"max_tokens":100}"#;
//! let request = ModelRequest::read(Api::ChatCompletions, body)?;
//! let check = limits.check(&request, &Caller::default()).await?;
//! assert!(check.can_proceed && check.reserved_tokens == check.input_tokens + 100);
//!
//! // Waits in line if it must, and holds the tokens that the call may use.
//! let admission = limits.admit(&request, &Caller::default(), None).await?;
//! // … the call …
//! admission.settle(Usage { input: 9, output: 12, ..Usage::default() }).await?;
//! # Ok(())
//! # }
//! # use std::future::Future;
//! # let done = std::pin::pin!(run()).as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
//! # assert!(matches!(done, std::task::Poll::Ready(Ok(()))));
//! ```

mod config;
pub mod count;
pub mod executor;
mod learned;
mod limits;
mod line;
mod overview;
mod parking;
mod plan;
pub mod provider;
mod request;
mod seen;
mod stream;
mod trail;
mod usage;

pub use config::{
    ClientConfig, Counts, LlmConfig, LlmSection, ModelConfig, ModelLimit, Oversize, Priority, SharedLimits,
    UnknownModel, UpstreamConfig, UpstreamKey, UpstreamKind, llm_key,
};
pub use limits::{Admission, Caller, Check, ModelLimits, Refusal, RefusalKind, ReportedLeft, Standing};
pub use overview::{
    ClientView, Estimates, GroupView, ModelLimitView, ModelView, ModelsOverview, ParkedTime, Reports,
    Settlement, TokenSeries, WaitingCall,
};
pub use parking::Parked;
pub use request::{Api, Body, ModelRequest, RequestError};
pub use stream::{Event, EventKind, EventReader, Streamed};
pub use trail::{Trail, TrailLine};
pub use usage::{Usage, of_answer, of_whole_answer};
