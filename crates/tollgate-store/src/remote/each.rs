//! Charges that are charged separately: which of them share a call, and which wait for which.
//!
//! Charges of one kind share a call, as far as the store can carry them out in one. Charges of one pair of limit and key are made
//! in order: a charge that cannot share a call with the one before it waits for that call, and for no other. So a call that hangs
//! delays only the later charges of its own pairs.

use std::collections::{HashMap, VecDeque};

use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::time::Instant;

use crate::{Failure, Outcome, StoreError, StoredCharge};

/// The most calls to one server in flight at once, for all kinds of charges.
const AT_ONCE: usize = 16;

/// Charges that go in one call.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Group {
    /// The server of the call, as a number. The number of calls to one server is bounded.
    server: u64,
    /// The places of its charges, in their order.
    places: Vec<usize>,
    /// The group with the previous charges of the same pairs, if any.
    after: Option<usize>,
}

/// Divides the charges into groups. A group that waits for another comes after it. All charges of one kind are on one server;
/// `is_once` says that a call cannot charge one pair twice, and `most` is the most charges of a call.
pub(crate) fn groups<K: PartialEq>(
    charges: &[StoredCharge<'_>],
    kind: impl Fn(&StoredCharge<'_>) -> K,
    server: impl Fn(&StoredCharge<'_>) -> u64,
    is_once: bool,
    most: usize,
) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    let mut kinds: Vec<K> = Vec::new();
    // Which group collects the charges of a kind that wait for the same group.
    let mut open: HashMap<(Option<usize>, usize), usize> = HashMap::new();
    // In which group the last charge of a pair is.
    let mut last: HashMap<(&str, &str), usize> = HashMap::new();
    for (place, charge) in charges.iter().enumerate() {
        let (kind, pair) = (kind(charge), (&*charge.limit.name, charge.key));
        let kind = kinds.iter().position(|other| *other == kind).unwrap_or_else(|| {
            kinds.push(kind);
            kinds.len() - 1
        });
        let has_room = |group: &usize| groups[*group].places.len() < most;
        let joins = |before: &usize| {
            !is_once && open.get(&(groups[*before].after, kind)) == Some(before) && has_room(before)
        };
        let after = match last.get(&pair).copied() {
            Some(before) if joins(&before) => groups[before].after,
            before => before,
        };
        let group = match open.get(&(after, kind)).copied().filter(has_room) {
            Some(group) => group,
            None => {
                groups.push(Group { server: server(charge), places: Vec::new(), after });
                open.insert((after, kind), groups.len() - 1);
                groups.len() - 1
            }
        };
        groups[group].places.push(place);
        last.insert(pair, group);
    }
    groups
}

/// The groups of one server that may be called.
#[derive(Default)]
struct Lane {
    waiting: VecDeque<usize>,
    in_flight: usize,
}

/// Makes all charges with `call`, which charges one group, and answers in the order of the charges. Groups that could not be sent
/// by the deadline are not sent.
pub(crate) async fn charge<'a, F>(
    count: usize,
    groups: Vec<Group>,
    deadline: Instant,
    call: impl Fn(Vec<usize>) -> F + Send + 'a,
) -> Vec<Result<Outcome, StoreError>>
where
    F: Future<Output = Result<Vec<Result<Outcome, StoreError>>, StoreError>> + Send + 'a,
{
    let missing = || Err(StoreError::failed(Failure::Reply, "the store left a charge without an answer"));
    let mut outcomes: Vec<Result<Outcome, StoreError>> = (0..count).map(|_| missing()).collect();
    let mut followers: HashMap<usize, Vec<usize>> = HashMap::new();
    let mut lanes: HashMap<u64, Lane> = HashMap::new();
    for (index, group) in groups.iter().enumerate() {
        match group.after {
            Some(before) => followers.entry(before).or_default().push(index),
            None => lanes.entry(group.server).or_default().waiting.push_back(index),
        }
    }
    let numbered = |index: usize| {
        let called = call(groups[index].places.clone());
        async move { (index, called.await) }
    };
    let mut in_flight = FuturesUnordered::new();
    loop {
        for lane in lanes.values_mut() {
            while lane.in_flight < AT_ONCE
                && let Some(index) = lane.waiting.pop_front()
            {
                if Instant::now() < deadline {
                    lane.in_flight += 1;
                    in_flight.push(numbered(index));
                } else {
                    answer(&mut outcomes, &groups[index].places, Err(not_sent()));
                    lane.waiting.extend(followers.remove(&index).unwrap_or_default());
                }
            }
        }
        let Some((index, answers)) = in_flight.next().await else { break };
        let Group { server, places, .. } = &groups[index];
        answer(&mut outcomes, places, answers);
        lanes.entry(*server).or_default().in_flight -= 1;
        for follower in followers.remove(&index).unwrap_or_default() {
            lanes.entry(groups[follower].server).or_default().waiting.push_back(follower);
        }
    }
    outcomes
}

fn not_sent() -> StoreError {
    StoreError::failed(
        Failure::Timeout,
        "the charges before this one took all the time that there was; this one was not sent",
    )
}

/// Records the results of a group.
fn answer(
    outcomes: &mut [Result<Outcome, StoreError>],
    places: &[usize],
    answers: Result<Vec<Result<Outcome, StoreError>>, StoreError>,
) {
    match answers {
        Ok(answers) => places.iter().zip(answers).for_each(|(place, answer)| outcomes[*place] = answer),
        Err(error) => places.iter().for_each(|place| outcomes[*place] = Err(error.for_another())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cost, Limit, Micros, StoredLimit};

    #[test]
    fn alike_go_together_and_a_pair_is_charged_in_order() {
        let limit = |name| StoredLimit::new(name, Limit::fixed_window(5, Micros::from_secs(60)).unwrap());
        let (api, other) = (limit("api"), limit("other"));
        let check =
            |charges: &[(&StoredLimit, &str, u64)], is_once, expected: &[(&[usize], Option<usize>)]| {
                let charges: Vec<StoredCharge<'_>> = charges
                    .iter()
                    .map(|&(limit, key, units)| StoredCharge {
                        limit,
                        key,
                        cost: Cost::new(units).unwrap(),
                        shadow: false,
                    })
                    .collect();
                let kind = |charge: &StoredCharge<'_>| (charge.limit.name.clone(), charge.cost.get());
                let groups = groups(&charges, kind, |_| 0, is_once, 3);
                let groups: Vec<_> = groups.iter().map(|group| (&group.places[..], group.after)).collect();
                assert_eq!(groups, expected, "{is_once}");
            };
        check(&[], false, &[]);
        let apart = [(&api, "a", 1), (&other, "a", 1), (&api, "b", 1)];
        check(&apart, true, &[(&[0, 2], None), (&[1], None)]);
        let again = [(&api, "a", 1), (&api, "a", 1), (&api, "b", 1)];
        check(&again, false, &[(&[0, 1, 2], None)]);
        check(&again, true, &[(&[0, 2], None), (&[1], Some(0))]);
        let costs = [(&api, "a", 1), (&api, "a", 2), (&api, "a", 1)];
        check(&costs, false, &[(&[0], None), (&[1], Some(0)), (&[2], Some(1))]);
        let a_to_c = [(&api, "a", 1), (&api, "b", 1), (&api, "c", 1)];
        check(&[&a_to_c[..], &[(&api, "d", 1)]].concat(), false, &[(&[0, 1, 2], None), (&[3], None)]);
        check(&[&a_to_c[..], &[(&api, "a", 1)]].concat(), false, &[(&[0, 1, 2], None), (&[3], Some(0))]);
        let twice = [&a_to_c[..], &[(&api, "b", 1), (&api, "a", 1), (&api, "a", 1)]].concat();
        check(&twice, true, &[(&[0, 1, 2], None), (&[3, 4], Some(0)), (&[5], Some(1))]);
        // Charges that wait for different calls are in different calls, though they are alike.
        let waits = [(&api, "a", 1), (&api, "b", 2), (&api, "a", 3), (&api, "b", 3)];
        check(&waits, false, &[(&[0], None), (&[1], None), (&[2], Some(0)), (&[3], Some(1))]);
    }

    /// A server that hangs until every charge of other servers was made, however many charges are its own and however often keys
    /// are repeated.
    #[tokio::test(start_paused = true)]
    async fn a_call_that_hangs_holds_up_no_other_server() {
        let limit = StoredLimit::new("api", Limit::fixed_window(5, Micros::from_secs(60)).unwrap());
        let keys: Vec<String> = (0..4 * AT_ONCE).map(|key| key.to_string()).collect();
        // Each key twice, with different costs: as many groups.
        let cost = |index: usize| Cost::new(1 + index as u64).unwrap();
        let all = keys.iter().chain(&keys).enumerate();
        let charges: Vec<StoredCharge<'_>> = all
            .map(|(index, key)| StoredCharge { limit: &limit, key, cost: cost(index), shadow: false })
            .collect();
        let server =
            |charge: &StoredCharge<'_>| u64::from(charge.key.parse::<usize>().unwrap() < 2 * AT_ONCE);
        let groups = groups(&charges, |charge| charge.cost.get(), server, true, 64);
        let (healthy, made) = (tokio::sync::Semaphore::new(0), std::sync::Mutex::new(Vec::new()));
        let call = |places: Vec<usize>| {
            let (charges, healthy, made) = (&charges, &healthy, &made);
            async move {
                if server(&charges[places[0]]) == 1 {
                    let all = healthy.acquire_many(u32::try_from(4 * AT_ONCE).unwrap()).await.expect("open");
                    drop(all);
                } else {
                    healthy.add_permits(1);
                }
                made.lock().unwrap().extend(places.iter().copied());
                Ok(places.iter().map(|_| Ok(Outcome::UNLIMITED)).collect())
            }
        };
        let deadline = Instant::now() + std::time::Duration::from_secs(60);
        let charged = charge(charges.len(), groups, deadline, call);
        let outcomes = tokio::time::timeout_at(deadline, charged).await.expect("no charge waits for others");
        assert!(outcomes.iter().all(Result::is_ok));
        let made = made.into_inner().unwrap();
        assert_eq!(made.len(), charges.len());
        for key in 0..keys.len() {
            let position = |place| made.iter().position(|made| *made == place);
            assert!(position(key) < position(key + keys.len()), "a pair is charged in order");
        }
    }

    /// Charges of one pair, one after the other, have one deadline.
    #[tokio::test(start_paused = true)]
    async fn what_is_not_begun_by_the_deadline_is_not_sent() {
        let limit = StoredLimit::new("api", Limit::fixed_window(5, Micros::from_secs(60)).unwrap());
        let charges = [StoredCharge { limit: &limit, key: "a", cost: Cost::ONE, shadow: false }; 9];
        let groups = groups(&charges, |_| (), |_| 0, true, 64);
        let (start, second) = (Instant::now(), std::time::Duration::from_secs(1));
        let sent = std::sync::atomic::AtomicUsize::new(0);
        let call = |places: Vec<usize>| {
            sent.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            async move {
                tokio::time::sleep(second).await;
                Ok(places.iter().map(|_| Ok(Outcome::UNLIMITED)).collect())
            }
        };
        let outcomes = charge(charges.len(), groups, start + 2 * second, call).await;
        assert_eq!(sent.into_inner(), 2);
        assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 2);
        let error = outcomes[8].as_ref().unwrap_err();
        assert!(error.failure() == Some(Failure::Timeout) && !error.is_ambiguous(), "{error}");
        assert_eq!(start.elapsed(), 2 * second);
    }
}
