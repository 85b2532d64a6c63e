//! Sections of the file that other crates own.
//!
//! One file configures a whole system, and each section is read by the crate that it configures: `[jobs]` by `tollgate-jobs`,
//! `[llm]` by `tollgate-llm`, `[server]` and `[[envoy]]` by the server. An [`Extension`] reads its section with the same
//! [`Reader`] as the library's own sections, so every mistake has its line, field, value and fix, and one run finds them all. The
//! limits of an extension become ordinary limits of the policy. This module does not know what a section means.

use super::environment::VariableKind;
use super::named;
use super::reader::{Field, Reader};
use crate::policy::Rule;

/// The sections of crates in this repository. A program that does not use such a crate skips its section, so that several programs
/// can read one file; every other unknown section is a mistake.
pub(super) const OWNED_BY_OTHERS: [&str; 4] = ["server", "jobs", "llm", "envoy"];

/// A section of the file that another crate reads, by [`Config::parse_with`](super::Config::parse_with).
///
/// ```
/// use tollgate::config::{Config, Extension, Field, Limits, Reader, VariableKind};
///
/// /// `[audit]`: whether the program writes an audit log.
/// #[derive(Default)]
/// struct Audit {
///     enabled: bool,
/// }
///
/// impl Extension for Audit {
///     fn name(&self) -> &'static str {
///         "audit"
///     }
///
///     fn variables(&self) -> &'static [(&'static str, VariableKind)] {
///         &[("enabled", VariableKind::Truth)]
///     }
///
///     fn read(&mut self, reader: &mut Reader<'_>, field: &Field<'_>, _limits: &mut Limits<'_>) {
///         let Some(section) = reader.section(field) else { return };
///         reader.only(&section, &["enabled"]);
///         self.enabled = section.field("enabled").and_then(|field| reader.truth(field)).unwrap_or_default();
///     }
/// }
///
/// let mut audit = Audit::default();
/// Config::parse_with("[audit]\nenabled = true\n", [], &mut [&mut audit])?;
/// assert!(audit.enabled);
///
/// let mistakes = Config::parse_with("[audit]\nenabld = true\n", [], &mut [&mut audit]).unwrap_err();
/// assert_eq!(mistakes.to_string(), "line 2, audit.enabld = ***: unknown field; did you mean `enabled`?");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Extension {
    /// The name of the section at the root of the file.
    fn name(&self) -> &'static str;

    /// The fields that an environment variable may set: `TOLLGATE_<SECTION>_<FIELD>`. None by default.
    fn variables(&self) -> &'static [(&'static str, VariableKind)] {
        &[]
    }

    /// Reads the section. Called only where the file or the environment has it, after `[limits]` has been read.
    fn read(&mut self, reader: &mut Reader<'_>, field: &Field<'_>, limits: &mut Limits<'_>);
}

/// The limits of a file while its other sections are read.
pub struct Limits<'a> {
    /// All names in `[limits]`, including those of limits that could not be read.
    pub(super) names: Vec<&'a str>,
    pub(super) rules: &'a mut Vec<Rule>,
}

impl Limits<'_> {
    /// The names in `[limits]`, including those of limits that have a mistake.
    pub fn names(&self) -> &[&str] {
        &self.names
    }

    /// The limits that could be read so far: those of `[limits]`, and those that extensions added.
    pub fn rules(&self) -> &[Rule] {
        self.rules
    }

    /// Adds limits. Their names must not be taken.
    pub fn add(&mut self, rules: impl IntoIterator<Item = Rule>) {
        self.rules.extend(rules);
    }

    /// Reads the name of a limit of `[limits]`. `no_length` is set where a concurrency limit makes no sense, and says why.
    pub fn read_name(
        &self,
        reader: &mut Reader<'_>,
        field: &Field<'_>,
        no_length: Option<&str>,
    ) -> Option<String> {
        named::read(reader, field, &self.names, self.rules, no_length)
    }
}
