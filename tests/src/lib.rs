//! What the integration tests share: the conformance suite, the cluster harness, and models and
//! data to train.
//!
//! The tests themselves are few binaries, `tests/*/main.rs`, so that
//! Burn is linked once.

pub mod cluster;
pub mod conformance;
pub mod digits;
pub mod host;
pub mod quiet;
pub mod replicas;
pub mod training;
