//! See `crate::fuzzing`.

use super::fault::Fault;
use super::requests::{
    Batch, CheckRequest, CloseKey, OfKey, OfReservation, One, OneKey, OpenKey, RemoveOverride,
    SetOverrideRequest, key_of_url, read,
};

/// A body of the JSON API, as each of its calls reads it, and a key of an address.
pub fn json(bytes: &[u8]) {
    if let Ok(check) = shown(read::<CheckRequest<'_>>(bytes))
        && let Ok(charges) = shown(check.charges())
    {
        assert!(!charges.is_empty(), "a check that checks nothing");
    }
    let _ = shown(read::<Batch<'_>>(bytes));
    let _ = shown(read::<One<'_>>(bytes));
    let _ = shown(read::<OfKey<'_>>(bytes));
    let _ = shown(read::<OneKey<'_>>(bytes));
    let _ = shown(read::<SetOverrideRequest<'_>>(bytes));
    let _ = shown(read::<RemoveOverride<'_>>(bytes));
    let _ = shown(read::<CloseKey<'_>>(bytes));
    let _ = shown(read::<OpenKey<'_>>(bytes));
    let _ = shown(read::<OfReservation<'_>>(bytes));
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = shown(key_of_url(Some("user"), text));
        if let Ok(key) = shown(key_of_url(None, text)) {
            assert_eq!(
                tollgate::Key::parse(key.canonical()).expect("canonical").canonical(),
                key.canonical()
            );
        }
    }
}

/// What is refused is refused in few words, however much was sent.
fn shown<T>(read: Result<T, Fault>) -> Result<T, ()> {
    read.map_err(|fault| {
        assert!(fault.to_string().len() < 2_048, "{} bytes of words", fault.to_string().len())
    })
}
