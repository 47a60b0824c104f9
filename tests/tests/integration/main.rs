//! Integration tests: real processes, real links, injected faults.

mod backend;
mod bad_input;
mod bulk;
mod collectives;
mod conformance;
mod data;
mod faults;
mod processes;
mod ranks;
mod sharing;
mod training;
