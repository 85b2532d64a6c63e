//! See `crate::fuzzing`.

use tollgate::Key;

use super::parse::Spans;
use super::request::{Request, canonical};

/// What a client of Redis sends.
pub fn resp(bytes: &[u8]) {
    let (mut spans, mut text, mut rest) = (Spans::new(), Vec::new(), bytes);
    while let Ok(Some(length)) = spans.find(rest) {
        assert!((1..=rest.len()).contains(&length), "a command of {length} in {} bytes", rest.len());
        if let Some(command) = spans.command(rest) {
            assert_eq!(command.bytes().len(), length, "a command is all that was found");
            match Request::read(&command) {
                Some(Ok(Request::Throttle { key, bucket, .. })) => {
                    let _ = bucket.limit();
                    if let Ok(canonical) = canonical(key, &mut text) {
                        assert_eq!(Key::parse(canonical).expect("written to be read").canonical(), canonical);
                    }
                }
                Some(Ok(Request::Check { cost, .. })) => assert!(cost > 0),
                Some(Err(mistake)) => {
                    assert!(!mistake.contains(['\r', '\n']), "an error is one line: {mistake:?}")
                }
                None => {}
            }
        }
        // What is there of a command says nothing until all of it is there.
        for part in [length / 2, length - 1] {
            assert!(matches!(Spans::new().find(&rest[..part]), Ok(None)), "{part} of {length} bytes");
        }
        rest = &rest[length..];
    }
}
