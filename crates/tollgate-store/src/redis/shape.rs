//! What charges have in common that go to a server in one call, how they are put to the script, and how its answers are read.
//!
//! Charges are alike if they charge the same limits at the same costs; only their keys differ. What they have in common is written
//! once for all of them, so it is worth comparing: [`Shape`] is numbers only, and becomes text when a batch is sent.

use redis::{Cmd, Value};
use smallvec::SmallVec;
use tollgate_kernel::{Cost, Limit, MAX_SPAN, Micros, Reading};

use super::codec::{self, Found};
use super::node::TEST_SHIFT_MS;
use super::script::{self, Script};
use super::{Held, failure};
use crate::remote::limit_codec;
use crate::{ChargeId, Failure, ManualClock, StoreError, StoredCharge};

/// What charges have in common that go in one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// In the order in which they are put to the script.
    parts: SmallVec<[ShapeCharge; 1]>,
    /// Which part of the charge each of them is.
    order: Order,
    hold: Option<HoldShape>,
}

/// Which part of a charge comes first, second and so on in a script.
pub(super) type Order = SmallVec<[usize; 4]>;

/// The order in which a script is asked about parts: by strategy, so that there are few scripts; a hold keeps the order of its charge.
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

/// What holds have in common: their time to live, and the question as their callers would have it back, or nothing where the charges
/// say as much.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HoldShape {
    pub(super) operation: Operation,
    pub(super) ttl: Micros,
    pub(super) question: String,
}

/// What the script is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    Charge,
    /// A charge that begins no key under numbers that come with the call.
    Known,
    Peek,
    Hold,
    /// A hold of which other charges are held on other servers.
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

/// What tells charges of one shape apart: the keys of the parts, and for a hold its key and its holder.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ChargeKeys {
    pub(super) parts: SmallVec<[String; 1]>,
    pub(super) hold: Option<(String, ChargeId)>,
}

/// What the script answers of one charge.
pub(crate) enum Answer {
    Found(Found),
    /// The charge was made before.
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

    /// Whether all of its numbers come with the call.
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

    /// What a call of this shape does.
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

/// A call of charges of one shape.
pub(super) struct ScriptCall<'a> {
    shape: &'a Shape,
    operation: Operation,
    /// The numbers of the everyday charge, where it is one.
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

    /// Puts what follows the operation. The names of parts begin with so many bytes that are always the same.
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
            cmd.arg(hold.ttl.min(MAX_SPAN).get()).arg(&hold.question).arg(start_bytes);
            for (_, id) in charges.iter().filter_map(|charge| charge.hold.as_ref()) {
                cmd.arg(&id.get().to_be_bytes()[..]);
            }
        }
    }

    /// Reads the answers, one for each charge; or for the first of them, where the script left the rest to another call.
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

/// Why one charge or settlement of several could not be made. Nothing of it was, unless a command was refused half-way.
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

/// A bucket whose state is whole microseconds: what the charge takes, the time to fill, how long the state is to stay, the numbers
/// as they end a state, and whether it keeps its instant instead.
struct WholeBucket {
    price_us: u64,
    span_us: u64,
    how: &'static str,
    stay: String,
    numbers: String,
    keeps_instant: bool,
}

/// A state of a bucket that fills within this stays as long as any of its states may have to, which is one thing less to work
/// out; for others it is worked out, so that a key that was hardly used does not stay for days.
const STAY_AS_LONG_AS_ANY: Micros = Micros::from_secs(600);

impl WholeBucket {
    /// A part, if it is one. A test's clock says when the state is to go.
    fn of(part: &ShapeCharge, clock: Option<&ManualClock>) -> Option<WholeBucket> {
        let limit = &part.limit;
        if !matches!(limit, Limit::TokenBucket(_) | Limit::LeakyBucket(_)) {
            return None;
        }
        let [1, period_us, burst, _, keeps_instant] = limit.parameters()[..] else { return None };
        // One token every so many whole us, so a time to fill is whole too.
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

    /// What was missing before an admitted charge, or -1 less that before a refused one.
    fn read(now: Micros, missing: i64, shadow: bool) -> Found {
        let is_charged = missing >= 0;
        let us = u64::try_from(if is_charged { missing } else { -1 - missing }).unwrap_or(0);
        let reading = Reading::Bucket { us: Micros::new(us), rest: 0 };
        // A part in shadow refuses nobody.
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
        let question = shape.script_call(Operation::Charge, None);
        let status = |text: &str| Value::SimpleString(text.to_owned());
        let all =
            [Value::Int(9), Value::Int(5), status("STATE"), Value::Int(-1), status("FULL"), status("FAILED")];
        let answers = question.read(&Value::Array(all.to_vec()), 5).unwrap();
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
        let first = question.read(&Value::Array(all.to_vec()), 9).unwrap();
        assert_eq!(first.len(), 5, "the others are left to another call");
        assert!(question.read(&Value::Array(all.to_vec()), 4).is_none());
        assert!(question.read(&Value::Array(vec![Value::Int(9)]), 4).is_none(), "at least one is answered");
        for wrong in
            [vec![], vec![Value::Nil], vec![Value::Int(9), Value::Nil], vec![Value::Int(9), status("?")]]
        {
            let charges = wrong.len().saturating_sub(1);
            assert!(question.read(&Value::Array(wrong.clone()), charges).is_none(), "{wrong:?}");
        }
        assert!(question.read(&Value::Nil, 0).is_none());
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
        let hold = |question: &str| {
            Some(HoldShape {
                operation: Operation::Hold,
                ttl: Micros::from_secs(1),
                question: question.to_owned(),
            })
        };
        assert_eq!(Shape::of(&[part(1)], None), Shape::of(&[StoredCharge { key: "other", ..part(1) }], None));
        assert_ne!(Shape::of(&[part(1)], None), Shape::of(&[part(2)], None));
        assert_ne!(Shape::of(&[part(1)], None), Shape::of(&[StoredCharge { shadow: true, ..part(1) }], None));
        assert_ne!(Shape::of(&[part(1)], None), Shape::of(&[part(1), part(1)], None));
        assert_ne!(Shape::of(&[part(1)], hold("a")), Shape::of(&[part(1)], hold("b")));
    }
}
