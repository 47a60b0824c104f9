//! Programs, workers and networks that break the protocol's rules, against real processes.
//!
//! Each test checks a claim of `docs/security.md`: it breaks one rule with the raw clients
//! of [`tensord_testkit::raw`] and observes the effect on all other parties. Each file has
//! one subject. A process must release whatever an attack made it allocate
//! (`Process::settled`).

mod answers;
mod connections;
mod ends;
#[cfg(target_os = "linux")]
mod keepers;
mod leases;
mod logs;
mod memory;
mod ops;
#[cfg(target_os = "linux")]
mod other_answers;
#[cfg(target_os = "linux")]
mod process_starts;
#[cfg(target_os = "linux")]
mod processes;
mod reads;
mod sessions;
#[cfg(target_os = "linux")]
mod snapshots;
mod uploads;
mod workers;
