//! Executes one op, read or sync at a time, and turns every failure into a fault.
//!
//! The interpreter does not know the order of work, the peers or the wire.

use std::sync::Arc;

use burn_ir::{
    BaseOperationIr, FloatOperationIr, NumericOperationIr, OperationIr, TensorId, TensorIr,
};
use tensord_backend::TensorStore;
use tensord_proto::{
    codec::{OpName, tensor_bytes},
    v1::{Fault, FaultKind},
};

use super::{
    super::{
        dataflow::Refusal,
        snapshot::{Header, Snapshot, SnapshotError},
        uploads::UploadBytes,
    },
    Reply, SyncRequest,
    capture::CapturedTensors,
    fault::{CurrentOp, FaultContext, UnreportedFaults},
    outcome::OutcomeRecorder,
    restore::restore_tensors,
    tensors::{StartedRead, Tensors},
};
use crate::{memory::SessionMemory, op_progress::OpProgress};

/// The tensors of a session, and the other state that executing an op reads and changes.
pub(super) struct Interpreter {
    pub(super) tensors: Tensors,
    /// The op whose turn it is.
    pub(super) current: CurrentOp,
    pub(super) outcome: OutcomeRecorder,
    unreported: UnreportedFaults,
    random: RandomState,
}

impl Interpreter {
    pub(super) fn new(
        store: Box<dyn TensorStore>,
        memory: SessionMemory,
        op_progress: Arc<OpProgress>,
        seed: u64,
    ) -> Self {
        Self {
            tensors: Tensors::new(store, memory),
            current: CurrentOp::new(op_progress),
            outcome: OutcomeRecorder::default(),
            unreported: UnreportedFaults::default(),
            random: RandomState { seed, draws: 0 },
        }
    }

    /// Returns the state of the tensors and of random ops, and the unreported faults.
    ///
    /// # Errors
    ///
    /// When a value is pending, the device would have to copy more than `max_copied_bytes`, or it
    /// cannot copy them.
    pub(super) fn capture(
        &mut self,
        max_copied_bytes: u64,
    ) -> Result<CapturedTensors, SnapshotError> {
        let (table, values) = self.tensors.capture(max_copied_bytes)?;
        let RandomState { seed, draws } = self.random;
        Ok(CapturedTensors {
            charges: table.charges,
            poisoned: table.poisoned,
            values,
            table_names: self.tensors.table_names(),
            unreported: self.unreported.iter().cloned().collect(),
            seed,
            draws,
        })
    }

    /// Restores this part of a snapshot, in an interpreter without tensors.
    ///
    /// # Errors
    ///
    /// When the snapshot is malformed, or the device has no room for it.
    pub(super) fn restore(&mut self, snapshot: &Snapshot) -> Result<(), SnapshotError> {
        let unreported = restore_tensors(&mut self.tensors, snapshot)?;
        self.unreported = UnreportedFaults::restored(unreported);
        let Header { seed, draws, .. } = snapshot.header;
        self.random = RandomState { seed, draws };
        Ok(())
    }

    /// Sets the seed of later random ops.
    pub(super) fn set_seed(&mut self, seed: u64) {
        self.random = RandomState { seed, draws: 0 };
    }

    /// Executes an op that needs no peer.
    pub(super) fn run(&mut self, mut op: Box<OperationIr>) {
        let scratch = match self.tensors.check_op(&op) {
            Ok(scratch) => scratch,
            Err(refusal) => return self.refuse(&op, refusal),
        };
        if let Err(refusal) = self.tensors.begin(&op) {
            // A tensor without a value is dropped like any other.
            if !matches!(*op, OperationIr::Drop(_)) {
                return self.refuse(&op, refusal);
            }
            self.outcome.record_refused(&refusal);
        }
        let name = OpName::of(&op);
        let seed = is_random_op(&op).then(|| self.random.next_seed());
        self.current.begin(name);
        zero_uninitialized(&mut op);
        match self.tensors.execute(op, seed, scratch) {
            Ok(()) => self.outcome.record_executed(),
            Err(refusal) => {
                self.outcome.record_refused(&refusal);
                let fault = self.record_fault(&self.current.context(name), refusal);
                self.tensors.fail(&fault);
            }
        }
    }

    /// Checks the all-reduce `op`, and makes its outputs pending: they arrive under
    /// `ticket`.
    ///
    /// # Errors
    ///
    /// Why the op must be [refused](Self::refuse).
    pub(super) fn begin_pending(&mut self, op: &OperationIr, ticket: u64) -> Result<(), Refusal> {
        let _scratch = self.tensors.check_op(op)?;
        self.tensors.begin(op)?;
        self.tensors.make_outputs_pending(ticket);
        self.outcome.record_executed();
        Ok(())
    }

    /// Poisons the outputs of `op`, which is not executed.
    pub(super) fn refuse(&mut self, op: &OperationIr, refusal: Refusal) {
        self.outcome.record_refused(&refusal);
        let fault = self.record_fault(&self.current.context(OpName::of(op)), refusal);
        self.tensors.poison_outputs(op, &fault);
    }

    /// Adds a tensor that has `fault` instead of a value.
    pub(super) fn poison(&mut self, id: TensorId, fault: Fault) {
        self.tensors.insert_poisoned(id, Arc::new(fault));
    }

    /// Gives the tensor `source` a second id.
    pub(super) fn alias(&mut self, id: TensorId, source: TensorId) {
        if let Err(refusal) = self.tensors.alias(id, source) {
            let fault = self.record_fault(&self.current.context("Alias"), refusal);
            self.tensors.insert_poisoned(id, fault);
        }
    }

    /// Executes an upload. `memory` is the memory taken for the elements of `out`.
    pub(super) fn upload(
        &mut self,
        out: &TensorIr,
        source: UploadBytes,
        memory: Result<SessionMemory, Refusal>,
    ) {
        let Err(refusal) = self.try_upload(out, source, memory) else {
            return self.outcome.record_executed();
        };
        self.outcome.record_refused(&refusal);
        let fault = self.record_fault(&self.current.context("Upload"), refusal);
        self.tensors.insert_poisoned(out.id, fault);
    }

    fn try_upload(
        &mut self,
        out: &TensorIr,
        source: UploadBytes,
        memory: Result<SessionMemory, Refusal>,
    ) -> Result<(), Refusal> {
        let mut memory = memory?;
        self.tensors.charge_name(out, &mut memory)?;
        let data = source.into_data(out)?;
        self.current.begin("Upload");
        self.tensors.insert(out, data, memory)
    }

    /// Waits until the device has executed everything, and reports the oldest fault that
    /// no reply has reported.
    pub(super) fn sync(&mut self, request: SyncRequest) -> Reply {
        let context = self.current.context("Sync");
        self.current.begin("Sync");
        let synced = self.tensors.sync();
        let fault = self
            .unreported
            .pop()
            .or_else(|| synced.err().map(|refusal| context.fault_for(refusal)));
        Reply::Synced { request, fault }
    }

    /// Reads a tensor for the client.
    pub(super) fn read(&mut self, request: u64, tensor: TensorIr) -> Reply {
        let failed = |fault| Reply::Value {
            request,
            result: Err(fault),
        };
        let context = self.current.context("Read");
        let checked = self.tensors.check(&tensor);
        let held = match checked.and_then(|()| self.tensors.hold(&tensor)) {
            Ok(held) => held,
            Err(refusal) => {
                self.tensors.discard(&tensor);
                return failed(self.reported_fault(&context, refusal));
            }
        };
        let bytes = tensor_bytes(&tensor.shape, tensor.dtype).unwrap_or(usize::MAX);
        self.tensors.release(&tensor);
        self.current.begin("Read");
        match self.tensors.begin_read(tensor, held) {
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
            Err(refusal) => failed(context.fault_for(refusal)),
        }
    }

    fn reported_fault(&mut self, context: &FaultContext, refusal: Refusal) -> Arc<Fault> {
        let fault = context.fault_for(refusal);
        self.unreported.mark_reported(&fault);
        fault
    }

    /// Starts to read a tensor for a peer; the tensor is not consumed. `has_memory` is true if
    /// the caller has taken memory for the value; otherwise the value itself holds memory until
    /// it is dropped.
    pub(super) fn read_for_peer(
        &mut self,
        tensor: &TensorIr,
        has_memory: bool,
        context: &FaultContext,
    ) -> Result<StartedRead, Arc<Fault>> {
        let held = match has_memory {
            true => None,
            false => match self.tensors.hold(tensor) {
                Ok(held) => held,
                Err(refusal) => return Err(self.record_fault(context, refusal)),
            },
        };
        let tensor = TensorIr {
            status: burn_ir::TensorStatus::ReadOnly,
            ..tensor.clone()
        };
        self.current.begin("Read");
        let started = self.tensors.begin_read(tensor, held);
        started.map_err(|refusal| context.fault_for(refusal))
    }

    /// Returns the fault of a refusal, and keeps it for a sync to report if it is new.
    pub(super) fn record_fault(&mut self, context: &FaultContext, refusal: Refusal) -> Arc<Fault> {
        self.unreported.record(context, refusal)
    }
}

/// The state of random ops. An op's numbers depend on the seed and the number of random ops
/// since it was set, so a replay draws the same numbers, and so does a program that runs
/// again, whatever its other ops.
struct RandomState {
    seed: u64,
    draws: u64,
}

impl RandomState {
    /// Returns the seed of the next random op. It uses SplitMix64's finalizer (Steele, Lea
    /// and Flood, "Fast splittable pseudorandom number generators", 2014), so that the seeds
    /// of neighbouring ops are unrelated.
    fn next_seed(&mut self) -> u64 {
        self.draws += 1;
        let mut z = self
            .seed
            .wrapping_add(self.draws.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
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
