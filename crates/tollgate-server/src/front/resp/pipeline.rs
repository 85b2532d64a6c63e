//! The commands of a pipeline that ask for decisions, where the counters are remote: gathered, charged in one call of the store and
//! answered in their order.
//!
//! Each is charged by itself and in order (`Tollgate::charge_each`). A `CL.THROTTLE` of nothing only looks, after those before it.

use tollgate::{Allowance, Charge, Key, Limit, NamedLimit, Outcome, Tollgate};

use super::limiters;
use super::reply::Reply;
use super::request::{Mistake, Request, canonical, write_check, write_throttle};
use super::{counted, needs_permit, parsed, undecided};
use crate::app::Bounds;
use crate::front::peer;

/// How many charges go into one call.
const MOST: usize = 64;

pub(super) struct Pipeline<'a> {
    gate: &'a Tollgate,
    bounds: Bounds,
    commands: Vec<Gathered<'a>>,
}

/// A command, and the limit and the key of its charge, or why there is none.
struct Gathered<'a> {
    request: Request<'a>,
    found: Result<(NamedLimit, Key<'a>), Mistake>,
}

impl Gathered<'_> {
    fn charge(&self) -> Result<Charge<'_>, &Mistake> {
        let (limit, key) = self.found.as_ref()?;
        Ok(Charge::new(limit, key).cost(self.request.cost()))
    }
}

impl<'a> Pipeline<'a> {
    pub(super) fn new(gate: &'a Tollgate, bounds: Bounds) -> Pipeline<'a> {
        Pipeline { gate, bounds, commands: Vec::new() }
    }

    /// Adds a command; what is wrong with it is answered in its place.
    pub(super) fn add(&mut self, request: Request<'a>) {
        let found = self.find(&request);
        self.commands.push(Gathered { request, found });
    }

    /// Whether there are as many as go into one call.
    pub(super) fn is_full(&self) -> bool {
        self.commands.len() >= MOST
    }

    fn find(&self, request: &Request<'a>) -> Result<(NamedLimit, Key<'a>), Mistake> {
        match request {
            Request::Throttle { key, bucket, .. } => {
                let mut text = Vec::new();
                let key = parsed(canonical(key, &mut text)?)?.into_owned();
                Ok((limiters::open(self.gate, self.bounds, bucket)?, key))
            }
            Request::Check { limit, key, .. } => {
                let key = parsed(key)?;
                let limit = self.gate.limit(limit).map_err(undecided)?;
                if matches!(limit.allowance(), Allowance::Limited(Limit::Concurrency(_))) {
                    return Err(needs_permit(limit.name()));
                }
                Ok((limit, key))
            }
        }
    }

    /// Decides what was gathered, and answers it in order.
    pub(super) async fn decide(&mut self, reply: &mut Reply) {
        let commands = std::mem::take(&mut self.commands);
        let is_look = |one: &Gathered<'_>| one.found.is_ok() && one.request.cost() == 0;
        for run in commands.chunk_by(|one, other| is_look(one) == is_look(other)) {
            match run {
                [first, ..] if is_look(first) => {
                    for one in run {
                        let outcome = self.look(one).await;
                        write(one, outcome, reply);
                    }
                }
                _ => self.charge(run, reply).await,
            }
        }
    }

    async fn look(&self, one: &Gathered<'_>) -> Result<Outcome, Mistake> {
        let (limit, key) = one.found.as_ref().map_err(Clone::clone)?;
        let _share = peer::share().await;
        self.gate.status(limit, key).await.map_err(undecided)
    }

    /// Charges a run of commands in one call.
    async fn charge(&self, run: &[Gathered<'_>], reply: &mut Reply) {
        let charges: Vec<Charge<'_>> = run.iter().filter_map(|one| one.charge().ok()).collect();
        let outcomes = match charges.is_empty() {
            true => Ok(Vec::new()),
            false => {
                let _share = peer::share_of(charges.len()).await;
                self.gate.charge_each(&charges).await.map_err(undecided)
            }
        };
        let mut outcomes = outcomes.map(Vec::into_iter);
        for one in run {
            let outcome = match (&one.found, &mut outcomes) {
                (Err(mistake), _) => Err(mistake.clone()),
                (Ok(_), Err(mistake)) => Err(mistake.clone()),
                (Ok(_), Ok(outcomes)) => match outcomes.next() {
                    Some(outcome) => outcome.map_err(undecided),
                    None => Err(Mistake::Borrowed("TRYAGAIN the store left the charge without an answer")),
                },
            };
            write(one, outcome, reply);
        }
    }
}

fn write(one: &Gathered<'_>, outcome: Result<Outcome, Mistake>, reply: &mut Reply) {
    match (one.request, outcome) {
        (Request::Throttle { quantity, .. }, Ok(outcome)) => {
            write_throttle(reply, outcome.numbers(), quantity);
        }
        (Request::Check { limit, .. }, Ok(outcome)) => write_check(reply, limit, &counted(&outcome)),
        (_, Err(mistake)) => reply.error(mistake),
    }
}
