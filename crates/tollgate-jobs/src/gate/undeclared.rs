//! Types of jobs that no policy names.
//!
//! A policy for `send_email` says nothing about jobs of the type `send_emial`: they run, without its limit and without a call to the store. So
//! each such type is warned about once, where other types have policies: if nothing limits it at all, or if its name is nearly one that has
//! a policy. Types come from the arguments, which anybody may have written: names are cleaned, and only so many are remembered.

use std::collections::HashSet;

use parking_lot::Mutex;
use tollgate::config::nearest;

use crate::plan::shown;
use crate::policy::Jobs;

/// How many types are warned about.
const MOST: usize = 1_000;

/// The types that were warned about.
#[derive(Debug, Default)]
pub(super) struct Undeclared(Mutex<HashSet<String>>);

impl Undeclared {
    /// Notes a job, and warns if it is the first of a type that should perhaps have a policy; `is_limited` says whether its queue or all jobs
    /// have one.
    pub(super) fn note(&self, jobs: &Jobs, job_type: &str, is_limited: bool) {
        if let Some(fix) = self.fix(jobs, job_type, is_limited) {
            tracing::warn!(job_type = shown(job_type), "no policy names this type of job, {fix}");
        }
    }

    /// What follows for a type that was not warned about yet, and what to do.
    fn fix(&self, jobs: &Jobs, job_type: &str, is_limited: bool) -> Option<String> {
        let types = &jobs.config().types;
        if types.is_empty() || types.iter().any(|(name, _)| name == job_type) {
            return None;
        }
        let name = shown(job_type);
        let mut known = self.0.lock();
        if known.len() >= MOST || known.contains(&name) {
            return None;
        }
        let guess = nearest(&name, types.iter().map(|(name, _)| name.as_str()));
        let fix = match (is_limited, guess) {
            (true, None) => None,
            (true, Some(guess)) => Some(format!(
                "so only the limits of its queue or of all jobs hold; did you mean `{guess}`? If not, write [jobs.types.{name}]"
            )),
            (false, None) => Some(format!("so nothing limits it; write [jobs.types.{name}]")),
            (false, Some(guess)) => Some(format!(
                "so nothing limits it; did you mean `{guess}`? If not, write [jobs.types.{name}]"
            )),
        };
        known.insert(name);
        fix
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::policy::JobPolicy;

    fn policies() -> Jobs {
        let rate = || JobPolicy::new().with_rate_limit(1, Duration::from_secs(60));
        Jobs::new().job("send_email", rate()).job("call_api", rate())
    }

    #[test]
    fn a_type_that_no_policy_names_is_warned_about_once() {
        let (jobs, undeclared) = (policies(), Undeclared::default());
        let fix = |name: &str, is_limited| undeclared.fix(&jobs, name, is_limited).unwrap_or_default();
        assert_eq!(fix("send_email", false), "");
        assert_eq!(
            fix("send_emial", false),
            "so nothing limits it; did you mean `send_email`? If not, write [jobs.types.send_emial]"
        );
        assert_eq!(fix("send_emial", false), "", "once");
        assert_eq!(fix("report", false), "so nothing limits it; write [jobs.types.report]");
        // Under a limit of its queue, or of all jobs, a type need not have one of its own.
        assert_eq!(fix("invoice", true), "");
        assert!(
            fix("cal_api", true)
                .starts_with("so only the limits of its queue or of all jobs hold; did you mean `call_api`?")
        );
        assert_eq!(
            Undeclared::default().fix(&Jobs::new(), "send_emial", false),
            None,
            "no type has a policy"
        );
    }

    #[test]
    fn names_are_cleaned_and_few_are_remembered() {
        let (jobs, undeclared) = (policies(), Undeclared::default());
        let hostile = format!("a\u{0}\n{}", "x".repeat(100_000));
        let fix = undeclared.fix(&jobs, &hostile, false).unwrap();
        assert!(fix.len() < 200 && !fix.contains(char::is_control), "{fix}");
        let warned =
            (0..10_000).filter(|n| undeclared.fix(&jobs, &format!("type-{n}"), false).is_some()).count();
        assert_eq!((warned, undeclared.0.lock().len()), (MOST - 1, MOST));
    }
}
