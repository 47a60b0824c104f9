//! The account of a session on real Flex is exactly the bytes of the storages that exist,
//! after each op of random programs.

use std::{collections::HashMap, time::Duration};

use burn_backend::{DType, Shape};
use burn_flex::{Flex, FlexDevice};
use burn_ir::{
    BaseOperationIr, BinaryOpIr, CatOpIr, FlipOpIr, FullOpIr, ReduceOpIr, RepeatDimOpIr, ScalarIr,
    ScalarOpIr, ShapeOpIr, SliceOpIr, SwapDimsOpIr, TensorStatus,
};
use burn_std::Slice;
use proptest::prelude::*;
use tensord_proto::{bulk::INLINE_BYTES, codec::tensor_bytes, ids::WorkerId, v1};

use super::{super::dataflow::NAME_BYTES, *};
use crate::{
    backend::BurnDevice, collective::LeaseMembers, custom::CustomOps, memory::DeviceMemory,
    op_progress::Signals,
};

/// Elements of a row. A value of more than 64 rows is not copied into a frame.
const COLUMNS: usize = 64;

/// Bytes of device memory: enough for most tensors of these programs, but not for all.
const CAPACITY: u64 = 1 << 20;

/// What a program does to the tensors that it picks.
#[derive(Debug, Clone)]
enum ProgramStep {
    Full(usize),
    Slice(usize, usize),
    Reshape(usize),
    Swap(usize),
    Flip(usize),
    Expand(usize),
    Repeat(usize, usize),
    CatOne(usize),
    AddScalar(usize),
    Add(usize),
    Sum(usize),
    Mismatch(usize),
    Alias(usize),
    Read(usize),
    Forget(usize),
    Drop(usize),
}

/// Returns random steps, each with whether it uses its input for the last time.
fn steps() -> impl Strategy<Value = Vec<(ProgramStep, bool)>> {
    let pick = || 0usize..64;
    let step = prop_oneof![
        4 => (1usize..120).prop_map(ProgramStep::Full),
        4 => (pick(), 1usize..120).prop_map(|(at, rows)| ProgramStep::Slice(at, rows)),
        2 => pick().prop_map(ProgramStep::Reshape),
        2 => pick().prop_map(ProgramStep::Swap),
        1 => pick().prop_map(ProgramStep::Flip),
        1 => pick().prop_map(ProgramStep::Expand),
        1 => (pick(), 1usize..3).prop_map(|(at, times)| ProgramStep::Repeat(at, times)),
        1 => pick().prop_map(ProgramStep::CatOne),
        3 => pick().prop_map(ProgramStep::AddScalar),
        2 => pick().prop_map(ProgramStep::Add),
        1 => pick().prop_map(ProgramStep::Sum),
        1 => pick().prop_map(ProgramStep::Mismatch),
        3 => pick().prop_map(ProgramStep::Alias),
        3 => pick().prop_map(ProgramStep::Read),
        2 => pick().prop_map(ProgramStep::Forget),
        4 => pick().prop_map(ProgramStep::Drop),
    ];
    prop::collection::vec((step, any::<bool>()), 0..80)
}

/// A reply of more than `INLINE_BYTES`, with the memory that it holds.
enum HeldReply {
    Storage {
        id: usize,
        bytes: u64,
        _data: TensorData,
    },
    Copy {
        bytes: u64,
        _data: TensorData,
    },
}

/// A program, its runner and all that the program holds.
struct Program {
    runner: Runner,
    device: Arc<DeviceMemory>,
    /// Tensors with a value, and poisoned ones.
    live: Vec<TensorIr>,
    poisoned: Vec<TensorIr>,
    /// Replies that the client has not acknowledged.
    held_replies: Vec<HeldReply>,
    next: u64,
}

impl Program {
    fn new() -> Self {
        let device = DeviceMemory::new(CAPACITY);
        let backend = BurnDevice::<Flex>::shared(FlexDevice, &CustomOps::new()).open();
        let share = v1::LeaseShare {
            worker_id: 1,
            ..v1::LeaseShare::default()
        };
        let membership = LeaseMembership {
            lease_members: LeaseMembers::new(vec![share], WorkerId(1)).into(),
            lease_rank: 0,
            bucket_bytes: Arc::default(),
        };
        let uploads = Uploads::new(0, Vec::new());
        let signals = Signals::new("here".into(), Duration::from_secs(60), Arc::default());
        let op_progress = OpProgress::new(signals);
        let runner = Runner::new(backend, device.open(), op_progress, 1, uploads, membership);
        Self {
            runner,
            device,
            live: Vec::new(),
            poisoned: Vec::new(),
            held_replies: Vec::new(),
            next: 0,
        }
    }

    fn out(&mut self, rows: usize, columns: usize) -> TensorIr {
        self.next += 1;
        TensorIr::uninit(
            TensorId::new(self.next),
            Shape::new([rows, columns]),
            DType::F32,
        )
    }

    /// Picks a live tensor, for its last use if `last` is true.
    fn pick(&mut self, at: usize, last: bool) -> Option<TensorIr> {
        let at = at % self.live.len().max(1);
        let picked = self.live.get(at)?.clone();
        let status = match last {
            true => TensorStatus::ReadWrite,
            false => TensorStatus::ReadOnly,
        };
        if last {
            self.live.swap_remove(at);
        }
        Some(TensorIr { status, ..picked })
    }

    /// Executes `op`, which makes `out`, and records whether `out` has a value.
    fn run(&mut self, op: OperationIr, out: TensorIr) {
        self.runner.run_op(Box::new(op));
        self.note(out);
    }

    fn note(&mut self, out: TensorIr) {
        if self.runner.flow.is_live(out.id) {
            self.live.push(out);
        } else if self.runner.flow.len() > self.live.len() + self.poisoned.len() {
            self.poisoned.push(out);
        }
    }

    fn step(&mut self, step: ProgramStep, last: bool) -> Option<()> {
        let float = OperationIr::BaseFloat;
        let number = |op| OperationIr::NumericFloat(DType::F32, op);
        match step {
            ProgramStep::Full(rows) => {
                let out = self.out(rows, COLUMNS);
                let value = ScalarIr::Float(1.0);
                let op = FullOpIr {
                    out: out.clone(),
                    value,
                };
                self.run(number(NumericOperationIr::Full(op)), out);
            }
            ProgramStep::Slice(at, rows) => {
                let tensor = self.pick(at, last)?;
                let rows = rows.min(tensor.shape[0]);
                let out = self.out(rows, tensor.shape[1]);
                let op = SliceOpIr {
                    ranges: vec![Slice::from(0..rows), Slice::from(0..tensor.shape[1])],
                    tensor,
                    out: out.clone(),
                };
                self.run(float(BaseOperationIr::Slice(op)), out);
            }
            ProgramStep::Reshape(at) => {
                let input = self.pick(at, last)?;
                let out = self.out(1, input.shape.num_elements());
                let op = ShapeOpIr {
                    input,
                    out: out.clone(),
                };
                self.run(float(BaseOperationIr::Reshape(op)), out);
            }
            ProgramStep::Swap(at) => {
                let input = self.pick(at, last)?;
                let out = self.out(input.shape[1], input.shape[0]);
                let op = SwapDimsOpIr {
                    input,
                    out: out.clone(),
                    dim1: 0,
                    dim2: 1,
                };
                self.run(float(BaseOperationIr::SwapDims(op)), out);
            }
            ProgramStep::Flip(at) => {
                let input = self.pick(at, last)?;
                let out = self.out(input.shape[0], input.shape[1]);
                let op = FlipOpIr {
                    input,
                    out: out.clone(),
                    axes: vec![0],
                };
                self.run(float(BaseOperationIr::Flip(op)), out);
            }
            ProgramStep::Expand(at) => {
                let input = self.pick(at, false)?;
                let row = self.out(1, input.shape[1]);
                let op = SliceOpIr {
                    ranges: vec![Slice::from(0..1), Slice::from(0..input.shape[1])],
                    tensor: input,
                    out: row.clone(),
                };
                self.run(float(BaseOperationIr::Slice(op)), row.clone());
                let input = self.pick(self.live.len().checked_sub(1)?, last)?;
                let out = self.out(4 * input.shape[0], input.shape[1]);
                let op = ShapeOpIr {
                    input,
                    out: out.clone(),
                };
                self.run(float(BaseOperationIr::Expand(op)), out);
            }
            ProgramStep::Repeat(at, times) => {
                let tensor = self.pick(at, last)?;
                let out = self.out(times * tensor.shape[0], tensor.shape[1]);
                let op = RepeatDimOpIr {
                    tensor,
                    dim: 0,
                    times,
                    out: out.clone(),
                };
                self.run(float(BaseOperationIr::RepeatDim(op)), out);
            }
            ProgramStep::CatOne(at) => {
                let tensor = self.pick(at, last)?;
                let out = self.out(tensor.shape[0], tensor.shape[1]);
                let op = CatOpIr {
                    tensors: vec![tensor],
                    dim: 0,
                    out: out.clone(),
                };
                self.run(float(BaseOperationIr::Cat(op)), out);
            }
            ProgramStep::AddScalar(at) => {
                let lhs = self.pick(at, last)?;
                let out = self.out(lhs.shape[0], lhs.shape[1]);
                let op = ScalarOpIr {
                    lhs,
                    rhs: ScalarIr::Float(1.0),
                    out: out.clone(),
                };
                self.run(number(NumericOperationIr::AddScalar(op)), out);
            }
            ProgramStep::Add(at) => {
                let rhs = self.pick(at, false)?;
                let lhs = TensorIr {
                    status: TensorStatus::ReadOnly,
                    ..rhs.clone()
                };
                let out = self.out(lhs.shape[0], lhs.shape[1]);
                let op = BinaryOpIr {
                    lhs,
                    rhs,
                    out: out.clone(),
                };
                self.run(number(NumericOperationIr::Add(op)), out);
            }
            ProgramStep::Sum(at) => {
                let input = self.pick(at, last)?;
                let out = TensorIr {
                    shape: Shape::new([1]),
                    ..self.out(1, 1)
                };
                let op = ReduceOpIr {
                    input,
                    out: out.clone(),
                };
                self.runner
                    .run_op(Box::new(number(NumericOperationIr::Sum(op))));
                // The other steps need tensors of rank 2.
                let used = TensorIr {
                    status: TensorStatus::ReadWrite,
                    ..out
                };
                self.runner.run_op(Box::new(OperationIr::Drop(used)));
            }
            ProgramStep::Mismatch(at) => {
                let lhs = TensorIr {
                    shape: Shape::new([7]),
                    ..self.pick(at, last)?
                };
                let out = self.out(7, 1);
                let op = ScalarOpIr {
                    lhs,
                    rhs: ScalarIr::Float(1.0),
                    out: out.clone(),
                };
                self.run(number(NumericOperationIr::AddScalar(op)), out);
            }
            ProgramStep::Alias(at) => {
                let source = self.pick(at, false)?;
                let out = self.out(source.shape[0], source.shape[1]);
                self.runner.alias(out.id, source.id);
                self.note(out);
            }
            ProgramStep::Read(at) => self.read(at, last)?,
            ProgramStep::Forget(at) => {
                let at = at % self.held_replies.len().max(1);
                self.held_replies.get(at)?;
                drop(self.held_replies.swap_remove(at));
            }
            ProgramStep::Drop(at) => {
                let used = match last {
                    true => self.poisoned.pop(),
                    false => self.pick(at, true),
                }?;
                let used = TensorIr {
                    status: TensorStatus::ReadWrite,
                    ..used
                };
                self.runner.run_op(Box::new(OperationIr::Drop(used)));
            }
        }
        Some(())
    }

    fn read(&mut self, at: usize, last: bool) -> Option<()> {
        let tensor = self.pick(at, last)?;
        let bytes = tensor_bytes(&tensor.shape, tensor.dtype).unwrap();
        let is_whole = self.runner.backend.is_host_readable(&tensor);
        let storage = self.runner.backend.storage(&tensor).unwrap();
        let Reply::Value { result, .. } = self.runner.read(1, tensor) else {
            panic!("Flex has its values at hand");
        };
        // An error means that there was no room for a copy. Small values are copied into
        // a frame.
        if let Ok(data) = result
            && bytes > INLINE_BYTES
        {
            self.held_replies.push(match is_whole {
                true => HeldReply::Storage {
                    id: storage.id,
                    bytes: storage.bytes,
                    _data: data,
                },
                false => HeldReply::Copy {
                    bytes: bytes as u64,
                    _data: data,
                },
            });
        }
        Some(())
    }

    /// Returns the bytes that should be charged, derived from the backend's storages.
    fn expected(&mut self) -> u64 {
        let names = (self.live.len() + self.poisoned.len()) as u64;
        let mut storages = HashMap::new();
        for tensor in &self.live {
            let storage = self.runner.backend.storage(tensor).unwrap();
            storages.insert(storage.id, storage.bytes);
        }
        let mut copies = 0;
        for answer in &self.held_replies {
            match answer {
                HeldReply::Storage { id, bytes, .. } => {
                    storages.insert(*id, *bytes);
                }
                HeldReply::Copy { bytes, .. } => copies += bytes,
            }
        }
        let mut faults = HashMap::new();
        for tensor in &self.poisoned {
            let Err(Refusal::Inherited(fault)) = self.runner.flow.check(tensor) else {
                panic!("it has no value");
            };
            let texts = [&fault.op_name, &fault.worker, &fault.reason];
            let texts: usize = texts.iter().map(|text| text.capacity()).sum();
            faults.insert(Arc::as_ptr(&fault), size_of::<Fault>() + 64 + texts);
        }
        let faults: usize = faults.values().sum();
        names * NAME_BYTES + storages.values().sum::<u64>() + copies + faults as u64
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn account_equals_the_live_storages(steps in steps()) {
        let mut program = Program::new();
        for (step, last) in steps {
            let description = format!("{step:?}, {last}");
            program.step(step, last);
            prop_assert_eq!(program.device.live_bytes(), program.expected(), "after {}", description);
        }
        let Program { runner, device, held_replies, .. } = program;
        drop(runner);
        let held: u64 = device.live_bytes();
        prop_assert_eq!(held > 0, !held_replies.is_empty());
        drop(held_replies);
        prop_assert_eq!(device.live_bytes(), 0);
    }
}
