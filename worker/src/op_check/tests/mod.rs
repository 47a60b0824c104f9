//! Honest ops are made by Burn's own constructors, so that what is derived here is held
//! against what clients declare.

mod arguments;
mod derived;
mod honest;
mod outputs;

use std::cell::Cell;

use burn_backend::{BoolStore, DType};
use burn_ir::{BinaryOpIr, NumericOperationIr, OperationIr, TensorId, TensorIr, TensorStatus};

const BOOL: DType = DType::Bool(BoolStore::Native);

thread_local! {
    static IDS: Cell<u64> = const { Cell::new(0) };
}

/// An id that no other tensor of the test has.
fn id() -> TensorId {
    IDS.set(IDS.get() + 1);
    TensorId::new(IDS.get())
}

fn typed<const N: usize>(dims: [usize; N], dtype: DType) -> TensorIr {
    TensorIr {
        id: id(),
        shape: dims.into(),
        status: TensorStatus::ReadOnly,
        dtype,
    }
}

fn float<const N: usize>(dims: [usize; N]) -> TensorIr {
    typed(dims, DType::F32)
}

fn int<const N: usize>(dims: [usize; N]) -> TensorIr {
    typed(dims, DType::I64)
}

fn boolean<const N: usize>(dims: [usize; N]) -> TensorIr {
    typed(dims, BOOL)
}

/// A tensor as an op makes it.
fn made(tensor: TensorIr) -> TensorIr {
    TensorIr {
        status: TensorStatus::NotInit,
        ..tensor
    }
}

/// What a refusal of `op` says.
#[track_caller]
fn refused(op: &OperationIr) -> String {
    let name = tensord_proto::codec::OpName::of(op);
    match super::check(op) {
        Ok(_) => panic!("{name} was accepted: {op:?}"),
        Err(broken) => broken.reason,
    }
}

#[track_caller]
fn accepted(op: &OperationIr) -> u64 {
    let name = tensord_proto::codec::OpName::of(op);
    super::check(op).unwrap_or_else(|broken| panic!("{name} was refused: {broken:?}\n{op:?}"))
}

fn numeric(op: NumericOperationIr) -> OperationIr {
    OperationIr::NumericFloat(DType::F32, op)
}

#[test]
fn a_check_of_a_common_op_takes_no_time() {
    let add = BinaryOpIr::create(float([64, 128]), float([64, 128]), id);
    let add = numeric(NumericOperationIr::Add(add));
    let begun = std::time::Instant::now();
    for _ in 0..100_000 {
        std::hint::black_box(super::check(std::hint::black_box(&add))).unwrap();
    }
    // Tens of nanoseconds; a debug build on a busy machine has a hundred times as much.
    assert!(begun.elapsed().as_millis() < 1000, "{:?}", begun.elapsed());
}
