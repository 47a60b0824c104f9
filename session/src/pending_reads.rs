//! Assembles values from the worker's replies.

use std::collections::HashMap;

use burn_backend::{Bytes, DType, ExecutionError, Shape, TensorData};
use burn_ir::TensorIr;
use tensord_proto::{
    aligned,
    bulk::{ChunkResult, INLINE_BYTES, PayloadAssembler},
    codec::decode_type,
    v1::{Chunk, Value, tensor_value, value},
};

use super::{
    Answer,
    answered::{AnsweredReads, Read},
    connection_end::ConnectionEnd,
};

/// A reply and its receiver.
pub enum Delivery {
    /// The value of a read.
    Value(Answer<TensorData>, Result<TensorData, ExecutionError>),
    /// The reply to a sync.
    Synced(Answer<()>, Result<(), ExecutionError>),
}

impl Delivery {
    /// Gives the reply to its receiver.
    pub fn deliver(self) {
        // The receiver may have been dropped.
        match self {
            Self::Value(answer, result) => drop(answer.send(result)),
            Self::Synced(answer, result) => drop(answer.send(result)),
        }
    }
}

/// The rule that the worker broke; the session cannot go on.
pub(super) type BrokenRule = String;

/// Why a session cannot go on after an answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum BadAnswer {
    /// The worker broke this rule.
    BrokeRule(BrokenRule),
    /// The answer differs from the first one; the text names the read.
    Diverged(String),
}

impl From<BrokenRule> for BadAnswer {
    fn from(rule: BrokenRule) -> Self {
        Self::BrokeRule(rule)
    }
}

impl From<BadAnswer> for ConnectionEnd {
    fn from(answer: BadAnswer) -> Self {
        match answer {
            BadAnswer::BrokeRule(rule) => Self::BrokeRule(rule),
            BadAnswer::Diverged(reason) => Self::Diverged(reason),
        }
    }
}

/// Reads that wait for their values. A large value comes in two parts that may
/// overtake each other: its type on one track, its payload on the other.
///
/// Nothing is kept that was not requested: each reply must be to a pending read and have its
/// shape and dtype, and payloads that no reply has announced yet have no more bytes than the
/// pending reads.
#[derive(Default)]
pub(super) struct PendingReads {
    reads: HashMap<u64, PendingRead>,
    /// Bytes of the reads without a reply.
    pending_bytes: usize,
    /// Reads whose payload was announced and is not complete, by the payload's number.
    announced: HashMap<u64, u64>,
    /// Payloads that no reply has announced yet, by number.
    arrived: HashMap<u64, Bytes>,
    arrived_bytes: usize,
    gathering: PayloadAssembler<()>,
    /// Number of complete payloads.
    payloads: u64,
    pub(super) answered: AnsweredReads,
}

/// A pending read.
struct PendingRead {
    answer: Answer<TensorData>,
    shape: Shape,
    dtype: DType,
    bytes: usize,
    /// The number of ops that the session had recorded before it.
    after_ops: u64,
    /// The type in the reply, if the reply has arrived and its payload has not.
    announced: Option<(Shape, DType)>,
}

impl PendingReads {
    /// Adds a read of `tensor`. Returns whether its value comes as a payload.
    pub(super) fn expect(
        &mut self,
        request: u64,
        tensor: &TensorIr,
        after_ops: u64,
        answer: Answer<TensorData>,
    ) -> bool {
        let size = tensor.dtype.size();
        let bytes = tensor.shape.num_elements().saturating_mul(size);
        let pending = PendingRead {
            answer,
            shape: tensor.shape.clone(),
            dtype: tensor.dtype,
            bytes,
            after_ops,
            announced: None,
        };
        self.pending_bytes = self.pending_bytes.saturating_add(bytes);
        self.reads.insert(request, pending);
        bytes > INLINE_BYTES
    }

    /// Returns the id of the first read whose answer has still to come, or to be repeated.
    pub(super) fn first_pending(&self) -> Option<u64> {
        let pending = self.reads.keys().copied().min();
        pending
            .into_iter()
            .chain(self.answered.first_unrepeated())
            .min()
    }

    /// Prepares for another process, which answers all reads since the last committed mark again:
    /// those without an answer, and those that were answered.
    pub(super) fn restored(&mut self) {
        for pending in self.reads.values_mut() {
            if pending.announced.take().is_some() {
                self.pending_bytes = self.pending_bytes.saturating_add(pending.bytes);
            }
        }
        self.announced.clear();
        self.arrived.clear();
        self.arrived_bytes = 0;
        self.gathering = PayloadAssembler::default();
        self.payloads = 0;
        self.answered.restored();
    }

    pub(super) fn into_answers(self) -> impl Iterator<Item = Answer<TensorData>> {
        self.reads.into_values().map(|pending| pending.answer)
    }

    pub(super) fn value(&mut self, value: Value) -> Result<Option<Delivery>, BadAnswer> {
        let request = value.request_id;
        if self.answered.is_unrepeated(request) {
            return self.repeated_value(value).map(|()| None);
        }
        let waiting = self.waiting();
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
                return Ok(self.finish(request, Err(error)));
            }
            None => return Err(format!("the answer to read {request} is empty").into()),
        };
        let bytes = match content {
            Some(tensor_value::Content::Payload(number)) => match self.arrived.remove(&number) {
                Some(bytes) => {
                    self.arrived_bytes = self.arrived_bytes.saturating_sub(bytes.len());
                    bytes
                }
                None if number < self.payloads || self.announced.contains_key(&number) => {
                    return Err(format!(
                        "the answer to read {request} names payload {number}, which another answer has named"
                    ).into());
                }
                // At most one payload for each pending read is missing.
                None if number - self.payloads >= waiting => {
                    return Err(format!(
                        "the answer to read {request} names payload {number}, but only {} payloads have arrived",
                        self.payloads
                    ).into());
                }
                None => {
                    pending.announced = Some((shape, dtype));
                    self.pending_bytes = self.pending_bytes.saturating_sub(pending.bytes);
                    self.announced.insert(number, request);
                    return Ok(None);
                }
            },
            Some(tensor_value::Content::Bytes(bytes)) => aligned::copy(&bytes),
            // A tensor may have no elements.
            None => aligned::with_capacity(0),
        };
        Ok(self.complete(request, shape, dtype, bytes)?)
    }

    /// Adds bytes of a payload. Returns the reply that they complete, or `None` if they
    /// complete none.
    pub(super) fn chunk(&mut self, chunk: &Chunk) -> Result<Option<Delivery>, BadAnswer> {
        if chunk.size_bytes > 0 {
            self.check_payload_size(chunk.size_bytes)?;
        }
        let gathered = self.gathering.take(chunk, |_| ((), true));
        let bytes = match gathered.map_err(|e| e.to_string())? {
            ChunkResult::More => return Ok(None),
            ChunkResult::Whole((), bytes) => bytes,
        };
        let number = self.payloads;
        self.payloads += 1;
        if let Some(request) = self.announced.get(&number).copied()
            && !self.reads.contains_key(&request)
        {
            self.announced.remove(&number);
            return self.answered.repeated(request, Some(&bytes)).map(|()| None);
        }
        let Some(request) = self.announced.remove(&number) else {
            let most = self.waiting();
            if self.arrived.len() as u64 >= most {
                return Err(format!(
                    "payload {number} is for no pending read: {most} are pending, and as many payloads have arrived"
                )
                .into());
            }
            self.arrived_bytes = self.arrived_bytes.saturating_add(bytes.len());
            self.arrived.insert(number, bytes);
            return Ok(None);
        };
        let announced = self.reads.get(&request);
        let announced = announced.and_then(|pending| pending.announced.clone());
        let (shape, dtype) = announced.ok_or_else(|| unexpected("read", request))?;
        Ok(self.complete(request, shape, dtype, bytes)?)
    }

    /// Checks that the next payload may have `size` bytes.
    fn check_payload_size(&self, size: u64) -> Result<(), BrokenRule> {
        let announced = self.announced.get(&self.payloads);
        let bytes_of = |request: &u64| match self.reads.get(request) {
            Some(pending) => Some(pending.bytes),
            None => self.answered.bytes_of(*request),
        };
        let most = match announced.and_then(bytes_of) {
            Some(bytes) => bytes,
            None => {
                let expected = self
                    .pending_bytes
                    .saturating_add(self.answered.unrepeated_bytes());
                expected.saturating_sub(self.arrived_bytes)
            }
        };
        match usize::try_from(size).is_ok_and(|size| size <= most) {
            true => Ok(()),
            false => Err(format!(
                "payload {} has {size} bytes, but the pending reads need at most {most}",
                self.payloads
            )),
        }
    }

    fn complete(
        &mut self,
        request: u64,
        shape: Shape,
        dtype: DType,
        bytes: Bytes,
    ) -> Result<Option<Delivery>, BrokenRule> {
        let data = TensorData::try_from_bytes(bytes, shape, dtype);
        let data = data.map_err(|e| format!("the answer to read {request} is malformed: {e}"))?;
        Ok(self.finish(request, Ok(data)))
    }

    fn finish(
        &mut self,
        request: u64,
        result: Result<TensorData, ExecutionError>,
    ) -> Option<Delivery> {
        let pending = self.reads.remove(&request)?;
        if pending.announced.is_none() {
            self.pending_bytes = self.pending_bytes.saturating_sub(pending.bytes);
        }
        let value = result.as_ref().ok().map(TensorData::as_bytes);
        let read = Read {
            bytes: pending.bytes,
            dtype: pending.dtype,
            after_ops: pending.after_ops,
        };
        self.answered.add(request, read, value);
        Some(Delivery::Value(pending.answer, result))
    }
}

/// Answers that another process repeats.
impl PendingReads {
    /// Returns the number of answers that may come.
    fn waiting(&self) -> u64 {
        self.reads.len() as u64 + self.answered.unrepeated_count()
    }

    /// Compares a repeated answer with the first one.
    fn repeated_value(&mut self, value: Value) -> Result<(), BadAnswer> {
        let request = value.request_id;
        let content = match value.result {
            Some(value::Result::Tensor(tensor)) => tensor.content,
            Some(value::Result::Fault(_)) => return self.answered.repeated(request, None),
            None => return Err(format!("the answer to read {request} is empty").into()),
        };
        match content {
            Some(tensor_value::Content::Payload(number)) => match self.arrived.remove(&number) {
                Some(bytes) => {
                    self.arrived_bytes = self.arrived_bytes.saturating_sub(bytes.len());
                    self.answered.repeated(request, Some(&bytes))
                }
                None if number < self.payloads || self.announced.contains_key(&number) => {
                    Err(format!(
                        "the repeated answer to read {request} names payload {number}, which another answer has named"
                    ).into())
                }
                None if number - self.payloads >= self.waiting() => Err(format!(
                    "the repeated answer to read {request} names payload {number}, but only {} payloads have arrived",
                    self.payloads
                ).into()),
                None => {
                    self.announced.insert(number, request);
                    Ok(())
                }
            },
            Some(tensor_value::Content::Bytes(bytes)) => {
                self.answered.repeated(request, Some(&bytes))
            }
            None => self.answered.repeated(request, Some(&[])),
        }
    }
}

impl PendingRead {
    /// Checks that a value of this type was requested. A device may represent bools and
    /// `flex32` in another way than the program.
    fn check(&self, request: u64, shape: &Shape, dtype: DType) -> Result<(), BrokenRule> {
        let is_like = |a: DType, b: DType| matches!((a, b), (DType::Flex32, DType::F32));
        let fits = dtype == self.dtype
            || is_like(dtype, self.dtype)
            || is_like(self.dtype, dtype)
            || dtype.is_bool() && self.dtype.is_bool() && dtype.size() <= self.dtype.size();
        match fits && *shape == self.shape {
            true => Ok(()),
            false => Err(format!(
                "the answer to read {request} is {shape} of {}, but {} of {} was requested",
                dtype.name(),
                self.shape,
                self.dtype.name()
            )),
        }
    }
}

/// Returns the rule that a reply without a pending request breaks.
pub(super) fn unexpected(what: &str, request: u64) -> BrokenRule {
    format!("the worker answered {what} {request}, which is not pending")
}
