//! Ops to bytes to ops. The input is a program in small: ops of any kind, loops
//! over those that came, frames cut anywhere, tensors noted.
//!
//! An input is a sequence of control bytes, each with what `Step` says, and
//! ops in postcard form.

use burn_ir::{IrVisitorMut, OperationIr, TensorId, TensorIr};

use crate::{input::Input, op_stream::RoundTrip};

/// Ids below this are of tensors that outlive the loop.
const CONSTANTS: u64 = 16;

/// Most ops of a loop's body, and of an input in all: more only take time.
const MAX_OPS: (usize, usize) = (64, 1 << 12);

/// What a control byte asks for, in the order of their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Step {
    /// An op follows, which joins the loop's body.
    Op,
    /// The loop's body again; a byte follows by how much the ids move on.
    Again,
    /// As [`Op`](Self::Op), without joining the body: an exception.
    Exception,
    /// The frame ends.
    Cut,
    /// The frame ends, and a tensor is noted: eight bytes of its id follow.
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

/// `op` with the ids it has so much later in a loop.
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
