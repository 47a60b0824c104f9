//! Tests of the checks. Honest ops are made by Burn's own constructors, so the derived
//! outputs are compared with what clients declare.

mod all_variants;
mod arguments;
mod derived;
mod empty;
mod module_arguments;
mod outputs;

use burn_backend::DType;
use burn_ir::OperationIr;

use super::samples::{BOOL, as_output, boolean, float, id, int, numeric, typed};

/// Checks that `op` is refused, and returns the reason.
#[track_caller]
fn assert_refused(op: &OperationIr) -> String {
    let name = tensord_proto::codec::OpName::of(op);
    match super::check(op) {
        Ok(_) => panic!("{name} was accepted: {op:?}"),
        Err(broken) => broken.reason,
    }
}

#[track_caller]
fn assert_refused_with(op: OperationIr, expected: &str) {
    let reason = assert_refused(&op);
    assert!(reason.contains(expected), "{reason:?} lacks {expected:?}");
}

#[track_caller]
fn assert_accepted(op: &OperationIr) -> u64 {
    let name = tensord_proto::codec::OpName::of(op);
    super::check(op).unwrap_or_else(|broken| panic!("{name} was refused: {broken:?}\n{op:?}"))
}
