//! Simulates a pool whose processes, workers and connections are lost at any moment.
//!
//! A random [`Program`] runs in the client's real sessions, one on each of its devices. The engine of the
//! real scheduler gives them devices of one worker or of several. Each worker is a real supervisor with
//! simulated processes, in which real sessions run on Flex, with real all-reduces and transfers between
//! them. It keeps the snapshots of its sessions, and of those of other workers, in its real stores. One
//! thread moves the frames and messages on virtual links, executes the ops, passes a virtual clock, and
//! injects faults: connections are cut with frames in flight, snapshots are refused, processes and workers
//! are killed between any two steps, one at a time or two at once; workers are cut off from the scheduler
//! and go on without it, the scheduler is restarted, and an administrator moves, suspends and resumes the
//! lease, and drains workers. Nothing is killed whose loss the pool does not promise to survive: a process
//! before the first snapshots are kept, or a worker before its keeper has them. A seed determines the
//! program and the schedule.
//!
//! Each program runs twice: undisturbed, without snapshots; and with faults. Both must give the
//! same bytes and the same faults, and each request one reply; and once a program has dropped all
//! tensors, both must charge the same memory.
//!
//! What is not simulated: several leases, shares of devices, the end of a session, a connection that
//! fails only between the client and a worker, memory that runs short, a journal that lapses, and
//! snapshot stores.
//! Some code asks the real clock: how long a snapshot takes, how fast a link between workers is, and how
//! many processes have died within a minute. So a machine that stops for some 40 ms at the wrong moment
//! moves a mark; this changes the schedule, and must not change the results. More than 19 kills in one run
//! end its lease.

#![cfg(target_os = "linux")]

mod client;
mod messages;
mod network;
mod program;
mod scheduler;
mod simulation;

pub use self::{
    client::Answer,
    program::Program,
    simulation::{Faults, Outcome, Report, simulate},
};

/// Runs the program of `seed` undisturbed and with `faults`, and compares what it reads. If it `is_traced`,
/// what happens in the pool of the second run is printed.
///
/// # Errors
///
/// How the runs differ, or why one of them did not end as it must.
pub fn check(seed: u64, faults: Faults, is_traced: bool) -> Result<Report, String> {
    let program = Program::random(seed);
    let undisturbed = simulate(&program, seed, Faults::NONE, false);
    let (expected, _) = undisturbed.map_err(|e| format!("the undisturbed run failed: {e}"))?;
    let (outcome, report) = simulate(&program, seed, faults, is_traced)?;
    let devices = outcome.answers.iter().zip(&expected.answers);
    for (device, (answers, expected)) in devices.enumerate() {
        if answers.len() != expected.len() {
            let (got, wanted) = (answers.len(), expected.len());
            return Err(format!(
                "device {device} got {got} answers instead of {wanted}"
            ));
        }
        let pairs = answers.iter().zip(expected);
        for (request, (got, wanted)) in pairs.enumerate() {
            if got != wanted {
                return Err(format!(
                    "request {request} of device {device} was answered with {got}, and undisturbed with {wanted}"
                ));
            }
        }
    }
    if outcome.live_bytes != expected.live_bytes {
        return Err(format!(
            "{} bytes are charged in the end, and {} undisturbed",
            outcome.live_bytes, expected.live_bytes
        ));
    }
    Ok(report)
}
