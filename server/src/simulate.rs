//! `tensord simulate`: the scheduler's engine under a virtual clock, over a trace of jobs.
//!
//! ```text
//! trace, generator ─► jobs ─┐
//! pool_spec ─► workers ─────┼─► run ─► recorder ─► outcome ─► report (text and JSON)
//! policy, order ────────────┘  (peers: workers and programs)  └─► timeline, gantt (SVG)
//! ```
//!
//! All is pure: times come from the trace, randomness from a seed. So the same input gives the same output.
//!
//! The engine is the one of a pool. Only its peers are simulated, and they are ideal: no worker is lost, no
//! message takes time, and a worker has the snapshots of its leases at once, so a suspended job goes on where
//! it was. A job is the lease of a program that stays connected, durable unless the trace says otherwise.

mod gantt;
pub(crate) mod generator;
mod metrics;
mod peers;
mod pieces;
pub(crate) mod pool_spec;
mod recorder;
pub(crate) mod report;
mod run;
mod svg;
mod timeline;
pub(crate) mod trace;

#[cfg(test)]
mod tests;

pub(crate) use metrics::Outcome;
pub(crate) use run::{Setup, run};

use self::{pool_spec::PoolSpec, trace::Job};

/// Returns a picture of each of these runs of one trace as SVG, one below the other: of a small pool, each job on its
/// devices, and else how many devices each tenant has.
pub(crate) fn picture(outcomes: &[Outcome], jobs: &[Job], pool: &PoolSpec) -> String {
    let devices: usize = pool.workers().map(|devices| devices.len()).sum();
    match pieces::are_kept(devices as u64, jobs.len()) {
        true => gantt::svg(outcomes, jobs, &pool.device_names()),
        false => timeline::svg(outcomes),
    }
}
