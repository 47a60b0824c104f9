//! Decodes bytes to ops. The bytes are split into frames, each with a count of ops. The
//! decoder must not panic, and must keep memory and time within bounds.
//!
//! Ops that were decoded must survive the round trip: encoded and decoded again they are
//! the same.
//!
//! An input is a sequence of control bytes with arguments. After a control byte below 128
//! come the frame's count of ops and its length, two bytes each, and the frame; after any
//! other comes the id of a tensor to note, eight bytes.

use burn_ir::{OperationIr, TensorId};
use tensord_proto::codec::{CodecError, DecodedOps, OpDecoder, OpEncoder, OpName};

use crate::{input::Input, memory::peak_of, plain};

/// The first control byte that notes a tensor.
pub(crate) const NOTE: u8 = 128;

/// Maximum number of bytes that decoding one frame may allocate. A frame has up to eight
/// million bytes of ops, at worst all tensors of four bytes, which take some ninety bytes
/// in memory each.
const MAX_BYTES: usize = 256 << 20;

/// Number of ops after which the target stops; more would only take time.
const MAX_OPS: usize = 1 << 17;

/// Runs the target.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let mut decoder = OpDecoder::default();
    let mut echo = RoundTrip::default();
    let mut ops = 0;
    while !input.is_empty() && ops < MAX_OPS {
        if input.byte() >= NOTE {
            let id = TensorId::new(input.long());
            decoder.note_tensor(id);
            echo.note(id);
            continue;
        }
        let (count, len) = (input.short(), input.short());
        let frame = input.bytes(len.into());
        // The target continues after an error. No session does, but the decoder's safety
        // must not depend on that.
        match decode(&mut decoder, frame, count.into()) {
            Ok(decoded) => {
                ops += decoded.len();
                echo.send(decoded.iter().map(|it| &*it.op));
            }
            Err(error) => check(&error, frame),
        }
    }
}

fn decode(decoder: &mut OpDecoder, frame: &[u8], count: u32) -> Result<DecodedOps, CodecError> {
    let (decoded, bytes) = peak_of(|| decoder.decode(frame, count));
    assert!(
        bytes < MAX_BYTES,
        "{bytes} bytes for a frame of {} bytes",
        frame.len()
    );
    if let Ok(ops) = &decoded {
        assert_eq!(ops.len(), count as usize);
    }
    decoded
}

fn check(error: &CodecError, frame: &[u8]) {
    assert_eq!(error.what, "ops");
    assert!(error.offset <= frame.len(), "{error}");
    assert!(!error.rule.is_empty());
}

/// An encoder and a decoder that exchange the same ops on a stream of their own.
#[derive(Default)]
pub(crate) struct RoundTrip {
    encoder: OpEncoder,
    decoder: OpDecoder,
}

impl RoundTrip {
    pub(crate) fn note(&mut self, id: TensorId) {
        self.encoder.note_tensor(id);
        self.decoder.note_tensor(id);
    }

    /// Sends `ops`, in as many frames as the encoder needs.
    pub(crate) fn send<'a>(&mut self, ops: impl IntoIterator<Item = &'a OperationIr>) {
        let (mut frame, mut sent) = (Vec::new(), Vec::new());
        for op in ops {
            self.encoder.encode(op, &mut frame);
            sent.push(op);
            if self.encoder.is_full() {
                self.receive(&mut frame, &mut sent);
            }
        }
        if !sent.is_empty() {
            self.receive(&mut frame, &mut sent);
        }
    }

    fn receive(&mut self, frame: &mut Vec<u8>, sent: &mut Vec<&OperationIr>) {
        self.encoder.finish(frame);
        let (frame, ops) = (std::mem::take(frame), std::mem::take(sent));
        let decoded = self
            .decoder
            .decode(&frame, ops.len() as u32)
            .unwrap_or_else(|error| panic!("{error}, in ops {:?}", names(&ops)));
        assert!(
            plain(decoded.iter().map(|it| &*it.op)) == plain(ops.iter().copied()),
            "{decoded:?}\nis not\n{ops:?}"
        );
    }
}

fn names(ops: &[&OperationIr]) -> Vec<String> {
    let names = ops.iter().take(100).map(|op| OpName::of(op).to_string());
    names.collect()
}

#[cfg(test)]
mod tests {
    use burn_backend::{DType, Shape};
    use burn_ir::{CustomOpIr, TensorIr};

    use super::*;

    /// A frame of a few bytes that decodes to the maximum number of small tensors.
    #[test]
    fn largest_expansion_of_a_frame_is_bounded() {
        let scalar = TensorIr::uninit(TensorId::new(1), Shape::new([]), DType::F32);
        let op = OperationIr::Custom(CustomOpIr::new("", &vec![scalar; 1 << 10], &[]));
        let count = tensord_proto::codec::MAX_PLAIN_BYTES_PER_FRAME / plain([&op]).len();
        let (mut encoder, mut decoder) = (OpEncoder::default(), OpDecoder::default());
        let mut frame = Vec::new();
        (0..count).for_each(|_| encoder.encode(&op, &mut frame));
        encoder.finish(&mut frame);
        let (decoded, bytes) = peak_of(|| decoder.decode(&frame, count as u32));
        assert_eq!(decoded.unwrap().len(), count);
        println!(
            "{bytes} bytes for {count} ops in a frame of {} bytes",
            frame.len()
        );
        assert!(bytes < MAX_BYTES);
    }
}
