//! A session without a network, for the fuzzer and for tests of whole programs of ops.
//!
//! Frames go through the same intake, decoder, rules, table and backend as in a worker.
//! Programs have no use for this module.

use burn_ir::OperationIr;

pub use crate::session::standalone::{OpOutcome, OpReport, StandaloneSession, StepOutcome};

/// Returns each variant of Burn's ops once, as clients send it, except those that no client
/// sends.
pub fn sample_ops() -> Vec<OperationIr> {
    crate::op_check::samples::ops()
}
