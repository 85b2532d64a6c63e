//! Several groups of keys, each of which is a quota of its own.

use std::time::Duration;

use tollgate::store::Micros;
use tollgate::{Key, Limit, Policy};
use tollgate_llm::{Api, Caller, ModelRequest, RefusalKind};

use super::{World, body, used};

const UPSTREAM: &str = "[llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://localhost/v1'\n\
                        keys = [{ key = 'x', group = 'one' }, { key = 'y', group = 'one' }, { key = 'z', group = 'two' }]\n";

#[tokio::test]
async fn quota_groups_of_keys_add_up() {
    let world = World::of(UPSTREAM, "[llm.models.gpt-4o]\nrpm = 2");
    let mut groups = Vec::new();
    while let Ok(admission) = world.admit_within(100, Some(Duration::ZERO)).await {
        groups.push(admission.group().expect("a group").to_owned());
        admission.settle(used(100)).await.expect("settled");
    }
    groups.sort();
    assert_eq!(groups, ["one", "one", "two", "two"]);
}

/// A world in which an override lowers the limit of one group to 50 tokens; that of the other is 1,000.
fn uneven(lowered: &str, more: &str) -> World {
    let world = World::of(UPSTREAM, &format!("{more}\n[llm.models.gpt-4o]\ntpm = 1000"));
    let small = Limit::sliding_window(50, Micros::from_secs(60)).expect("sound");
    let key = || Key::parse(&tollgate_llm::llm_key(lowered)).expect("sound").into_owned();
    let rules = world.gate.policy().rules().to_vec().into_iter();
    let rules = rules.map(|rule| rule.with_override(key(), small).expect("sound"));
    world.gate.reload(Policy::new(rules).expect("sound")).expect("in place");
    world
}

/// A group whose limit is smaller than the call takes none of it; it is refused for ever only if no group can take it.
#[tokio::test]
async fn a_call_goes_with_a_group_that_can_take_it() {
    for lowered in ["one", "two"] {
        let world = uneven(lowered, "");
        let other = if lowered == "one" { "two" } else { "one" };
        assert!(world.check(300).await.can_proceed, "{lowered}");
        for _ in 0..3 {
            let admission = world.admit_within(300, Some(Duration::ZERO)).await.expect("room");
            assert_eq!(admission.group(), Some(other), "{lowered}");
            assert_eq!(admission.left_out(), [lowered], "no retry waits for it");
            admission.settle(used(300)).await.expect("settled");
        }
        let refusal = world.admit_within(300, Some(Duration::ZERO)).await.expect_err("900 are used");
        assert_eq!(
            (refusal.kind, refusal.retry_after),
            (RefusalKind::Limited, Some(Duration::from_secs(60)))
        );
        let small = world.admit_within(40, Some(Duration::ZERO)).await.expect("room");
        small.cancel().await.expect("cancelled");
        let refusal = world.admit(1_200).await.expect_err("larger than either");
        assert_eq!(refusal.kind, RefusalKind::Never);
        let reason =
            "Token limit exceeded: 1200 tokens / 1000 TPM; the request alone is larger than the limit";
        assert_eq!(refusal.reason, reason, "the largest limit is named");
    }
}

/// A guessed output is lowered to what the group has that the call goes with.
#[tokio::test]
async fn a_guess_is_lowered_for_each_group_by_itself() {
    for lowered in ["one", "two"] {
        let world = uneven(lowered, "llm.default_output_tokens = 700");
        let body = r#"{"model":"gpt-4o","messages":[{"role":"user","content":"hi"}]}"#;
        let request = ModelRequest::read(Api::ChatCompletions, body.as_bytes()).expect("a request");
        let mut reserved = Vec::new();
        for _ in 0..2 {
            let admission =
                world.limits.admit(&request, &Caller::default(), Some(Duration::ZERO)).await.expect("room");
            reserved.push((admission.group().expect("a group").to_owned(), admission.reserved()));
        }
        reserved.sort();
        let of = |group: &str| (group.to_owned(), if group == lowered { 50 } else { 8 + 700 });
        assert_eq!(reserved, [of("one"), of("two")]);
    }
}

/// A call that some group can take whole does not run alone in another.
#[tokio::test]
async fn a_call_runs_alone_only_if_no_group_can_take_it_whole() {
    for lowered in ["one", "two"] {
        let world = uneven(lowered, "llm.on_oversize = 'alone'");
        let other = if lowered == "one" { "two" } else { "one" };
        for _ in 0..2 {
            let admission = world.admit_within(300, Some(Duration::ZERO)).await.expect("room");
            assert_eq!(admission.group(), Some(other));
            admission.cancel().await.expect("cancelled");
        }
        let mut groups = Vec::new();
        for _ in 0..2 {
            let admission = world.admit_within(1_200, Some(Duration::ZERO)).await.expect("an empty window");
            groups.push(admission.group().expect("a group").to_owned());
            admission.settle(used(1_200)).await.expect("settled");
        }
        groups.sort();
        assert_eq!(groups, ["one", "two"]);
    }
}

/// The same for calls that are admitted together: the group must take all of them.
#[tokio::test]
async fn a_batch_goes_with_a_group_that_can_take_all_of_it() {
    for lowered in ["one", "two"] {
        let world = uneven(lowered, "");
        let other = if lowered == "one" { "two" } else { "one" };
        let bodies = |tokens: &[u64]| tokens.iter().map(|tokens| body(*tokens)).collect::<Vec<_>>();
        let requests = |bodies: &'static [String]| {
            let read = |body: &'static String| ModelRequest::read(Api::ChatCompletions, body.as_bytes());
            bodies.iter().map(read).collect::<Result<Vec<_>, _>>().expect("requests")
        };
        // Each fits the lowered limit and both together do not; one fits and the other does not.
        for tokens in [[40, 40], [40, 300], [300, 40]] {
            let requests = requests(bodies(&tokens).leak());
            assert!(
                world.limits.check_batch(&requests, &Caller::default()).await.expect("a check").can_proceed
            );
            let admitted =
                world.limits.admit_batch(&requests, &Caller::default(), Some(Duration::ZERO)).await;
            let admitted = admitted.unwrap_or_else(|refusal| panic!("{lowered} {tokens:?}: {refusal}"));
            for (admission, tokens) in admitted.into_iter().zip(tokens) {
                assert_eq!((admission.group(), admission.reserved()), (Some(other), tokens));
                admission.cancel().await.expect("cancelled");
            }
            let left = world.gate.status("llm.gpt-4o.tpm", &tollgate_llm::llm_key(other)).await;
            assert_eq!(left.expect("a status").remaining(), 1_000);
        }
        let requests = requests(bodies(&[600, 600]).leak());
        let refusal =
            world.limits.admit_batch(&requests, &Caller::default(), None).await.expect_err("too large");
        assert_eq!(refusal.kind, RefusalKind::Never);
        assert!(refusal.reason.contains("1200 tokens / 1000 TPM; the batch alone"), "{refusal}");
    }
}
