//! `tensord simulate`: the scheduler's engine under a virtual clock, over a trace of jobs.
//!
//! ```text
//! trace, generator ─► jobs ─┐
//! pool_spec ─► workers ─────┼─► run ─► recorder ─► outcome ─► report (text and JSON)
//! policy, order ────────────┘  (peers: workers and programs)  └─► timeline (SVG)
//! ```
//!
//! All is pure: times come from the trace, randomness from a seed. So the same input gives the same output.
//!
//! The engine is the one of a pool. Only its peers are simulated, and they are ideal: no worker is lost, no
//! message takes time, and a worker has the snapshots of its leases at once, so a suspended job goes on where
//! it was. A job is the durable lease of a program that stays connected.

pub(crate) mod generator;
mod metrics;
mod peers;
pub(crate) mod pool_spec;
mod recorder;
pub(crate) mod report;
mod run;
mod svg;
pub(crate) mod timeline;
pub(crate) mod trace;

#[cfg(test)]
mod tests;

pub(crate) use metrics::Outcome;
pub(crate) use run::{Setup, run};
