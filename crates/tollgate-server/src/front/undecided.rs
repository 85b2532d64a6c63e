//! Why a charge could not be decided, as every face reports it.
//!
//! If the request is wrong, the message says what is wrong. If the store failed, it says in which way, and
//! not with which words: those say where it is and as whom it is asked, which is for the log, and the log has them.

use tollgate::Error;
use tollgate::store::Failure;

/// What callers see.
pub(crate) fn words(error: &Error) -> String {
    match error.failure() {
        None => error.to_string(),
        Some(Failure::Full) => {
            "the store has no room to remember more (full); settle open reservations, shorten their time \
                                to live or give it more room"
                .to_owned()
        }
        Some(failure) => format!("the store could not answer ({failure}); ask again later"),
    }
}

#[cfg(test)]
mod tests {
    use tollgate::store::StoreError;

    use super::*;

    #[test]
    fn callers_learn_how_the_store_failed_and_not_its_address() {
        for failure in Failure::ALL {
            let error =
                StoreError::failed(failure, "PostgreSQL at 10.0.0.5:5432 does not let tollgate_app in");
            let words = words(&error.into());
            assert!(words.starts_with("the store ") && words.contains(&format!("({failure})")), "{words}");
            assert!(!words.contains("10.0.0.5") && !words.contains("tollgate_app"), "{words}");
        }
        let wrong = StoreError::invalid("a cost of 0");
        assert_eq!(words(&wrong.into()), "a cost of 0");
    }
}
