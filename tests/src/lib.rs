//! What the integration tests share: the conformance suite, the cluster harness, models and
//! data to train, and clients that keep no rule.
//!
//! The tests themselves are a few binaries, `tests/*/main.rs`: each links Burn, so there
//! is no more than one for what needs a process of its own.

pub mod cluster;
pub mod conformance;
pub mod digits;
pub mod host;
pub mod meters;
pub mod quiet;
pub mod raw;
pub mod replicas;
pub mod training;
