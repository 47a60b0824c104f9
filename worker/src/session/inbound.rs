//! Turns the frames of a session into pieces of work and payloads.
//!
//! Only payloads span several frames. They are gathered here, in memory that is taken
//! from the device's account first, so that a client cannot make a worker hold more than
//! its device has. The exception is a payload that fits what the session may keep of its
//! uploads: it is gathered even if the device is full.

use std::sync::Arc;

use burn_ir::{TensorId, TensorIr};
use tensord_proto::{
    MAX_READS_PER_FRAME,
    bulk::{ChunkResult, PayloadAssembler, PayloadError},
    codec::{CodecError, decode_tensor, decode_type},
    content::kept_cost,
    v1::{Fault, frame::Body},
};
use tensord_transport::channel::duplex::FrameError;

use super::{
    dataflow::{Refusal, out_of_memory},
    runner::{SyncRequest, Work},
    uploads::Payload,
};
use crate::{
    collective::Capability,
    memory::{DeviceMemory, SessionMemory},
};

/// Maximum bytes that are kept of a fault from the client: of its reason, and of each
/// name.
const CLIENT_REASON_BYTES: usize = 1 << 10;
const CLIENT_NAME_BYTES: usize = 128;

/// An entry of a session's work queue.
pub(crate) enum Item {
    /// Work, and the bytes of credit that it returns when done.
    Work(Work, usize),
    /// The first request id, the tensors to read, with consecutive request ids, and the bytes
    /// of credit that all of the reads return together.
    Reads(u64, Vec<TensorIr>, usize),
    /// The client closes the session.
    Close,
}

/// The error when a frame is rejected. The client broke a rule and the session ends,
/// except after a [loss](Self::is_loss).
#[derive(Debug, thiserror::Error)]
pub(crate) enum InboundError {
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Codec(#[from] CodecError),
    #[error(transparent)]
    Payload(#[from] PayloadError),
    #[error("{0}")]
    Violation(String),
}

impl InboundError {
    /// Returns whether the connection lost a frame, which a new connection repairs.
    pub(crate) fn is_loss(&self) -> bool {
        matches!(self, Self::Frame(e) if e.is_loss())
    }
}

/// Decodes a body from the track for ops, which took `bytes` of credit. Returns `None`
/// for a ping.
pub(crate) fn item(body: Body, bytes: usize) -> Result<Option<Item>, InboundError> {
    let work = match body {
        Body::Ops(ops) => Work::Ops {
            count: ops.count,
            encoded: ops.encoded,
            contents: ops.contents,
        },
        Body::Reads(reads) => {
            let count = reads.tensors.len();
            if !(1..=MAX_READS_PER_FRAME).contains(&count) {
                return Err(InboundError::Violation(format!(
                    "a frame has {count} reads; it must have 1 to {MAX_READS_PER_FRAME}"
                )));
            }
            let tensors = reads.tensors.iter().map(|tensor| decode_tensor(tensor));
            let tensors = tensors.collect::<Result<_, _>>()?;
            return Ok(Some(Item::Reads(reads.request_id, tensors, bytes)));
        }
        Body::Sync(sync) => Work::Sync(SyncRequest {
            id: sync.request_id,
            shares_uploads: sync.share_uploads,
        }),
        Body::Seed(seed) => Work::Seed(seed.seed),
        Body::Mark(mark) => Work::Mark(mark),
        Body::Poison(poison) => Work::Poison {
            id: TensorId::new(poison.tensor_id),
            fault: bound_fault_texts(poison.fault.unwrap_or_default()),
        },
        Body::Alias(alias) => Work::Alias {
            id: TensorId::new(alias.tensor_id),
            source: TensorId::new(alias.source_id),
        },
        Body::Offer(offer) => Work::Offer {
            tensor: decode_tensor(&offer.tensor)?,
            capability: capability(&offer.capability)?,
            to: offer.to,
        },
        Body::Take(take) => {
            let (shape, dtype, _) = decode_type(take.r#type.as_ref())?;
            let out = TensorIr::uninit(TensorId::new(take.tensor_id), shape, dtype);
            Work::Take {
                out,
                capability: capability(&take.capability)?,
                from: take.from,
            }
        }
        Body::Close(_) => return Ok(Some(Item::Close)),
        Body::Ping(_) => return Ok(None),
        _ => return Err(unexpected_frame()),
    };
    Ok(Some(Item::Work(work, bytes)))
}

/// Shortens the texts of a fault from the client: a session keeps them for as long as the
/// tensor.
fn bound_fault_texts(fault: Fault) -> Fault {
    let cut = |text: String, most: usize| match text.len() {
        size if size <= most => text,
        size => {
            let end = text.floor_char_boundary(most);
            format!("{} [cut, {size} bytes]", &text[..end])
        }
    };
    Fault {
        op_name: cut(fault.op_name, CLIENT_NAME_BYTES),
        worker: cut(fault.worker, CLIENT_NAME_BYTES),
        reason: cut(fault.reason, CLIENT_REASON_BYTES),
        ..fault
    }
}

fn capability(bytes: &[u8]) -> Result<Capability, InboundError> {
    let size = bytes.len();
    let wrong =
        |_| InboundError::Violation(format!("a capability has {size} bytes; it must have 16"));
    bytes.try_into().map_err(wrong)
}

fn unexpected_frame() -> InboundError {
    InboundError::Violation("the frame is one that clients do not send on this track".into())
}

/// Gathers the payloads of the bulk track.
pub(crate) struct Payloads {
    memory: Arc<DeviceMemory>,
    /// Maximum bytes of uploads that the session keeps.
    kept_limit_bytes: u64,
    assembler: PayloadAssembler<Result<SessionMemory, Refusal>>,
}

impl Payloads {
    pub(crate) fn new(memory: Arc<DeviceMemory>, kept_limit_bytes: u64) -> Self {
        Self {
            memory,
            kept_limit_bytes,
            assembler: PayloadAssembler::default(),
        }
    }

    /// Drops the payload that is partly received.
    pub(crate) fn clear(&mut self) {
        self.assembler = PayloadAssembler::default();
    }

    /// Processes the next body of the bulk track. Returns a payload when its last chunk
    /// has arrived.
    pub(crate) fn take(&mut self, body: Body) -> Result<Option<Payload>, InboundError> {
        let chunk = match body {
            Body::Chunk(chunk) => chunk,
            Body::Ping(_) => return Ok(None),
            _ => return Err(unexpected_frame()),
        };
        let (device, kept_limit_bytes) = (&self.memory, self.kept_limit_bytes);
        let begin = |size: u64| {
            let mut memory = device.open();
            let taken = memory.take(size).map_err(out_of_memory);
            // A payload that the device has no room for is gathered all the same if the
            // session may keep it for later.
            let keep = taken.is_ok() || size.saturating_add(kept_cost(0)) <= kept_limit_bytes;
            (taken.map(|()| memory), keep)
        };
        match self.assembler.take(&chunk, begin)? {
            ChunkResult::More => Ok(None),
            ChunkResult::Whole(memory, bytes) => Ok(Some(Payload { bytes, memory })),
        }
    }
}

#[cfg(test)]
mod tests {
    use tensord_proto::{
        bulk::chunks,
        v1::{self, FaultKind},
    };

    use super::*;

    fn payload(payloads: &mut Payloads, bytes: &'static [u8]) -> Payload {
        let mut whole = None;
        for chunk in chunks(bytes.into()) {
            whole = payloads.take(Body::Chunk(chunk)).unwrap();
        }
        whole.expect("the payload is complete")
    }

    #[test]
    fn payload_takes_memory_unless_it_does_not_fit() {
        let memory = DeviceMemory::new(7);
        let mut payloads = Payloads::new(memory.clone(), 0);
        let first = payload(&mut payloads, b"abcd");
        assert_eq!((&*first.bytes, memory.live_bytes()), (&b"abcd"[..], 4));
        let second = payload(&mut payloads, b"efgh");
        assert!(second.bytes.is_empty());
        assert!(matches!(
            second.memory,
            Err(Refusal::New(FaultKind::OutOfMemory, _))
        ));
        drop(first);
        assert_eq!(memory.live_bytes(), 0);
    }

    #[test]
    fn cacheable_payload_is_assembled_on_a_full_device() {
        let mut payloads = Payloads::new(DeviceMemory::new(1), kept_cost(4));
        let kept = payload(&mut payloads, b"abcd");
        assert!(kept.memory.is_err() && *kept.bytes == *b"abcd");
        let large = payload(&mut payloads, b"abcde");
        assert!(large.memory.is_err() && large.bytes.is_empty());
    }

    #[test]
    fn client_fault_texts_are_bounded() {
        let kept_bytes_of = |size: usize| {
            let fault = Fault {
                op_number: 7,
                op_name: "n".repeat(size),
                worker: "w".repeat(size),
                reason: "€".repeat(size),
                ..Fault::default()
            };
            let poison = v1::Poison {
                tensor_id: 1,
                fault: Some(fault),
                ..v1::Poison::default()
            };
            match item(Body::Poison(poison), 1).unwrap() {
                Some(Item::Work(Work::Poison { fault, .. }, 1)) => fault,
                _ => panic!("a fault is work"),
            }
        };
        let (short, long) = (kept_bytes_of(100), kept_bytes_of(100_000));
        assert_eq!((short.op_name.len(), short.reason.len()), (100, 300));
        assert_eq!(long.op_number, 7);
        assert!(long.op_name.len() < 160 && long.worker.len() < 160);
        assert!(long.reason.len() < 1060);
        assert!(long.reason.ends_with("€ [cut, 300000 bytes]"), "{long:?}");
    }

    #[test]
    fn frames_of_the_wrong_track_or_direction_are_refused() {
        let mut payloads = Payloads::new(DeviceMemory::new(1), 0);
        let seed = || Body::Seed(v1::Seed { seed: 1 });
        assert!(item(seed(), 1).is_ok());
        let errors = [
            payloads.take(seed()).err().unwrap(),
            payloads
                .take(Body::Chunk(v1::Chunk::default()))
                .err()
                .unwrap(),
            item(Body::Chunk(v1::Chunk::default()), 1).err().unwrap(),
            item(Body::Values(v1::Values::default()), 1).err().unwrap(),
            item(Body::Reads(v1::Reads::default()), 1).err().unwrap(),
        ];
        let words = [
            "do not send",
            "has no size",
            "do not send",
            "do not send",
            "a frame has 0 reads",
        ];
        for (error, words) in errors.iter().zip(words) {
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}
