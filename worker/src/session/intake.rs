//! Frames of a session into pieces of work.
//!
//! The one thing that spans frames is a tensor's bytes: they are gathered here,
//! in memory that was taken from the device's account first, so that a client
//! cannot make a worker hold more than its device has.

use std::sync::Arc;

use burn_backend::{DType, Shape};
use burn_ir::TensorId;
use bytes::Bytes;
use tensord_proto::{
    codec::{CodecError, decode_tensor, decode_type},
    v1::{self, frame::Body},
};

use super::{
    IntakeError,
    dataflow::{Refusal, out_of_memory},
    runner::{Content, Work},
};
use crate::memory::DeviceMemory;

/// What the executor gets.
pub(crate) enum Item {
    /// Work, and the bytes of credit it gives back when done.
    Work(Work, usize),
    /// The client is done.
    Close,
}

/// What a frame came to.
#[derive(Default)]
pub(crate) struct Taken {
    pub(crate) item: Option<Item>,
    /// Bytes of credit that are free again at once.
    pub(crate) consumed: usize,
}

pub(crate) struct Intake {
    memory: Arc<DeviceMemory>,
    upload: Option<Gathering>,
}

/// An upload whose bytes are still coming.
struct Gathering {
    id: TensorId,
    shape: Shape,
    dtype: DType,
    size: usize,
    left: usize,
    content: Result<Content, Refusal>,
    /// Credit of the announcing frame, given back when the upload is carried
    /// out, so that uploads that wait are bounded too.
    credit: usize,
}

impl Intake {
    pub(crate) fn new(memory: Arc<DeviceMemory>) -> Self {
        Self {
            memory,
            upload: None,
        }
    }

    /// Takes the next body, which took `bytes` of credit.
    pub(crate) fn take(&mut self, body: Body, bytes: usize) -> Result<Taken, IntakeError> {
        if self.upload.is_some() && !matches!(body, Body::Chunk(_) | Body::Ping(_)) {
            let rule = "another frame came before all chunks of an upload";
            return Err(IntakeError::Order(rule.into()));
        }
        let work = |work| {
            Ok(Taken {
                item: Some(Item::Work(work, bytes)),
                consumed: 0,
            })
        };
        match body {
            Body::Ops(ops) => work(Work::Ops {
                count: ops.count,
                encoded: ops.encoded,
            }),
            Body::Upload(upload) => self.begin(upload, bytes),
            Body::Chunk(chunk) => self.gather(&chunk.bytes, bytes),
            Body::Read(read) => work(Work::Read {
                request: read.request_id,
                tensor: decode_tensor(&read.tensor)?,
            }),
            Body::Sync(sync) => work(Work::Sync {
                request: sync.request_id,
            }),
            Body::Seed(seed) => work(Work::Seed(seed.seed)),
            Body::Poison(poison) => {
                let id = TensorId::new(poison.tensor_id);
                work(Work::Poison {
                    id,
                    fault: poison.fault.unwrap_or_default(),
                })
            }
            Body::Alias(alias) => {
                let (id, source) = (
                    TensorId::new(alias.tensor_id),
                    TensorId::new(alias.source_id),
                );
                work(Work::Alias { id, source })
            }
            Body::Close(_) => Ok(Taken {
                item: Some(Item::Close),
                consumed: bytes,
            }),
            Body::Ping(_) => Ok(Taken::default()),
            _ => Err(IntakeError::Order(
                "a frame that clients do not send".into(),
            )),
        }
    }

    fn begin(&mut self, upload: v1::Upload, bytes: usize) -> Result<Taken, IntakeError> {
        let (shape, dtype, size) = decode_type(upload.r#type.as_ref())?;
        if upload.size_bytes != size as u64 {
            let rule = format!(
                "{} bytes for {shape} of {}, which has {size}",
                upload.size_bytes,
                dtype.name()
            );
            return Err(CodecError {
                what: "upload",
                offset: 0,
                rule,
            }
            .into());
        }
        let mut memory = self.memory.open();
        let content = match memory.take(size as u64) {
            Ok(()) => Ok(Content {
                bytes: Vec::with_capacity(size),
                memory,
            }),
            Err(e) => Err(out_of_memory(e)),
        };
        let id = TensorId::new(upload.tensor_id);
        self.upload = Some(Gathering {
            id,
            shape,
            dtype,
            size,
            left: size,
            content,
            credit: bytes,
        });
        self.gather(&upload.bytes, 0)
    }

    fn gather(&mut self, chunk: &Bytes, bytes: usize) -> Result<Taken, IntakeError> {
        let Some(upload) = &mut self.upload else {
            return Err(IntakeError::Order("a chunk without an upload".into()));
        };
        if chunk.len() > upload.left {
            let rule = format!("{} bytes more than its size", chunk.len() - upload.left);
            let offset = upload.size - upload.left;
            return Err(CodecError {
                what: "upload",
                offset,
                rule,
            }
            .into());
        }
        upload.left -= chunk.len();
        if let Ok(content) = &mut upload.content {
            content.bytes.extend_from_slice(chunk);
        }
        if upload.left > 0 {
            return Ok(Taken {
                item: None,
                consumed: bytes,
            });
        }
        let done = self.upload.take().expect("it was just there");
        let Gathering {
            id,
            shape,
            dtype,
            content,
            credit,
            ..
        } = done;
        let work = Work::Upload {
            id,
            shape,
            dtype,
            content,
        };
        // The bytes now count as the device's memory, no longer as the wire's.
        Ok(Taken {
            item: Some(Item::Work(work, credit)),
            consumed: bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use tensord_proto::{codec::encode_type, v1::Chunk};

    use super::*;

    fn upload(elements: usize, size: u64, bytes: &'static [u8]) -> Body {
        Body::Upload(v1::Upload {
            tensor_id: 1,
            r#type: Some(encode_type(&Shape::new([elements]), DType::U8)),
            size_bytes: size,
            bytes: Bytes::from_static(bytes),
        })
    }

    fn chunk(bytes: &'static [u8]) -> Body {
        Body::Chunk(Chunk {
            bytes: Bytes::from_static(bytes),
        })
    }

    fn content(taken: Taken) -> Result<Vec<u8>, Refusal> {
        match taken.item {
            Some(Item::Work(Work::Upload { content, .. }, _)) => content.map(|c| c.bytes),
            _ => panic!("no upload came of it"),
        }
    }

    #[test]
    fn an_upload_is_gathered_from_its_chunks() {
        let mut intake = Intake::new(DeviceMemory::new(100));
        assert!(intake.take(upload(5, 5, b"ab"), 20).unwrap().item.is_none());
        assert_eq!(intake.take(chunk(b"cd"), 6).unwrap().consumed, 6);
        let taken = intake.take(chunk(b"e"), 5).unwrap();
        assert_eq!(content(taken).unwrap(), b"abcde");
    }

    #[test]
    fn an_upload_that_does_not_fit_is_refused_but_keeps_its_place() {
        let memory = DeviceMemory::new(3);
        let mut intake = Intake::new(memory.clone());
        intake.take(upload(5, 5, b"ab"), 20).unwrap();
        let refusal = content(intake.take(chunk(b"cde"), 7).unwrap()).unwrap_err();
        assert!(
            matches!(refusal, Refusal::New(v1::FaultKind::OutOfMemory, _)),
            "{refusal:?}"
        );
        assert_eq!(memory.live_bytes(), 0);
    }

    #[test]
    fn a_client_that_breaks_the_rules_is_told_which() {
        let error = |bodies: Vec<Body>| {
            let mut intake = Intake::new(DeviceMemory::new(100));
            let mut taken = bodies.into_iter().map(|body| intake.take(body, 1));
            taken.find_map(Result::err).expect("an error").to_string()
        };
        assert!(error(vec![upload(5, 6, b"")]).contains("6 bytes for [5] of u8, which has 5"));
        assert!(error(vec![chunk(b"a")]).contains("without an upload"));
        assert!(error(vec![upload(2, 2, b""), chunk(b"abc")]).contains("1 bytes more"));
        let early = error(vec![upload(2, 2, b""), Body::Seed(v1::Seed { seed: 1 })]);
        assert!(early.contains("before all chunks"), "{early}");
        assert!(error(vec![Body::Value(v1::Value::default())]).contains("do not send"));
    }
}
