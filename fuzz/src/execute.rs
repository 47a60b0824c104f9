//! Runs ops of every variant, valid and invalid, through decoder, rules, tensor table and
//! backend.
//!
//! One seed determines one session. A session uses some variants; it begins with ops as
//! clients send them and mutates them. An op that was executed may be mutated again, so
//! ops become less and less like the first ones. At the end a few frames are sent with
//! random bytes changed.
//!
//! Asserted for every op: it is executed or becomes a fault; an executed op made the shapes
//! and dtypes that it declares; tensord's own code does not panic. Asserted for every
//! session: it returns all the memory that it took.

mod mutate;
mod panics;
pub mod report;
pub mod templates;
mod tensor_pool;
pub mod variants;

use burn_ir::{BackendIr, CustomOpIr, IrVisitorMut, OperationIr, TensorIr, TensorStatus};
use tensord_proto::{
    codec::{OpEncoder, OpName, tensor_bytes},
    content,
    v1::{Ops, frame},
};
use tensord_worker::{
    CustomOps, OpResult, PortableOp,
    custom::Tensors,
    testing::{OpOutcome, StandaloneSession, StepOutcome},
};

use self::{
    panics::{caught, install_panic_hook, take_own_panic},
    report::Report,
    templates::Templates,
    tensor_pool::{Batch, MAX_BYTES, TensorPool},
};
use crate::{frames, guard, seeds::Rng};

/// Memory of the device. It is small, so that it is full at times and no op takes long.
const CAPACITY_BYTES: u64 = 2 << 20;

/// Number of variants in a session, and of ops that a session makes for them.
const VARIANTS: usize = 16;
const ROUNDS: usize = 768;

/// Maximum number of executed ops of a variant that a session keeps for later mutations.
const OPS_PER_VARIANT: usize = 12;

/// Maximum number of corrupted frames at the end of a session.
const MAX_CORRUPTED_FRAMES: usize = 12;

/// Receives the position of a session, so that a failure can be located.
pub trait Position {
    /// Called before op number `op` of the session with `seed` runs. The op was made for
    /// `variant`.
    fn at(&mut self, seed: u64, op: u64, variant: usize);
}

impl<F: FnMut(u64, u64, usize)> Position for F {
    fn at(&mut self, seed: u64, op: u64, variant: usize) {
        self(seed, op, variant);
    }
}

/// Returns the seed of session `number` of a run.
pub fn session_seed(run: u64, number: u64) -> u64 {
    let mut rng = Rng(run ^ number.wrapping_mul(0xd134_2543_de82_ef95));
    rng.next();
    rng.next()
}

/// Runs the session with `seed`, and counts the outcomes of its ops.
///
/// # Errors
///
/// When an assertion fails; the message names the op.
pub fn run(
    seed: u64,
    templates: &Templates,
    report: &mut Report,
    position: &mut dyn Position,
) -> Result<(), String> {
    install_panic_hook();
    let rng = Rng(seed);
    let mut program = Program {
        session: StandaloneSession::open(CAPACITY_BYTES, seed, &custom_ops()),
        encoder: OpEncoder::default(),
        seed,
        frames: 0,
        ops: 0,
        rng,
        tensor_pool: TensorPool::default(),
        left: Vec::new(),
        templates,
        report,
        position,
    };
    let result = program.run();
    let ops = program.ops;
    result.map_err(|what| format!("session {seed:#x}, op {ops}: {what}"))?;
    let Program { session, .. } = program;
    let kept = session.close();
    report.sessions += 1;
    match kept {
        0 => Ok(()),
        kept => Err(format!(
            "session {seed:#x} ended, but {kept} bytes are still in use"
        )),
    }
}

struct Program<'a> {
    session: StandaloneSession,
    encoder: OpEncoder,
    seed: u64,
    frames: u64,
    ops: u64,
    rng: Rng,
    tensor_pool: TensorPool,
    /// Tensors that the next frame drops.
    left: Vec<TensorIr>,
    templates: &'a Templates,
    report: &'a mut Report,
    position: &'a mut dyn Position,
}

/// Ops of a variant that the next mutations start from.
struct VariantOps {
    variant: usize,
    ops: Vec<OperationIr>,
}

impl Program<'_> {
    fn run(&mut self) -> Result<(), String> {
        let mut lines: Vec<VariantOps> = (0..VARIANTS)
            .map(|_| {
                let variant = self.rng.below(self.templates.len());
                let ops = vec![self.templates.get(variant).1.clone()];
                VariantOps { variant, ops }
            })
            .collect();
        let mut last = None;
        for _ in 0..ROUNDS {
            let at = self.rng.below(lines.len());
            last = Some(self.round(&mut lines[at])?);
        }
        self.corrupt(&last.unwrap_or_default())
    }

    /// Makes an op, mostly mutated, and sends it with ops that make its inputs. Returns the
    /// frame's body.
    fn round(&mut self, line: &mut VariantOps) -> Result<Ops, String> {
        let which = self.rng.below(line.ops.len());
        let mut op = line.ops[which].clone();
        let mutations = match self.rng.below(8) {
            0..=3 => 0,
            4..=6 => 1,
            _ => 3,
        };
        (0..mutations).for_each(|_| mutate::mutate(&mut op, &mut self.rng));
        let mut batch = Batch::default();
        batch.ops.extend(self.left.drain(..).map(OperationIr::Drop));
        self.supply_inputs(&mut op, &mut batch);
        let kept = op.clone();
        let name = OpName::of(&op);
        match op {
            OperationIr::Init(init) => {
                let bytes = tensor_bytes(&init.out.shape, init.out.dtype);
                // An upload that declares more bytes than it brings would end the session.
                if bytes.is_none_or(|bytes| bytes > MAX_BYTES) {
                    return Ok(Ops::default());
                }
                let mut bytes = tensor_pool::contents(&init.out, &mut self.rng);
                if self.rng.below(4) == 0
                    && let Some(byte) = bytes.first_mut()
                {
                    *byte = 2;
                }
                batch.upload(init.out, bytes);
            }
            op => batch.ops.push(op),
        }
        let body = self.encode(&batch);
        self.send(body.clone())
            .map_err(|e| format!("the session refused a valid frame: {e}"))?;
        let mut outcome = None;
        for _ in 0..batch.ops.len() {
            outcome = self.step(line.variant, Some(&kept))?;
        }
        self.idle(line.variant)?;
        let executed = outcome == Some(OpOutcome::Executed);
        self.settle(&kept, executed);
        let variant = self.templates.number(name);
        if executed && mutations > 0 && variant == Some(line.variant) && is_small(&kept) {
            match line.ops.len() {
                0..OPS_PER_VARIANT => line.ops.push(kept),
                len => {
                    // The first stays as it is.
                    let at = 1 + self.rng.below(len - 1);
                    line.ops[at] = kept;
                }
            }
        }
        Ok(body)
    }

    /// Gives the tensors of `op` ids, mostly of tensors that are there and as declared.
    fn supply_inputs(&mut self, op: &mut OperationIr, batch: &mut Batch) {
        let mischief = self.rng.below(24);
        let (tensor_pool, rng) = (&mut self.tensor_pool, &mut self.rng);
        let is_drop = matches!(op, OperationIr::Drop(_));
        each_tensor(op, |tensor| {
            let is_output = tensor.status == TensorStatus::NotInit;
            tensor.id = match (mischief, is_output) {
                // One that exists already, or is taken for what it is not.
                (0, true) | (1, false) => match tensor_pool.any(rng) {
                    Some(any) => any.id,
                    None => tensor_pool.id(),
                },
                // An id that was never used.
                (2, false) => tensor_pool.id(),
                (_, true) => tensor_pool.id(),
                (_, false) => {
                    let found = tensor_pool.find(&tensor.shape, tensor.dtype, batch, rng);
                    found.unwrap_or_else(|| tensor_pool.id())
                }
            };
            if !is_output {
                tensor.status = match is_drop || rng.below(3) == 0 {
                    true => TensorStatus::ReadWrite,
                    false => TensorStatus::ReadOnly,
                };
            }
        });
    }

    fn encode(&mut self, batch: &Batch) -> Ops {
        let (mut encoded, mut contents) = (Vec::new(), Vec::new());
        for op in &batch.ops {
            self.encoder.encode(op, &mut encoded);
        }
        self.encoder.finish(&mut encoded);
        let entries = batch.uploads.iter();
        entries.for_each(|entry| content::put(&mut contents, entry));
        Ops {
            count: batch.ops.len() as u32,
            encoded: encoded.into(),
            contents: contents.into(),
        }
    }

    fn send(&mut self, body: Ops) -> Result<(), String> {
        self.frames += 1;
        let frame = frames::encode(self.frames, 0, Some(frame::Body::Ops(body)));
        let session = &mut self.session;
        caught(|| guard::with_guards(|| session.receive(frame.into())))?
    }

    /// Executes one step of the session, and returns the outcome of its op.
    fn step(
        &mut self,
        variant: usize,
        op: Option<&OperationIr>,
    ) -> Result<Option<OpOutcome>, String> {
        self.ops += 1;
        self.position.at(self.seed, self.ops, variant);
        let session = &mut self.session;
        let stepped = caught(|| guard::with_guards(|| session.step()));
        let about = |what: String| format!("{what}\nthe op was: {op:?}");
        let stepped = stepped.map_err(about)?.map_err(about)?;
        let StepOutcome::Op(done) = stepped else {
            return Ok(None);
        };
        if let Some(panic) = take_own_panic() {
            return Err(about(format!("{} made tensord panic: {panic}", done.name)));
        }
        if let Some(mismatch) = done.mismatch {
            return Err(about(format!("{}: {mismatch}", done.name)));
        }
        if let Some(number) = self.templates.number(done.name) {
            self.report.note(number, &done.outcome);
        }
        Ok(Some(done.outcome))
    }

    /// Executes the remaining steps of a frame.
    fn idle(&mut self, variant: usize) -> Result<(), String> {
        for _ in 0..8 {
            if self.session_is_idle(variant)? {
                return Ok(());
            }
        }
        Err("the session does not become idle".into())
    }

    fn session_is_idle(&mut self, variant: usize) -> Result<bool, String> {
        self.position.at(self.seed, self.ops, variant);
        let session = &mut self.session;
        let stepped = caught(|| guard::with_guards(|| session.step()))??;
        Ok(matches!(stepped, StepOutcome::Idle))
    }

    /// Records which tensors exist after `op`, and which the next frame drops.
    fn settle(&mut self, op: &OperationIr, executed: bool) {
        for input in op.inputs() {
            if input.status == TensorStatus::ReadWrite {
                self.tensor_pool.forget(input.id);
            }
        }
        for out in op.outputs() {
            let read = TensorIr {
                status: TensorStatus::ReadOnly,
                ..out.clone()
            };
            let bytes = tensor_bytes(&out.shape, out.dtype).unwrap_or(usize::MAX);
            // A few outputs without a value are kept, so that later ops read them.
            let keep = match executed {
                true => bytes <= MAX_BYTES,
                false => self.rng.below(48) == 0,
            };
            match keep {
                true => self.left.extend(self.tensor_pool.keep(read, &mut self.rng)),
                false => self.left.push(read),
            }
        }
    }

    /// Sends the last frame again with a few bytes changed, until the session refuses one
    /// as a whole, after which no session continues.
    fn corrupt(&mut self, last: &Ops) -> Result<(), String> {
        for _ in 0..MAX_CORRUPTED_FRAMES {
            self.frames += 1;
            let body = match self.rng.below(4) {
                0 => last.clone(),
                _ => {
                    let mut encoded = last.encoded.to_vec();
                    corrupt_bytes(&mut encoded, &mut self.rng);
                    Ops {
                        encoded: encoded.into(),
                        ..last.clone()
                    }
                }
            };
            let is_whole = body == *last;
            let mut frame = frames::encode(self.frames, 0, Some(frame::Body::Ops(body)));
            if is_whole {
                corrupt_bytes(&mut frame, &mut self.rng);
            }
            let session = &mut self.session;
            let taken = caught(|| guard::with_guards(|| session.receive(frame.into())))?;
            let taken = taken.is_ok() && self.finish_corrupted()?;
            if let Some(panic) = take_own_panic() {
                return Err(format!("a corrupted frame made tensord panic: {panic}"));
            }
            if !taken {
                self.report.frames_refused += 1;
                break;
            }
            self.report.frames_taken += 1;
        }
        Ok(())
    }

    /// Executes the ops of a corrupted frame. Returns `false` if the session cannot
    /// continue.
    fn finish_corrupted(&mut self) -> Result<bool, String> {
        // A frame of a few bytes may stand for many ops.
        for _ in 0..10_000 {
            self.ops += 1;
            self.position.at(self.seed, self.ops, self.templates.len());
            let session = &mut self.session;
            match caught(|| guard::with_guards(|| session.step()))? {
                Err(_) => return Ok(false),
                Ok(StepOutcome::Idle) => return Ok(true),
                Ok(StepOutcome::Other) => {}
                Ok(StepOutcome::Op(done)) => {
                    if let Some(mismatch) = done.mismatch {
                        return Err(format!("{} of a corrupted frame: {mismatch}", done.name));
                    }
                    if let Some(number) = self.templates.number(done.name) {
                        self.report.note(number, &done.outcome);
                    }
                }
            }
        }
        Ok(false)
    }
}

/// Returns whether an op is small enough to be kept for later mutations.
fn is_small(op: &OperationIr) -> bool {
    let is_small = |tensor: &TensorIr| {
        let bytes = tensor_bytes(&tensor.shape, tensor.dtype);
        bytes.is_some_and(|bytes| bytes <= MAX_BYTES) && tensor.shape.as_slice().len() <= 6
    };
    op.inputs().chain(op.outputs()).all(is_small)
}

fn corrupt_bytes(bytes: &mut [u8], rng: &mut Rng) {
    if bytes.is_empty() {
        return;
    }
    for _ in 0..=rng.below(3) {
        let at = rng.below(bytes.len());
        bytes[at] = match rng.below(3) {
            0 => rng.next() as u8,
            1 => bytes[at] ^ (1 << rng.below(8)),
            _ => rng.below(4) as u8,
        };
    }
}

/// Calls `visit` with each tensor of an op.
pub(crate) fn each_tensor(op: &mut OperationIr, visit: impl FnMut(&mut TensorIr)) {
    struct Visit<F>(F);
    impl<F: FnMut(&mut TensorIr)> IrVisitorMut for Visit<F> {
        fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
            (self.0)(tensor);
        }
    }
    op.visit_mut(&mut Visit(visit));
}

/// The custom op that the template for custom ops calls.
#[derive(Clone)]
struct Negate;

impl PortableOp for Negate {
    fn run<B: BackendIr>(
        &self,
        tensors: &mut Tensors<B>,
        call: &CustomOpIr,
        _: &B::Device,
    ) -> OpResult {
        let (Some(x), Some(y)) = (call.inputs.first(), call.outputs.first()) else {
            return Ok(());
        };
        let x = tensors.get_float_tensor::<B>(x);
        tensors.register_float_tensor::<B>(&y.id, B::float_neg(x));
        Ok(())
    }
}

fn custom_ops() -> CustomOps {
    CustomOps::new().portable("swish", Negate)
}

#[cfg(test)]
mod tests;
