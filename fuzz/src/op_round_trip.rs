//! Encodes ops and decodes them again. The input is a small program: ops of any kind, loops
//! over earlier ops, ends of frames anywhere, noted tensors.
//!
//! An input is a sequence of control bytes, each followed by what its `Step` documents, and
//! ops in postcard's format.

use burn_ir::{IrVisitorMut, OperationIr, TensorId, TensorIr};

use crate::{input::Input, op_stream::RoundTrip};

/// Ids below this belong to tensors that outlive the loop.
const CONSTANTS: u64 = 16;

/// Maximum number of ops in a loop's body, and in an input; more would only take time.
const MAX_OPS: (usize, usize) = (64, 1 << 12);

/// The meaning of a control byte, in the order of the numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Step {
    /// An op follows, which joins the loop's body.
    Op,
    /// The loop's body is repeated; the following byte is added to the ids.
    Again,
    /// As [`Op`](Self::Op), but the op does not join the body: an exception in the loop.
    Exception,
    /// The frame ends.
    Cut,
    /// The frame ends, and a tensor is noted; the eight bytes of its id follow.
    Note,
    /// Another loop begins.
    Forget,
}

const STEPS: [Step; 6] = [
    Step::Op,
    Step::Again,
    Step::Exception,
    Step::Cut,
    Step::Note,
    Step::Forget,
];

/// Runs the target.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let (mut echo, mut body, mut pending) = (RoundTrip::default(), Vec::new(), Vec::new());
    let (mut ops, mut round) = (0, 0);
    while !input.is_empty() && ops < MAX_OPS.1 {
        match STEPS[usize::from(input.byte()) % STEPS.len()] {
            step @ (Step::Op | Step::Exception) => {
                let Some(op) = read_op(&mut input) else {
                    continue;
                };
                pending.push(moved(&op, round));
                if step == Step::Op && body.len() < MAX_OPS.0 {
                    body.push(op);
                }
            }
            Step::Again => {
                round = u64::wrapping_add(round, input.byte().into());
                pending.extend(body.iter().map(|op| moved(op, round)));
            }
            Step::Cut => {
                ops += pending.len();
                echo.send(&std::mem::take(&mut pending));
            }
            Step::Note => {
                echo.send(&std::mem::take(&mut pending));
                echo.note(TensorId::new(input.long()));
            }
            Step::Forget => body.clear(),
        }
        if pending.len() > MAX_OPS.1 {
            break;
        }
    }
    echo.send(&pending);
}

fn read_op(input: &mut Input<'_>) -> Option<OperationIr> {
    let (op, rest) = postcard::take_from_bytes(input.0).ok()?;
    input.0 = rest;
    Some(op)
}

/// Returns `op` with `by` added to the ids of tensors that belong to the loop.
fn moved(op: &OperationIr, by: u64) -> OperationIr {
    struct Mover(u64);
    impl IrVisitorMut for Mover {
        fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
            let id = tensor.id.value();
            if id >= CONSTANTS {
                tensor.id = TensorId::new(id.wrapping_add(self.0));
            }
        }
    }
    let mut op = op.clone();
    op.visit_mut(&mut Mover(by));
    op
}
