//! The key of an event: shown only to observers that ask for it.

use std::fmt;

/// The key of a charge. `Debug` does not show it: a key is personal data, and an event is easily printed.
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use tollgate::telemetry::{Event, Observer};
/// use tollgate::{Limit, Tollgate};
///
/// /// The keys that were denied, as an operator has asked to see them.
/// #[derive(Default)]
/// struct Denied(Mutex<Vec<String>>);
///
/// impl Observer for Denied {
///     fn decided(&self, event: &Event<'_>) {
///         if let (false, Some(key)) = (event.allowed, event.key.reveal()) {
///             self.0.lock().unwrap().push(key.to_owned());
///         }
///     }
/// }
///
/// let denied = Arc::new(Denied::default());
/// let limit = Limit::token_bucket("1/h", 1)?;
/// let gate = Tollgate::builder().limit("api", limit).observer(denied.clone()).build()?;
/// let api = gate.local("api")?;
/// api.check("user:42");
/// api.check("user:42");
/// assert_eq!(*denied.0.lock().unwrap(), ["user:42"]);
/// # Ok::<(), tollgate::Error>(())
/// ```
#[derive(Clone, Copy)]
pub struct EventKey<'a>(Option<&'a str>);

impl<'a> EventKey<'a> {
    /// By the canonical text of the key, if that makes sense.
    pub(crate) fn new(canonical: Option<&'a str>) -> EventKey<'a> {
        EventKey(canonical)
    }

    /// The canonical text of the key; `None` if it is malformed. An observer that shows it to others is responsible for that;
    /// `Telemetry::key_hash` gives a hash that can be shown.
    pub fn reveal(&self) -> Option<&'a str> {
        self.0
    }
}

impl fmt::Debug for EventKey<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EventKey(..)")
    }
}
