//! Integration tests: real processes, real links, injected faults.
//!
//! Burn's client keeps a thread for each device that a process has ever had, which
//! looks for work every 150 µs. So what takes many devices, or long, is in binaries of
//! its own beside this one: `collectives`, `training`, `data_parallel`, `backends`.

mod backend;
mod bad_input;
mod bulk;
mod conformance;
mod data;
mod faults;
mod processes;
mod sharing;
