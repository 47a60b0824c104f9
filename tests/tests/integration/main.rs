//! Integration tests: real processes, real links, injected faults.

mod conformance;
mod faults;
mod training;
