//! The conformance suite, which compares every op of a device with Burn's CPU backend.
//!
//! The integration tests are in a few binaries, `tests/*/main.rs`. Each one links Burn, so a
//! test has a binary of its own only if it needs its own process. They start real processes
//! by `tensord_testkit`.

pub mod conformance;
