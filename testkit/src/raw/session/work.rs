//! The work that a session gives to the worker as an honest client does: ops, uploads, reads and
//! syncs.

use burn_backend::DType;
use burn_ir::{InitOperationIr, OperationIr, TensorId, TensorIr, TensorStatus};
use bytes::Bytes;
use tensord_proto::{
    codec::encode_tensor,
    content::{self, Content, Entry},
    v1::{self, Fault, Ops, Reads, frame::Body, tensor_value, value},
};

use super::{
    super::{SessionError, bytes_of, typed},
    RawSession,
};

impl RawSession {
    /// Returns a tensor id that is unused in this session. Ids that a test chooses itself
    /// should be below 2^32.
    pub fn new_id(&mut self) -> u64 {
        self.tensors += 1;
        (1 << 32) + self.tensors
    }

    /// Queues ops, encoded as an honest client does.
    pub fn ops(&mut self, ops: &[OperationIr]) {
        self.ops_with(ops, Vec::new());
    }

    /// Queues ops with any list of contents for the uploads among them.
    ///
    /// # Panics
    ///
    /// If there are more ops than one frame may have.
    pub fn ops_with(&mut self, ops: &[OperationIr], contents: Vec<u8>) {
        let mut encoded = Vec::new();
        for op in ops {
            assert!(!self.encoder.is_full(), "more ops than a frame may have");
            self.encoder.encode(op, &mut encoded);
        }
        self.encoder.finish(&mut encoded);
        self.push(Body::Ops(Ops {
            count: ops.len().try_into().expect("fewer than a frame may have"),
            encoded: encoded.into(),
            contents: contents.into(),
        }));
    }

    /// Queues the upload of a 1-d `f32` tensor and returns a reference that can be read any
    /// number of times.
    pub fn upload(&mut self, values: &[f32]) -> TensorIr {
        let id = self.new_id();
        self.upload_as(typed(id, &[values.len()], DType::F32), bytes_of(values))
    }

    /// Queues the upload of any bytes as the content of `tensor`. The bytes travel in the
    /// frame of the op, which has room for about 4 MiB.
    pub fn upload_as(&mut self, tensor: TensorIr, bytes: Vec<u8>) -> TensorIr {
        let content = Content::Inline {
            bytes: bytes.into(),
            keep: None,
        };
        self.upload_from(tensor, &[Entry::Upload(content)])
    }

    /// Queues the upload of `tensor`, with its bytes where `entries` point.
    pub fn upload_from(&mut self, tensor: TensorIr, entries: &[Entry]) -> TensorIr {
        let mut contents = Vec::new();
        for entry in entries {
            content::put(&mut contents, entry);
        }
        let out = TensorIr {
            status: TensorStatus::NotInit,
            ..tensor.clone()
        };
        self.ops_with(&[OperationIr::Init(InitOperationIr { out })], contents);
        tensor
    }

    /// Queues a body that creates the tensor `id` without the op codec, such as an `Alias`
    /// or a `Take`, and makes the id known to the codec.
    pub fn push_made(&mut self, id: u64, body: Body) {
        self.push(body);
        self.encoder.note_tensor(TensorId::new(id));
    }

    /// Queues one request to read `tensors` and returns the request id of the first.
    pub fn reads(&mut self, tensors: &[TensorIr]) -> u64 {
        let request_id = self.requests + 1;
        self.requests += tensors.len().max(1) as u64;
        let tensors = tensors.iter().map(encode_tensor).collect();
        self.push(Body::Reads(Reads {
            request_id,
            tensors,
        }));
        request_id
    }

    /// Reads a tensor and returns its bytes, or the fault because of which it has none.
    /// Drops replies to other requests that arrive first.
    ///
    /// # Errors
    ///
    /// If the session is over.
    ///
    /// # Panics
    ///
    /// If no reply arrives, or if the value is too large for a frame and takes the track
    /// for bulk bytes.
    pub async fn fetch(&mut self, tensor: &TensorIr) -> Result<Result<Bytes, Fault>, SessionError> {
        let request = self.reads(std::slice::from_ref(tensor));
        loop {
            let Body::Values(values) = self.next().await? else {
                continue;
            };
            let found = values.values.into_iter().find(|v| v.request_id == request);
            let Some(found) = found else { continue };
            return Ok(match found.result {
                Some(value::Result::Fault(fault)) => Err(fault),
                Some(value::Result::Tensor(tensor)) => match tensor.content {
                    Some(tensor_value::Content::Bytes(bytes)) => Ok(bytes),
                    other => panic!("not the bytes themselves: {other:?}"),
                },
                None => return Err(SessionError::Protocol("a value with nothing in it".into())),
            });
        }
    }

    /// Waits until all earlier ops are done and returns the first fault that no sync has
    /// reported. Drops replies to other requests that arrive first.
    ///
    /// # Errors
    ///
    /// If the session is over.
    ///
    /// # Panics
    ///
    /// If no reply arrives.
    pub async fn sync(&mut self) -> Result<Option<Fault>, SessionError> {
        let request_id = self.request_sync(false);
        self.synced(request_id).await
    }

    /// Queues a request for a reply when all earlier ops are done and, if `share_uploads` is true, the
    /// kept uploads are shared. Returns the request id.
    pub fn request_sync(&mut self, share_uploads: bool) -> u64 {
        self.requests += 1;
        let request_id = self.requests;
        self.push(Body::Sync(v1::Sync {
            request_id,
            share_uploads,
        }));
        request_id
    }

    /// Waits for the reply to the sync `request_id`, and returns its fault. Drops replies to other
    /// requests that arrive first.
    ///
    /// # Errors
    ///
    /// If the session is over.
    ///
    /// # Panics
    ///
    /// If no reply arrives.
    pub async fn synced(&mut self, request_id: u64) -> Result<Option<Fault>, SessionError> {
        loop {
            match self.next().await? {
                Body::Synced(synced) if synced.request_id == request_id => return Ok(synced.fault),
                _ => {}
            }
        }
    }
}
