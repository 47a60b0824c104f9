//! What an op costs a worker besides its kernel: `cargo bench -p tensord-worker --features
//! testing`.

use burn_backend::{DType, Shape};
use burn_ir::{BinaryOpIr, NumericOperationIr, OperationIr, TensorId, TensorIr, TensorStatus};
use divan::{Bencher, black_box, counter::ItemsCount};
use tensord_worker::testing::{TensorTable, check_op};

/// Ops of a run.
const OPS: u64 = 1024;

fn main() {
    divan::main();
}

fn tensor(id: u64, status: TensorStatus) -> TensorIr {
    TensorIr {
        id: TensorId::new(id),
        shape: Shape::new([64, 128]),
        status,
        dtype: DType::F32,
    }
}

/// Returns the op that adds tensor 0 to tensor `id`, whose last use this is.
fn add(id: u64) -> OperationIr {
    let op = BinaryOpIr {
        lhs: tensor(id, TensorStatus::ReadWrite),
        rhs: tensor(0, TensorStatus::ReadOnly),
        out: tensor(id + 1, TensorStatus::NotInit),
    };
    OperationIr::NumericFloat(DType::F32, NumericOperationIr::Add(op))
}

/// The tensor table, which decides whether an op may run and charges its outputs.
#[divan::bench]
fn begin_and_finish(bencher: Bencher) {
    let ops: Vec<_> = (1..=OPS).map(add).collect();
    let table = || {
        let mut table = TensorTable::new(1 << 30);
        table.insert(&tensor(0, TensorStatus::NotInit));
        table.insert(&tensor(1, TensorStatus::NotInit));
        table
    };
    bencher
        .counter(ItemsCount::new(OPS))
        .with_inputs(table)
        .bench_values(|mut table| {
            ops.iter().for_each(|op| table.run(op));
            table
        });
}

/// The rules for the arguments of an op.
#[divan::bench]
fn check(bencher: Bencher) {
    let op = add(1);
    bencher
        .counter(ItemsCount::new(1u64))
        .bench(|| check_op(black_box(&op)));
}
