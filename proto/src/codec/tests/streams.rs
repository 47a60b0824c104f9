//! Random streams of ops: loops, exceptions, frames cut anywhere.

use burn_ir::{ScalarIr, ScalarOpIr};
use proptest::{collection::vec, prelude::*};

use super::{corpus::init, *};

/// An op of a loop's body. Each input is given by how long ago it was made.
#[derive(Debug, Clone)]
enum LoopOp {
    Add(u64, u64),
    Scale(u64, f64),
    Drop(u64),
    /// Reads a tensor made before the loop.
    Constant(u64),
    /// A tensor that no op makes.
    Init,
}

#[derive(Debug, Clone)]
enum Edit {
    Insert(LoopOp),
    Remove,
    Change(LoopOp),
    Cut,
    Upload,
    /// Both ends forget all ops, and a new decoder takes over.
    Restart,
}

fn loop_op() -> impl Strategy<Value = LoopOp> {
    prop_oneof![
        (0u64..9, 0u64..9).prop_map(|(lhs, rhs)| LoopOp::Add(lhs, rhs)),
        (0u64..9, prop::sample::select(vec![0.1, 0.5, 2.0]))
            .prop_map(|(id, by)| LoopOp::Scale(id, by)),
        (0u64..9).prop_map(LoopOp::Drop),
        (0u64..4).prop_map(LoopOp::Constant),
        Just(LoopOp::Init),
    ]
}

fn edit() -> impl Strategy<Value = Edit> {
    prop_oneof![
        loop_op().prop_map(Edit::Insert),
        Just(Edit::Remove),
        loop_op().prop_map(Edit::Change),
        Just(Edit::Cut),
        Just(Edit::Upload),
        Just(Edit::Restart),
    ]
}

fn scale(id: u64, by: f64, out: u64) -> OperationIr {
    let (lhs, rhs, out) = (tensor(id), ScalarIr::Float(by), tensor(out));
    OperationIr::NumericFloat(
        DType::F32,
        NumericOperationIr::MulScalar(ScalarOpIr { lhs, rhs, out }),
    )
}

/// Sends the ops of a program, frame by frame.
struct Sender {
    pair: Pair,
    next: u64,
    pending: Vec<OperationIr>,
}

impl Sender {
    fn run(&mut self, loop_op: &LoopOp, round: usize) {
        let id = |back: u64| self.next.saturating_sub(back + 1);
        let op = match *loop_op {
            LoopOp::Add(lhs, rhs) => add(id(lhs), id(rhs), self.next),
            // Changes with each iteration, in the same way for all, as a schedule does.
            LoopOp::Scale(input, by) => scale(id(input), by.powi(round as i32), self.next),
            LoopOp::Drop(input) => return self.pending.push(drop_of(id(input))),
            LoopOp::Constant(constant) => add(constant, id(0), self.next),
            LoopOp::Init => init(self.next),
        };
        self.next += 1;
        self.pending.push(op);
    }

    fn cut(&mut self) {
        self.pair.send(&std::mem::take(&mut self.pending));
        self.pair.assert_in_step();
    }

    fn edit(&mut self, edit: &Edit, loop_op: &LoopOp, round: usize) {
        match edit {
            Edit::Insert(inserted) => {
                self.run(inserted, round);
                self.run(loop_op, round);
            }
            Edit::Remove => {}
            Edit::Change(changed) => self.run(changed, round),
            Edit::Cut => {
                self.cut();
                self.run(loop_op, round);
            }
            Edit::Upload => {
                self.cut();
                self.pair.note(self.next);
                self.next += 1;
                self.run(loop_op, round);
            }
            Edit::Restart => {
                self.cut();
                self.pair.encoder.restart();
                self.pair.decoder.restart();
                self.pair.assert_in_step();
                self.pair.decoder = OpDecoder::starting_at(self.pair.decoder.counter());
                self.pair.assert_in_step();
                self.run(loop_op, round);
            }
        }
    }
}

proptest! {
    #[test]
    fn a_loop_with_exceptions_survives_the_round_trip(
        first in 0u64..1 << 40,
        body in vec(loop_op(), 1..30),
        rounds in 1usize..12,
        edits in vec((any::<prop::sample::Index>(), edit()), 0..20),
    ) {
        let mut sender = Sender { pair: Pair::default(), next: first, pending: Vec::new() };
        let total = body.len() * rounds;
        for at in 0..total {
            let (loop_op, round) = (&body[at % body.len()], at / body.len());
            match edits.iter().find(|(place, _)| place.index(total) == at) {
                Some((_, edit)) => sender.edit(edit, loop_op, round),
                None => sender.run(loop_op, round),
            }
        }
        sender.cut();
    }

    #[test]
    fn arbitrary_ids_survive_the_round_trip(ids in vec(any::<[u64; 3]>(), 0..50)) {
        let ops: Vec<_> = ids.iter().map(|&[lhs, rhs, out]| add(lhs, rhs, out)).collect();
        let mut pair = Pair::default();
        for _ in 0..2 {
            pair.send(&ops);
        }
        pair.assert_in_step();
    }
}

#[test]
fn full_dictionary_is_reset() {
    let mut pair = Pair::default();
    let of_width = |width: usize| {
        let shape = Shape::new([1, width]);
        OperationIr::Drop(TensorIr { shape, ..tensor(1) })
    };
    for first in (0..40_000).step_by(100) {
        let ops: Vec<_> = (first..first + 100).map(of_width).collect();
        pair.send(&ops);
    }
    pair.assert_in_step();
    // The encoder goes on learning.
    let again: Vec<_> = (39_900..40_000).map(of_width).collect();
    assert!(pair.send(&again) < 10);
}

#[test]
fn ops_too_large_for_the_dictionary_are_encoded() {
    let inputs: Vec<_> = (0..5_000).map(tensor).collect();
    let large = OperationIr::Custom(burn_ir::CustomOpIr::new("large", &inputs, &[]));
    let mut pair = Pair::default();
    for i in 0..4 {
        pair.send(&[add(1, 2, 3 + i), large.clone(), add(2, 2, 4 + i)]);
        pair.assert_in_step();
    }
}

#[test]
fn changes_to_ops_with_over_61_values_are_encoded() {
    // A record's head has no bits for the values beyond the first sixty-one.
    let with = |changed: Option<usize>| {
        let mut inputs: Vec<_> = (0..100).map(tensor).collect();
        if let Some(i) = changed {
            inputs[i] = tensor(500);
        }
        OperationIr::Custom(burn_ir::CustomOpIr::new("wide", &inputs, &[]))
    };
    let mut pair = Pair::default();
    for i in 0..100 {
        pair.send(&[with(None), with(Some(i)), with(Some(99 - i)), with(None)]);
        pair.assert_in_step();
    }
}

#[test]
fn both_ends_agree_after_history_wraps_around() {
    let mut pair = Pair::default();
    let mut next = 2;
    // Longer than the history: in each iteration, what was learnt before is gone.
    for _ in 0..3 {
        for first in (0..40_000u64).step_by(500) {
            let ops: Vec<_> = (first..first + 500)
                .map(|i| {
                    next += 1;
                    add(next - 1 - (i * i * 31 % next.min(997)), next - 1, next)
                })
                .collect();
            pair.send(&ops);
        }
        pair.assert_in_step();
    }
}

#[test]
fn encoder_reports_a_full_frame() {
    let mut pair = Pair::default();
    let (mut frame, mut frames, mut ops) = (Vec::new(), 0, Vec::new());
    for i in 0..200_000 {
        ops.push(add(1, 2, 3 + i));
        pair.encoder.encode(&ops[ops.len() - 1], &mut frame);
        if pair.encoder.is_full() {
            pair.encoder.finish(&mut frame);
            let decoded = pair.decoder.decode(&frame, ops.len() as u32).unwrap();
            assert!(decoded.iter().map(|it| &*it.op).eq(&ops) && frame.len() < 64);
            (frames, frame, ops) = (frames + 1, Vec::new(), Vec::new());
        }
    }
    assert_eq!(frames, 200_000 / MAX_OPS_PER_FRAME);
}
