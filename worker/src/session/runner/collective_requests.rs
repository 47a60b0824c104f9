//! All-reduces and transfers: what a session does with its peers, the other sessions of
//! the lease.
//!
//! The runner creates a [`Request`], the session passes it on, and the outcome arrives
//! under the request's ticket. Until then the tensor is pending.
//!
//! All-reduces are requested in buckets: they are held back while the ops between them
//! are executed, until the bucket is full, the program syncs, an op needs a result, or
//! the session's turn is over. The all-reduces of a group keep their order, as the n-th
//! must be the n-th on every rank. So an all-reduce that cannot begin delays those after
//! it.

use std::{
    collections::{HashMap, hash_map::Entry},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use burn_backend::distributed::ReduceOperation;
use burn_backend::{AllocationProperty, ExecutionError, TensorData};
use burn_ir::{
    AllReduceOpIr, DistributedOperationIr, OperationIr, TensorId, TensorIr, TensorStatus,
};
use burn_std::future::DynFut;
use bytes::Bytes;
use tensord_proto::{
    bulk::shared,
    codec::{DecodedOps, tensor_bytes},
    v1::{Fault, FaultKind},
};

use super::{
    super::dataflow::{NAME_BYTES, Refusal},
    FaultContext, Runner, panic_message,
    reading::StartedRead,
};
use crate::collective::{
    AllReduceCall, Arrival, Capability, Failure, LeaseMembers, Members, Offer, Outcome,
    ReceivedValue, Take, Value,
};
use crate::op_check;

/// Maximum number of results of a session in flight. Beyond this limit an all-reduce
/// waits.
const MAX_RESULTS_IN_FLIGHT: usize = 1 << 15;

/// The sessions of the lease, and this session's rank among them.
#[derive(Debug, Clone)]
pub(crate) struct LeaseMembership {
    pub(crate) lease_members: Arc<LeaseMembers>,
    pub(crate) lease_rank: u32,
    /// Bytes of all-reduces at which a bucket is full.
    pub(crate) bucket_bytes: Arc<AtomicUsize>,
}

/// Converts the result of a read.
fn read_value(data: Result<TensorData, ExecutionError>, context: &FaultContext) -> ReadResult {
    let data = data.map_err(|e| context.fault(FaultKind::Backend, e.reason()))?;
    Ok(Value {
        shape: data.shape().clone(),
        dtype: data.dtype(),
        bytes: shared(data.into_bytes()),
    })
}

/// A request of a session to its peers.
pub(crate) enum Request {
    Call(AllReduceCall),
    Offer(Capability, Offer),
    Take(Capability, Take),
    /// One of the others, once the device has read its value.
    InFlight(DynFut<Request>),
}

/// A tensor's value, or the fault that it has instead.
type ReadResult = Result<Value, Arc<Fault>>;

/// The state of an all-reduce that was begun before its turn.
#[derive(Debug)]
pub(super) enum EarlyAllReduce {
    /// The result is in flight under this ticket.
    Ticket(u64),
    /// The group is not valid, for this reason.
    Invalid(String),
}

/// A result in flight.
#[derive(Debug)]
pub(super) struct InFlightResult {
    /// The tensor that the result is for, and the number of the op that makes it. `None`
    /// until that op's turn.
    out: Option<(TensorId, u64)>,
    /// The outcome, if it arrived before the op's turn.
    early_outcome: Option<Outcome>,
    context: FaultContext,
}

/// Returns `op` as an all-reduce, if it is one.
pub(super) fn all_reduce(op: &OperationIr) -> Option<&AllReduceOpIr> {
    match op {
        OperationIr::Distributed(DistributedOperationIr::AllReduce(op)) => Some(op),
        _ => None,
    }
}

/// Returns whether results are in flight for ops up to `number` whose turn has come.
pub(super) fn has_in_flight_up_to(in_flight: &HashMap<u64, InFlightResult>, number: u64) -> bool {
    let before = |in_flight: &InFlightResult| in_flight.out.is_some_and(|(_, turn)| turn <= number);
    in_flight.values().any(before)
}

impl Runner {
    /// Returns the requests to pass on. Unless `all` is true, they are held back until a
    /// bucket is full or one of them is urgent.
    pub(crate) fn take_requests(&mut self, all: bool) -> Vec<Request> {
        let bucket_bytes = || self.membership.bucket_bytes.load(Ordering::Relaxed);
        let is_small = self.bucket_bytes == 0 || self.bucket_bytes < bucket_bytes();
        if !all && !self.flush_requests && is_small {
            return Vec::new();
        }
        (self.flush_requests, self.bucket_bytes) = (false, 0);
        std::mem::take(&mut self.requests)
    }

    /// Records the all-reduces among `ops`, which were just decoded.
    pub(super) fn record_all_reduces(&mut self, ops: &DecodedOps) {
        for op in ops.iter().filter_map(|op| all_reduce(op)) {
            let group = self
                .decoded_all_reduces
                .entry(op.device_ids.clone())
                .or_default();
            group.push_back(op.clone());
        }
    }

    /// Begins the decoded all-reduces whose tensors have values, in the order of each
    /// group.
    pub(super) fn begin_ready_all_reduces(&mut self) {
        if self.decoded_all_reduces.is_empty() {
            return;
        }
        let mut begin = Vec::new();
        self.decoded_all_reduces.retain(|_, group| {
            while let Some(op) = group.front()
                && self.flow.is_live(op.tensor.id)
                && self.in_flight.len() + begin.len() < MAX_RESULTS_IN_FLIGHT
            {
                begin.extend(group.pop_front());
            }
            !group.is_empty()
        });
        begin.iter().for_each(|op| self.begin_all_reduce(op));
    }

    /// Returns the output of the all-reduce of the same group that must begin just before
    /// `op`, if it has not begun.
    pub(super) fn preceding_unstarted(&self, op: &AllReduceOpIr) -> Option<TensorId> {
        let group = self.decoded_all_reduces.get(&op.device_ids)?;
        let at = group.iter().position(|one| one.out.id == op.out.id)?;
        Some(group.get(at.checked_sub(1)?)?.out.id)
    }

    /// Returns whether so many results are in flight that all work must wait for them.
    pub(super) fn is_in_flight_full(&self) -> bool {
        self.in_flight.len() >= MAX_RESULTS_IN_FLIGHT
    }

    fn begin_all_reduce(&mut self, op: &AllReduceOpIr) {
        let early_all_reduces = match self.members(op) {
            Ok(members) => EarlyAllReduce::Ticket(self.call(op, members)),
            Err(wrong) => EarlyAllReduce::Invalid(wrong),
        };
        self.early_all_reduces.insert(op.out.id, early_all_reduces);
    }

    fn members(&self, op: &AllReduceOpIr) -> Result<Members, String> {
        let LeaseMembership {
            lease_members,
            lease_rank,
            ..
        } = &self.membership;
        let lease_ranks = op.device_ids.iter().map(|id| u32::from(id.index_id));
        let members = Members::new(lease_ranks.collect(), lease_members)?;
        match members.rank(*lease_rank) {
            Some(_) => Ok(members),
            None => {
                let here = lease_members.describe(*lease_rank);
                Err(format!(
                    "the tensor is on {here}, which is not in the group"
                ))
            }
        }
    }

    /// Creates the request for an all-reduce, with the tensor's value or the fault that
    /// it has instead: the other ranks need one of the two, or they would wait. Returns
    /// the ticket.
    fn call(&mut self, op: &AllReduceOpIr, members: Members) -> u64 {
        let context = self.fault_context("Distributed.AllReduce");
        let read = self.flow.check(&op.tensor).map(|()| false);
        let read = read.map_err(|refusal| match refusal {
            Refusal::Inherited(fault) => fault,
            Refusal::New(kind, reason) => context.fault(kind, reason),
        });
        let (shape, dtype) = (op.tensor.shape.clone(), op.tensor.dtype);
        self.bucket_bytes += tensor_bytes(&shape, dtype).unwrap_or(0);
        let ticket = self.ticket(None, context.clone());
        let mean = op.op == ReduceOperation::Mean;
        self.request_with_value(&op.tensor, read, context, move |read| {
            let (shape, dtype, bytes, fault) = match read {
                Ok(value) => (value.shape, value.dtype, value.bytes, None),
                Err(fault) => (shape, dtype, Bytes::new(), Some(fault)),
            };
            let arrival = Arrival {
                shape,
                dtype,
                mean,
                fault,
                ring_bytes: None,
            };
            Request::Call(AllReduceCall {
                members,
                ticket,
                arrival,
                bytes,
            })
        });
        ticket
    }

    /// Queues the request that `request` creates from the value of `tensor`, which is not
    /// consumed. `checked` is the fault if the tensor has no value, otherwise whether
    /// memory is already taken for the value.
    fn request_with_value(
        &mut self,
        tensor: &TensorIr,
        checked: Result<bool, Arc<Fault>>,
        context: FaultContext,
        request: impl FnOnce(ReadResult) -> Request + Send + 'static,
    ) {
        let request = match checked {
            Err(fault) => request(Err(fault)),
            Ok(has_memory) => match self.value(tensor, has_memory, &context) {
                Ok(StartedRead::Value(data)) => request(read_value(data, &context)),
                Ok(StartedRead::InFlight(read)) => Request::InFlight(Box::pin(async move {
                    request(read_value(read.await, &context))
                })),
                Err(fault) => request(Err(fault)),
            },
        };
        self.requests.push(request);
    }

    fn ticket(&mut self, out: Option<TensorId>, context: FaultContext) -> u64 {
        self.last_ticket += 1;
        let early_outcome = None;
        let out = out.map(|id| (id, self.op_number));
        self.in_flight.insert(
            self.last_ticket,
            InFlightResult {
                out,
                early_outcome,
                context,
            },
        );
        self.last_ticket
    }

    /// Starts to read a tensor, which is not consumed. Unless `has_memory` is true, which
    /// means that memory is already taken for the value, the value holds memory until it
    /// is dropped.
    fn value(
        &mut self,
        tensor: &TensorIr,
        has_memory: bool,
        context: &FaultContext,
    ) -> Result<StartedRead, Arc<Fault>> {
        let held = match has_memory {
            true => None,
            false => self
                .hold(tensor)
                .map_err(|r| self.fault_with_context(context, r))?,
        };
        let tensor = TensorIr {
            status: TensorStatus::ReadOnly,
            ..tensor.clone()
        };
        self.begin_read(tensor, held, context)
    }

    /// Executes the turn of an all-reduce: begins it, unless it has begun before, and
    /// makes its output pending.
    pub(super) fn all_reduce(&mut self, op: &OperationIr) {
        let OperationIr::Distributed(DistributedOperationIr::AllReduce(reduce)) = op else {
            return;
        };
        if let Entry::Occupied(mut group) =
            self.decoded_all_reduces.entry(reduce.device_ids.clone())
        {
            let is_next = |next: &mut AllReduceOpIr| next.out.id == reduce.out.id;
            if group.get_mut().pop_front_if(is_next).is_some() {
                if group.get().is_empty() {
                    group.remove();
                }
                self.begin_all_reduce(reduce);
            }
        }
        let ticket = match self.early_all_reduces.remove(&reduce.out.id) {
            Some(EarlyAllReduce::Ticket(ticket)) => ticket,
            Some(EarlyAllReduce::Invalid(reason)) => {
                return self.refuse(op, Refusal::New(FaultKind::Mismatch, reason));
            }
            None => {
                let reason = "two all-reduces declare the same output".into();
                return self.refuse(op, Refusal::New(FaultKind::Mismatch, reason));
            }
        };
        let begun = self.check_op(op).and_then(|_scratch| self.flow.begin(op));
        if let Err(refusal) = begun {
            self.in_flight.remove(&ticket);
            return self.refuse(op, refusal);
        }
        for consumed in self.flow.make_outputs_pending(ticket) {
            self.backend.forget(consumed);
        }
        self.record_executed();
        let context = self.fault_context("Distributed.AllReduce");
        if let Some(in_flight) = self.in_flight.get_mut(&ticket) {
            in_flight.out = Some((reduce.out.id, self.op_number));
            in_flight.context = context;
            if let Some(outcome) = in_flight.early_outcome.take() {
                self.on_outcome(ticket, outcome);
            }
        }
    }

    /// Processes the outcome that arrived under `ticket`.
    pub(crate) fn on_outcome(&mut self, ticket: u64, outcome: Outcome) {
        let Some(in_flight) = self.in_flight.get_mut(&ticket) else {
            return;
        };
        let Some((id, _)) = in_flight.out else {
            in_flight.early_outcome = Some(outcome);
            return;
        };
        let context = self
            .in_flight
            .remove(&ticket)
            .expect("the entry was just found")
            .context;
        // `None` if the tensor was dropped meanwhile.
        if let Some((shape, dtype)) = self.flow.pending_type(id, ticket) {
            let out = TensorIr {
                id,
                shape,
                dtype,
                status: TensorStatus::NotInit,
            };
            let arrived = self.insert(&out, outcome);
            let settled = arrived.map_err(|refusal| self.fault_with_context(&context, refusal));
            self.flow.resolve_pending(id, settled);
        }
        self.deferred.settled(id);
        self.begin_ready_all_reduces();
    }

    fn fault_with_context(&mut self, context: &FaultContext, refusal: Refusal) -> Arc<Fault> {
        match refusal {
            Refusal::Inherited(fault) => fault,
            Refusal::New(kind, reason) => {
                let fault = context.fault(kind, reason);
                self.record_fault(&fault);
                fault
            }
        }
    }

    fn insert(&mut self, out: &TensorIr, outcome: Outcome) -> Result<(), Refusal> {
        let (shape, dtype, bytes) = match outcome {
            Ok(ReceivedValue::Reduced(bytes)) => (out.shape.clone(), out.dtype, bytes),
            Ok(ReceivedValue::Taken(value)) => (value.shape, value.dtype, value.bytes),
            Err(Failure::Inherited(fault)) => return Err(Refusal::Inherited(fault)),
            Err(Failure::New(kind, reason)) => return Err(Refusal::New(kind, reason)),
        };
        let mismatch = |reason: String| Refusal::New(FaultKind::Mismatch, reason);
        if (&shape, dtype) != (&out.shape, out.dtype) {
            let (is, wanted) = (dtype.name(), out.dtype.name());
            let wanted = format!("{} of {wanted}", out.shape);
            return Err(mismatch(format!(
                "the value is {shape} of {is}, but the op declares {wanted}"
            )));
        }
        // Not written to: Burn copies shared bytes before it changes them.
        let bytes = burn_backend::Bytes::from_shared(bytes, AllocationProperty::Native);
        let data = TensorData::try_from_bytes(bytes, shape, dtype);
        let data = data.map_err(|e| mismatch(e.to_string()))?;
        let backend = &mut self.backend;
        catch_unwind(AssertUnwindSafe(|| backend.upload(out.id, data)))
            .map_err(|panic| Refusal::New(FaultKind::Panic, panic_message(panic.as_ref())))
    }

    /// Offers a tensor's value to the session with rank `to` in the lease.
    pub(super) fn offer(&mut self, tensor: &TensorIr, capability: Capability, to: u32) {
        let context = self.fault_context("Offer");
        let checked = self
            .flow
            .check(tensor)
            .map_err(|refusal| self.fault_with_context(&context, refusal));
        // The value takes memory of the device until the other session has taken it.
        let size = tensor_bytes(&tensor.shape, tensor.dtype).unwrap_or(usize::MAX);
        let reserved = checked.and_then(|()| {
            let reserved = self.flow.reserve(size as u64);
            reserved.map_err(|refusal| self.fault_with_context(&context, refusal))
        });
        let (checked, memory) = match reserved {
            Ok(memory) => (Ok(true), Some(memory)),
            Err(fault) => (Err(fault), None),
        };
        let forget = tensor.status == TensorStatus::ReadWrite && checked.is_ok();
        let from = self.membership.lease_rank;
        self.request_with_value(tensor, checked, context, move |value| {
            let offer = Offer {
                from,
                to,
                value,
                _memory: memory,
            };
            Request::Offer(capability, offer)
        });
        self.flow.release(tensor);
        if forget {
            self.backend.forget(tensor.clone());
        }
        self.flush_requests = true;
    }

    /// Makes a pending tensor of the value that the session with rank `from` offers.
    pub(super) fn take(&mut self, out: &TensorIr, capability: Capability, from: u32) {
        let context = self.fault_context("Take");
        let size = tensor_bytes(&out.shape, out.dtype).unwrap_or(usize::MAX);
        let sound = op_check::check_tensor(out).map_err(Refusal::from);
        let is_new = sound.and_then(|()| self.flow.check_new(out.id));
        let named = (size as u64).saturating_add(NAME_BYTES);
        let memory = is_new.and_then(|()| self.flow.reserve(named));
        let memory = match memory {
            Ok(memory) => memory,
            Err(refusal) => {
                let fault = self.fault_with_context(&context, refusal);
                return self.flow.insert_poisoned(out.id, fault);
            }
        };
        let ticket = self.ticket(Some(out.id), context);
        self.flow.add_pending(out, ticket, memory);
        let to = self.membership.lease_rank;
        let take = Take {
            from,
            to,
            ticket,
            size,
        };
        self.requests.push(Request::Take(capability, take));
        self.flush_requests = true;
    }
}
