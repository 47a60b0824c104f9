//! Random programs of ops.

use std::{ops::Range, time::Instant};

use burn_backend::{DType, Distribution, Shape, TensorData};
use burn_ir::{
    BaseOperationIr, BinaryOpIr, FlipOpIr, FloatOperationIr, MatmulOpIr, NumericOperationIr,
    OperationIr, RandomOpIr, ReduceDimOpIr, ScalarIr, ScalarOpIr, SliceOpIr, SwapDimsOpIr,
    TensorId, TensorIr, TensorStatus,
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tensord_client::testing::{PendingSync, PendingValue, SimulatedSession};
use tensord_proto::collective_op::AllReduce;

/// Columns of all tensors before any is transposed.
const COLUMNS: usize = 16;

/// Rows that tensors may have. A tensor of 300 rows or more is read and uploaded by the track for
/// bulk bytes.
const ROWS: [usize; 4] = [1, 7, 16, 300];

/// Number of steps of a program on one device.
const STEPS: Range<usize> = 20..160;

/// Number of collective steps of a program on several devices, and of the other steps of each device
/// before each of them.
const COLLECTIVE_STEPS: Range<usize> = 5..40;
const STEPS_BETWEEN: Range<usize> = 0..8;

/// Most devices of a program.
const MAX_DEVICES: usize = 3;

/// A step of a program. Tensors are picked by numbers, modulo the number of those that exist.
#[derive(Debug, Clone)]
enum Step {
    Upload {
        rows: usize,
        value: u32,
    },
    Random {
        rows: usize,
    },
    Seed(u64),
    /// An op of one tensor.
    Unary(UnaryOp, Pick),
    Alias(Pick),
    Drop(usize),
    Read(usize),
    Sync,
    /// An all-reduce of a new tensor with other devices, whose numbers are ascending.
    AllReduce {
        rows: usize,
        group: Vec<u32>,
        mean: bool,
    },
    /// A new tensor goes to another device. The number is different for each transfer.
    Offer {
        rows: usize,
        to: u32,
        number: u8,
    },
    Take {
        rows: usize,
        from: u32,
        number: u8,
    },
    /// The program needs all values that it has requested before it goes on.
    Wait,
}

/// An op that makes a tensor of another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum UnaryOp {
    AddScalar,
    AddSelf,
    Square,
    Transpose,
    Flip,
    FirstRow,
    Sum,
    /// An op whose shapes do not fit, so that its output has a fault.
    Mismatch,
}

impl UnaryOp {
    /// Returns whether the op reads its input twice, so that neither read may be the last use.
    fn reads_twice(self) -> bool {
        matches!(self, Self::AddSelf | Self::Square)
    }

    /// Returns the shape of the output, or `None` if the op does not take this input.
    fn shape(self, [rows, columns]: [usize; 2]) -> Option<[usize; 2]> {
        match self {
            Self::AddScalar | Self::AddSelf | Self::Flip => Some([rows, columns]),
            Self::Square => (rows == columns).then_some([rows, columns]),
            Self::Transpose => Some([columns, rows]),
            Self::FirstRow | Self::Sum => Some([1, columns]),
            Self::Mismatch => Some([rows + 1, columns]),
        }
    }

    fn op(self, input: TensorIr, out: TensorIr) -> OperationIr {
        match self {
            Self::AddScalar => add_scalar(input, 0.75, out),
            Self::Mismatch => add_scalar(input, 1.0, out),
            Self::AddSelf => {
                let (lhs, rhs) = (input.clone(), input);
                number(NumericOperationIr::Add(BinaryOpIr { lhs, rhs, out }))
            }
            Self::Square => {
                let (lhs, rhs) = (input.clone(), input);
                let op = FloatOperationIr::Matmul(MatmulOpIr { lhs, rhs, out });
                OperationIr::Float(DType::F32, op)
            }
            Self::Transpose => float(BaseOperationIr::SwapDims(SwapDimsOpIr {
                input,
                out,
                dim1: 0,
                dim2: 1,
            })),
            Self::Flip => {
                let axes = vec![0];
                float(BaseOperationIr::Flip(FlipOpIr { input, out, axes }))
            }
            Self::FirstRow => {
                let [rows, columns] = out.shape.dims();
                let ranges = vec![(0..rows).into(), (0..columns).into()];
                let tensor = input;
                float(BaseOperationIr::Slice(SliceOpIr {
                    tensor,
                    ranges,
                    out,
                }))
            }
            Self::Sum => number(NumericOperationIr::SumDim(ReduceDimOpIr {
                input,
                out,
                axis: 0,
                accumulator_len: 1,
            })),
        }
    }
}

/// Which tensor an op reads, and whether for the last time.
#[derive(Debug, Clone, Copy)]
struct Pick {
    at: usize,
    is_last: bool,
}

/// A program: a list of steps for each of its devices.
#[derive(Debug, Clone)]
pub struct Program(Vec<Vec<Step>>);

impl Program {
    /// Returns the program of a seed.
    pub fn random(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        match rng.random_range(1..=MAX_DEVICES) {
            1 => {
                let steps = rng.random_range(STEPS);
                Self(vec![(0..steps).map(|_| step(&mut rng)).collect()])
            }
            devices => Self::on_several(devices, &mut rng),
        }
    }

    /// Returns a program whose devices take part in all-reduces and transfers.
    fn on_several(devices: usize, rng: &mut StdRng) -> Self {
        let mut steps = vec![Vec::new(); devices];
        for number in 0..rng.random_range(COLLECTIVE_STEPS) {
            for steps in &mut steps {
                let count = 0..rng.random_range(STEPS_BETWEEN);
                // While results are in flight, it depends on the schedule which reply is the first that
                // can report a fault.
                let fails = |step: &Step| matches!(step, Step::Unary(UnaryOp::Mismatch, _));
                steps.extend(count.map(|_| step(rng)).filter(|step| !fails(step)));
            }
            let rows = ROWS[rng.random_range(0..ROWS.len())];
            let first = rng.random_range(0..devices);
            let second = (first + rng.random_range(1..devices)) % devices;
            if rng.random_bool(0.3) {
                let (from, to, number) = (first as u32, second as u32, number as u8);
                steps[first].push(Step::Offer { rows, to, number });
                steps[second].push(Step::Take { rows, from, number });
                continue;
            }
            let mut group = match rng.random_bool(0.6) {
                true => (0..devices as u32).collect(),
                false => vec![first as u32, second as u32],
            };
            group.sort_unstable();
            let mean = rng.random_bool(0.5);
            for &rank in &group {
                let group = group.clone();
                steps[rank as usize].push(Step::AllReduce { rows, group, mean });
            }
        }
        Self(steps)
    }

    /// Returns the number of devices.
    pub fn devices(&self) -> usize {
        self.0.len()
    }
}

fn step(rng: &mut StdRng) -> Step {
    let rows = ROWS[rng.random_range(0..ROWS.len())];
    let at = rng.random_range(0..64);
    let pick = Pick {
        at,
        is_last: rng.random_bool(0.4),
    };
    match rng.random_range(0..40) {
        0..6 => Step::Upload {
            rows,
            value: rng.random_range(0..3),
        },
        6..9 => Step::Random { rows },
        9 => Step::Seed(rng.random()),
        10..14 => Step::Unary(UnaryOp::AddScalar, pick),
        14..16 => Step::Unary(UnaryOp::AddSelf, pick),
        16..18 => Step::Unary(UnaryOp::Square, pick),
        18..21 => Step::Unary(UnaryOp::Transpose, pick),
        21..23 => Step::Unary(UnaryOp::Flip, pick),
        23..25 => Step::Unary(UnaryOp::FirstRow, pick),
        25 => Step::Unary(UnaryOp::Sum, pick),
        26 => Step::Unary(UnaryOp::Mismatch, pick),
        27..29 => Step::Alias(pick),
        29..31 => Step::Drop(at),
        31..36 => Step::Read(at),
        36 => Step::Sync,
        _ => Step::Wait,
    }
}

/// A request that the program has made.
pub(crate) enum Request {
    Value(PendingValue),
    Sync(PendingSync),
}

/// What a program does next.
pub(crate) enum Progress {
    /// It goes on.
    Continues,
    /// It has made a request.
    Requested(Request),
    /// It needs the replies to all of its requests.
    Waits,
    /// It is done, and has made its last request.
    Done,
}

/// What a device of a program that runs is to do.
pub(crate) struct Run<'a> {
    steps: std::slice::Iter<'a, Step>,
    tensors: Vec<TensorIr>,
    has_made_last_request: bool,
}

impl<'a> Run<'a> {
    pub(crate) fn new(program: &'a Program, device: usize) -> Self {
        Self {
            steps: program.0[device].iter(),
            tensors: Vec::new(),
            has_made_last_request: false,
        }
    }

    /// Executes the next step. The session must not be full.
    pub(crate) fn step(&mut self, session: &SimulatedSession, now: Instant) -> Progress {
        let Some(step) = self.steps.next() else {
            if std::mem::replace(&mut self.has_made_last_request, true) {
                return Progress::Done;
            }
            // Until then, how much memory tensors hold depends on the schedule: an op that finds a
            // view's storage in use by a reply allocates, and otherwise works in the storage.
            for tensor in self.tensors.drain(..) {
                session.record(OperationIr::Drop(used_up(tensor)));
            }
            return Progress::Requested(Request::Sync(session.sync()));
        };
        self.execute(step, session, now)
            .unwrap_or(Progress::Continues)
    }

    /// Executes a step, if there is a tensor for it.
    fn execute(
        &mut self,
        step: &Step,
        session: &SimulatedSession,
        now: Instant,
    ) -> Option<Progress> {
        match step {
            Step::Upload { rows, value } => {
                let out = out(session, *rows, COLUMNS);
                session.upload(out.id, data(*rows, *value));
                self.tensors.push(made(out));
            }
            Step::Random { rows } => {
                let random = random(session, *rows);
                self.tensors.push(random);
            }
            Step::AllReduce { rows, group, mean } => {
                let tensor = used_up(random(session, *rows));
                let out = out(session, *rows, COLUMNS);
                let reduce = AllReduce {
                    tensor,
                    out: out.clone(),
                    mean: *mean,
                    lease_ranks: group.clone(),
                };
                session.all_reduce(reduce, now);
                self.tensors.push(made(out));
            }
            Step::Offer { rows, to, number } => {
                let tensor = used_up(random(session, *rows));
                session.offer(&tensor, [*number; 16], *to, now);
            }
            Step::Take { rows, from, number } => {
                let out = out(session, *rows, COLUMNS);
                session.take_offer(out.id, &out, [*number; 16], *from, now);
                self.tensors.push(made(out));
            }
            Step::Seed(seed) => session.seed(*seed),
            Step::Unary(op, pick) => self.unary(session, *op, *pick)?,
            Step::Alias(pick) => {
                let source = self.pick(kept(*pick))?;
                let id = session.new_tensor();
                session.alias(id, source.id);
                self.tensors.push(TensorIr { id, ..source });
            }
            Step::Drop(at) => {
                let is_last = true;
                let tensor = self.pick(Pick { at: *at, is_last })?;
                session.record(OperationIr::Drop(tensor));
            }
            Step::Read(at) => {
                let is_last = false;
                let tensor = self.pick(Pick { at: *at, is_last })?;
                return Some(Progress::Requested(Request::Value(session.read(&tensor))));
            }
            Step::Sync => return Some(Progress::Requested(Request::Sync(session.sync()))),
            Step::Wait => return Some(Progress::Waits),
        }
        None
    }

    /// Returns a tensor, and forgets it if it is picked for its last use.
    fn pick(&mut self, pick: Pick) -> Option<TensorIr> {
        let at = pick.at % self.tensors.len().max(1);
        let tensor = self.tensors.get(at)?.clone();
        let status = match pick.is_last {
            true => {
                self.tensors.swap_remove(at);
                TensorStatus::ReadWrite
            }
            false => TensorStatus::ReadOnly,
        };
        Some(TensorIr { status, ..tensor })
    }

    /// Records an op of a picked tensor, unless there is none that the op takes.
    fn unary(&mut self, session: &SimulatedSession, op: UnaryOp, pick: Pick) -> Option<()> {
        let pick = match op.reads_twice() {
            true => kept(pick),
            false => pick,
        };
        let input = self.pick(pick)?;
        let [rows, columns] = op.shape(input.shape.dims())?;
        let out = out(session, rows, columns);
        session.record(op.op(input, out.clone()));
        self.tensors.push(made(out));
        Some(())
    }
}

fn kept(pick: Pick) -> Pick {
    Pick {
        is_last: false,
        ..pick
    }
}

fn float(op: BaseOperationIr) -> OperationIr {
    OperationIr::BaseFloat(op)
}

fn number(op: NumericOperationIr) -> OperationIr {
    OperationIr::NumericFloat(DType::F32, op)
}

fn add_scalar(lhs: TensorIr, scalar: f64, out: TensorIr) -> OperationIr {
    let rhs = ScalarIr::Float(scalar);
    number(NumericOperationIr::AddScalar(ScalarOpIr { lhs, rhs, out }))
}

/// Makes a tensor of random numbers.
fn random(session: &SimulatedSession, rows: usize) -> TensorIr {
    let out = out(session, rows, COLUMNS);
    let distribution = Distribution::Default;
    let op = FloatOperationIr::Random(RandomOpIr {
        out: out.clone(),
        distribution,
    });
    session.record(OperationIr::Float(DType::F32, op));
    made(out)
}

/// Returns a tensor for its last use.
fn used_up(tensor: TensorIr) -> TensorIr {
    let status = TensorStatus::ReadWrite;
    TensorIr { status, ..tensor }
}

/// Returns a tensor for an op to make.
fn out(session: &SimulatedSession, rows: usize, columns: usize) -> TensorIr {
    let id: TensorId = session.new_tensor();
    TensorIr::uninit(id, Shape::new([rows, columns]), DType::F32)
}

/// Returns a tensor that an op has made.
fn made(out: TensorIr) -> TensorIr {
    TensorIr {
        status: TensorStatus::ReadOnly,
        ..out
    }
}

/// Returns what a program uploads. There are few different uploads, so that some are kept by the
/// worker and not sent again.
fn data(rows: usize, value: u32) -> TensorData {
    let values = (0..rows * COLUMNS).map(|at| (at % 31) as f32 * 0.25 + value as f32);
    TensorData::new(values.collect::<Vec<f32>>(), [rows, COLUMNS])
}
