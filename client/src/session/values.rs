//! Answers of the worker into values.

use burn_backend::{DType, ExecutionError, Shape, TensorData};
use tensord_proto::{
    codec::decode_type,
    v1::{Chunk, Synced, TensorValue, Value, value},
};

use super::State;

/// A value whose bytes are still coming.
pub(super) struct Gathering {
    request: u64,
    shape: Shape,
    dtype: DType,
    size: usize,
    bytes: Vec<u8>,
}

/// An answer and who waits for it.
pub(super) enum Delivery {
    Value(
        super::Answer<TensorData>,
        Result<TensorData, ExecutionError>,
    ),
    Synced(super::Answer<()>, Result<(), ExecutionError>),
}

impl Delivery {
    pub(super) fn deliver(self) {
        // Whoever waited may be gone; then there is nobody to tell.
        match self {
            Self::Value(answer, result) => drop(answer.send(result)),
            Self::Synced(answer, result) => drop(answer.send(result)),
        }
    }
}

/// The worker broke a rule; the session cannot go on.
pub(super) type Broken = String;

impl State {
    pub(super) fn value(&mut self, value: Value) -> Result<Option<Delivery>, Broken> {
        let request = value.request_id;
        match value.result {
            Some(value::Result::Tensor(tensor)) => self.begin(request, tensor),
            Some(value::Result::Fault(fault)) => {
                let error = ExecutionError::with_context(fault.to_string());
                Ok(self.answered(request, Err(error)))
            }
            None => Err(format!("the answer to read {request} is empty")),
        }
    }

    fn begin(&mut self, request: u64, tensor: TensorValue) -> Result<Option<Delivery>, Broken> {
        let (shape, dtype, size) =
            decode_type(tensor.r#type.as_ref()).map_err(|e| e.to_string())?;
        if tensor.size_bytes != size as u64 || self.gathering.is_some() {
            return Err(format!(
                "the answer to read {request} does not fit its announcement"
            ));
        }
        let mut bytes = Vec::with_capacity(size);
        bytes.extend_from_slice(&tensor.bytes);
        self.gathering = Some(Gathering {
            request,
            shape,
            dtype,
            size,
            bytes,
        });
        self.gathered()
    }

    pub(super) fn chunk(&mut self, chunk: &Chunk) -> Result<Option<Delivery>, Broken> {
        let gathering = self
            .gathering
            .as_mut()
            .ok_or("a chunk came without a value")?;
        if chunk.bytes.len() > gathering.size - gathering.bytes.len() {
            return Err(format!(
                "the answer to read {} is longer than announced",
                gathering.request
            ));
        }
        gathering.bytes.extend_from_slice(&chunk.bytes);
        self.gathered()
    }

    fn gathered(&mut self) -> Result<Option<Delivery>, Broken> {
        let whole = |gathering: &mut Gathering| gathering.bytes.len() == gathering.size;
        let Some(done) = self.gathering.take_if(whole) else {
            return Ok(None);
        };
        let data = TensorData::try_from_bytes_vec(done.bytes, done.shape, done.dtype);
        let data = data.map_err(|e| format!("the answer to read {}: {e}", done.request))?;
        Ok(self.answered(done.request, Ok(data)))
    }

    fn answered(
        &mut self,
        request: u64,
        result: Result<TensorData, ExecutionError>,
    ) -> Option<Delivery> {
        let answer = self.reads.remove(&request)?;
        Some(Delivery::Value(answer, result))
    }

    pub(super) fn synced(&mut self, synced: Synced) -> Option<Delivery> {
        let answer = self.syncs.remove(&synced.request_id)?;
        let result = match synced.fault {
            None => Ok(()),
            Some(fault) => Err(ExecutionError::with_context(fault.to_string())),
        };
        Some(Delivery::Synced(answer, result))
    }
}
