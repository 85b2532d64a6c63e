//! Request and response bodies.

use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Either, Full};
use hyper::body::{Body as _, Incoming};

use super::fault::Fault;

/// The body of an answer: a text, or a stream, which may break off as its source does.
pub(crate) type Body = Either<Full<Bytes>, BoxBody<Bytes, io::Error>>;

pub(crate) fn full(bytes: impl Into<Bytes>) -> Body {
    Either::Left(Full::new(bytes.into()))
}

/// The longest body that is read.
pub(crate) const MOST_BYTES: usize = 64 * 1024;

/// How long a body may take to come.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A whole body, if it is short and comes in time.
pub(super) async fn read_up_to(body: Incoming, most: usize) -> Result<Bytes, Fault> {
    // A body that declares a length over the limit is refused before it is read.
    if body.size_hint().lower() > most as u64 {
        return Err(Fault::too_large(most));
    }
    match tokio::time::timeout(TIMEOUT, gather(body, most)).await {
        Ok(gathered) => gathered,
        Err(_) => Err(Fault::too_slow()),
    }
}

/// The chunks of a body, copied into one buffer unless there is only one. A chunk keeps the whole read buffer alive, so a peer
/// that sends single bytes would make us keep some KiB for each.
async fn gather(mut body: Incoming, most: usize) -> Result<Bytes, Fault> {
    let mut whole = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| Fault::malformed("the body ended early"))?;
        let Ok(piece) = frame.into_data() else { continue };
        if whole.len() + piece.len() > most {
            return Err(Fault::too_large(most));
        }
        if whole.is_empty() && body.is_end_stream() {
            return Ok(piece);
        }
        whole.extend_from_slice(&piece);
    }
    Ok(whole.freeze())
}
