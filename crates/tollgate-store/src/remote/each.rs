//! Charges that are each made by themselves: which of them go in one call.
//!
//! Charges of one kind go together, as far as the store can carry them out in one call. Charges of one pair of limit and key are
//! made in their order, so those that cannot be in one call are in different rounds.

use std::collections::HashMap;

use crate::{Failure, Outcome, StoreError, StoredCharge};

/// How many calls are in flight at once, however many kinds of charges there are.
const AT_ONCE: usize = 16;

/// Rounds, one after the other; in each the groups, which may be under way at the same time; in each of these the places of its
/// items, in their order. `is_once` says that a call cannot charge one pair twice.
pub(crate) fn rounds<K: PartialEq>(
    items: &[StoredCharge<'_>],
    kind: impl Fn(&StoredCharge<'_>) -> K,
    is_once: bool,
    most: usize,
) -> Vec<Vec<Vec<usize>>> {
    let mut rounds: Vec<Vec<Vec<usize>>> = Vec::new();
    let mut kinds: Vec<K> = Vec::new();
    // Which group of a round collects a kind.
    let mut open: HashMap<(usize, usize), usize> = HashMap::new();
    // In which round and group the last charge of a pair is.
    let mut last: HashMap<(&str, &str), (usize, usize)> = HashMap::new();
    for (place, item) in items.iter().enumerate() {
        let (kind, pair) = (kind(item), (&*item.limit.name, item.key));
        let kind = kinds.iter().position(|other| *other == kind).unwrap_or_else(|| {
            kinds.push(kind);
            kinds.len() - 1
        });
        let has_room = |round: usize, group: &usize| rounds[round][*group].len() < most;
        let round = match last.get(&pair) {
            None => 0,
            Some((round, group)) => {
                let open = open.get(&(*round, kind)).filter(|open| has_room(*round, open));
                round + usize::from(is_once || open != Some(group))
            }
        };
        if rounds.len() == round {
            rounds.push(Vec::new());
        }
        let groups = &mut rounds[round];
        let group = match open.get(&(round, kind)) {
            Some(&group) if groups[group].len() < most => group,
            _ => {
                groups.push(Vec::new());
                open.insert((round, kind), groups.len() - 1);
                groups.len() - 1
            }
        };
        groups[group].push(place);
        last.insert(pair, (round, group));
    }
    rounds
}

/// Makes the charges of all rounds by `call`, which makes those of one group, and answers in the order of the items.
pub(crate) async fn charge<'a, F>(
    count: usize,
    rounds: Vec<Vec<Vec<usize>>>,
    call: impl Fn(Vec<usize>) -> F + Send + 'a,
) -> Vec<Result<Outcome, StoreError>>
where
    F: Future<Output = Result<Vec<Result<Outcome, StoreError>>, StoreError>> + Send + 'a,
{
    let missing = || Err(StoreError::failed(Failure::Reply, "the store left a charge without an answer"));
    let mut outcomes: Vec<Result<Outcome, StoreError>> = (0..count).map(|_| missing()).collect();
    for groups in rounds.iter().flat_map(|round| round.chunks(AT_ONCE)) {
        let calls: Vec<F> = groups.iter().map(|places| call(places.clone())).collect();
        let answers = futures_util::future::join_all(calls).await;
        for (places, answers) in groups.iter().zip(answers) {
            match answers {
                Ok(answers) => {
                    for (place, answer) in places.iter().zip(answers) {
                        outcomes[*place] = answer;
                    }
                }
                Err(error) => {
                    for place in places {
                        outcomes[*place] = Err(error.for_another());
                    }
                }
            }
        }
    }
    outcomes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cost, Limit, Micros, StoredLimit};

    #[test]
    fn alike_go_together_and_a_pair_is_charged_in_order() {
        let limit = |name| StoredLimit::new(name, Limit::fixed_window(5, Micros::from_secs(60)).unwrap());
        let (api, other) = (limit("api"), limit("other"));
        let check = |asked: &[(&StoredLimit, &str, u64)], is_once, expected: &[&[&[usize]]]| {
            let items: Vec<StoredCharge<'_>> = asked
                .iter()
                .map(|&(limit, key, units)| StoredCharge {
                    limit,
                    key,
                    cost: Cost::new(units).unwrap(),
                    shadow: false,
                })
                .collect();
            let rounds = rounds(&items, |item| (item.limit.name.clone(), item.cost.get()), is_once, 3);
            assert_eq!(rounds, expected, "{is_once}");
        };
        check(&[], false, &[]);
        check(&[(&api, "a", 1), (&other, "a", 1), (&api, "b", 1)], true, &[&[&[0, 2], &[1]]]);
        check(&[(&api, "a", 1), (&api, "a", 1), (&api, "b", 1)], false, &[&[&[0, 1, 2]]]);
        check(&[(&api, "a", 1), (&api, "a", 1), (&api, "b", 1)], true, &[&[&[0, 2]], &[&[1]]]);
        check(&[(&api, "a", 1), (&api, "a", 2), (&api, "a", 1)], false, &[&[&[0]], &[&[1]], &[&[2]]]);
        let a_to_c = [(&api, "a", 1), (&api, "b", 1), (&api, "c", 1)];
        check(&[&a_to_c[..], &[(&api, "d", 1)]].concat(), false, &[&[&[0, 1, 2], &[3]]]);
        check(&[&a_to_c[..], &[(&api, "a", 1)]].concat(), false, &[&[&[0, 1, 2]], &[&[3]]]);
    }
}
