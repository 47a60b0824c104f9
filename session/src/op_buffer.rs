//! Recorded ops and requests, and their encoding into the bodies of frames.
//!
//! The program's threads only append to a list, as encoding would slow them down. The
//! sender, mostly the driver, takes the whole list and encodes it here.

use burn_ir::{InitOperationIr, OperationIr, TensorId, TensorIr};
use tensord_proto::{
    MAX_FRAME_BYTES,
    codec::OpEncoder,
    content::{self, Entry},
    v1::{Mark, Ops, frame::Body},
};

/// Limit on the number of ops in a frame: some milliseconds of work for a worker, which
/// starts on them while the next are encoded.
const MAX_FRAME_OPS: u32 = 4096;

/// Size in bytes at which a frame is complete.
const TARGET_FRAME_BYTES: usize = 48 << 10;

/// The items that a program recorded, in order.
///
/// Nearly all are ops. They have a list of their own, because an op is over 600 bytes: it
/// is moved once, and encoded in place.
#[derive(Debug, Default)]
pub struct OpBuffer {
    ops: Vec<OperationIr>,
    /// The other items, each with the number of ops before it.
    others: Vec<(usize, Item)>,
}

impl OpBuffer {
    #[inline]
    pub(super) fn op(&mut self, op: OperationIr) {
        self.ops.push(op);
    }

    #[inline]
    pub(super) fn push(&mut self, item: Item) {
        self.others.push((self.ops.len(), item));
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.ops.len() + self.others.len()
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A recorded item that is not an op.
#[derive(Debug)]
pub enum Item {
    /// An upload: the tensor, and the entries that show where its bytes are.
    Upload(TensorIr, Vec<Entry>),
    /// A frame.
    Frame(Body),
    /// A frame that makes a tensor.
    NewTensor(TensorId, Body),
    /// A mark.
    Mark(Mark),
}

/// Encodes what a session recorded. Each item is encoded once, in order, because the
/// encoder predicts ops from those before.
#[derive(Default)]
pub struct FrameEncoder {
    /// The items to encode; empty between calls, and kept for its allocation.
    taken: OpBuffer,
    encoder: OpEncoder,
    ops: Vec<u8>,
    contents: Vec<u8>,
    count: u32,
}

/// Most bytes that a frame has beside its ops: its numbers, and the lengths of its parts.
const FRAME_OVERHEAD_BYTES: usize = 128;

/// Checks that a frame is not too large for a link. Several ops share a frame only while that is short, so nearly all of
/// a frame that is too large is its last op.
///
/// # Errors
///
/// The reason, for the program.
pub fn check_size(body: &Body) -> Result<(), String> {
    const MAX_BYTES: usize = MAX_FRAME_BYTES - FRAME_OVERHEAD_BYTES;
    let bytes = match body {
        Body::Ops(ops) => ops.encoded.len() + ops.contents.len(),
        _ => 0,
    };
    match bytes <= MAX_BYTES {
        true => Ok(()),
        false => Err(format!(
            "the program has an op that takes about {bytes} bytes when it is sent, and at most {MAX_BYTES} are possible: it has too many inputs or outputs; make several ops of it"
        )),
    }
}

impl FrameEncoder {
    /// Takes all items out of `op_buffer`.
    pub fn take(&mut self, op_buffer: &mut OpBuffer) {
        assert!(
            self.taken.is_empty(),
            "the items taken before were not encoded"
        );
        std::mem::swap(&mut self.taken, op_buffer);
    }

    /// Encodes the items taken, into the bodies of frames.
    pub fn encode(&mut self) -> Vec<Body> {
        let mut bodies = Vec::new();
        let mut taken = std::mem::take(&mut self.taken);
        let mut encoded = 0;
        for (before, item) in taken.others.drain(..) {
            self.ops(&taken.ops[encoded..before], &mut bodies);
            encoded = before;
            self.item(item, &mut bodies);
        }
        self.ops(&taken.ops[encoded..], &mut bodies);
        self.finish_frame(&mut bodies);
        taken.ops.clear();
        self.taken = taken;
        bodies
    }

    fn ops(&mut self, ops: &[OperationIr], bodies: &mut Vec<Body>) {
        ops.iter().for_each(|op| self.op(op, bodies));
    }

    fn item(&mut self, item: Item, bodies: &mut Vec<Body>) {
        match item {
            Item::Upload(out, entries) => {
                for entry in &entries {
                    content::put(&mut self.contents, entry);
                }
                self.op(&OperationIr::Init(InitOperationIr { out }), bodies);
            }
            Item::Frame(body) => {
                self.finish_frame(bodies);
                bodies.push(body);
            }
            Item::NewTensor(id, body) => {
                self.finish_frame(bodies);
                bodies.push(body);
                // The worker's decoder counts the tensor at the same point.
                self.encoder.note_tensor(id);
            }
            Item::Mark(mark) => {
                self.finish_frame(bodies);
                bodies.push(Body::Mark(mark));
                // The decoder of another process starts here.
                self.encoder.restart();
            }
        }
    }

    fn op(&mut self, op: &OperationIr, bodies: &mut Vec<Body>) {
        self.encoder.encode(op, &mut self.ops);
        self.count += 1;
        let bytes = self.ops.len() + self.contents.len();
        if bytes >= TARGET_FRAME_BYTES || self.count >= MAX_FRAME_OPS || self.encoder.is_full() {
            self.finish_frame(bodies);
        }
    }

    fn finish_frame(&mut self, bodies: &mut Vec<Body>) {
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
