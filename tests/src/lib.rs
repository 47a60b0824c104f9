//! What the integration tests share: the conformance suite and the cluster harness.
//!
//! The tests themselves are one binary, `tests/integration/main.rs`, so that
//! Burn is linked once.

pub mod cluster;
pub mod conformance;
pub mod training;
