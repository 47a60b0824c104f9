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
    FaultContext, Runner, panic_text,
    reading::Begun,
};
use crate::collective::{
    Arrival, Arrived, Call, Capability, Failure, LeaseMembers, Members, Offer, Outcome, Take, Value,
};
use crate::op_check;

/// Maximum number of results of a session in flight. Beyond this limit an all-reduce
/// waits.
const MAX_AWAITED: usize = 1 << 15;

/// The sessions of the lease, and this session's rank among them.
#[derive(Debug, Clone)]
pub(crate) struct LeaseMembership {
    pub(crate) lease_members: Arc<LeaseMembers>,
    pub(crate) lease_rank: u32,
    /// Bytes of all-reduces at which a bucket is full.
    pub(crate) bucket_bytes: Arc<AtomicUsize>,
}

/// Converts the result of a read.
fn valued(data: Result<TensorData, ExecutionError>, about: &FaultContext) -> Read {
    let data = data.map_err(|e| about.fault(FaultKind::Backend, e.reason()))?;
    Ok(Value {
        shape: data.shape().clone(),
        dtype: data.dtype(),
        bytes: shared(data.into_bytes()),
    })
}

/// A request of a session to its peers.
pub(crate) enum Request {
    Call(Call),
    Offer(Capability, Offer),
    Take(Capability, Take),
    /// One of the others, once the device has read its value.
    Later(DynFut<Request>),
}

/// A tensor's value, or the fault that it has instead.
type Read = Result<Value, Arc<Fault>>;

/// The state of an all-reduce that was begun before its turn.
#[derive(Debug)]
pub(super) enum Started {
    /// The result is in flight under this ticket.
    Ticket(u64),
    /// The group is not valid, for this reason.
    Wrong(String),
}

/// A result in flight.
#[derive(Debug)]
pub(super) struct Awaited {
    /// The tensor that the result is for, and the number of the op that makes it. `None`
    /// until that op's turn.
    out: Option<(TensorId, u64)>,
    /// The outcome, if it arrived before the op's turn.
    early: Option<Outcome>,
    about: FaultContext,
}

/// Returns `op` as an all-reduce, if it is one.
pub(super) fn all_reduce(op: &OperationIr) -> Option<&AllReduceOpIr> {
    match op {
        OperationIr::Distributed(DistributedOperationIr::AllReduce(op)) => Some(op),
        _ => None,
    }
}

/// Returns whether results are in flight for ops up to `number` whose turn has come.
pub(super) fn awaits_from_before(awaited: &HashMap<u64, Awaited>, number: u64) -> bool {
    let before = |awaited: &Awaited| awaited.out.is_some_and(|(_, turn)| turn <= number);
    awaited.values().any(before)
}

impl Runner {
    /// Returns the requests to pass on. Unless `all` is true, they are held back until a
    /// bucket is full or one of them is urgent.
    pub(crate) fn take_requests(&mut self, all: bool) -> Vec<Request> {
        let bucket_bytes = || self.membership.bucket_bytes.load(Ordering::Relaxed);
        let is_small = self.bucket_bytes == 0 || self.bucket_bytes < bucket_bytes();
        if !all && !self.urgent && is_small {
            return Vec::new();
        }
        (self.urgent, self.bucket_bytes) = (false, 0);
        std::mem::take(&mut self.requests)
    }

    /// Records the all-reduces among `ops`, which were just decoded.
    pub(super) fn note_all_reduces(&mut self, ops: &DecodedOps) {
        for op in ops.iter().filter_map(|op| all_reduce(op)) {
            let group = self.reduces.entry(op.device_ids.clone()).or_default();
            group.push_back(op.clone());
        }
    }

    /// Begins the decoded all-reduces whose tensors have values, in the order of each
    /// group.
    pub(super) fn begin_early(&mut self) {
        if self.reduces.is_empty() {
            return;
        }
        let mut begin = Vec::new();
        self.reduces.retain(|_, group| {
            while let Some(op) = group.front()
                && self.flow.is_live(op.tensor.id)
                && self.awaited.len() + begin.len() < MAX_AWAITED
            {
                begin.extend(group.pop_front());
            }
            !group.is_empty()
        });
        begin.iter().for_each(|op| self.begin_all_reduce(op));
    }

    /// Returns the output of the all-reduce of the same group that must begin just before
    /// `op`, if it has not begun.
    pub(super) fn one_before(&self, op: &AllReduceOpIr) -> Option<TensorId> {
        let group = self.reduces.get(&op.device_ids)?;
        let at = group.iter().position(|one| one.out.id == op.out.id)?;
        Some(group.get(at.checked_sub(1)?)?.out.id)
    }

    /// Returns whether so many results are in flight that all work must wait for them.
    pub(super) fn awaits_too_much(&self) -> bool {
        self.awaited.len() >= MAX_AWAITED
    }

    fn begin_all_reduce(&mut self, op: &AllReduceOpIr) {
        let started = match self.members(op) {
            Ok(members) => Started::Ticket(self.call(op, members)),
            Err(wrong) => Started::Wrong(wrong),
        };
        self.started.insert(op.out.id, started);
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
        let about = self.fault_context("Distributed.AllReduce");
        let read = self.flow.check(&op.tensor).map(|()| false);
        let read = read.map_err(|refusal| match refusal {
            Refusal::Inherited(fault) => fault,
            Refusal::New(kind, reason) => about.fault(kind, reason),
        });
        let (shape, dtype) = (op.tensor.shape.clone(), op.tensor.dtype);
        self.bucket_bytes += tensor_bytes(&shape, dtype).unwrap_or(0);
        let ticket = self.ticket(None, about.clone());
        let mean = op.op == ReduceOperation::Mean;
        self.ask_with(&op.tensor, read, about, move |read| {
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
            Request::Call(Call {
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
    fn ask_with(
        &mut self,
        tensor: &TensorIr,
        checked: Result<bool, Arc<Fault>>,
        about: FaultContext,
        request: impl FnOnce(Read) -> Request + Send + 'static,
    ) {
        let request = match checked {
            Err(fault) => request(Err(fault)),
            Ok(has_place) => match self.value(tensor, has_place, &about) {
                Ok(Begun::Value(data)) => request(valued(data, &about)),
                Ok(Begun::Later(read)) => {
                    Request::Later(Box::pin(async move { request(valued(read.await, &about)) }))
                }
                Err(fault) => request(Err(fault)),
            },
        };
        self.requests.push(request);
    }

    fn ticket(&mut self, out: Option<TensorId>, about: FaultContext) -> u64 {
        self.tickets += 1;
        let early = None;
        let out = out.map(|id| (id, self.op_number));
        self.awaited
            .insert(self.tickets, Awaited { out, early, about });
        self.tickets
    }

    /// Starts to read a tensor, which is not consumed. Unless `has_place` is true, which
    /// means that memory is already taken for the value, the value holds memory until it
    /// is dropped.
    fn value(
        &mut self,
        tensor: &TensorIr,
        has_place: bool,
        about: &FaultContext,
    ) -> Result<Begun, Arc<Fault>> {
        let held = match has_place {
            true => None,
            false => self.hold(tensor).map_err(|r| self.blamed(about, r))?,
        };
        let tensor = TensorIr {
            status: TensorStatus::ReadOnly,
            ..tensor.clone()
        };
        self.begin_read(tensor, held, about)
    }

    /// Executes the turn of an all-reduce: begins it, unless it has begun before, and
    /// makes its output pending.
    pub(super) fn all_reduce(&mut self, op: &OperationIr) {
        let OperationIr::Distributed(DistributedOperationIr::AllReduce(reduce)) = op else {
            return;
        };
        if let Entry::Occupied(mut group) = self.reduces.entry(reduce.device_ids.clone()) {
            let is_next = |next: &mut AllReduceOpIr| next.out.id == reduce.out.id;
            if group.get_mut().pop_front_if(is_next).is_some() {
                if group.get().is_empty() {
                    group.remove();
                }
                self.begin_all_reduce(reduce);
            }
        }
        let ticket = match self.started.remove(&reduce.out.id) {
            Some(Started::Ticket(ticket)) => ticket,
            Some(Started::Wrong(reason)) => {
                return self.refuse(op, Refusal::New(FaultKind::Mismatch, reason));
            }
            None => {
                let reason = "two all-reduces declare the same output".into();
                return self.refuse(op, Refusal::New(FaultKind::Mismatch, reason));
            }
        };
        let begun = self.check_op(op).and_then(|_scratch| self.flow.begin(op));
        if let Err(refusal) = begun {
            self.awaited.remove(&ticket);
            return self.refuse(op, refusal);
        }
        for consumed in self.flow.defer(ticket) {
            self.backend.forget(consumed);
        }
        self.saw_ran();
        let about = self.fault_context("Distributed.AllReduce");
        if let Some(awaited) = self.awaited.get_mut(&ticket) {
            awaited.out = Some((reduce.out.id, self.op_number));
            awaited.about = about;
            if let Some(outcome) = awaited.early.take() {
                self.arrive(ticket, outcome);
            }
        }
    }

    /// Processes the outcome that arrived under `ticket`.
    pub(crate) fn arrive(&mut self, ticket: u64, outcome: Outcome) {
        let Some(awaited) = self.awaited.get_mut(&ticket) else {
            return;
        };
        let Some((id, _)) = awaited.out else {
            awaited.early = Some(outcome);
            return;
        };
        let about = self
            .awaited
            .remove(&ticket)
            .expect("the entry was just found")
            .about;
        // `None` if the tensor was dropped meanwhile.
        if let Some((shape, dtype)) = self.flow.expected(id, ticket) {
            let out = TensorIr {
                id,
                shape,
                dtype,
                status: TensorStatus::NotInit,
            };
            let arrived = self.insert(&out, outcome);
            let settled = arrived.map_err(|refusal| self.blamed(&about, refusal));
            self.flow.settle(id, settled);
        }
        self.deferred.settled(id);
        self.begin_early();
    }

    fn blamed(&mut self, about: &FaultContext, refusal: Refusal) -> Arc<Fault> {
        match refusal {
            Refusal::Inherited(fault) => fault,
            Refusal::New(kind, reason) => {
                let fault = about.fault(kind, reason);
                self.note_fault(&fault);
                fault
            }
        }
    }

    fn insert(&mut self, out: &TensorIr, outcome: Outcome) -> Result<(), Refusal> {
        let (shape, dtype, bytes) = match outcome {
            Ok(Arrived::Reduced(bytes)) => (out.shape.clone(), out.dtype, bytes),
            Ok(Arrived::Taken(value)) => (value.shape, value.dtype, value.bytes),
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
            .map_err(|panic| Refusal::New(FaultKind::Panic, panic_text(panic.as_ref())))
    }

    /// Offers a tensor's value to the session with rank `to` in the lease.
    pub(super) fn offer(&mut self, tensor: &TensorIr, capability: Capability, to: u32) {
        let about = self.fault_context("Offer");
        let checked = self
            .flow
            .check(tensor)
            .map_err(|refusal| self.blamed(&about, refusal));
        // The value takes memory of the device until the other session has taken it.
        let size = tensor_bytes(&tensor.shape, tensor.dtype).unwrap_or(usize::MAX);
        let reserved = checked.and_then(|()| {
            let reserved = self.flow.reserve(size as u64);
            reserved.map_err(|refusal| self.blamed(&about, refusal))
        });
        let (checked, memory) = match reserved {
            Ok(memory) => (Ok(true), Some(memory)),
            Err(fault) => (Err(fault), None),
        };
        let forget = tensor.status == TensorStatus::ReadWrite && checked.is_ok();
        let from = self.membership.lease_rank;
        self.ask_with(tensor, checked, about, move |value| {
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
        self.urgent = true;
    }

    /// Makes a pending tensor of the value that the session with rank `from` offers.
    pub(super) fn take(&mut self, out: &TensorIr, capability: Capability, from: u32) {
        let about = self.fault_context("Take");
        let size = tensor_bytes(&out.shape, out.dtype).unwrap_or(usize::MAX);
        let sound = op_check::check_tensor(out).map_err(Refusal::from);
        let is_new = sound.and_then(|()| self.flow.check_new(out.id));
        let named = (size as u64).saturating_add(NAME_BYTES);
        let memory = is_new.and_then(|()| self.flow.reserve(named));
        let memory = match memory {
            Ok(memory) => memory,
            Err(refusal) => {
                let fault = self.blamed(&about, refusal);
                return self.flow.insert_poisoned(out.id, fault);
            }
        };
        let ticket = self.ticket(Some(out.id), about);
        self.flow.expect(out, ticket, memory);
        let to = self.membership.lease_rank;
        let take = Take {
            from,
            to,
            ticket,
            size,
        };
        self.requests.push(Request::Take(capability, take));
        self.urgent = true;
    }
}
