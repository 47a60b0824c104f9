//! What the integration tests share: the conformance suite, the cluster harness, and models and
//! data to train.
//!
//! The tests themselves are a few binaries, `tests/*/main.rs`: each links Burn, so there
//! is no more than one for what needs a process of its own.

pub mod cluster;
pub mod conformance;
pub mod digits;
pub mod host;
pub mod quiet;
pub mod replicas;
pub mod training;
