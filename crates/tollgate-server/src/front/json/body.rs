//! Bodies, out and in.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Either, Full, LengthLimitError, Limited};
use hyper::body::Incoming;

use super::fault::Fault;

/// The body of an answer: a text, or a stream of events.
pub(crate) type Body = Either<Full<Bytes>, BoxBody<Bytes, Infallible>>;

pub(crate) fn full(bytes: impl Into<Bytes>) -> Body {
    Either::Left(Full::new(bytes.into()))
}

/// The longest body that is read.
pub(crate) const MOST_BYTES: usize = 64 * 1024;

/// How long a body may take to come.
const PATIENCE: Duration = Duration::from_secs(10);

/// A whole body, if it is short and comes in time.
pub(crate) async fn read(body: Incoming) -> Result<Bytes, Fault> {
    let whole = Limited::new(body, MOST_BYTES).collect();
    match tokio::time::timeout(PATIENCE, whole).await {
        Ok(Ok(whole)) => Ok(whole.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(Fault::too_large(MOST_BYTES)),
        Ok(Err(_)) => Err(Fault::malformed("the body ended early")),
        Err(_) => Err(Fault::too_slow()),
    }
}
