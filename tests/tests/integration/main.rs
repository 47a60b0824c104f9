//! Integration tests: real processes, real links, injected faults.

mod bad_input;
mod conformance;
mod faults;
mod processes;
mod sharing;
mod training;
