//! The cost of a training step.

use std::time::{Duration, Instant};

use super::{corpus::init, program::Program, *};

/// Sends `steps` steps, each as a frame, and returns the bytes that each took. `upload`
/// adds the upload of a step's batch, given its id and the step's ops.
fn costs(
    steps: usize,
    upload: impl Fn(&mut Pair, u64, &mut Vec<OperationIr>),
) -> (usize, Vec<usize>) {
    let mut program = Program::new();
    let mut pair = Pair::default();
    let costs = (0..steps).map(|_| {
        let batch = program.step();
        upload(&mut pair, batch, &mut program.ops);
        pair.send(&program.ops)
    });
    let costs = costs.collect();
    pair.assert_in_step();
    (program.ops.len(), costs)
}

/// Uploads a batch before the frame.
fn noted(pair: &mut Pair, batch: u64, _: &mut Vec<OperationIr>) {
    pair.note(batch);
}

#[test]
fn a_steady_step_costs_tens_of_bytes() {
    let (ops, costs) = costs(50, noted);
    println!("{ops} ops in {costs:?} bytes");
    assert!((100..=250).contains(&ops));
    assert!(costs[1] < 2 * ops, "the second step: {} bytes", costs[1]);
    for (i, &cost) in costs.iter().enumerate().skip(4) {
        assert!(cost <= 40, "step {i}: {cost} bytes");
    }
}

#[test]
fn predicted_uploads_cost_nothing() {
    let (_, before) = costs(50, noted);
    // Anywhere before its first use, which is the first op's.
    let (_, within) = costs(50, |_, batch, ops| ops.insert(0, init(batch)));
    println!("{within:?} bytes with an op for the upload, {before:?} without");
    for i in 4..50 {
        assert!(within[i] <= before[i], "step {i}: {} bytes", within[i]);
    }
}

#[test]
fn loop_of_uploads_is_encoded_as_a_run() {
    let mut pair = Pair::default();
    let frame = |round: u64| {
        let ids = 1 + 3 * round..4 + 3 * round;
        let ops = ids.clone().map(init).chain(ids.map(drop_of));
        ops.collect::<Vec<_>>()
    };
    let costs: Vec<_> = (0..20).map(|round| pair.send(&frame(round))).collect();
    // The first frame teaches the two templates, the next one where the loop begins.
    assert!(costs[2..].iter().all(|&cost| cost <= 2), "{costs:?}");
    // Many iterations in a frame are still one record.
    let many: Vec<_> = (20..2_020).flat_map(frame).collect();
    assert!(pair.send(&many) <= 4);
    pair.assert_in_step();
}

#[test]
fn one_unpredicted_op_costs_few_bytes() {
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

/// Not a test: prints the time that an op takes. For the release profile.
#[test]
#[ignore = "a measurement"]
fn print_time_per_op() {
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
