//! Answers of the worker into values.

use std::collections::HashMap;

use burn_backend::{Bytes, DType, ExecutionError, Shape, TensorData};
use burn_ir::TensorIr;
use tensord_proto::{
    aligned,
    bulk::{Gathered, Gathering, INLINE_BYTES},
    codec::decode_type,
    v1::{Chunk, Synced, Value, tensor_value, value},
};

use super::{Answer, State};

/// An answer and who waits for it.
pub(super) enum Delivery {
    Value(Answer<TensorData>, Result<TensorData, ExecutionError>),
    Synced(Answer<()>, Result<(), ExecutionError>),
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

/// Reads that wait for their values. A large value comes in two parts that may
/// overtake each other: its type on one track, its payload on the other.
///
/// Nothing is kept that was not asked for: each answer must be to a read that waits, and of
/// its shape and dtype, and payloads that nobody has announced yet have no more bytes than
/// the reads that wait for one.
#[derive(Default)]
pub(super) struct Values {
    reads: HashMap<u64, PendingRead>,
    /// Bytes of the reads that no answer has come to.
    pending_bytes: usize,
    /// Reads whose payload is still to come, by its number.
    announced: HashMap<u64, u64>,
    /// Payloads whose value was not announced yet, by number.
    arrived: HashMap<u64, Bytes>,
    arrived_bytes: usize,
    gathering: Gathering<()>,
    /// Payloads that are whole.
    payloads: u64,
}

/// A read, and who waits for it.
struct PendingRead {
    answer: Answer<TensorData>,
    shape: Shape,
    dtype: DType,
    bytes: usize,
    /// The answer, once there is only its payload to come.
    announced: Option<(Shape, DType)>,
}

impl Values {
    /// Notes who waits for `tensor`. True: its value will be a payload.
    pub(super) fn expect(
        &mut self,
        request: u64,
        tensor: &TensorIr,
        answer: Answer<TensorData>,
    ) -> bool {
        let size = tensor.dtype.size();
        let bytes = tensor.shape.num_elements().saturating_mul(size);
        let pending = PendingRead {
            answer,
            shape: tensor.shape.clone(),
            dtype: tensor.dtype,
            bytes,
            announced: None,
        };
        self.pending_bytes = self.pending_bytes.saturating_add(bytes);
        self.reads.insert(request, pending);
        bytes > INLINE_BYTES
    }

    pub(super) fn into_answers(self) -> impl Iterator<Item = Answer<TensorData>> {
        self.reads.into_values().map(|pending| pending.answer)
    }

    pub(super) fn value(&mut self, value: Value) -> Result<Option<Delivery>, Broken> {
        let request = value.request_id;
        let waiting = self.reads.len() as u64;
        let pending = self.reads.get_mut(&request);
        let pending = pending.filter(|pending| pending.announced.is_none());
        let pending = pending.ok_or_else(|| unexpected("read", request))?;
        let (content, shape, dtype) = match value.result {
            Some(value::Result::Tensor(tensor)) => {
                let kind = decode_type(tensor.r#type.as_ref());
                let (shape, dtype, _) = kind.map_err(|e| e.to_string())?;
                pending.check(request, &shape, dtype)?;
                (tensor.content, shape, dtype)
            }
            Some(value::Result::Fault(fault)) => {
                let error = ExecutionError::with_context(fault.to_string());
                return Ok(self.answered(request, Err(error)));
            }
            None => return Err(format!("the answer to read {request} is empty")),
        };
        let bytes = match content {
            Some(tensor_value::Content::Payload(number)) => match self.arrived.remove(&number) {
                Some(bytes) => {
                    self.arrived_bytes = self.arrived_bytes.saturating_sub(bytes.len());
                    bytes
                }
                None if number < self.payloads || self.announced.contains_key(&number) => {
                    return Err(format!(
                        "the answer to read {request} is payload {number}, again"
                    ));
                }
                // Each that has not come is of a read that waits.
                None if number - self.payloads >= waiting => {
                    return Err(format!(
                        "the answer to read {request} is payload {number} where {} have come",
                        self.payloads
                    ));
                }
                None => {
                    pending.announced = Some((shape, dtype));
                    self.pending_bytes = self.pending_bytes.saturating_sub(pending.bytes);
                    self.announced.insert(number, request);
                    return Ok(None);
                }
            },
            Some(tensor_value::Content::Bytes(bytes)) => aligned::copy(&bytes),
            // Burn has tensors without elements.
            None => aligned::room(0),
        };
        self.whole(request, shape, dtype, bytes)
    }

    /// Takes bytes of a payload.
    pub(super) fn chunk(&mut self, chunk: &Chunk) -> Result<Option<Delivery>, Broken> {
        if chunk.size_bytes > 0 {
            self.begins(chunk.size_bytes)?;
        }
        let gathered = self.gathering.take(chunk, |_| ((), true));
        let bytes = match gathered.map_err(|e| e.to_string())? {
            Gathered::More => return Ok(None),
            Gathered::Whole((), bytes) => bytes,
        };
        let number = self.payloads;
        self.payloads += 1;
        let Some(request) = self.announced.remove(&number) else {
            self.arrived_bytes = self.arrived_bytes.saturating_add(bytes.len());
            self.arrived.insert(number, bytes);
            return Ok(None);
        };
        let announced = self.reads.get(&request);
        let announced = announced.and_then(|pending| pending.announced.clone());
        let (shape, dtype) = announced.ok_or_else(|| unexpected("read", request))?;
        self.whole(request, shape, dtype, bytes)
    }

    /// Whether the next payload may have `size` bytes.
    fn begins(&self, size: u64) -> Result<(), Broken> {
        let announced = self.announced.get(&self.payloads);
        let announced = announced.and_then(|request| self.reads.get(request));
        let most = match announced {
            Some(pending) => pending.bytes,
            None => self.pending_bytes.saturating_sub(self.arrived_bytes),
        };
        match usize::try_from(size).is_ok_and(|size| size <= most) {
            true => Ok(()),
            false => Err(format!(
                "payload {} has {size} bytes, where reads wait for {most}",
                self.payloads
            )),
        }
    }

    fn whole(
        &mut self,
        request: u64,
        shape: Shape,
        dtype: DType,
        bytes: Bytes,
    ) -> Result<Option<Delivery>, Broken> {
        let data = TensorData::try_from_bytes(bytes, shape, dtype);
        let data = data.map_err(|e| format!("the answer to read {request}: {e}"))?;
        Ok(self.answered(request, Ok(data)))
    }

    fn answered(
        &mut self,
        request: u64,
        result: Result<TensorData, ExecutionError>,
    ) -> Option<Delivery> {
        let pending = self.reads.remove(&request)?;
        if pending.announced.is_none() {
            self.pending_bytes = self.pending_bytes.saturating_sub(pending.bytes);
        }
        Some(Delivery::Value(pending.answer, result))
    }
}

impl PendingRead {
    /// Whether a value of this type is what was asked for. A device may have bools and
    /// `flex32` in another form than the program.
    fn check(&self, request: u64, shape: &Shape, dtype: DType) -> Result<(), Broken> {
        let is_like = |a: DType, b: DType| matches!((a, b), (DType::Flex32, DType::F32));
        let fits = dtype == self.dtype
            || is_like(dtype, self.dtype)
            || is_like(self.dtype, dtype)
            || dtype.is_bool() && self.dtype.is_bool() && dtype.size() <= self.dtype.size();
        match fits && *shape == self.shape {
            true => Ok(()),
            false => Err(format!(
                "the answer to read {request} is {shape} of {}, where {} of {} was asked for",
                dtype.name(),
                self.shape,
                self.dtype.name()
            )),
        }
    }
}

/// What an answer is that nobody waits for.
fn unexpected(what: &str, request: u64) -> Broken {
    format!("it answers {what} {request}, which was not asked or has its answer")
}

impl State {
    pub(super) fn synced(&mut self, synced: Synced) -> Result<Delivery, Broken> {
        let request = synced.request_id;
        let answer = self.syncs.remove(&request);
        let answer = answer.ok_or_else(|| unexpected("sync", request))?;
        let result = match synced.fault {
            None => Ok(()),
            Some(fault) => Err(ExecutionError::with_context(fault.to_string())),
        };
        Ok(Delivery::Synced(answer, result))
    }
}
