//! The shape of charges that can share one script call, and how they are encoded and their answers decoded.
//!
//! Charges have the same shape if they charge the same limits with the same costs; only their keys differ. The common arguments
//! are sent once for the whole batch. [`Shape`] contains only numbers, so it is cheap to compare, and becomes text when a batch
//! is sent. `batch.rs` groups and sends; `codec.rs` encodes single parts.

use redis::{Cmd, Value};
use smallvec::SmallVec;
use tollgate_kernel::{Cost, Limit, MAX_SPAN, Micros, Reading};

use super::codec::{self, Found};
use super::node::TEST_SHIFT_MS;
use super::script::{self, Script};
use super::{Held, failure};
use crate::remote::limit_codec;
use crate::{ChargeId, Failure, ManualClock, StoreError, StoredCharge};

/// What the charges of one script call have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// The limits, in the order of the script's arguments.
    parts: SmallVec<[ShapeCharge; 1]>,
    /// The index in the charge of each of them.
    order: Order,
    hold: Option<HoldShape>,
}

/// The index in the charge of the first, second, ... part of a script call.
pub(super) type Order = SmallVec<[usize; 4]>;

/// The order of the parts in a script call: by strategy, so that there are few scripts; a hold keeps the order of its charge.
pub(super) fn order_of(parts: &[StoredCharge<'_>], is_hold: bool) -> Order {
    let mut order: Order = (0..parts.len()).collect();
    if !is_hold {
        order.sort_by_key(|index| limit_codec::number(parts[*index].limit.limit.strategy()));
    }
    order
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ShapeCharge {
    limit: Limit,
    cost: Cost,
    shadow: bool,
}

/// What the holds of one call have in common: their time to live, and the request to return to a repeated call; empty if the
/// charges contain the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HoldShape {
    pub(super) operation: Operation,
    pub(super) ttl: Micros,
    pub(super) request: String,
}

/// The operation of the script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Charge,
    /// A charge that creates no key under limits whose numbers come with the call.
    Known,
    Peek,
    Hold,
    /// A hold with other parts on other servers.
    HoldPart,
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Operation::Charge => "charge",
            Operation::Known => "known",
            Operation::Peek => "peek",
            Operation::Hold => "hold",
            Operation::HoldPart => "hold-part",
        }
    }
}

/// The part of a charge that its shape does not have: the keys of the parts, and for a hold its key and its id.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ChargeKeys {
    pub(super) parts: SmallVec<[String; 1]>,
    pub(super) hold: Option<(String, ChargeId)>,
}

/// The script's answer to one charge.
pub(crate) enum Answer {
    Found(Found),
    /// The charge was made before, under the same id.
    Held(Held),
}

impl Shape {
    pub(super) fn of(parts: &[StoredCharge<'_>], hold: Option<HoldShape>) -> Shape {
        let part = |part: &StoredCharge<'_>| ShapeCharge {
            limit: part.limit.limit,
            cost: part.cost,
            shadow: part.shadow,
        };
        let order = order_of(parts, hold.is_some());
        let parts = order.iter().map(|index| part(&parts[*index])).collect();
        Shape { parts, order, hold }
    }

    /// Whether a limit keeps its instant: then its numbers come with the call.
    pub(super) fn keeps_instant(&self) -> bool {
        self.parts.iter().any(|part| match part.limit {
            Limit::TokenBucket(bucket) => bucket.keeps_instant(),
            Limit::LeakyBucket(bucket) => bucket.room().keeps_instant(),
            _ => false,
        })
    }

    pub(super) fn has_hold(&self) -> bool {
        self.hold.is_some()
    }

    /// Which script a call of this shape uses, and how.
    pub(super) fn script_call(&self, operation: Operation, clock: Option<&ManualClock>) -> ScriptCall<'_> {
        if let ([part], None, Operation::Charge | Operation::Known) = (&self.parts[..], &self.hold, operation)
            && let Some(bucket) = WholeBucket::of(part, clock)
        {
            return ScriptCall { shape: self, operation, bucket: Some(bucket), script: &script::BUCKETS };
        }
        let operation = self.hold.as_ref().map_or(operation, |hold| hold.operation);
        let script =
            script::charging(self.parts.iter().map(|part| part.limit.strategy()), self.hold.is_some());
        ScriptCall { shape: self, operation, bucket: None, script }
    }
}

/// A script call for charges of one shape.
pub(super) struct ScriptCall<'a> {
    shape: &'a Shape,
    operation: Operation,
    /// The arguments of the common charge, if it is one.
    bucket: Option<WholeBucket>,
    pub(super) script: &'static Script,
}

impl ScriptCall<'_> {
    /// The keys of the call, charge after charge.
    pub(super) fn keys(charges: &[ChargeKeys]) -> Vec<&str> {
        let of = |charge: &'_ ChargeKeys| charge.parts.len() + usize::from(charge.hold.is_some());
        let mut keys = Vec::with_capacity(charges.iter().map(of).sum());
        for charge in charges {
            keys.extend(charge.parts.iter().map(String::as_str));
            keys.extend(charge.hold.iter().map(|(key, _)| key.as_str()));
        }
        keys
    }

    pub(super) fn operation(&self) -> &'static str {
        self.operation.name()
    }

    /// Adds the arguments after the operation. `start_bytes` is the length of the prefix of all part names.
    pub(super) fn put(&self, cmd: &mut Cmd, charges: &[ChargeKeys], start_bytes: usize) {
        if let Some(bucket) = &self.bucket {
            bucket.put(cmd);
            return;
        }
        cmd.arg(self.shape.parts.len());
        for part in &self.shape.parts {
            codec::put_charge(cmd, &part.limit, part.cost, part.shadow);
        }
        if let Some(hold) = &self.shape.hold {
            cmd.arg(hold.ttl.min(MAX_SPAN).get()).arg(&hold.request).arg(start_bytes);
            for (_, id) in charges.iter().filter_map(|charge| charge.hold.as_ref()) {
                cmd.arg(&id.get().to_be_bytes()[..]);
            }
        }
    }

    /// Reads the answers, one for each charge, or only for the first charges if the script left the rest to another call.
    pub(super) fn read(&self, answer: &Value, charges: usize) -> Option<Vec<Result<Answer, StoreError>>> {
        let Value::Array(answers) = answer else { return None };
        let (Value::Int(now), answers) = answers.split_first()? else { return None };
        let now = Micros::new(u64::try_from(*now).ok()?);
        let limits = || self.shape.parts.iter().map(|part| part.limit);
        let read = |answer: &Value| match answer {
            Value::Int(missing) => {
                let shadow = self.shape.parts.first().is_some_and(|part| part.shadow);
                Some(Ok(Answer::Found(WholeBucket::read(now, *missing, shadow))))
            }
            Value::BulkString(numbers) => {
                let mut found = codec::read_found(now, numbers, limits())?;
                found.restore(&self.shape.order);
                Some(Ok(Answer::Found(found)))
            }
            Value::SimpleString(status) => unkept(status).map(Err),
            Value::Array(_) => Held::read(answer).map(Answer::Held).map(Ok),
            _ => None,
        };
        (1..=charges).contains(&answers.len()).then(|| answers.iter().map(read).collect())?
    }
}

/// The error of one charge or settlement in a batch. Nothing of it was done, unless a command failed half-way.
pub(super) fn unkept(status: &str) -> Option<StoreError> {
    match status {
        "STATE" => Some(failure::not_ours()),
        "FULL" => Some(failure::no_room()),
        "FAILED" => {
            let error = StoreError::failed(Failure::Refused, "Redis refused a command of this call");
            Some(error.of_this_call().ambiguous())
        }
        _ => None,
    }
}

/// A bucket whose state is whole microseconds: the price of the charge, the time to fill, the expiry of the state, the numbers at
/// the end of a state, and whether it keeps its instant instead.
struct WholeBucket {
    price_us: u64,
    span_us: u64,
    how: &'static str,
    stay: String,
    numbers: String,
    keeps_instant: bool,
}

/// A state that fills within this time expires after the longest time that any state of its limit needs, which saves a
/// computation. Longer ones are computed, so that a key with little use does not stay for days.
const STAY_AS_LONG_AS_ANY: Micros = Micros::from_secs(600);

impl WholeBucket {
    /// A part, if it is such a bucket. With a manual clock the expiry is an instant.
    fn of(part: &ShapeCharge, clock: Option<&ManualClock>) -> Option<WholeBucket> {
        let limit = &part.limit;
        if !matches!(limit, Limit::TokenBucket(_) | Limit::LeakyBucket(_)) {
            return None;
        }
        let [1, period_us, burst, _, keeps_instant] = limit.parameters()[..] else { return None };
        // One token every whole number of us, so a time to fill is whole too.
        let span_us = burst.checked_mul(period_us)?;
        let (price_us, _) = limit.price(part.cost)?;
        let numbers = format!("/1/{period_us:x}/{burst:x}");
        let stay_ms = (span_us + span_us.min(1_000_000)) / 1_000 + 1;
        let (how, stay) = match clock {
            Some(clock) => ("PXAT", (clock.now().get() / 1_000 + stay_ms + TEST_SHIFT_MS).to_string()),
            None if span_us <= STAY_AS_LONG_AS_ANY.get() => ("PX", stay_ms.to_string()),
            None => ("PX", String::new()),
        };
        Some(WholeBucket { price_us, span_us, how, stay, numbers, keeps_instant: keeps_instant == 1 })
    }

    fn put(&self, cmd: &mut Cmd) {
        cmd.arg(self.price_us).arg(self.span_us).arg(self.how).arg(&self.stay).arg(&self.numbers);
        cmd.arg(u8::from(self.keeps_instant));
    }

    /// The value of the script: what was missing before an admitted charge, or -1 less that before a denied one.
    fn read(now: Micros, missing: i64, shadow: bool) -> Found {
        let is_charged = missing >= 0;
        let us = u64::try_from(if is_charged { missing } else { -1 - missing }).unwrap_or(0);
        let reading = Reading::Bucket { us: Micros::new(us), rest: 0 };
        // A shadow part denies nothing.
        Found { now, passed: is_charged || shadow, readings: SmallVec::from_elem(reading, 1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StoredLimit;

    #[test]
    fn answers_are_read_one_for_each_charge() {
        let limit = Limit::token_bucket("4/s", 10).unwrap();
        let limit = StoredLimit::new("a", limit);
        let part = StoredCharge { limit: &limit, key: "k", cost: Cost::ONE, shadow: false };
        let shape = Shape::of(&[part], None);
        let script_call = shape.script_call(Operation::Charge, None);
        let status = |text: &str| Value::SimpleString(text.to_owned());
        let all =
            [Value::Int(9), Value::Int(5), status("STATE"), Value::Int(-1), status("FULL"), status("FAILED")];
        let answers = script_call.read(&Value::Array(all.to_vec()), 5).unwrap();
        let passed = |answer: &Result<Answer, StoreError>| match answer {
            Ok(Answer::Found(found)) => Ok(found.passed),
            Ok(Answer::Held(_)) => panic!("nothing was held"),
            Err(error) => Err(error.failure()),
        };
        let read: Vec<_> = answers.iter().map(passed).collect();
        let refused = |failure| Err(Some(failure));
        let expected =
            [Ok(true), refused(Failure::State), Ok(false), refused(Failure::Full), refused(Failure::Refused)];
        assert_eq!(read, expected);
        let first = script_call.read(&Value::Array(all.to_vec()), 9).unwrap();
        assert_eq!(first.len(), 5, "the others are left to another call");
        assert!(script_call.read(&Value::Array(all.to_vec()), 4).is_none());
        assert!(
            script_call.read(&Value::Array(vec![Value::Int(9)]), 4).is_none(),
            "at least one is answered"
        );
        for wrong in
            [vec![], vec![Value::Nil], vec![Value::Int(9), Value::Nil], vec![Value::Int(9), status("?")]]
        {
            let charges = wrong.len().saturating_sub(1);
            assert!(script_call.read(&Value::Array(wrong.clone()), charges).is_none(), "{wrong:?}");
        }
        assert!(script_call.read(&Value::Nil, 0).is_none());
    }

    #[test]
    fn what_was_found_is_put_in_the_order_of_the_charge() {
        let second = Micros::from_secs(1);
        let limits = [
            Limit::concurrency(5, second),
            Limit::fixed_window(5, second),
            Limit::token_bucket("4/s", 10),
            Limit::fixed_window(6, second),
        ];
        let limits = limits.map(|limit| StoredLimit::new("a", limit.unwrap()));
        let part = |limit| StoredCharge { limit, key: "k", cost: Cost::ONE, shadow: false };
        let parts: Vec<StoredCharge<'_>> = limits.iter().map(part).collect();
        assert_eq!(order_of(&parts, false)[..], [2, 1, 3, 0]);
        assert_eq!(order_of(&parts, true)[..], [0, 1, 2, 3], "a hold keeps the order of its charge");
        let shape = Shape::of(&parts, None);
        let number = |number: u64| number.to_be_bytes()[1..].to_vec();
        let numbers = |numbers: [u64; 3]| numbers.map(number).concat();
        let answer = [
            vec![1],
            number(7),
            number(0),
            b"\x02w".to_vec(),
            numbers([20, 2, 10]),
            b"\x02w".to_vec(),
            numbers([21, 3, 11]),
            numbers([4, 0, 9]),
        ];
        let answer = Value::Array(vec![Value::Int(9), Value::BulkString(answer.concat())]);
        let mut answers = shape.script_call(Operation::Charge, None).read(&answer, 1).unwrap();
        let Some(Ok(Answer::Found(found))) = answers.pop() else { panic!("found") };
        let found: Vec<u64> = found
            .readings
            .iter()
            .map(|reading| match reading {
                Reading::Leases(leases) => leases.used,
                Reading::Window(window) => window.count,
                Reading::Bucket { us, .. } => us.get(),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(found, [4, 2, 7, 3]);
    }

    #[test]
    fn charges_are_alike_by_their_limits_costs_and_holds() {
        let limit = StoredLimit::new("a", Limit::fixed_window(5, Micros::from_secs(1)).unwrap());
        let part =
            |cost| StoredCharge { limit: &limit, key: "k", cost: Cost::new(cost).unwrap(), shadow: false };
        let hold = |request: &str| {
            Some(HoldShape {
                operation: Operation::Hold,
                ttl: Micros::from_secs(1),
                request: request.to_owned(),
            })
        };
        assert_eq!(Shape::of(&[part(1)], None), Shape::of(&[StoredCharge { key: "other", ..part(1) }], None));
        assert_ne!(Shape::of(&[part(1)], None), Shape::of(&[part(2)], None));
        assert_ne!(Shape::of(&[part(1)], None), Shape::of(&[StoredCharge { shadow: true, ..part(1) }], None));
        assert_ne!(Shape::of(&[part(1)], None), Shape::of(&[part(1), part(1)], None));
        assert_ne!(Shape::of(&[part(1)], hold("a")), Shape::of(&[part(1)], hold("b")));
    }
}
