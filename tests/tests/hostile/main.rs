//! Programs, workers and networks that keep no rule, against real processes.
//!
//! Each test is a claim of `docs/security.md`: it breaks one rule by the raw clients of
//! [`tensord_tests::raw`], and looks at what everybody else notices of it. One file a
//! subject; what a process took during an attack must be given back after it
//! (`Process::settled`).

mod answers;
mod connections;
mod ends;
mod leases;
mod logs;
mod memory;
mod ops;
mod reads;
mod sessions;
mod uploads;
mod workers;
