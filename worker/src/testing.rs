//! Parts of a worker without a network: a session for the fuzzer and for tests of whole
//! programs of ops, a worker for the simulation, and the tensor table for benchmarks.
//!
//! A session's frames go through the same decoder, rules, table and backend as in a worker.
//! Programs have no use for this module.

use std::sync::atomic::{AtomicBool, Ordering};

use burn_ir::{OperationIr, TensorIr};
use tensord_proto::codec::tensor_bytes;

pub use crate::session::standalone::{OpOutcome, OpReport, StandaloneSession, StepOutcome};
#[cfg(target_os = "linux")]
pub use crate::supervisor::simulated::{SessionPoints, SimulatedSettings, SimulatedWorker};
use crate::{memory::DeviceMemory, session::dataflow::Dataflow};

/// Returns each variant of Burn's ops once, as clients send it, except those that no client
/// sends.
pub fn sample_ops() -> Vec<OperationIr> {
    crate::op_check::samples::ops()
}

/// Set by [`switch_off_op_checks`].
static UNCHECKED: AtomicBool = AtomicBool::new(false);

/// Makes all sessions of this process execute ops without the checks that keep kernels within
/// their tensors. For tests of the other protections against harmful ops.
pub fn switch_off_op_checks() {
    UNCHECKED.store(true, Ordering::Relaxed);
}

/// Returns whether ops are executed without checks, after [`switch_off_op_checks`].
pub(crate) fn are_op_checks_off() -> bool {
    UNCHECKED.load(Ordering::Relaxed)
}

/// Checks the arguments of `op`, and returns the bytes of scratch memory of its kernel.
///
/// # Panics
///
/// If the op breaks a rule.
pub fn check_op(op: &OperationIr) -> u64 {
    crate::op_check::check(op).unwrap_or_else(|broken| panic!("{broken:?}"))
}

/// The tensor table of a session without a backend, for benchmarks.
#[derive(Debug)]
pub struct TensorTable(Dataflow);

impl TensorTable {
    /// Creates an empty table for a device of `capacity_bytes`.
    pub fn new(capacity_bytes: u64) -> Self {
        Self(Dataflow::new(DeviceMemory::new(capacity_bytes).open()))
    }

    /// Adds a tensor.
    ///
    /// # Panics
    ///
    /// If there is no memory for it.
    pub fn insert(&mut self, tensor: &TensorIr) {
        let bytes = tensor_bytes(&tensor.shape, tensor.dtype).expect("the size is addressable");
        let memory = self.0.reserve(bytes as u64).expect("there is memory");
        self.0
            .insert(tensor.id, tensor.shape.clone(), tensor.dtype, memory);
    }

    /// Begins and finishes an op.
    ///
    /// # Panics
    ///
    /// If the table refuses the op.
    pub fn run(&mut self, op: &OperationIr) {
        self.0.begin(op).expect("the op may run");
        self.0.finish(&mut |_| None);
    }
}
