//! All-reduces and transfers: the work of a session that needs its peers, the other
//! sessions of the lease.
//!
//! This part creates a [`Request`], the session passes it on, and the outcome arrives
//! under the request's ticket. Until then the tensor is pending. An all-reduce that is
//! decoded ahead and whose tensor has a value begins at once, and runs while the ops before
//! it are executed.

use std::sync::{Arc, atomic::AtomicUsize};

use burn_backend::{AllocationProperty, ExecutionError, TensorData};
use burn_ir::{OperationIr, TensorId, TensorIr};
use bytes::Bytes;
use tensord_proto::{
    bulk::shared,
    codec::{DecodedOps, tensor_bytes},
    collective_op::AllReduce,
    v1::{Fault, FaultKind},
};

use super::{
    super::dataflow::Refusal,
    all_reduce_order::{AllReduceOrder, BegunAllReduce},
    fault::FaultContext,
    in_flight::{self, InFlightResults},
    interpreter::Interpreter,
    requests::{Request, RequestBucket},
    tensors::StartedRead,
};
use crate::collective::{
    AllReduceCall, Arrival, Capability, Failure, LeaseMembers, Members, Offer, Outcome,
    ReceivedValue, Take, Value,
};

/// The sessions of the lease, and this session's rank among them.
#[derive(Debug, Clone)]
pub(crate) struct LeaseMembership {
    pub(crate) lease_members: Arc<LeaseMembers>,
    pub(crate) lease_rank: u32,
    /// Bytes of all-reduces at which a bucket is full.
    pub(crate) bucket_bytes: Arc<AtomicUsize>,
}

impl LeaseMembership {
    /// Returns the group of `op`, or why it is not valid.
    fn members(&self, op: &AllReduce) -> Result<Members, String> {
        let members = Members::new(op.lease_ranks.clone(), &self.lease_members)?;
        match members.rank(self.lease_rank) {
            Some(_) => Ok(members),
            None => {
                let here = self.lease_members.describe(self.lease_rank);
                Err(format!(
                    "the tensor is on {here}, which is not in the group"
                ))
            }
        }
    }
}

/// A tensor's value, or the fault that it has instead.
type ReadResult = Result<Value, Arc<Fault>>;

/// The all-reduces and transfers of a session.
pub(super) struct Collectives {
    membership: LeaseMembership,
    order: AllReduceOrder,
    in_flight: InFlightResults,
    bucket: RequestBucket,
}

impl Collectives {
    pub(super) fn new(membership: LeaseMembership) -> Self {
        Self {
            order: AllReduceOrder::default(),
            in_flight: InFlightResults::default(),
            bucket: RequestBucket::new(membership.bucket_bytes.clone()),
            membership,
        }
    }

    /// Returns the requests to pass on; see [`RequestBucket::take`].
    pub(super) fn take_requests(&mut self, all: bool) -> Vec<Request> {
        self.bucket.take(all)
    }

    /// Makes the next [`take_requests`](Self::take_requests) return all requests without
    /// waiting for more.
    pub(super) fn flush(&mut self) {
        self.bucket.flush();
    }

    /// Returns whether so many results are in flight that all work must wait for them.
    pub(super) fn is_full(&self) -> bool {
        !self.in_flight.has_room(0)
    }

    /// Returns whether no result is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Returns whether results are in flight for ops up to `number` whose turn has come.
    pub(super) fn has_in_flight_up_to(&self, number: u64) -> bool {
        self.in_flight.has_any_up_to(number)
    }

    /// Records the all-reduces among `ops`, which were just decoded.
    pub(super) fn record(&mut self, ops: &DecodedOps) {
        self.order.record(ops);
    }

    /// Returns the output of the all-reduce that must begin just before `op`; see
    /// [`AllReduceOrder::preceding_unstarted`].
    pub(super) fn preceding_unstarted(&self, op: &AllReduce) -> Option<TensorId> {
        self.order.preceding_unstarted(op)
    }

    /// Begins the decoded all-reduces whose tensors have values, in the order of each
    /// group.
    pub(super) fn begin_ready(&mut self, interpreter: &mut Interpreter) {
        let (in_flight, tensors) = (&self.in_flight, &interpreter.tensors);
        let ready = self
            .order
            .take_ready(|op, earlier| tensors.is_live(op.tensor.id) && in_flight.has_room(earlier));
        for (op, early_bytes) in &ready {
            let ticket = self.begin(interpreter, op);
            let begun = BegunAllReduce {
                ticket,
                early_bytes: *early_bytes,
            };
            self.order.set_begun(op.out.id, begun);
        }
    }

    /// Begins an all-reduce. Returns the ticket of its result, or why its group is not valid.
    fn begin(&mut self, interpreter: &mut Interpreter, op: &AllReduce) -> Result<u64, String> {
        let members = self.membership.members(op)?;
        Ok(self.call(interpreter, op, members))
    }

    /// Creates the request for an all-reduce, with the tensor's value or the fault that
    /// it has instead: the other ranks need one of the two, or they would wait. Returns
    /// the ticket.
    fn call(&mut self, interpreter: &mut Interpreter, op: &AllReduce, members: Members) -> u64 {
        let context = interpreter.current.context("Distributed.AllReduce");
        let checked = interpreter.tensors.check(&op.tensor);
        let checked = checked.map_err(|refusal| context.fault_for(refusal));
        let (shape, dtype) = (op.tensor.shape.clone(), op.tensor.dtype);
        let bytes = tensor_bytes(&shape, dtype).unwrap_or(0);
        let ticket = self.in_flight.add(None, context.clone());
        let mean = op.mean;
        let read = checked.and_then(|()| interpreter.read_for_peer(&op.tensor, false, &context));
        let request = request_with_value(read, context, move |value| {
            let (shape, dtype, bytes, fault) = match value {
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
        self.bucket.push(request, bytes);
        ticket
    }

    /// Executes the turn of the all-reduce `op`: begins it, unless it has begun before, and
    /// makes its output pending. Returns the output if the result has arrived already.
    pub(super) fn all_reduce(
        &mut self,
        interpreter: &mut Interpreter,
        op: &OperationIr,
        reduce: &AllReduce,
    ) -> Option<TensorId> {
        let begun = match self.order.take_begun(reduce.out.id) {
            Some(begun) => begun.ticket,
            None if self.order.take_next(reduce) => self.begin(interpreter, reduce),
            None => Err("two all-reduces declare the same output".into()),
        };
        let ticket = match begun {
            Ok(ticket) => ticket,
            Err(reason) => {
                interpreter.refuse(op, Refusal::New(FaultKind::Mismatch, reason));
                return None;
            }
        };
        let output = interpreter.begin_pending(op, ticket);
        // The result of a refused op counts as in flight until it arrives, and is then dropped:
        // the other ranks may take long, and a program may make many such ops.
        let context = interpreter.current.context("Distributed.AllReduce");
        let turn = (reduce.out.id, interpreter.current.number());
        let arrival = self.in_flight.on_turn(ticket, turn, context);
        if let Err(refusal) = output {
            interpreter.refuse(op, refusal);
            return None;
        }
        Some(settle(interpreter, ticket, arrival?))
    }

    /// Processes the outcome that arrived under `ticket`. Returns the tensor that now has a
    /// value or a fault, unless the outcome is for an op whose turn has not come.
    pub(super) fn on_outcome(
        &mut self,
        interpreter: &mut Interpreter,
        ticket: u64,
        outcome: Outcome,
    ) -> Option<TensorId> {
        let arrival = self.in_flight.on_outcome(ticket, outcome)?;
        Some(settle(interpreter, ticket, arrival))
    }

    /// Offers a tensor's value to the session with rank `to` in the lease.
    pub(super) fn offer(
        &mut self,
        interpreter: &mut Interpreter,
        tensor: &TensorIr,
        capability: Capability,
        to: u32,
    ) {
        let context = interpreter.current.context("Offer");
        // The value takes memory of the device until the other session has taken it.
        let size = tensor_bytes(&tensor.shape, tensor.dtype).unwrap_or(usize::MAX);
        let tensors = &interpreter.tensors;
        let reserved = tensors
            .check(tensor)
            .and_then(|()| tensors.reserve(size as u64));
        let (read, memory) = match reserved {
            Ok(memory) => {
                let read = interpreter.read_for_peer(tensor, true, &context);
                (read, Some(memory))
            }
            Err(refusal) => (Err(interpreter.record_fault(&context, refusal)), None),
        };
        let from = self.membership.lease_rank;
        let request = request_with_value(read, context, move |value| {
            let offer = Offer {
                from,
                to,
                value,
                _memory: memory,
            };
            Request::Offer(capability, offer)
        });
        self.bucket.push(request, 0);
        interpreter.tensors.discard(tensor);
        self.bucket.flush();
    }

    /// Requests the value that the session with rank `from` in the lease offers, and adds
    /// `out` as a pending tensor for it.
    pub(super) fn take(
        &mut self,
        interpreter: &mut Interpreter,
        out: &TensorIr,
        capability: Capability,
        from: u32,
    ) {
        let context = interpreter.current.context("Take");
        let ticket = match interpreter.tensors.reserve_pending(out) {
            Ok(memory) => {
                let turn = (out.id, interpreter.current.number());
                let ticket = self.in_flight.add(Some(turn), context);
                interpreter.tensors.add_pending(out, ticket, memory);
                Some(ticket)
            }
            Err(refusal) => {
                let fault = interpreter.record_fault(&context, refusal);
                interpreter.tensors.insert_poisoned(out.id, fault);
                None
            }
        };
        // A value for which there is no room is taken, too, or the other session would keep it.
        let take = Take {
            from,
            to: self.membership.lease_rank,
            ticket,
            size: tensor_bytes(&out.shape, out.dtype).unwrap_or_default(),
        };
        self.bucket.push(Request::Take(capability, take), 0);
        self.bucket.flush();
    }
}

/// Returns the request that `request` creates from the result of `read`, or a
/// [`Request::InFlight`] that does so once the device has read the value.
fn request_with_value(
    read: Result<StartedRead, Arc<Fault>>,
    context: FaultContext,
    request: impl FnOnce(ReadResult) -> Request + Send + 'static,
) -> Request {
    match read {
        Ok(StartedRead::Value(data)) => request(read_value(data, &context)),
        Ok(StartedRead::InFlight(read)) => Request::InFlight(Box::pin(async move {
            request(read_value(read.await, &context))
        })),
        Err(fault) => request(Err(fault)),
    }
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

/// Gives the pending tensor of `arrival` its value or a fault, and returns its id.
fn settle(interpreter: &mut Interpreter, ticket: u64, arrival: in_flight::Arrival) -> TensorId {
    let in_flight::Arrival {
        out: id,
        context,
        outcome,
    } = arrival;
    // `None` if the tensor was dropped meanwhile.
    if let Some(out) = interpreter.tensors.pending(id, ticket) {
        let value = received_data(&out, outcome);
        let inserted = value.and_then(|data| interpreter.tensors.set_value(id, data));
        let settled = inserted.map_err(|refusal| interpreter.record_fault(&context, refusal));
        interpreter.tensors.resolve_pending(id, settled);
    }
    id
}

/// Converts an outcome to the data of the pending tensor `out`.
fn received_data(out: &TensorIr, outcome: Outcome) -> Result<TensorData, Refusal> {
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
    // Burn does not write to these bytes: it copies shared bytes before it changes them.
    let bytes = burn_backend::Bytes::from_shared(bytes, AllocationProperty::Native);
    TensorData::try_from_bytes(bytes, shape, dtype).map_err(|e| mismatch(e.to_string()))
}
