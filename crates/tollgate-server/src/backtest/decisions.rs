//! `--decisions`: one JSON object for each limit that a request meets, in the order of replay.

use std::io;

use serde::Serialize;

use super::output::Output;
use crate::failure::Failure;

/// What one limit said to one request. The fields, and their order, are what other programs rely on.
#[derive(Debug, Serialize)]
pub(super) struct Decision<'a> {
    pub(super) line: u64,
    pub(super) time_us: u64,
    pub(super) limit: &'a str,
    pub(super) key: &'a str,
    pub(super) cost: u64,
    /// Whether the request was let through and this charged. Where it meets several limits it is charged by all or by none; one
    /// that had room says so by a `retry_after_us` of 0.
    pub(super) allowed: bool,
    /// `None` where there is no limit.
    pub(super) remaining: Option<u64>,
    /// `None` when it never fits.
    pub(super) retry_after_us: Option<u64>,
    pub(super) reset_after_us: u64,
    pub(super) delay_us: u64,
    /// Only where the limit is a shadow and would have denied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) would_deny: Option<bool>,
    /// Only where there are several files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) file: Option<&'a str>,
}

/// Where decisions go, if anybody wants them.
pub(super) struct Decisions(Option<Output>);

impl Decisions {
    /// To a place that is open already.
    pub(super) fn to(output: Option<Output>) -> Decisions {
        Decisions(output)
    }

    /// Whether they go to stdout, so that nothing else may.
    pub(super) fn fill_stdout(&self) -> bool {
        self.0.as_ref().is_some_and(Output::fills_stdout)
    }

    /// Whether nobody wants them.
    pub(super) fn unwanted(&self) -> bool {
        self.0.is_none()
    }

    /// Writes one.
    pub(super) fn write(&mut self, decision: &Decision<'_>) -> Result<(), Failure> {
        let Some(output) = &mut self.0 else { return Ok(()) };
        output.write(|out| {
            serde_json::to_writer(&mut *out, decision).map_err(io::Error::from)?;
            out.write_all(b"\n")
        })
    }

    /// Says that the last one was written: now the file appears.
    pub(super) fn finish(self) -> Result<(), Failure> {
        self.0.map_or(Ok(()), Output::finish)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_and_order_are_the_contract() {
        let mut decision = Decision {
            line: 7,
            time_us: 1_700_000_000_000_000,
            limit: "api",
            key: "user:42",
            cost: 1,
            allowed: false,
            remaining: Some(0),
            retry_after_us: Some(200_000),
            reset_after_us: 2_000_000,
            delay_us: 0,
            would_deny: None,
            file: None,
        };
        let contract = r#"{"line":7,"time_us":1700000000000000,"limit":"api","key":"user:42","cost":1,"allowed":false,"remaining":0,"retry_after_us":200000,"reset_after_us":2000000,"delay_us":0}"#;
        assert_eq!(serde_json::to_string(&decision).unwrap(), contract);
        decision.retry_after_us = None;
        (decision.would_deny, decision.file) = (Some(true), Some("a.csv"));
        let text = serde_json::to_string(&decision).unwrap();
        assert!(text.contains(r#""retry_after_us":null"#), "{text}");
        assert!(text.ends_with(r#""delay_us":0,"would_deny":true,"file":"a.csv"}"#), "{text}");
    }
}
