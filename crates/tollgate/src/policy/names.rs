//! Names of limits, each stored once for the life of the process.
//!
//! Outcomes have the name of their limit without a lifetime and without a reference count, so a name is never freed. It takes at
//! most 64 bytes, and metrics recorders keep it as a label anyway. Their number is bounded, so that a program that invents names
//! (a limit for each tenant) gets an error before it runs out of memory.

use std::collections::HashSet;

use parking_lot::Mutex;

use crate::error::Error;

/// How many names a process may have by default.
pub(crate) const MAX_NAMES: usize = 100_000;

static NAMES: Mutex<Option<HashSet<&'static str>>> = Mutex::new(None);

/// The one text of this name.
pub(crate) fn intern(name: &str, max_names: usize) -> Result<&'static str, Error> {
    let mut names = NAMES.lock();
    let names = names.get_or_insert_default();
    if let Some(known) = names.get(name) {
        return Ok(known);
    }
    if names.len() >= max_names {
        return Err(Error::call(format!(
            "this process has named {max_names} limits, which is as many as it may; use one name with overrides, or numbers that \
             come with the call, or raise max_names"
        )));
    }
    let name: &'static str = String::leak(name.to_owned());
    names.insert(name);
    Ok(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_kept_once_and_there_is_an_end_to_names() {
        let first = intern("names-test", MAX_NAMES).unwrap();
        assert!(std::ptr::eq(first, intern(&format!("{}-test", "names"), MAX_NAMES).unwrap()));
        assert!(std::ptr::eq(first, intern("names-test", 0).unwrap()), "a known name needs no room");
        let error = intern("names-test-2", 0).unwrap_err();
        assert!(error.to_string().contains("raise max_names"), "{error}");
    }
}
