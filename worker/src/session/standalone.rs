//! A session on Flex without a connection, an executor or peers.
//!
//! The caller passes frames to the session, as a client's connection would, and runs it
//! one op at a time. Each step returns the outcome of its op.

use std::{sync::Arc, time::Duration};

use burn_backend::TensorData;
use burn_ir::TensorIr;
use bytes::Bytes;
use tensord_backend::{CustomOps, flex_device};
use tensord_proto::{
    codec::OpName,
    collective_op::CollectiveOp,
    ids::WorkerId,
    v1::{self, FaultKind},
};
use tensord_transport::channel::duplex::Duplex;

use super::{
    inbound::{Item, item},
    outbound::{OUTBOX_BYTES, WINDOW_BYTES},
    runner::{LeaseMembership, RecordedOutcome, Reply, Request, Runner, Step, Work},
    uploads::{KeptLimits, Uploads},
};
use crate::{
    collective::{Failure, LeaseMembers, ReceivedValue},
    memory::DeviceMemory,
    op_progress::{OpProgress, Signals},
};

/// The most bytes of uploads that the session may keep.
const KEPT_LIMITS: KeptLimits = KeptLimits {
    new: 1 << 20,
    restored: 1 << 20,
};

/// A session on Flex that is alone in its lease and runs on the caller's thread.
pub struct StandaloneSession {
    /// The session's end of the connection.
    wire: Duplex,
    runner: Runner,
    memory: Arc<DeviceMemory>,
    replies: Vec<Reply>,
}

/// The outcome of one step.
#[derive(Debug)]
pub enum StepOutcome {
    /// An op was processed.
    Op(OpReport),
    /// Another piece of work was processed.
    Other,
    /// There is no work.
    Idle,
}

/// The outcome of one op.
#[derive(Debug)]
pub struct OpReport {
    /// The name of the op.
    pub name: OpName,
    /// Whether the op was executed.
    pub outcome: OpOutcome,
    /// How an output differs from what the op declares, or that it is missing. `None` if
    /// all outputs are as declared, or the op was not executed.
    pub mismatch: Option<String>,
}

/// Whether an op was executed.
#[derive(Debug, Clone, PartialEq)]
pub enum OpOutcome {
    /// The backend executed it.
    Executed,
    /// It has a fault of its own: it breaks a rule, or the backend panicked.
    Refused(FaultKind, String),
    /// An input has no value, because of an earlier fault.
    Poisoned,
}

impl StandaloneSession {
    /// Opens a session on a device of `capacity_bytes`, with Burn's ops and `custom_ops`.
    pub fn open(capacity_bytes: u64, seed: u64, custom_ops: &CustomOps) -> Self {
        let device = flex_device(custom_ops);
        let memory = DeviceMemory::new(capacity_bytes);
        let share = v1::LeaseShare {
            worker_id: 1,
            worker: "lone".into(),
            ..v1::LeaseShare::default()
        };
        let membership = LeaseMembership {
            lease_members: Arc::new(LeaseMembers::new(vec![share], WorkerId(1))),
            lease_rank: 0,
            bucket_bytes: Arc::default(),
        };
        // The caller owns the thread, so no op timeout applies.
        let signals = Signals::new("lone".into(), Duration::MAX, Arc::default());
        let runner = Runner::new(
            device.open(),
            memory.open(),
            OpProgress::new(signals),
            seed,
            Uploads::new(KEPT_LIMITS, Vec::new()),
            membership,
        );
        Self {
            wire: Duplex::new(OUTBOX_BYTES, u64::MAX, WINDOW_BYTES),
            runner,
            memory,
            replies: Vec::new(),
        }
    }

    /// Processes a frame from the client.
    ///
    /// # Errors
    ///
    /// When the frame breaks a rule. That ends a session, so this one must be closed.
    pub fn receive(&mut self, frame: Bytes) -> Result<(), String> {
        let Some((body, bytes)) = self.wire.receive(frame).map_err(|e| e.to_string())? else {
            return Ok(());
        };
        match item(body, bytes).map_err(|e| e.to_string())? {
            Some(Item::Work(work, credit)) => self.plan(work, credit)?,
            Some(Item::Reads(first, tensors, credit)) => {
                self.wire.inbox().consume(credit);
                for (request, tensor) in (first..=u64::MAX).zip(tensors) {
                    self.plan(Work::Read { request, tensor }, 0)?;
                }
            }
            Some(Item::Close) | None => {}
        }
        Ok(())
    }

    fn plan(&mut self, work: Work, credit: usize) -> Result<(), String> {
        self.runner.plan(work, credit).map_err(|e| e.to_string())
    }

    /// Processes one op or another piece of work.
    ///
    /// # Errors
    ///
    /// When a frame breaks a rule, or an upload needs a payload, which this session never
    /// receives. The session must be closed.
    pub fn step(&mut self) -> Result<StepOutcome, String> {
        let next = self.runner.next_planned();
        let next = next.map(|op| {
            let is_late = CollectiveOp::is(op);
            let outputs: Vec<TensorIr> = op.outputs().cloned().collect();
            (OpName::of(op), outputs, is_late)
        });
        match self.runner.step().map_err(|e| e.to_string())? {
            Step::Ran(credit, reply) => {
                self.wire.inbox().consume(credit);
                self.replies.extend(reply);
            }
            Step::NeedsPayload => return Err("the payload of an upload is missing".into()),
            Step::NeedsOutcome | Step::Closed => {}
            Step::Idle => return Ok(StepOutcome::Idle),
        }
        while self.answer_requests() {}
        let (Some((name, outputs, is_late)), Some(recorded)) = (next, self.runner.take_outcome())
        else {
            return Ok(StepOutcome::Other);
        };
        let is_there = |out: &TensorIr| self.runner.is_live(out.id);
        let outcome = match recorded {
            // The all-reduce ran, but the device could not store its result.
            RecordedOutcome::Ran if is_late && !outputs.iter().all(is_there) => OpOutcome::Refused(
                FaultKind::Backend,
                "the all-reduce delivered no value".into(),
            ),
            RecordedOutcome::Ran => OpOutcome::Executed,
            RecordedOutcome::Refused(kind, reason) => OpOutcome::Refused(kind, reason),
            RecordedOutcome::Inherited => OpOutcome::Poisoned,
        };
        let mismatch = match outcome {
            OpOutcome::Executed => outputs.iter().enumerate().find_map(|(i, out)| {
                // An op that names an output twice has made one tensor, the last.
                let again = outputs[i + 1..].iter().any(|last| last.id == out.id);
                if again { None } else { self.difference(out) }
            }),
            _ => None,
        };
        Ok(StepOutcome::Op(OpReport {
            name,
            outcome,
            mismatch,
        }))
    }

    /// Returns how the backend's tensor for `out` differs from what the op declares.
    fn difference(&mut self, out: &TensorIr) -> Option<String> {
        let Some((shape, dtype)) = self.runner.actual_type(out) else {
            return Some(format!("output {} does not exist", out.id.value()));
        };
        let mismatch = (&shape, dtype) != (&out.shape, out.dtype);
        mismatch.then(|| {
            format!(
                "the backend returned {shape} of {dtype:?}, but the op declares {} of {:?}",
                out.shape, out.dtype
            )
        })
    }

    /// Answers the session's requests to its peers, of which there are none. Returns
    /// whether there were requests.
    fn answer_requests(&mut self) -> bool {
        let requests = self.runner.take_requests(true);
        let any = !requests.is_empty();
        for request in requests {
            match request {
                Request::Call(call) => {
                    let reduced = match call.arrival.fault {
                        Some(fault) => Err(Failure::Inherited(fault)),
                        None => Ok(ReceivedValue::Reduced(call.bytes)),
                    };
                    self.runner.on_outcome(call.ticket, reduced);
                }
                // No other session takes or offers a value.
                Request::Offer(..) | Request::Take(..) | Request::InFlight(_) => {}
            }
        }
        any
    }

    /// Reads a tensor.
    ///
    /// # Errors
    ///
    /// The fault, if the tensor has no value.
    pub fn read(&mut self, tensor: TensorIr) -> Result<TensorData, String> {
        self.replies.clear();
        self.plan(Work::Read { request: 0, tensor }, 0)?;
        while !matches!(self.step()?, StepOutcome::Idle) {}
        match self.replies.pop() {
            Some(Reply::Value { result, .. }) => result.map_err(|fault| fault.to_string()),
            _ => Err("the read has no answer".into()),
        }
    }

    /// Returns the number of the session's tensors, with a value or a fault.
    pub fn tensors(&self) -> usize {
        self.runner.tensors()
    }

    /// Returns the bytes of device memory that the session holds.
    pub fn live_bytes(&self) -> u64 {
        self.memory.live_bytes()
    }

    /// Ends the session, and returns the bytes of device memory that it did not give
    /// back.
    pub fn close(self) -> u64 {
        let Self {
            runner,
            memory,
            replies,
            ..
        } = self;
        drop(replies);
        drop(runner);
        memory.live_bytes()
    }
}

#[cfg(test)]
mod tests {
    use burn_backend::{BoolStore, DType};
    use burn_ir::{
        BaseOperationIr, InitOperationIr, NumericOperationIr, OperationIr, ReduceDimOpIr,
        SelectOpIr, TensorId, TensorStatus,
    };
    use prost::Message as _;
    use tensord_proto::{
        codec::OpEncoder,
        content::{Content, Entry, put},
    };

    use super::*;

    const BOOL: DType = DType::Bool(BoolStore::Native);

    fn typed<const N: usize>(id: u64, dims: [usize; N], dtype: DType) -> TensorIr {
        TensorIr {
            id: TensorId::new(id),
            shape: dims.into(),
            status: TensorStatus::ReadOnly,
            dtype,
        }
    }

    fn made(tensor: TensorIr) -> TensorIr {
        TensorIr {
            status: TensorStatus::NotInit,
            ..tensor
        }
    }

    fn upload(tensor: TensorIr) -> OperationIr {
        OperationIr::Init(InitOperationIr { out: made(tensor) })
    }

    /// Runs `ops`, whose uploads have `contents`, and returns their outcomes.
    fn run(
        session: &mut StandaloneSession,
        ops: &[OperationIr],
        contents: &[&[u8]],
    ) -> Vec<OpReport> {
        let (mut encoder, mut encoded) = (OpEncoder::default(), Vec::new());
        ops.iter().for_each(|op| encoder.encode(op, &mut encoded));
        encoder.finish(&mut encoded);
        let mut list = Vec::new();
        for bytes in contents {
            let bytes = Bytes::copy_from_slice(bytes);
            put(
                &mut list,
                &Entry::Upload(Content::Inline { bytes, keep: None }),
            );
        }
        let body = v1::Ops {
            count: ops.len() as u32,
            encoded: encoded.into(),
            contents: list.into(),
        };
        let frame = v1::Frame {
            seq: 1,
            ack: 0,
            credit_bytes: 0,
            body: Some(v1::frame::Body::Ops(body)),
        };
        session.receive(frame.encode_to_vec().into()).unwrap();
        let mut reports = Vec::new();
        loop {
            match session.step().unwrap() {
                StepOutcome::Op(report) => reports.push(report),
                StepOutcome::Other => {}
                StepOutcome::Idle => return reports,
            }
        }
    }

    #[test]
    fn selected_booleans_stay_booleans() {
        let mut session = StandaloneSession::open(1 << 20, 1, &CustomOps::new());
        let select = SelectOpIr {
            tensor: typed(1, [3], BOOL),
            dim: 0,
            indices: typed(2, [2], DType::I64),
            out: made(typed(3, [2], BOOL)),
        };
        let ops = [
            upload(typed(1, [3], BOOL)),
            upload(typed(2, [2], DType::I64)),
            OperationIr::BaseBool(BaseOperationIr::Select(select)),
        ];
        let indices = [2i64, 1].map(i64::to_le_bytes).concat();
        let reports = run(&mut session, &ops, &[&[1, 0, 1], &indices]);
        assert_eq!(reports.len(), 3);
        for report in &reports {
            assert_eq!(report.outcome, OpOutcome::Executed, "{report:?}");
            assert_eq!(report.mismatch, None, "{report:?}");
        }
        let value = session.read(typed(3, [2], BOOL)).unwrap();
        assert_eq!((value.dtype(), value.as_bytes()), (BOOL, &[1, 0][..]));
        assert_eq!(session.tensors(), 3);
        assert!(session.live_bytes() > 0);
        assert_eq!(session.close(), 0);
    }

    #[test]
    fn indices_have_the_declared_dtype() {
        let mut session = StandaloneSession::open(1 << 20, 1, &CustomOps::new());
        let largest = |id, dtype| {
            let largest = ReduceDimOpIr {
                input: typed(1, [4], DType::F32),
                out: made(typed(id, [1], dtype)),
                axis: 0,
                accumulator_len: 1,
            };
            OperationIr::NumericFloat(DType::F32, NumericOperationIr::ArgMax(largest))
        };
        let ops = [
            upload(typed(1, [4], DType::F32)),
            largest(2, DType::U8),
            largest(3, DType::I32),
        ];
        let values = [0.0f32, 1.0, 5.0, 2.0].map(f32::to_le_bytes).concat();
        for report in run(&mut session, &ops, &[&values]) {
            assert_eq!(report.outcome, OpOutcome::Executed, "{report:?}");
            assert_eq!(report.mismatch, None, "{report:?}");
        }
        let value = session.read(typed(2, [1], DType::U8)).unwrap();
        assert_eq!((value.dtype(), value.as_bytes()), (DType::U8, &[2][..]));
        let value = session.read(typed(3, [1], DType::I32)).unwrap();
        assert_eq!(value.as_bytes(), 2i32.to_le_bytes());
        assert_eq!(session.close(), 0);
    }
}
