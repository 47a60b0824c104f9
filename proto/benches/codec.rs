//! The op codec on steps of a training loop: `cargo bench -p tensord-proto --features ir`.
//!
//! A step is a sequence of small ops with new tensors, as Burn records them. The first steps
//! teach encoder and decoder the loop; those after them are what a long training costs.

use burn_backend::{DType, Shape};
use burn_ir::{
    BinaryOpIr, NumericOperationIr, OperationIr, ScalarIr, ScalarOpIr, TensorId, TensorIr,
};
use divan::{Bencher, counter::ItemsCount};
use tensord_proto::codec::{OpDecoder, OpEncoder};

/// Ops of a step: about those of a training step of a small network.
const OPS_PER_STEP: u64 = 256;

fn main() {
    divan::main();
}

/// Returns the ops of step `number`: additions and products by turns, each with a drop of
/// its input. Tensor 0 is a constant, the others are new in each step.
fn step(number: u64) -> Vec<OperationIr> {
    let tensor = |id| TensorIr::uninit(TensorId::new(id), Shape::new([64, 128]), DType::F32);
    let first = 1 + number * OPS_PER_STEP;
    (0..OPS_PER_STEP / 2)
        .flat_map(|i| {
            let (lhs, out) = (tensor(first + i), tensor(first + i + 1));
            let op = match i % 2 {
                0 => NumericOperationIr::Add(BinaryOpIr {
                    lhs: lhs.clone(),
                    rhs: tensor(0),
                    out,
                }),
                _ => NumericOperationIr::MulScalar(ScalarOpIr {
                    lhs: lhs.clone(),
                    rhs: ScalarIr::Float(0.5),
                    out,
                }),
            };
            [
                OperationIr::NumericFloat(DType::F32, op),
                OperationIr::Drop(lhs),
            ]
        })
        .collect()
}

fn encode(encoder: &mut OpEncoder, ops: &[OperationIr]) -> Vec<u8> {
    let mut frame = Vec::new();
    ops.iter().for_each(|op| encoder.encode(op, &mut frame));
    encoder.finish(&mut frame);
    frame
}

/// Returns an encoder and a decoder that have processed three steps.
fn trained() -> (OpEncoder, OpDecoder) {
    let (mut encoder, mut decoder) = (OpEncoder::default(), OpDecoder::default());
    for number in 0..3 {
        let frame = encode(&mut encoder, &step(number));
        decoder
            .decode(&frame, OPS_PER_STEP as u32)
            .expect("the encoder's frames are valid");
    }
    (encoder, decoder)
}

/// Encodes a step that is like the ones before.
#[divan::bench]
fn encode_known_step(bencher: Bencher) {
    let ops = step(3);
    bencher
        .counter(ItemsCount::new(OPS_PER_STEP))
        .with_inputs(|| trained().0)
        .bench_values(|mut encoder| encode(&mut encoder, &ops));
}

/// Encodes the first step of a program.
#[divan::bench]
fn encode_first_step(bencher: Bencher) {
    let ops = step(0);
    bencher
        .counter(ItemsCount::new(OPS_PER_STEP))
        .with_inputs(OpEncoder::default)
        .bench_values(|mut encoder| encode(&mut encoder, &ops));
}

/// Decodes a step that is like the ones before.
#[divan::bench]
fn decode_known_step(bencher: Bencher) {
    let (mut encoder, _) = trained();
    let frame = encode(&mut encoder, &step(3));
    bencher
        .counter(ItemsCount::new(OPS_PER_STEP))
        .with_inputs(|| trained().1)
        .bench_values(|mut decoder| decoder.decode(&frame, OPS_PER_STEP as u32));
}

/// Decodes the first step of a program.
#[divan::bench]
fn decode_first_step(bencher: Bencher) {
    let frame = encode(&mut OpEncoder::default(), &step(0));
    bencher
        .counter(ItemsCount::new(OPS_PER_STEP))
        .with_inputs(OpDecoder::default)
        .bench_values(|mut decoder| decoder.decode(&frame, OPS_PER_STEP as u32));
}
