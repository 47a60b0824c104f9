//! Executes one session's work in order, one piece at a time.
//!
//! - `schedule`: decides what is executed when, and decodes work ahead; `deferred` has
//!   the work that waits.
//! - `collective_requests`: all-reduces and transfers. An all-reduce that is decoded
//!   ahead and whose tensor has a value begins at once, and runs while the ops before it
//!   are executed.
//! - `reading`: reads values, and holds their memory until they are sent.
//! - `upload`: makes tensors of bytes from the client.
//!
//! One thread uses a runner at a time, usually the device's executor. Every failure of an
//! op ends here as a [`Fault`]: a refusal of the dataflow table, an error or a panic of
//! the backend. Only bytes that break the protocol end the session.

mod collective_requests;
mod deferred;
#[cfg(feature = "testing")]
mod outcome_recorder;
mod reading;
mod schedule;
#[cfg(test)]
mod tests;
mod upload;

use std::{
    collections::{HashMap, VecDeque},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use burn_backend::{ExecutionError, TensorData};
use burn_ir::{
    AllReduceOpIr, BaseOperationIr, DeviceIdIr, DistributedOperationIr, FloatOperationIr,
    NumericOperationIr, OperationIr, TensorId, TensorIr,
};
use burn_std::future::DynFut;
use bytes::Bytes;
use tensord_proto::{
    codec::{OpDecoder, OpName},
    v1::{Fault, FaultKind},
};

#[cfg(feature = "testing")]
pub(crate) use self::outcome_recorder::RecordedOutcome;
use self::{
    collective_requests::{EarlyAllReduce, InFlightResult},
    deferred::Deferred,
    schedule::Plan,
};
pub(crate) use self::{
    collective_requests::{LeaseMembership, Request},
    schedule::Step,
};
use super::{
    dataflow::{Dataflow, Refusal},
    uploads::Uploads,
};
use crate::{
    backend::{TensorStore, panic_message},
    collective::Capability,
    memory::SessionMemory,
    op_check,
    op_progress::OpProgress,
};

/// Maximum number of faults kept for syncs to report. Without a limit, a program that
/// never reads or syncs would accumulate them.
const MAX_UNREPORTED: usize = 64;

/// Maximum bytes of the reason of a fault that is created here: a backend's error may
/// have the source of a whole kernel.
const REASON_BYTES: usize = 16 << 10;

/// A piece of work, as received from the client.
pub(crate) enum Work {
    Ops {
        count: u32,
        encoded: Bytes,
        contents: Bytes,
    },
    Poison {
        id: TensorId,
        fault: Fault,
    },
    Alias {
        id: TensorId,
        source: TensorId,
    },
    Read {
        request: u64,
        tensor: TensorIr,
    },
    Sync {
        request: u64,
    },
    Seed(u64),
    Offer {
        tensor: TensorIr,
        capability: Capability,
        to: u32,
    },
    Take {
        out: TensorIr,
        capability: Capability,
        from: u32,
    },
}

/// A reply to the client.
pub(crate) enum Reply {
    Value {
        request: u64,
        result: Result<TensorData, Arc<Fault>>,
    },
    /// The device is still reading the value, which the future returns.
    InFlight {
        request: u64,
        /// Bytes of host memory that the value takes once it is read.
        bytes: usize,
        read: DynFut<Result<TensorData, ExecutionError>>,
        context: FaultContext,
    },
    Synced {
        request: u64,
        fault: Option<Arc<Fault>>,
    },
}

/// The op and worker that a fault names.
#[derive(Debug, Clone)]
pub(crate) struct FaultContext {
    op_number: u64,
    op_name: OpName,
    op_progress: Arc<OpProgress>,
}

impl FaultContext {
    pub(crate) fn fault(&self, kind: FaultKind, reason: impl Into<String>) -> Arc<Fault> {
        if matches!(kind, FaultKind::Backend | FaultKind::Panic) {
            self.op_progress.signals.record_failure();
        }
        let mut reason = reason.into();
        reason.truncate(reason.floor_char_boundary(REASON_BYTES));
        reason.shrink_to_fit();
        Arc::new(Fault {
            kind: kind.into(),
            op_number: self.op_number,
            op_name: self.op_name.to_string(),
            worker: self.op_progress.signals.worker.to_string(),
            reason,
        })
    }
}

pub(crate) struct Runner {
    backend: Box<dyn TensorStore>,
    flow: Dataflow,
    decoder: OpDecoder,
    /// Records the op that is being executed.
    op_progress: Arc<OpProgress>,
    /// Decoded work, with the bytes of credit that each piece returns.
    plans: VecDeque<(Plan, usize)>,
    /// Number of ops and other pieces of work in `plans`.
    planned_ops: usize,
    /// Work that waits for values.
    deferred: Deferred,
    uploads: Uploads,
    /// The upload that waits for its payload, and the slot to keep the payload in, if
    /// any.
    awaited_upload: Option<(TensorIr, Option<u32>)>,
    membership: LeaseMembership,
    /// Decoded all-reduces that have not begun, in order, by group.
    decoded_all_reduces: HashMap<Vec<DeviceIdIr>, VecDeque<AllReduceOpIr>>,
    /// All-reduces that have begun but whose turn has not come, by output.
    early_all_reduces: HashMap<TensorId, EarlyAllReduce>,
    /// Results in flight, by ticket.
    in_flight: HashMap<u64, InFlightResult>,
    /// Requests to peers that have not been passed on.
    requests: Vec<Request>,
    /// Bytes of the all-reduces in `requests`.
    bucket_bytes: usize,
    /// Whether `requests` must be passed on without waiting for more.
    flush_requests: bool,
    last_ticket: u64,
    /// Number of ops whose turn has come.
    ops_seen: u64,
    /// Number of the current op, or of the last one.
    op_number: u64,
    seed: u64,
    /// Number of random ops since the seed was set. An op's numbers depend on the seed
    /// and this count alone, so a replay draws the same numbers, and so does a program
    /// that runs again, whatever its other ops.
    draws: u64,
    /// Faults that no reply has reported, oldest first.
    unreported: VecDeque<Arc<Fault>>,
    /// Outcome of the current op, or of the last one.
    #[cfg(feature = "testing")]
    last_outcome: Option<RecordedOutcome>,
}

impl Runner {
    pub(crate) fn new(
        backend: Box<dyn TensorStore>,
        memory: SessionMemory,
        op_progress: Arc<OpProgress>,
        seed: u64,
        uploads: Uploads,
        membership: LeaseMembership,
    ) -> Self {
        Self {
            backend,
            flow: Dataflow::new(memory),
            decoder: OpDecoder::default(),
            op_progress,
            plans: VecDeque::new(),
            planned_ops: 0,
            deferred: Deferred::default(),
            uploads,
            awaited_upload: None,
            membership,
            decoded_all_reduces: HashMap::new(),
            early_all_reduces: HashMap::new(),
            in_flight: HashMap::new(),
            requests: Vec::new(),
            bucket_bytes: 0,
            flush_requests: false,
            last_ticket: 0,
            ops_seen: 0,
            op_number: 0,
            seed,
            draws: 0,
            unreported: VecDeque::new(),
            #[cfg(feature = "testing")]
            last_outcome: None,
        }
    }

    /// Ends the runner, and returns the uploads that the session kept.
    pub(crate) fn into_kept(self) -> impl Iterator<Item = Bytes> + Send {
        self.uploads.into_kept()
    }

    /// Executes a piece of work other than a frame of ops.
    fn execute_work(&mut self, work: Work) -> Option<Reply> {
        match work {
            Work::Ops { .. } => unreachable!("ops were decoded when they were planned"),
            Work::Poison { id, fault } => {
                self.flow.insert_poisoned(id, Arc::new(fault));
            }
            Work::Alias { id, source } => self.alias(id, source),
            Work::Read { request, tensor } => return Some(self.read(request, tensor)),
            Work::Sync { request } => return Some(self.sync(request)),
            Work::Seed(seed) => (self.seed, self.draws) = (seed, 0),
            Work::Offer {
                tensor,
                capability,
                to,
            } => self.offer(&tensor, capability, to),
            Work::Take {
                out,
                capability,
                from,
            } => self.take(&out, capability, from),
        }
        None
    }

    fn fault_context(&self, op_name: impl Into<OpName>) -> FaultContext {
        FaultContext {
            op_number: self.op_number,
            op_name: op_name.into(),
            op_progress: self.op_progress.clone(),
        }
    }

    fn fault_for_refusal(&mut self, refusal: Refusal, op_name: impl Into<OpName>) -> Arc<Fault> {
        match refusal {
            Refusal::Inherited(fault) => fault,
            Refusal::New(kind, reason) => {
                let fault = self.fault_context(op_name).fault(kind, reason);
                self.record_fault(&fault);
                fault
            }
        }
    }

    /// Keeps a fault for a sync to report.
    fn record_fault(&mut self, fault: &Arc<Fault>) {
        if self.unreported.len() < MAX_UNREPORTED {
            self.unreported.push_back(fault.clone());
        }
    }

    fn run_op(&mut self, mut op: Box<OperationIr>) {
        if let OperationIr::Distributed(distributed) = &*op {
            return match distributed {
                DistributedOperationIr::AllReduce(_) => self.all_reduce(&op),
                // Work that needs a result waits for the result, not for this op.
                DistributedOperationIr::SyncCollective => {
                    self.flush_requests = true;
                    self.record_executed();
                }
            };
        }
        if let Some(reason) = self.unsupported(&op) {
            let refusal = Refusal::New(FaultKind::Unsupported, reason);
            return self.refuse(&op, refusal);
        }
        let scratch = match self.check_op(&op) {
            Ok(scratch) => scratch,
            Err(refusal) => return self.refuse(&op, refusal),
        };
        if let Err(refusal) = self.flow.begin(&op) {
            // A tensor without a value is dropped like any other.
            if !matches!(*op, OperationIr::Drop(_)) {
                return self.refuse(&op, refusal);
            }
            self.record_refused(&refusal);
        }
        let (backend, seed) = (&mut self.backend, op_seed(self.seed, self.draws));
        let (name, draws) = (OpName::of(&op), is_random_op(&op));
        self.op_progress.begin_op(self.op_number, name);
        zero_uninitialized(&mut op);
        let ran = catch_unwind(AssertUnwindSafe(|| match draws {
            true => backend.execute_seeded(op, seed),
            false => backend.execute(op),
        }));
        self.draws += u64::from(draws);
        drop(scratch);
        match ran {
            Ok(()) => {
                self.flow.finish(&mut |tensor| self.backend.storage(tensor));
                self.record_executed();
            }
            Err(panic) => {
                let refusal = Refusal::New(FaultKind::Panic, panic_message(panic.as_ref()));
                self.record_refused(&refusal);
                let fault = self.fault_for_refusal(refusal, name);
                // The panic may have come after some outputs were made.
                for tensor in self.flow.fail(&fault) {
                    self.backend.forget(tensor);
                }
            }
        }
    }

    /// Decides whether a backend may run `op`, and takes the memory that its kernel needs
    /// in addition to inputs and outputs.
    fn check_op(&self, op: &OperationIr) -> Result<Option<SessionMemory>, Refusal> {
        match op_check::check(op)? {
            0 => Ok(None),
            bytes => self.flow.reserve(bytes).map(Some),
        }
    }

    /// Returns why the device cannot try `op` at all, or `None` if it can.
    fn unsupported(&self, op: &OperationIr) -> Option<String> {
        match op {
            OperationIr::Custom(call) => self.backend.custom_op_error(&call.id),
            _ => None,
        }
    }

    /// Poisons the outputs of `op`, which is not executed.
    fn refuse(&mut self, op: &OperationIr, refusal: Refusal) {
        self.record_refused(&refusal);
        let fault = self.fault_for_refusal(refusal, OpName::of(op));
        for tensor in self.flow.poison(op, &fault) {
            self.backend.forget(tensor);
        }
    }

    fn alias(&mut self, id: TensorId, source: TensorId) {
        let backend = &mut self.backend;
        let aliased = self.flow.alias(id, source, &mut |t| backend.storage(t));
        if let Err(refusal) = aliased {
            let fault = self.fault_for_refusal(refusal, "Alias");
            self.flow.insert_poisoned(id, fault);
        } else {
            self.backend.alias(id, source);
        }
    }

    fn sync(&mut self, request: u64) -> Reply {
        let context = self.fault_context("Sync");
        self.op_progress.begin_op(self.op_number, "Sync".into());
        let backend = &mut self.backend;
        let synced = catch_unwind(AssertUnwindSafe(|| backend.sync()));
        let fault = self.unreported.pop_front().or_else(|| match synced {
            Ok(Ok(())) => None,
            Ok(Err(e)) => Some(context.fault(FaultKind::Backend, e.reason())),
            Err(panic) => Some(context.fault(FaultKind::Panic, panic_message(panic.as_ref()))),
        });
        Reply::Synced { request, fault }
    }

    /// Records that a reply reports `fault`, so that no sync reports it again.
    fn mark_reported(&mut self, fault: Arc<Fault>) -> Arc<Fault> {
        self.unreported
            .retain(|unreported| !Arc::ptr_eq(unreported, &fault));
        fault
    }
}

/// Outcomes are only recorded with the feature `testing`.
#[cfg(not(feature = "testing"))]
impl Runner {
    fn record_executed(&mut self) {}

    fn record_refused(&mut self, _refusal: &Refusal) {}
}

/// Replaces `Empty` with `Zeros`: uninitialised memory may have another program's data.
fn zero_uninitialized(op: &mut OperationIr) {
    let (OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op)) = op
    else {
        return;
    };
    if let BaseOperationIr::Empty(empty) = op {
        *op = BaseOperationIr::Zeros(empty.clone());
    }
}

/// Returns whether `op` draws random numbers.
fn is_random_op(op: &OperationIr) -> bool {
    matches!(
        op,
        OperationIr::Float(_, FloatOperationIr::Random(_))
            | OperationIr::NumericInt(_, NumericOperationIr::IntRandom(_))
    )
}

/// Returns the seed of random op number `draw`. It uses SplitMix64's finalizer (Steele,
/// Lea and Flood, "Fast splittable pseudorandom number generators", 2014), so that the
/// seeds of neighbouring ops are unrelated.
fn op_seed(seed: u64, draw: u64) -> u64 {
    let mut z = seed.wrapping_add(draw.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
