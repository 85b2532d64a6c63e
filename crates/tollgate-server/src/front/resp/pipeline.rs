//! The commands of a pipeline that ask for decisions, where the counters are remote: gathered, charged in one call of the store and
//! answered in their order.
//!
//! Each is charged by itself and in order (`Tollgate::charge_each`). A `CL.THROTTLE` of nothing only looks, after those before it.

use tollgate::{Allowance, Charge, Limit, NamedLimit, Outcome, Tollgate};

use super::limiters;
use super::reply::Reply;
use super::request::{Mistake, Request, canonical, write_check, write_throttle};
use super::{counted, needs_permit, sound, undecided};
use crate::app::Bounds;
use crate::front::peer;

/// How many charges go into one call.
const MOST: usize = 64;

pub(super) struct Pipeline<'a> {
    gate: &'a Tollgate,
    bounds: Bounds,
    commands: Vec<Gathered<'a>>,
}

/// A command, and what it charges or why it cannot.
struct Gathered<'a> {
    request: Request<'a>,
    charged: Result<Charged, Mistake>,
}

/// What a command charges.
struct Charged {
    limit: NamedLimit,
    key: String,
    /// Zero only looks.
    cost: u64,
}

impl<'a> Pipeline<'a> {
    pub(super) fn new(gate: &'a Tollgate, bounds: Bounds) -> Pipeline<'a> {
        Pipeline { gate, bounds, commands: Vec::new() }
    }

    /// Adds a command; what is wrong with it is answered in its place.
    pub(super) fn add(&mut self, request: Request<'a>) {
        let charged = self.charged(&request);
        self.commands.push(Gathered { request, charged });
    }

    /// Whether there are as many as go into one call.
    pub(super) fn is_full(&self) -> bool {
        self.commands.len() >= MOST
    }

    fn charged(&self, request: &Request<'_>) -> Result<Charged, Mistake> {
        Ok(match request {
            Request::Throttle { key, bucket, quantity } => {
                let mut text = Vec::new();
                let key = canonical(key, &mut text)?.to_owned();
                Charged { limit: limiters::open(self.gate, self.bounds, bucket)?, key, cost: *quantity }
            }
            Request::Check { limit, key, cost } => {
                sound(key)?;
                let limit = self.gate.limit(limit).map_err(undecided)?;
                if matches!(limit.allowance(), Allowance::Limited(Limit::Concurrency(_))) {
                    return Err(needs_permit(limit.name()));
                }
                Charged { limit, key: (*key).to_owned(), cost: *cost }
            }
        })
    }

    /// Decides what was gathered, and answers it in order.
    pub(super) async fn decide(&mut self, reply: &mut Reply) {
        let commands = std::mem::take(&mut self.commands);
        let is_look = |one: &Gathered<'_>| matches!(&one.charged, Ok(charged) if charged.cost == 0);
        for run in commands.chunk_by(|one, other| is_look(one) == is_look(other)) {
            match run {
                [first, ..] if is_look(first) => {
                    for one in run {
                        let outcome = self.look(&one.charged).await;
                        write(one, outcome, reply);
                    }
                }
                _ => self.charge(run, reply).await,
            }
        }
    }

    async fn look(&self, charged: &Result<Charged, Mistake>) -> Result<Outcome, Mistake> {
        let charged = charged.as_ref().map_err(Clone::clone)?;
        let _share = peer::share().await;
        self.gate.status(&charged.limit, &charged.key).await.map_err(undecided)
    }

    /// Charges a run of commands in one call.
    async fn charge(&self, run: &[Gathered<'_>], reply: &mut Reply) {
        let charges: Vec<Charge<'_>> = run
            .iter()
            .filter_map(|one| one.charged.as_ref().ok())
            .map(|charged| Charge::new(&charged.limit, &charged.key).cost(charged.cost))
            .collect();
        let outcomes = match charges.is_empty() {
            true => Ok(Vec::new()),
            false => {
                let _share = peer::share_of(charges.len()).await;
                self.gate.charge_each(&charges).await.map_err(undecided)
            }
        };
        let mut outcomes = outcomes.map(Vec::into_iter);
        for one in run {
            let outcome = match (&one.charged, &mut outcomes) {
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
