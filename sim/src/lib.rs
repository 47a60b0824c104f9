//! Simulates sessions whose processes and connections are lost at any moment.
//!
//! A random [`Program`] runs in the client's real sessions, one on each of its devices, on virtual
//! links to a worker with real sessions on Flex, real all-reduces and transfers between them, its real
//! store of snapshots, and the real rules of how a connection finds its session. One thread moves the
//! frames, executes the ops, passes a virtual clock, and injects faults: connections are cut with
//! frames in flight, replies are lost, snapshots are refused, and the process of the lease is killed
//! between any two steps, once all sessions have a snapshot of one cut. A seed determines the program
//! and the schedule.
//!
//! Each program runs twice: undisturbed, without snapshots; and with faults. Both must give the
//! same bytes and the same faults, and each request one reply; and once a program has dropped all
//! tensors, both must charge the same memory.
//!
//! What is not simulated: a process that dies before its first snapshot is kept, the end of a
//! session, the copying of snapshots, memory that runs short, a journal that lapses, the engine of
//! the scheduler, several workers, and tokens.
//! How long a snapshot takes is measured by the real clock, so a machine that stops for some
//! 40 ms at the wrong moment moves a mark; this changes the schedule, and must not change the
//! results.

#![cfg(target_os = "linux")]

mod network;
mod program;
mod simulation;

pub use self::{
    program::Program,
    simulation::{Faults, Outcome, Report, simulate},
};

/// Runs the program of `seed` undisturbed and with `faults`, and compares what it reads.
///
/// # Errors
///
/// How the runs differ, or why one of them did not end as it must.
pub fn check(seed: u64, faults: Faults) -> Result<Report, String> {
    let program = Program::random(seed);
    let undisturbed = simulate(&program, seed, Faults::NONE);
    let (expected, _) = undisturbed.map_err(|e| format!("the undisturbed run failed: {e}"))?;
    let (outcome, report) = simulate(&program, seed, faults)?;
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
