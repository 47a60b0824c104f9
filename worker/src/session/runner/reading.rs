//! Reads the values of tensors, and holds their memory until they are sent.
//!
//! A reply may use a tensor's storage, or be a copy in the same memory. Either is charged
//! to the session until the client has acknowledged the reply, even if the tensor is
//! dropped before. So a client that reads no replies makes the worker keep no more than
//! its device has. Copies of a GPU's tensors are in host memory and not charged to the
//! device: `LATER_BYTES` in `session/mod.rs` bounds them.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    task::{Context, Poll, Waker},
};

use burn_backend::{AllocationProperty, ExecutionError, TensorData};
use burn_ir::{TensorIr, TensorStatus};
use burn_std::future::DynFut;
use tensord_proto::{
    bulk::{INLINE_BYTES, shared},
    codec::tensor_bytes,
    v1::{Fault, FaultKind},
};

use super::{
    super::dataflow::{Refusal, Storage},
    FaultContext, Reply, Runner, panic_text,
};
use crate::memory::SessionMemory;

/// Maximum bytes of reads that the connection's reader executes itself, in some
/// microseconds.
const AT_HAND_BYTES: usize = 16 << 10;

/// A read that has begun.
pub(super) enum Begun {
    /// The value, or the backend's error.
    Value(Result<TensorData, ExecutionError>),
    /// The device is still reading the value.
    Later(DynFut<Result<TensorData, ExecutionError>>),
}

/// The session's memory that a reply holds.
#[expect(dead_code, reason = "held for what happens when it is dropped")]
pub(super) enum AnswerMemory {
    /// The storage that the reply shares with a tensor.
    Storage(Arc<Storage>),
    /// The memory taken for a copy.
    Copy(SessionMemory),
}

/// The bytes of a reply, with the memory that they hold.
struct Charged {
    bytes: bytes::Bytes,
    _held: AnswerMemory,
}

impl AsRef<[u8]> for Charged {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Runner {
    pub(super) fn read(&mut self, request: u64, tensor: TensorIr) -> Reply {
        let failed = |fault| Reply::Value {
            request,
            result: Err(fault),
        };
        let about = self.fault_context("Read");
        if let Err(refusal) = self.flow.check(&tensor) {
            self.flow.release(&tensor);
            return failed(self.refused(refusal, &about));
        }
        let bytes = tensor_bytes(&tensor.shape, tensor.dtype).unwrap_or(usize::MAX);
        let held = self.hold(&tensor);
        self.flow.release(&tensor);
        let begun = match held {
            Ok(held) => self.begin_read(tensor, held, &about),
            Err(refusal) => {
                if tensor.status == TensorStatus::ReadWrite {
                    self.backend.forget(tensor);
                }
                return failed(self.refused(refusal, &about));
            }
        };
        match begun {
            Ok(Begun::Value(Ok(data))) => Reply::Value {
                request,
                result: Ok(data),
            },
            Ok(Begun::Value(Err(e))) => failed(about.fault(FaultKind::Backend, e.reason())),
            Ok(Begun::Later(read)) => Reply::Later {
                request,
                bytes,
                read,
                about,
            },
            Err(fault) => failed(fault),
        }
    }

    fn refused(&mut self, refusal: Refusal, about: &FaultContext) -> Arc<Fault> {
        let fault = match refusal {
            Refusal::Inherited(fault) => fault,
            Refusal::New(kind, reason) => about.fault(kind, reason),
        };
        self.reported(fault)
    }

    /// Begins to read a tensor that has a value. The value holds `held`.
    pub(super) fn begin_read(
        &mut self,
        tensor: TensorIr,
        held: Option<AnswerMemory>,
        about: &FaultContext,
    ) -> Result<Begun, Arc<Fault>> {
        self.at_hand.begin(self.op_number, "Read".into());
        let backend = &mut self.backend;
        let started = catch_unwind(AssertUnwindSafe(|| {
            let mut read = backend.read(tensor);
            match read.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(value) => Begun::Value(value),
                Poll::Pending => Begun::Later(read),
            }
        }));
        match started {
            Ok(Begun::Value(value)) => Ok(Begun::Value(value.map(|data| charged(data, held)))),
            Ok(later) => Ok(later),
            Err(panic) => Err(about.fault(FaultKind::Panic, panic_text(panic.as_ref()))),
        }
    }

    /// Returns the memory that the value of `tensor` holds until it is sent. Small values
    /// hold none: they are copied into the reply's frame, which the outbox bounds.
    pub(super) fn hold(&mut self, tensor: &TensorIr) -> Result<Option<AnswerMemory>, Refusal> {
        let bytes = tensor_bytes(&tensor.shape, tensor.dtype).unwrap_or(usize::MAX);
        if bytes <= INLINE_BYTES || !self.backend.is_in_host_memory() {
            return Ok(None);
        }
        let backend = &mut self.backend;
        if backend.is_at_hand(tensor) {
            let storage = self.flow.hold(tensor.id, &mut |t| backend.storage(t));
            return Ok(storage.map(AnswerMemory::Storage));
        }
        let copy = self.flow.reserve(bytes as u64)?;
        Ok(Some(AnswerMemory::Copy(copy)))
    }

    /// Returns whether no work must be done before `tensors` are read, and their values
    /// are small and in host memory.
    pub(crate) fn has_at_hand(&mut self, tensors: &[TensorIr]) -> bool {
        let rests = self.plans.is_empty() && self.deferred.is_empty() && self.awaited.is_empty();
        let bytes = tensors.iter().try_fold(0usize, |sum, tensor| {
            sum.checked_add(tensor_bytes(&tensor.shape, tensor.dtype)?)
        });
        let (flow, backend) = (&self.flow, &mut self.backend);
        let is_at_hand = |tensor: &TensorIr| flow.is_live(tensor.id) && backend.is_at_hand(tensor);
        rests && bytes.is_some_and(|bytes| bytes <= AT_HAND_BYTES) && tensors.iter().all(is_at_hand)
    }
}

/// Adds the memory that it holds to a value.
fn charged(data: TensorData, held: Option<AnswerMemory>) -> TensorData {
    let Some(held) = held else {
        return data;
    };
    let (bytes, shape, dtype) = data.into_parts();
    let bytes = bytes::Bytes::from_owner(Charged {
        bytes: shared(bytes),
        _held: held,
    });
    let bytes = burn_backend::Bytes::from_shared(bytes, AllocationProperty::Native);
    TensorData::from_bytes(bytes, shape, dtype)
}
