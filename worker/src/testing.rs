//! A session without a network, for the fuzzer and for tests of whole programs of ops.
//!
//! What a client's connection would bring goes through the same intake, decoder, rules,
//! table and backend as in a worker. Nothing here is of use to a program.

use burn_ir::OperationIr;

pub use crate::session::lone::{Became, LoneSession, OpReport, Stepped};

/// Each variant of Burn's ops once, as clients send it, but those that no client sends.
pub fn honest_ops() -> Vec<OperationIr> {
    crate::op_check::samples::ops()
}
