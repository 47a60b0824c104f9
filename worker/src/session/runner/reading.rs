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
    FaultContext, Reply, Runner, panic_message,
};
use crate::memory::SessionMemory;

/// Maximum bytes of reads that the connection's reader executes itself, in some
/// microseconds.
const MAX_DIRECT_READ_BYTES: usize = 16 << 10;

/// A read that has begun.
pub(super) enum StartedRead {
    /// The value, or the backend's error.
    Value(Result<TensorData, ExecutionError>),
    /// The device is still reading the value.
    InFlight(DynFut<Result<TensorData, ExecutionError>>),
}

/// The session's memory that a reply holds.
#[expect(dead_code, reason = "held for what happens when it is dropped")]
pub(super) enum ReplyMemory {
    /// The storage that the reply shares with a tensor.
    Storage(Arc<Storage>),
    /// The memory taken for a copy.
    Copy(SessionMemory),
}

/// The bytes of a reply, with the memory that they hold.
struct Charged {
    bytes: bytes::Bytes,
    _held: ReplyMemory,
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
        let context = self.fault_context("Read");
        if let Err(refusal) = self.flow.check(&tensor) {
            self.flow.release(&tensor);
            return failed(self.reported_fault(refusal, &context));
        }
        let bytes = tensor_bytes(&tensor.shape, tensor.dtype).unwrap_or(usize::MAX);
        let held = self.hold(&tensor);
        self.flow.release(&tensor);
        let begun = match held {
            Ok(held) => self.begin_read(tensor, held, &context),
            Err(refusal) => {
                if tensor.status == TensorStatus::ReadWrite {
                    self.backend.forget(tensor);
                }
                return failed(self.reported_fault(refusal, &context));
            }
        };
        match begun {
            Ok(StartedRead::Value(Ok(data))) => Reply::Value {
                request,
                result: Ok(data),
            },
            Ok(StartedRead::Value(Err(e))) => failed(context.fault(FaultKind::Backend, e.reason())),
            Ok(StartedRead::InFlight(read)) => Reply::InFlight {
                request,
                bytes,
                read,
                context,
            },
            Err(fault) => failed(fault),
        }
    }

    fn reported_fault(&mut self, refusal: Refusal, context: &FaultContext) -> Arc<Fault> {
        let fault = match refusal {
            Refusal::Inherited(fault) => fault,
            Refusal::New(kind, reason) => context.fault(kind, reason),
        };
        self.mark_reported(fault)
    }

    /// Begins to read a tensor that has a value. The value holds `held`.
    pub(super) fn begin_read(
        &mut self,
        tensor: TensorIr,
        held: Option<ReplyMemory>,
        context: &FaultContext,
    ) -> Result<StartedRead, Arc<Fault>> {
        self.op_progress.begin_op(self.op_number, "Read".into());
        let backend = &mut self.backend;
        let started = catch_unwind(AssertUnwindSafe(|| {
            let mut read = backend.read(tensor);
            match read.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(value) => StartedRead::Value(value),
                Poll::Pending => StartedRead::InFlight(read),
            }
        }));
        match started {
            Ok(StartedRead::Value(value)) => {
                Ok(StartedRead::Value(value.map(|data| charged(data, held))))
            }
            Ok(in_flight) => Ok(in_flight),
            Err(panic) => Err(context.fault(FaultKind::Panic, panic_message(panic.as_ref()))),
        }
    }

    /// Returns the memory that the value of `tensor` holds until it is sent. Small values
    /// hold none: they are copied into the reply's frame, which the outbox bounds.
    pub(super) fn hold(&mut self, tensor: &TensorIr) -> Result<Option<ReplyMemory>, Refusal> {
        let bytes = tensor_bytes(&tensor.shape, tensor.dtype).unwrap_or(usize::MAX);
        if bytes <= INLINE_BYTES || !self.backend.is_in_host_memory() {
            return Ok(None);
        }
        let backend = &mut self.backend;
        if backend.is_host_readable(tensor) {
            let storage = self
                .flow
                .share_storage(tensor.id, &mut |t| backend.storage(t));
            return Ok(storage.map(ReplyMemory::Storage));
        }
        let copy = self.flow.reserve(bytes as u64)?;
        Ok(Some(ReplyMemory::Copy(copy)))
    }

    /// Returns whether no work must be done before `tensors` are read, and their values
    /// are small and in host memory.
    pub(crate) fn can_read_at_once(&mut self, tensors: &[TensorIr]) -> bool {
        let rests = self.plans.is_empty() && self.deferred.is_empty() && self.in_flight.is_empty();
        let bytes = tensors.iter().try_fold(0usize, |sum, tensor| {
            sum.checked_add(tensor_bytes(&tensor.shape, tensor.dtype)?)
        });
        let (flow, backend) = (&self.flow, &mut self.backend);
        let is_host_readable =
            |tensor: &TensorIr| flow.is_live(tensor.id) && backend.is_host_readable(tensor);
        rests
            && bytes.is_some_and(|bytes| bytes <= MAX_DIRECT_READ_BYTES)
            && tensors.iter().all(is_host_readable)
    }
}

/// Adds the memory that it holds to a value.
fn charged(data: TensorData, held: Option<ReplyMemory>) -> TensorData {
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
