//! The lease of a request whose connection is upgraded to another protocol (101 Switching Protocols).
//!
//! The response to such a request ends with its head, while the connection goes on. The layer cannot see when the connection
//! ends, but the handler can: it finds a [`Lease`] in the request's extensions and keeps it for as long as it serves the
//! connection.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use super::after::After;

/// The lease of a request under a concurrency limit, found in its extensions. Only requests that hold a lease have one.
///
/// If the response is 101 Switching Protocols (a WebSocket), the lease is held and renewed until the last clone of this is
/// dropped. If no clone is kept, it ends with the response. For any other response the lease ends with the body, and this changes
/// nothing.
///
/// ```
/// # #[cfg(feature = "axum")] {
/// use axum::Extension;
/// use axum::extract::Request;
/// use tollgate::http::Lease;
///
/// /// Answers 101 and serves the connection that it becomes.
/// async fn upgrade(lease: Option<Extension<Lease>>, request: Request) -> http::Response<axum::body::Body> {
///     tokio::spawn(async move {
///         let _held_while_served = lease;
///         // hyper::upgrade::on(request).await, and so on.
///     });
///     http::Response::builder().status(101).body(axum::body::Body::empty()).expect("a response")
/// }
/// # let _ = upgrade;
/// # }
/// ```
#[derive(Clone)]
pub struct Lease(Arc<Mutex<Option<Box<After>>>>);

impl Lease {
    pub(super) fn new() -> Lease {
        Lease(Arc::default())
    }

    /// Hands the work that is left for the request to the last clone.
    pub(super) fn hold(self, after: Box<After>) {
        *self.0.lock() = Some(after);
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").finish_non_exhaustive()
    }
}
