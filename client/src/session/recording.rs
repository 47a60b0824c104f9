//! What a program recorded, into the bodies of frames.
//!
//! The program's threads only leave ops in a list: they have better things to do
//! than to encode them. The driver takes the list as a whole and encodes it here.

use burn_ir::{InitOperationIr, OperationIr, TensorId, TensorIr};
use tensord_proto::{
    codec::OpEncoder,
    content::{self, Entry},
    v1::{Ops, frame::Body},
};

/// Ops in a frame, at most: some milliseconds of work for a worker, which can
/// start on them while the next are encoded.
const CUT_OPS: u32 = 4096;

/// Bytes from which on a frame is cut.
const CUT_BYTES: usize = 48 << 10;

/// Something that a program asked for, in order.
// Nearly all are ops, and a box for each would cost more than the room.
#[expect(clippy::large_enum_variant)]
#[derive(Debug)]
pub(super) enum Item {
    Op(OperationIr),
    /// A tensor of bytes from here, and where they are.
    Upload(TensorIr, Vec<Entry>),
    /// A body of its own.
    Said(Body),
    /// A body of its own that makes a tensor.
    Made(TensorId, Body),
}

/// Encodes a session's items. Frames are encoded once, in order: the encoder
/// remembers what it said.
#[derive(Default)]
pub(super) struct Recording {
    /// Those at hand; empty in between, and kept for its memory.
    items: Vec<Item>,
    encoder: OpEncoder,
    ops: Vec<u8>,
    contents: Vec<u8>,
    count: u32,
}

impl Recording {
    /// Takes the items of `recorded`, and leaves it a list without any.
    pub(super) fn take(&mut self, recorded: &mut Vec<Item>) {
        debug_assert!(self.items.is_empty(), "items that were not encoded");
        std::mem::swap(&mut self.items, recorded);
    }

    /// Makes bodies of the items taken.
    pub(super) fn encode(&mut self) -> Vec<Body> {
        let mut bodies = Vec::new();
        let mut items = std::mem::take(&mut self.items);
        for item in items.drain(..) {
            match item {
                Item::Op(op) => self.op(&op, &mut bodies),
                Item::Upload(out, entries) => {
                    for entry in &entries {
                        content::put(&mut self.contents, entry);
                    }
                    self.op(&OperationIr::Init(InitOperationIr { out }), &mut bodies);
                }
                Item::Said(body) => {
                    self.cut(&mut bodies);
                    bodies.push(body);
                }
                Item::Made(id, body) => {
                    self.cut(&mut bodies);
                    bodies.push(body);
                    // The worker counts it in the same place.
                    self.encoder.note_tensor(id);
                }
            }
        }
        self.cut(&mut bodies);
        self.items = items;
        bodies
    }

    fn op(&mut self, op: &OperationIr, bodies: &mut Vec<Body>) {
        self.encoder.encode(op, &mut self.ops);
        self.count += 1;
        let bytes = self.ops.len() + self.contents.len();
        if bytes >= CUT_BYTES || self.count >= CUT_OPS || self.encoder.is_full() {
            self.cut(bodies);
        }
    }

    fn cut(&mut self, bodies: &mut Vec<Body>) {
        if self.count > 0 {
            self.encoder.finish(&mut self.ops);
            bodies.push(Body::Ops(Ops {
                count: std::mem::take(&mut self.count),
                encoded: std::mem::take(&mut self.ops).into(),
                contents: std::mem::take(&mut self.contents).into(),
            }));
        }
    }
}
