//! What a training step costs.

use std::time::{Duration, Instant};

use super::{program::Program, *};

/// Sends `steps` steps, each a frame; the bytes each took.
fn costs(steps: usize) -> (usize, Vec<usize>) {
    let mut program = Program::new();
    let mut pair = Pair::default();
    let costs = (0..steps).map(|_| {
        let batch = program.step();
        pair.note(batch);
        pair.send(&program.ops)
    });
    let costs = costs.collect();
    pair.assert_in_step();
    (program.ops.len(), costs)
}

#[test]
fn a_steady_step_costs_tens_of_bytes() {
    let (ops, costs) = costs(50);
    println!("{ops} ops in {costs:?} bytes");
    assert!((100..=250).contains(&ops));
    assert!(costs[1] < 2 * ops, "the second step: {} bytes", costs[1]);
    for (i, &cost) in costs.iter().enumerate().skip(4) {
        assert!(cost <= 40, "step {i}: {cost} bytes");
    }
}

#[test]
fn an_exception_costs_little() {
    let mut program = Program::new();
    let mut pair = Pair::default();
    for i in 0..60 {
        let batch = program.step();
        pair.note(batch);
        let at = i % program.ops.len();
        match i % 3 {
            _ if i < 5 => {}
            0 => drop(program.ops.remove(at)),
            1 => program.ops.insert(at, drop_of(1)),
            _ => program.ops.swap(at, at + 1),
        }
        let cost = pair.send(&program.ops);
        assert!(i < 5 || cost <= 90, "step {i}: {cost} bytes");
    }
    pair.assert_in_step();
}

/// Not a test: prints what an op costs in time. For the release profile.
#[test]
#[ignore = "a measurement"]
fn timing() {
    const STEPS: u32 = 2_000;
    let (mut program, mut pair) = (Program::new(), Pair::default());
    let (mut encoding, mut decoding) = (Duration::ZERO, Duration::ZERO);
    let (mut ops, mut bytes) = (0, 0);
    for _ in 0..STEPS {
        let batch = program.step();
        pair.note(batch);
        let started = Instant::now();
        let frame = pair.encode(&program.ops);
        let encoded = Instant::now();
        let count = program.ops.len() as u32;
        let decoded = pair.decoder.decode(&frame, count).unwrap();
        decoding += encoded.elapsed();
        encoding += encoded - started;
        bytes += frame.len();
        ops += decoded.len();
    }
    let per_op = |time: Duration| time.as_nanos() as f64 / ops as f64;
    println!("encode {:.0} ns/op", per_op(encoding));
    println!("decode {:.0} ns/op", per_op(decoding));
    println!("{bytes} bytes for {ops} ops");
}
