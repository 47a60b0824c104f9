//! Integration tests: real processes, real links, injected faults.
//!
//! Burn's client keeps a thread for each device that a process has ever had, which polls
//! every 150 µs. So tests that need many devices, or much time, are in their own binaries:
//! `collectives`, `training`, `data_parallel`, `backends`.

mod arrays;
mod backend;
mod bad_input;
mod bulk;
mod casts;
mod conformance;
mod data;
mod faults;
mod processes;
mod programs;
mod queue;
mod shares;
mod sharing;
mod tenants;
mod usage;
mod weights;
