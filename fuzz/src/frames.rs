//! Processes bytes as frames, at one end of a session that has sent a few frames itself. No
//! frame may cause a panic or a large allocation, and accepted frames must keep the
//! numbering: each once, in order, within the credit.
//!
//! The contents of frames are decoded as well: ops and their uploads, types, tensors,
//! profiles.
//!
//! An input is a sequence of frames, each after two bytes with its length.

use burn_ir::OperationIr;
use bytes::Bytes;
use prost::Message;
use tensord_proto::{
    codec::{DecodedOps, DeviceProfile, OpDecoder, decode_tensor, decode_type, tensor_bytes},
    content::{Contents, Entry},
    v1::{Frame, Seed, frame, value},
};
use tensord_transport::channel::duplex::{self, Duplex};

use crate::{input::Input, memory::peak_of};

/// Credit of the peer, in bytes.
const WINDOW_BYTES: u64 = 64 << 10;

/// Maximum number of bytes that receiving a frame may allocate. A dimension of a shape
/// takes one byte on the wire and eight in memory, and a vector has two copies while it
/// grows.
const MAX_BYTES: usize = 2 << 20;

/// Runs the target.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let mut end = Receiver::new();
    while !input.is_empty() {
        let len = input.short();
        let frame = Bytes::copy_from_slice(input.bytes(len.into()));
        if let Ok(frame) = duplex::decode(frame.clone()) {
            let again = duplex::decode(frame.encode_to_vec().into());
            assert_eq!(again.as_ref(), Ok(&frame));
        }
        end.receive(frame);
    }
}

/// One end of a session, and what it must have received so far.
struct Receiver {
    duplex: Duplex,
    ops: OpDecoder,
    received: u64,
    received_bytes: u64,
}

impl Receiver {
    /// Creates an end that has queued three frames and sent two of them.
    fn new() -> Self {
        let mut duplex = Duplex::new(1 << 20, 1 << 20, WINDOW_BYTES);
        (0..3).for_each(|seed| duplex.push(frame::Body::Seed(Seed { seed })));
        (0..2).for_each(|_| drop(duplex.next_to_send().expect("there is credit")));
        let ops = OpDecoder::default();
        let (received, received_bytes) = (0, 0);
        Self {
            duplex,
            ops,
            received,
            received_bytes,
        }
    }

    /// Receives a frame. A frame that breaks a rule would end the session; the target
    /// continues, as a refused frame must not change the numbering.
    fn receive(&mut self, bytes: Bytes) {
        let seq = duplex::decode(bytes.clone()).map_or(0, |frame| frame.seq);
        let (taken, peak) = peak_of(|| self.duplex.receive(bytes));
        assert!(peak < MAX_BYTES, "{peak} bytes for a frame");
        if let Ok(Some((body, cost))) = taken {
            if seq > 0 {
                self.received += 1;
                self.received_bytes += cost as u64;
                assert_eq!(seq, self.received);
                assert!(cost > 0 && self.received_bytes <= self.duplex.inbox().credit());
            } else {
                assert_eq!(cost, 0);
            }
            read(&body, &mut self.ops);
            self.duplex.inbox().consume(cost);
        }
        assert_eq!(self.duplex.inbox().received(), self.received);
        assert!(self.duplex.outbox().sent() <= 3);
    }
}

/// Decodes the contents of a body, as the two ends do.
fn read(body: &frame::Body, decoder: &mut OpDecoder) {
    match body {
        frame::Body::Ops(ops) => {
            if let Ok(decoded) = decoder.decode(&ops.encoded, ops.count) {
                read_contents(&decoded, &ops.contents);
            }
        }
        frame::Body::Poison(poison) => drop(decode_type(poison.r#type.as_ref())),
        frame::Body::Reads(reads) => {
            reads
                .tensors
                .iter()
                .for_each(|tensor| drop(decode_tensor(tensor)));
        }
        frame::Body::Opened(opened) => {
            if let Some(settings) = &opened.settings {
                drop(DeviceProfile::decode(&settings.encoded));
            }
        }
        frame::Body::Values(values) => {
            for value in &values.values {
                if let Some(value::Result::Tensor(tensor)) = &value.result {
                    drop(decode_type(tensor.r#type.as_ref()));
                }
            }
        }
        _ => {}
    }
}

/// Decodes the list of contents of the uploads among `ops`.
fn read_contents(ops: &DecodedOps, list: &Bytes) {
    let mut contents = Contents::new(list.clone());
    for decoded in ops {
        let OperationIr::Init(init) = &*decoded.op else {
            continue;
        };
        let Some(size) = tensor_bytes(&init.out.shape, init.out.dtype) else {
            return;
        };
        loop {
            match contents.next(size) {
                Ok(Entry::Forget(_)) => {}
                Ok(Entry::Upload(_)) => break,
                Err(error) => {
                    assert!(error.offset <= list.len() && !error.rule.is_empty());
                    return;
                }
            }
        }
    }
}

/// Returns an encoded frame.
pub(crate) fn encode(seq: u64, ack: u64, body: Option<frame::Body>) -> Vec<u8> {
    let credit_bytes = 1 << 20;
    let frame = Frame {
        seq,
        ack,
        credit_bytes,
        body,
    };
    frame.encode_to_vec()
}
