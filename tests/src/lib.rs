//! Code shared by the integration tests: the conformance suite, the cluster harness, models
//! and data to train, and raw clients that can break any rule of the protocol.
//!
//! The tests are in a few binaries, `tests/*/main.rs`. Each one links Burn, so a test has a
//! binary of its own only if it needs its own process.

pub mod cluster;
pub mod conformance;
pub mod digits;
pub mod host;
pub mod quiet;
pub mod raw;
pub mod replicas;
pub mod resource_usage;
pub mod training;
