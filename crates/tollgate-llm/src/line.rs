//! The queue of calls that wait for one quota: weighted-fair between clients, two priorities, without starvation.
//!
//! Within a client, calls go in the order in which they came. Between clients, the one goes first that has been served least for its
//! weight: start-time fair queueing, in tokens. Interactive calls go before batch calls, but every quarter of a window the oldest batch
//! call that has waited that long goes first, so batch work moves under any load.
//!
//! Only the first in line tries. Denied by a limit that all share, it keeps its place and sleeps exactly as long as the limit says;
//! denied for longer by a limit of its own client, it steps aside until then, so that it holds up nobody else. What is settled makes the
//! first look again at once. A waiter that is dropped leaves no trace. Nothing here counts quota: the limits decide.

use std::collections::{BTreeMap, HashMap};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::config::{Counts, Priority};
use parking_lot::Mutex;
use tollgate::Clock;
use tollgate::store::Micros;

/// What one token of a client of weight one advances it by. Divisible by small weights, so that shares are even.
const SCALE: u128 = 720_720;

/// Who joins.
#[derive(Clone, Debug)]
pub(crate) struct Joining {
    pub(crate) client: Arc<str>,
    pub(crate) weight: u64,
    pub(crate) priority: Priority,
    /// In tokens.
    pub(crate) cost: u64,
    /// Of those, input.
    pub(crate) input: u64,
}

/// What goes before a call that joins at the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ahead {
    calls: u64,
    tokens: u64,
    input: u64,
}

impl Ahead {
    fn and(self, other: Ahead) -> Ahead {
        Ahead {
            calls: self.calls.saturating_add(other.calls),
            tokens: self.tokens.saturating_add(other.tokens),
            input: self.input.saturating_add(other.input),
        }
    }

    fn without(self, other: Ahead) -> Ahead {
        Ahead {
            calls: self.calls.saturating_sub(other.calls),
            tokens: self.tokens.saturating_sub(other.tokens),
            input: self.input.saturating_sub(other.input),
        }
    }

    /// In units of a limit that counts this.
    pub(crate) fn of(self, counts: Counts) -> u64 {
        match counts {
            Counts::Requests | Counts::Concurrency => self.calls,
            Counts::Tokens => self.tokens,
            Counts::InputTokens => self.input,
            Counts::OutputTokens => self.tokens.saturating_sub(self.input),
        }
    }
}

/// One line.
#[derive(Debug)]
pub(crate) struct Line {
    clock: Clock,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    max_waiting: usize,
    /// After how long a batch call goes before interactive ones.
    age: Micros,
    last_ticket: u64,
    waiting: usize,
    /// The waiting calls by their priority: interactive, batch.
    waiting_by: [Ahead; 2],
    /// The calls that were admitted and may still give something back.
    open: usize,
    clients: HashMap<Arc<str>, Client>,
    /// How far the line has served, in scaled tokens for each weight.
    served: u128,
    /// The batch call that goes before interactive ones, once it is its turn, and when the last one did.
    promoted: Option<u64>,
    last_promoted: Micros,
    nudges: u64,
}

#[derive(Debug)]
struct Client {
    weight: u64,
    priority: Priority,
    calls: BTreeMap<u64, Call>,
    /// Up to where this client has been served.
    finish: u128,
    /// Its own limits deny it until then.
    held_until: Micros,
}

#[derive(Debug)]
struct Call {
    cost: u64,
    joined: Micros,
    waker: Option<Waker>,
}

/// What a waiter is to do.
enum Turn {
    Try(u64),
    /// Look again then.
    Sleep(Option<Micros>),
}

/// A place in the line, given up when dropped.
pub(crate) struct Ticket<'a> {
    line: &'a Line,
    client: Arc<str>,
    priority: Priority,
    number: u64,
    cost: u64,
    input: u64,
}

impl Line {
    pub(crate) fn new(clock: Clock, max_waiting: usize, window: Micros) -> Line {
        let state = State { last_promoted: clock.now(), ..State::default() };
        let line = Line { clock, state: Mutex::new(state) };
        line.rebind(max_waiting, window);
        line
    }

    /// Sets how many may wait, and the window by which batch calls age. Waiting calls stay.
    pub(crate) fn rebind(&self, max_waiting: usize, window: Micros) {
        let mut state = self.state.lock();
        (state.max_waiting, state.age) = (max_waiting, Micros::new(window.get() / 4));
    }

    /// Takes a place; `None` if the line is full.
    pub(crate) fn join(&self, who: Joining) -> Option<Ticket<'_>> {
        let now = self.clock.now();
        let mut state = self.state.lock();
        if state.waiting >= state.max_waiting {
            return None;
        }
        state.last_ticket += 1;
        let number = state.last_ticket;
        state.waiting += 1;
        // Who is behind the others anyway need not be remembered.
        let served = state.served;
        state.clients.retain(|_, client| !client.calls.is_empty() || client.finish > served);
        let client = state.clients.entry(who.client.clone()).or_insert_with(|| Client {
            weight: 1,
            priority: who.priority,
            calls: BTreeMap::new(),
            finish: 0,
            held_until: Micros::ZERO,
        });
        (client.weight, client.priority) = (who.weight.max(1), who.priority);
        client.calls.insert(number, Call { cost: who.cost, joined: now, waker: None });
        let (client, priority) = (who.client, who.priority);
        let ticket = Ticket { line: self, client, priority, number, cost: who.cost, input: who.input };
        let sum = &mut state.waiting_by[priority as usize];
        *sum = sum.and(ticket.units());
        Some(ticket)
    }

    /// Has the first look again: something was given back, perhaps to a client's own limits too.
    pub(crate) fn nudge(&self) {
        let mut state = self.state.lock();
        state.nudges += 1;
        for client in state.clients.values_mut() {
            client.held_until = Micros::ZERO;
        }
        let waker = self.first_waker(&mut state);
        drop(state);
        waker.into_iter().for_each(Waker::wake);
    }

    /// A call that was admitted has been settled.
    pub(crate) fn settled(&self) {
        let mut state = self.state.lock();
        state.open = state.open.saturating_sub(1);
        drop(state);
        self.nudge();
    }

    /// How many wait.
    pub(crate) fn waiting(&self) -> usize {
        self.state.lock().waiting
    }

    /// How many of one client wait, which go before a new one of its calls.
    pub(crate) fn waiting_of(&self, client: &str) -> usize {
        self.state.lock().clients.get(client).map_or(0, |client| client.calls.len())
    }

    /// What goes before a call of this priority that joins now.
    pub(crate) fn ahead(&self, priority: Priority) -> Ahead {
        let [interactive, batch] = self.state.lock().waiting_by;
        match priority {
            Priority::Interactive => interactive,
            Priority::Batch => interactive.and(batch),
        }
    }

    /// The tokens of all waiting calls.
    #[cfg(test)]
    fn tokens(&self) -> u64 {
        self.ahead(Priority::Batch).tokens
    }

    /// Whether calls run whose settlement may give something back.
    pub(crate) fn has_open(&self) -> bool {
        self.state.lock().open > 0
    }

    /// Whose calls go next, one name for each call, if nothing changes. Clients that their own limits deny come last.
    pub(crate) fn order(&self, most: usize) -> Vec<Arc<str>> {
        let now = self.clock.now();
        let mut state = self.state.lock();
        self.promote(&mut state, now);
        let mut clients: Vec<_> = state
            .clients
            .iter()
            .filter(|(_, client)| !client.calls.is_empty())
            .map(|(name, client)| (name, client, client.finish, client.calls.iter().peekable()))
            .collect();
        let (mut served, mut order) = (state.served, Vec::new());
        while order.len() < most {
            let next = clients.iter_mut().filter_map(|(name, client, finish, calls)| {
                let (number, call) = calls.peek()?;
                let class = (state.promoted != Some(**number)).then_some(client.priority);
                let rank = (client.held_until > now, class, (*finish).max(served), **number);
                Some((rank, *name, u128::from(call.cost) * SCALE / u128::from(client.weight), finish, calls))
            });
            let Some((rank, name, cost, finish, calls)) = next.min_by_key(|(rank, ..)| *rank) else { break };
            served = rank.2;
            *finish = served.saturating_add(cost);
            calls.next();
            order.push(name.clone());
        }
        order
    }

    fn first_waker(&self, state: &mut State) -> Option<Waker> {
        let (client, number) = self.first(state)?;
        state.clients.get_mut(&client)?.calls.get_mut(&number)?.waker.take()
    }

    /// Whose turn it is.
    fn first(&self, state: &mut State) -> Option<(Arc<str>, u64)> {
        let now = self.clock.now();
        self.promote(state, now);
        let free = state.clients.iter().filter(|(_, client)| client.held_until <= now);
        let heads =
            free.filter_map(|(name, client)| Some((name, client, *client.calls.first_key_value()?.0)));
        let first = heads.min_by_key(|(_, client, number)| {
            let class = match state.promoted == Some(*number) {
                true => None,
                false => Some(client.priority),
            };
            (class, client.finish.max(state.served), *number)
        });
        first.map(|(name, _, number)| (name.clone(), number))
    }

    /// Chooses the oldest batch call, if it has waited long enough and so long ago the last one was chosen.
    fn promote(&self, state: &mut State, now: Micros) {
        if state.promoted.is_some() || now < state.last_promoted.saturating_add(state.age) {
            return;
        }
        let batch = state
            .clients
            .values()
            .filter(|client| client.priority == Priority::Batch && client.held_until <= now);
        let heads = batch.filter_map(|client| client.calls.first_key_value());
        let aged = heads.filter(|(_, call)| now >= call.joined.saturating_add(state.age));
        if let Some(number) = aged.map(|(number, _)| *number).min() {
            (state.promoted, state.last_promoted) = (Some(number), now);
        }
    }

    /// When the head of a client should look again by itself: when its own limits let it, or when it may be promoted.
    fn looks_again(&self, state: &State, client: &Client, call: &Call, now: Micros) -> Option<Micros> {
        let held = Some(client.held_until).filter(|held| *held > now);
        let ages = call.joined.max(state.last_promoted).saturating_add(state.age);
        let ages = Some(ages).filter(|ages| client.priority == Priority::Batch && *ages > now);
        [held, ages].into_iter().flatten().min()
    }
}

impl Ticket<'_> {
    /// Waits until it is this call's turn to try, with the count of nudges to hand in the next time; `None` at the deadline. Tried and
    /// denied, it is not asked again before `not_before`, unless there was a nudge since `seen`.
    pub(crate) async fn turn(&self, tried: Option<(Micros, u64)>, deadline: Micros) -> Option<u64> {
        let clock = &self.line.clock;
        let mut alarm = None;
        poll_fn(|context| {
            loop {
                let at = match self.poll(tried, context) {
                    Turn::Try(nudges) => return Poll::Ready(Some(nudges)),
                    Turn::Sleep(at) => at.unwrap_or(deadline).min(deadline),
                };
                if alarm.as_ref().is_none_or(|(set, _)| *set != at) {
                    alarm = Some((at, Box::pin(clock.alarm(at))));
                }
                let Some((_, ringing)) = &mut alarm else { return Poll::Pending };
                match Pin::as_mut(ringing).poll(context) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(()) if clock.now() >= deadline => return Poll::Ready(None),
                    Poll::Ready(()) => alarm = None,
                }
            }
        })
        .await
    }

    fn poll(&self, tried: Option<(Micros, u64)>, context: &mut Context<'_>) -> Turn {
        let now = self.line.clock.now();
        let mut state = self.line.state.lock();
        let first = self.line.first(&mut state);
        let nudges = state.nudges;
        let sleep = match first {
            Some((_, number)) if number == self.number => match tried {
                Some((not_before, seen)) if now < not_before && nudges == seen => Some(not_before),
                _ => return Turn::Try(nudges),
            },
            _ => {
                let client = state.clients.get(&self.client);
                let head = client.and_then(|client| Some((client, client.calls.first_key_value()?)));
                head.filter(|(_, (number, _))| **number == self.number)
                    .and_then(|(client, (_, call))| self.line.looks_again(&state, client, call, now))
            }
        };
        if let Some(call) =
            state.clients.get_mut(&self.client).and_then(|client| client.calls.get_mut(&self.number))
        {
            call.waker = Some(context.waker().clone());
        }
        Turn::Sleep(sleep)
    }

    /// Only its own client's limits have denied it: others may go on until then.
    pub(crate) fn step_aside(&self, until: Micros) {
        let mut state = self.line.state.lock();
        if let Some(client) = state.clients.get_mut(&self.client) {
            client.held_until = until;
        }
        if state.promoted == Some(self.number) {
            state.promoted = None;
        }
        let waker = self.line.first_waker(&mut state);
        drop(state);
        waker.into_iter().for_each(Waker::wake);
    }

    /// It was admitted.
    pub(crate) fn admitted(self) {
        let mut state = self.line.state.lock();
        state.open += 1;
        let served = state.served;
        if let Some(client) = state.clients.get_mut(&self.client) {
            let start = client.finish.max(served);
            client.finish = start.saturating_add(u128::from(self.cost) * SCALE / u128::from(client.weight));
            state.served = start;
        }
        // Dropping it lets the next one try.
        drop(state);
    }

    /// How many are in line, this one included.
    pub(crate) fn waiting(&self) -> usize {
        self.line.waiting()
    }

    /// What goes before this call if it leaves and joins again.
    pub(crate) fn ahead(&self) -> Ahead {
        self.line.ahead(self.priority).without(self.units())
    }

    fn units(&self) -> Ahead {
        Ahead { calls: 1, tokens: self.cost, input: self.input }
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        let mut state = self.line.state.lock();
        let call = state.clients.get_mut(&self.client).and_then(|client| client.calls.remove(&self.number));
        if call.is_some() {
            state.waiting = state.waiting.saturating_sub(1);
            let sum = &mut state.waiting_by[self.priority as usize];
            *sum = sum.without(self.units());
        }
        if state.promoted == Some(self.number) {
            state.promoted = None;
        }
        // The next of this client may have to look for itself when its client may go on.
        let next = state.clients.get_mut(&self.client);
        let next = next.and_then(|client| client.calls.first_entry()?.get_mut().waker.take());
        let first = self.line.first_waker(&mut state);
        drop(state);
        next.into_iter().chain(first).for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use tollgate::ManualClock;

    use super::*;

    const WINDOW: Micros = Micros::from_secs(60);

    fn line() -> (ManualClock, Line) {
        let hands = ManualClock::at(Micros::ZERO);
        let line = Line::new(hands.clock(), 1_000, WINDOW);
        (hands, line)
    }

    fn joining(client: &str, weight: u64, priority: Priority, cost: u64) -> Joining {
        Joining { client: client.into(), weight, priority, cost, input: 0 }
    }

    fn may_try(ticket: &Ticket<'_>) -> bool {
        matches!(ticket.poll(None, &mut Context::from_waker(Waker::noop())), Turn::Try(_))
    }

    /// Serves so many, and says whose they were.
    fn serve<'a>(tickets: &mut Vec<Ticket<'a>>, count: usize) -> Vec<Arc<str>> {
        let mut served = Vec::new();
        for _ in 0..count {
            let at = tickets.iter().position(may_try).expect("somebody's turn");
            assert_eq!(tickets.iter().filter(|ticket| may_try(ticket)).count(), 1, "one at a time");
            let ticket = tickets.remove(at);
            served.push(ticket.client.clone());
            ticket.admitted();
        }
        served
    }

    #[test]
    fn f2_tokens_are_shared_by_weight_and_a_client_alone_has_all() {
        let (_hands, line) = line();
        let mut tickets = Vec::new();
        for _ in 0..200 {
            tickets.extend(line.join(joining("three", 3, Priority::Interactive, 100)));
            tickets.extend(line.join(joining("one", 1, Priority::Interactive, 50)));
        }
        let served = serve(&mut tickets, 250);
        let tokens =
            |name: &str, cost: usize| served.iter().filter(|client| &***client == name).count() * cost;
        let (three, one) = (tokens("three", 100), tokens("one", 50));
        assert!((three * 100 / (three + one)).abs_diff(75) <= 3, "{three} and {one}");
        tickets.retain(|ticket| &*ticket.client == "one");
        assert!(serve(&mut tickets, 50).iter().all(|client| &**client == "one"));
    }

    #[test]
    fn the_order_that_is_shown_is_the_order_of_service() {
        let (hands, line) = line();
        let mut tickets = Vec::new();
        for number in 0..40 {
            tickets.extend(line.join(joining("three", 3, Priority::Interactive, 100 + number)));
            tickets.extend(line.join(joining("one", 1, Priority::Interactive, 50)));
            tickets.extend(line.join(joining("night", 1, Priority::Batch, 10)));
        }
        serve(&mut tickets, 5);
        // An aged batch call goes before the others.
        hands.advance(Micros::from_secs(15));
        let shown = line.order(30);
        assert_eq!((&*shown[0], shown.len()), ("night", 30));
        assert_eq!(shown, serve(&mut tickets, 30));
        assert_eq!(line.order(1_000).len(), tickets.len());
        tickets.clear();
        assert!(line.order(10).is_empty());
        let out = line.join(joining("out", 1, Priority::Interactive, 10)).unwrap();
        let other = line.join(joining("other", 1, Priority::Interactive, 10)).unwrap();
        out.step_aside(hands.clock().now().saturating_add(Micros::from_secs(5)));
        assert_eq!(line.order(10), [Arc::<str>::from("other"), Arc::from("out")], "who is out comes last");
        drop((out, other));
    }

    #[test]
    fn a_client_that_was_idle_has_no_credit_and_no_debt() {
        let (_hands, line) = line();
        let mut tickets: Vec<_> =
            (0..100).filter_map(|_| line.join(joining("a", 1, Priority::Interactive, 10))).collect();
        serve(&mut tickets, 50);
        tickets.extend((0..50).filter_map(|_| line.join(joining("b", 1, Priority::Interactive, 10))));
        let served = serve(&mut tickets, 20);
        assert_eq!(served.iter().filter(|client| &***client == "b").count(), 10, "{served:?}");
    }

    #[test]
    fn f3_interactive_goes_first_and_batch_still_moves() {
        let (hands, line) = line();
        let mut tickets: Vec<_> =
            (0..100).filter_map(|_| line.join(joining("night", 1, Priority::Batch, 10))).collect();
        tickets.extend((0..100).filter_map(|_| line.join(joining("day", 1, Priority::Interactive, 10))));
        assert!(serve(&mut tickets, 10).iter().all(|client| &**client == "day"));
        hands.advance(Micros::from_secs(15));
        let served = serve(&mut tickets, 5);
        assert_eq!(
            served.iter().map(|client| &**client).collect::<Vec<_>>(),
            ["night", "day", "day", "day", "day"]
        );
        hands.advance(Micros::from_secs(14));
        assert_eq!(&*serve(&mut tickets, 1)[0], "day", "one in a quarter of a window");
        hands.advance(Micros::from_secs(1));
        assert_eq!(&*serve(&mut tickets, 1)[0], "night");
    }

    #[test]
    fn a_client_that_is_out_holds_up_nobody_else() {
        let (hands, line) = line();
        let out = line.join(joining("out", 1, Priority::Interactive, 10)).unwrap();
        let behind = line.join(joining("out", 1, Priority::Interactive, 10)).unwrap();
        let other = line.join(joining("other", 1, Priority::Interactive, 10)).unwrap();
        assert!(may_try(&out) && !may_try(&other));
        out.step_aside(Micros::from_secs(5));
        assert!(may_try(&other) && !may_try(&out) && !may_try(&behind));
        hands.advance(Micros::from_secs(5));
        assert!(may_try(&out) && !may_try(&other));
        out.step_aside(Micros::from_secs(9));
        line.nudge();
        assert!(may_try(&out), "what was given back may be its own");
    }

    #[test]
    fn the_line_is_bounded_and_a_waiter_that_leaves_leaves_nothing() {
        let hands = ManualClock::at(Micros::ZERO);
        let line = Line::new(hands.clock(), 2, WINDOW);
        let one = line.join(joining("a", 1, Priority::Interactive, 7)).unwrap();
        let two = line.join(joining("a", 1, Priority::Interactive, 8)).unwrap();
        assert!(line.join(joining("a", 1, Priority::Interactive, 1)).is_none());
        assert_eq!((line.waiting(), line.tokens()), (2, 15));
        drop(one);
        assert!(may_try(&two));
        drop(two);
        assert_eq!((line.waiting(), line.tokens()), (0, 0));
        drop(line.join(joining("b", 1, Priority::Interactive, 1)));
        assert!(line.state.lock().clients.len() <= 1, "nobody is remembered for nothing");
    }

    #[test]
    fn interactive_calls_have_no_batch_calls_ahead() {
        let line = Line::new(ManualClock::at(Micros::ZERO).clock(), 9, WINDOW);
        let night = line.join(joining("night", 1, Priority::Batch, 700)).unwrap();
        let user = line.join(joining("user", 1, Priority::Interactive, 20)).unwrap();
        let ahead = |priority| line.ahead(priority).of(Counts::Tokens);
        assert_eq!((ahead(Priority::Interactive), ahead(Priority::Batch)), (20, 720));
        assert_eq!((user.ahead().of(Counts::Tokens), night.ahead().of(Counts::Tokens)), (0, 20));
        drop(night);
        assert_eq!((ahead(Priority::Interactive), ahead(Priority::Batch)), (20, 20));
    }
}
