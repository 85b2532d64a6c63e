//! The layers over loopback: requests a second by the clock on the wall, and the CPU time of the server's thread for each.

use std::time::Duration;

use super::client::{Client, Requests};
use super::contestant::Contestant;
use super::rounds::{Cell, Plan};
use super::server::Server;
use crate::machine::{Core, pin_to};

/// Measures everybody, in turns. The server has the first core and the client the second, if there is one.
pub(crate) fn measure(plan: &Plan, cores: &[Core], contestants: &[Contestant]) -> Result<Vec<Cell>, String> {
    let routers = contestants.iter().map(Contestant::router).collect();
    let server = Server::start(cores.first().copied(), routers)?;
    std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            cores.get(1).or(cores.first()).copied().into_iter().for_each(pin_to);
            load(plan, &server, contestants)
        });
        client.join().unwrap_or_else(|_| Err("the client panicked".into()))
    })
}

fn load(plan: &Plan, server: &Server, contestants: &[Contestant]) -> Result<Vec<Cell>, String> {
    let requests = Requests::new();
    let clients = server.addresses.iter().map(|&address| Client::connect(address));
    let mut clients = clients.collect::<Result<Vec<Client>, String>>()?;
    let mut cells: Vec<Cell> = contestants.iter().map(Cell::new).collect();
    for turn in plan.turns(contestants.len()) {
        let (contestant, client, cell) = (&contestants[turn], &mut clients[turn], &mut cells[turn]);
        let mut run = |duration: Duration| client.run(&requests, duration, contestant.fields);
        run(plan.turn / 8)?;
        let before = server.used()?;
        let tally = run(plan.turn)?;
        let used = server.used()?.saturating_sub(before);
        cell.rates.push(tally.requests as f64 / tally.wall.as_secs_f64());
        cell.cpu_ns.push(used.as_nanos() as f64 / tally.requests as f64);
        cell.requests += tally.requests;
        cell.astray += tally.astray;
    }
    Ok(cells)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::contestant;

    #[test]
    fn everybody_answers_as_promised() {
        let plan = Plan { rounds: 1, turn: Duration::from_millis(1), calls: 0 };
        for cell in measure(&plan, &[], &contestant::all().unwrap()).unwrap() {
            assert!(cell.requests > 0 && cell.astray == 0, "{cell:?}");
        }
    }
}
