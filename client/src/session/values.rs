//! Answers of the worker into values.

use std::collections::HashMap;

use burn_backend::{Bytes, DType, ExecutionError, Shape, TensorData};
use burn_ir::TensorIr;
use tensord_proto::{
    aligned,
    bulk::{Gathered, Gathering, INLINE_BYTES},
    codec::decode_type,
    v1::{Chunk, Synced, TensorValue, Value, tensor_value, value},
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
#[derive(Default)]
pub(super) struct Values {
    /// Who waits, and for how many bytes at most.
    reads: HashMap<u64, (Answer<TensorData>, usize)>,
    /// Values whose payload is still to come, by its number.
    announced: HashMap<u64, Announced>,
    /// Payloads whose value was not announced yet, by number.
    arrived: HashMap<u64, Bytes>,
    gathering: Gathering<()>,
    /// Payloads that are whole.
    payloads: u64,
}

struct Announced {
    request: u64,
    shape: Shape,
    dtype: DType,
}

impl Values {
    /// Notes who waits for `tensor`. True: its value will be a payload.
    pub(super) fn expect(
        &mut self,
        request: u64,
        tensor: &TensorIr,
        answer: Answer<TensorData>,
    ) -> bool {
        let size = tensor
            .shape
            .num_elements()
            .saturating_mul(tensor.dtype.size());
        self.reads.insert(request, (answer, size));
        size > INLINE_BYTES
    }

    pub(super) fn into_answers(self) -> impl Iterator<Item = Answer<TensorData>> {
        self.reads.into_values().map(|(answer, _)| answer)
    }

    pub(super) fn value(&mut self, value: Value) -> Result<Option<Delivery>, Broken> {
        let request = value.request_id;
        match value.result {
            Some(value::Result::Tensor(tensor)) => self.tensor(request, tensor),
            Some(value::Result::Fault(fault)) => {
                let error = ExecutionError::with_context(fault.to_string());
                Ok(self.answered(request, Err(error)))
            }
            None => Err(format!("the answer to read {request} is empty")),
        }
    }

    fn tensor(&mut self, request: u64, tensor: TensorValue) -> Result<Option<Delivery>, Broken> {
        let (shape, dtype, _) = decode_type(tensor.r#type.as_ref()).map_err(|e| e.to_string())?;
        let announced = Announced {
            request,
            shape,
            dtype,
        };
        match tensor.content {
            Some(tensor_value::Content::Payload(number)) => match self.arrived.remove(&number) {
                Some(bytes) => self.whole(announced, bytes),
                None if number < self.payloads => Err(format!(
                    "the answer to read {request} is payload {number}, again"
                )),
                None => {
                    self.announced.insert(number, announced);
                    Ok(None)
                }
            },
            Some(tensor_value::Content::Bytes(bytes)) => {
                self.whole(announced, aligned::copy(&bytes))
            }
            // Burn has tensors without elements.
            None => self.whole(announced, aligned::room(0)),
        }
    }

    /// Takes bytes of a payload.
    pub(super) fn chunk(&mut self, chunk: &Chunk) -> Result<Option<Delivery>, Broken> {
        // A size that nobody asked for is not worth its memory; it ends the
        // session once the value is announced.
        let reads = &self.reads;
        let begin = |size| {
            let asked = reads.values().any(|(_, most)| *most as u64 >= size);
            ((), asked)
        };
        match self
            .gathering
            .take(chunk, begin)
            .map_err(|e| e.to_string())?
        {
            Gathered::More => Ok(None),
            Gathered::Whole((), bytes) => {
                let number = self.payloads;
                self.payloads += 1;
                match self.announced.remove(&number) {
                    Some(announced) => self.whole(announced, bytes),
                    None => {
                        self.arrived.insert(number, bytes);
                        Ok(None)
                    }
                }
            }
        }
    }

    fn whole(&mut self, value: Announced, bytes: Bytes) -> Result<Option<Delivery>, Broken> {
        let data = TensorData::try_from_bytes(bytes, value.shape, value.dtype);
        let data = data.map_err(|e| format!("the answer to read {}: {e}", value.request))?;
        Ok(self.answered(value.request, Ok(data)))
    }

    fn answered(
        &mut self,
        request: u64,
        result: Result<TensorData, ExecutionError>,
    ) -> Option<Delivery> {
        let (answer, _) = self.reads.remove(&request)?;
        Some(Delivery::Value(answer, result))
    }
}

impl State {
    pub(super) fn synced(&mut self, synced: Synced) -> Option<Delivery> {
        let answer = self.syncs.remove(&synced.request_id)?;
        let result = match synced.fault {
            None => Ok(()),
            Some(fault) => Err(ExecutionError::with_context(fault.to_string())),
        };
        Some(Delivery::Synced(answer, result))
    }
}
