//! What strangers send and operators get wrong: it is refused with a message that says what to mend, it changes nothing, and no
//! message holds a password or a key.

mod addresses;
mod certificates;
mod foreign;
mod hostile;
mod rights;

use tollgate_store::StoreError;

/// Whatever an error can be made to say: its message, its causes, and how a developer sees it.
fn all_of(error: &StoreError) -> String {
    let mut said = format!("{error} | {error:?}");
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        said.push_str(&format!(" | {error} | {error:?}"));
        cause = error.source();
    }
    said
}
