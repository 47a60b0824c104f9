//! Carries out one session's work, in order, one piece at a time.
//!
//! Owned by the device's executor thread. Everything that can go wrong with an
//! op ends here as a [`Fault`]: a refusal of the dataflow table, an error or a
//! panic of the backend. Only bytes that are no ops at all end the session.

use std::{
    any::Any,
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use burn_backend::{DType, ExecutionError, TensorData};
use burn_ir::{
    DistributedOperationIr, FloatOperationIr, NumericOperationIr, OperationIr, TensorId, TensorIr,
};
use burn_std::future::DynFut;
use bytes::Bytes;
use tensord_proto::{
    codec::{CodecError, OpDecoder, op_name, tensor_bytes},
    v1::{Fault, FaultKind},
};

use super::{
    dataflow::{Dataflow, Refusal},
    uploads::{Next, Payload, Source, Uploads},
};
use crate::{backend::Engine, memory::SessionMemory};

/// Faults remembered for syncs to tell; a program that reads nothing and syncs
/// never would pile them up.
const MAX_UNREPORTED: usize = 64;

/// A piece of work, as it came off the wire.
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
}

/// What running one op came to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The frame has more.
    More,
    /// The frame is done.
    Done,
    /// The next op is an upload whose bytes are in the next payload.
    NeedsPayload,
}

/// What a piece of work gives the client.
pub(crate) enum Reply {
    Value {
        request: u64,
        result: Result<TensorData, Arc<Fault>>,
    },
    /// The device is still at it; the future gives the value.
    Later {
        request: u64,
        read: DynFut<Result<TensorData, ExecutionError>>,
        about: Blame,
    },
    Synced {
        request: u64,
        fault: Option<Arc<Fault>>,
    },
}

/// Who to name when an op turns out to have failed.
#[derive(Debug, Clone)]
pub(crate) struct Blame {
    op_number: u64,
    op_name: String,
    worker: Arc<str>,
}

impl Blame {
    pub(crate) fn fault(&self, kind: FaultKind, reason: impl Into<String>) -> Arc<Fault> {
        Arc::new(Fault {
            kind: kind.into(),
            op_number: self.op_number,
            op_name: self.op_name.clone(),
            worker: self.worker.to_string(),
            reason: reason.into(),
        })
    }
}

pub(crate) struct Runner {
    engine: Box<dyn Engine>,
    flow: Dataflow,
    decoder: OpDecoder,
    worker: Arc<str>,
    /// Ops of the frame being worked on.
    pending: VecDeque<OperationIr>,
    uploads: Uploads,
    /// An upload that waits for its payload, to be kept in a slot if there is one.
    awaiting: Option<(TensorIr, Option<u32>)>,
    op_number: u64,
    seed: u64,
    /// Random ops since the seed was set. A replay draws the same numbers, and
    /// so does a program that runs again, whatever else it did in between.
    draws: u64,
    /// Faults that no answer told of yet, oldest first.
    unreported: VecDeque<Arc<Fault>>,
}

impl Runner {
    pub(crate) fn new(
        engine: Box<dyn Engine>,
        memory: SessionMemory,
        worker: Arc<str>,
        seed: u64,
        uploads: Uploads,
    ) -> Self {
        Self {
            engine,
            flow: Dataflow::new(memory),
            decoder: OpDecoder::default(),
            worker,
            pending: VecDeque::new(),
            uploads,
            awaiting: None,
            op_number: 0,
            seed,
            draws: 0,
            unreported: VecDeque::new(),
        }
    }

    /// Ops carried out or refused so far.
    pub(crate) fn op_number(&self) -> u64 {
        self.op_number
    }

    /// Runs one op of the frame begun last.
    pub(crate) fn step(&mut self) -> Result<Step, CodecError> {
        if self.awaiting.is_some() {
            return Ok(Step::NeedsPayload);
        }
        match self.pending.pop_front() {
            Some(OperationIr::Init(init)) => return self.init(init.out),
            Some(op) => self.run_op(op),
            None => {}
        }
        self.end_step()
    }

    fn end_step(&self) -> Result<Step, CodecError> {
        if !self.pending.is_empty() {
            return Ok(Step::More);
        }
        self.uploads.finish()?;
        Ok(Step::Done)
    }

    /// What the session kept of its uploads, now that it is over.
    pub(crate) fn into_kept(self) -> impl Iterator<Item = Bytes> + Send {
        self.uploads.into_kept()
    }

    /// Begins a piece of work; ops are then run by [`step`](Self::step).
    pub(crate) fn begin(&mut self, work: Work) -> Result<Option<Reply>, CodecError> {
        // The other end's encoder counts these tensors, too.
        if let Work::Poison { id, .. } | Work::Alias { id, .. } = &work {
            self.decoder.note_tensor(*id);
        }
        match work {
            Work::Ops {
                count,
                encoded,
                contents,
            } => {
                self.pending = self.decoder.decode(&encoded, count)?.into();
                self.uploads.begin(contents);
            }
            Work::Poison { id, fault } => {
                self.op_number += 1;
                self.flow.insert_poisoned(id, Arc::new(fault));
            }
            Work::Alias { id, source } => self.alias(id, source),
            Work::Read { request, tensor } => return Ok(Some(self.read(request, tensor))),
            Work::Sync { request } => return Ok(Some(self.sync(request))),
            Work::Seed(seed) => (self.seed, self.draws) = (seed, 0),
        }
        Ok(None)
    }

    fn blame(&self, op_name: impl Into<String>) -> Blame {
        Blame {
            op_number: self.op_number,
            op_name: op_name.into(),
            worker: self.worker.clone(),
        }
    }

    fn fault_of(&mut self, refusal: Refusal, op_name: impl FnOnce() -> String) -> Arc<Fault> {
        match refusal {
            Refusal::Inherited(fault) => fault,
            Refusal::New(kind, reason) => {
                let fault = self.blame(op_name()).fault(kind, reason);
                if self.unreported.len() < MAX_UNREPORTED {
                    self.unreported.push_back(fault.clone());
                }
                fault
            }
        }
    }

    fn run_op(&mut self, op: OperationIr) {
        self.op_number += 1;
        if let Some(reason) = unsupported(&op) {
            let refusal = Refusal::New(FaultKind::Unsupported, reason.into());
            return self.fail(&op, refusal, false);
        }
        if let Err(refusal) = self.flow.begin(&op) {
            // A tensor without a value is dropped like any other.
            if !matches!(op, OperationIr::Drop(_)) {
                return self.fail(&op, refusal, false);
            }
        }
        let (engine, seed) = (&mut self.engine, mix(self.seed, self.draws));
        let draws = draws(&op);
        let for_engine = op.clone();
        let ran = catch_unwind(AssertUnwindSafe(|| match draws {
            true => engine.execute_seeded(for_engine, seed),
            false => engine.execute(for_engine),
        }));
        self.draws += u64::from(draws);
        match ran {
            Ok(()) => self.flow.finish(&op),
            Err(panic) => {
                let refusal = Refusal::New(FaultKind::Panic, panic_text(panic.as_ref()));
                self.fail(&op, refusal, true);
            }
        }
    }

    fn fail(&mut self, op: &OperationIr, refusal: Refusal, began: bool) {
        let fault = self.fault_of(refusal, || op_name(op));
        for tensor in self.flow.poison(op, &fault, began) {
            self.engine.forget(tensor);
        }
        // A panic may have come after some outputs were made.
        for out in op.outputs().filter(|_| began) {
            self.engine.forget(out.clone());
        }
    }

    /// Begins an upload; its bytes may still have to come.
    fn init(&mut self, out: TensorIr) -> Result<Step, CodecError> {
        let size = tensor_bytes(&out.shape, out.dtype)
            .ok_or_else(|| self.uploads.error("an upload beyond what can be addressed"))?;
        let source = match self.uploads.next(size)? {
            Next::Here(source) => source,
            Next::Payload(keep) => {
                self.awaiting = Some((out, keep));
                return Ok(Step::NeedsPayload);
            }
        };
        let memory = self.flow.reserve(size as u64);
        self.upload(&out, source, memory);
        self.end_step()
    }

    /// Goes on with the upload that [`step`](Self::step) wants a payload for.
    pub(crate) fn payload(&mut self, payload: Payload) -> Result<Step, CodecError> {
        let (out, keep) = self.awaiting.take().expect("it is given when asked for");
        // Kept even if the device has no room for it: the client counts on that.
        let source = self.uploads.keep(payload.bytes, keep)?;
        self.upload(&out, source, payload.memory);
        self.end_step()
    }

    fn upload(&mut self, out: &TensorIr, source: Source, memory: Result<SessionMemory, Refusal>) {
        self.op_number += 1;
        let Err(refusal) = self.try_upload(out, source, memory) else {
            return;
        };
        let fault = self.fault_of(refusal, || "Upload".into());
        self.flow.insert_poisoned(out.id, fault);
    }

    fn try_upload(
        &mut self,
        out: &TensorIr,
        source: Source,
        memory: Result<SessionMemory, Refusal>,
    ) -> Result<(), Refusal> {
        let memory = memory?;
        self.flow.check_new(out.id)?;
        let data = source.into_data(out)?;
        let engine = &mut self.engine;
        catch_unwind(AssertUnwindSafe(|| engine.upload(out.id, data)))
            .map_err(|panic| Refusal::New(FaultKind::Panic, panic_text(panic.as_ref())))?;
        self.flow
            .insert(out.id, out.shape.clone(), out.dtype, memory);
        Ok(())
    }

    fn alias(&mut self, id: TensorId, source: TensorId) {
        self.op_number += 1;
        if let Err(refusal) = self.flow.alias(id, source) {
            let fault = self.fault_of(refusal, || "Alias".into());
            self.flow.insert_poisoned(id, fault);
        } else {
            self.engine.alias(id, source);
        }
    }

    fn read(&mut self, request: u64, tensor: TensorIr) -> Reply {
        let failed = |fault| Reply::Value {
            request,
            result: Err(fault),
        };
        let about = self.blame("Read");
        if let Err(refusal) = self.flow.check(&tensor) {
            self.flow.release(&tensor);
            let fault = match refusal {
                Refusal::Inherited(fault) => fault,
                Refusal::New(kind, reason) => about.fault(kind, reason),
            };
            return failed(self.reported(fault));
        }
        self.flow.release(&tensor);
        let engine = &mut self.engine;
        let started = catch_unwind(AssertUnwindSafe(|| {
            let mut read = engine.read(tensor);
            let polled = Pin::new(&mut read).poll(&mut Context::from_waker(Waker::noop()));
            (read, polled)
        }));
        match started {
            Ok((_, Poll::Ready(Ok(data)))) => Reply::Value {
                request,
                result: Ok(data),
            },
            Ok((_, Poll::Ready(Err(e)))) => failed(about.fault(FaultKind::Backend, e.reason())),
            Ok((read, Poll::Pending)) => Reply::Later {
                request,
                read,
                about,
            },
            Err(panic) => failed(about.fault(FaultKind::Panic, panic_text(panic.as_ref()))),
        }
    }

    fn sync(&mut self, request: u64) -> Reply {
        let about = self.blame("Sync");
        let engine = &mut self.engine;
        let synced = catch_unwind(AssertUnwindSafe(|| engine.sync()));
        let fault = self.unreported.pop_front().or_else(|| match synced {
            Ok(Ok(())) => None,
            Ok(Err(e)) => Some(about.fault(FaultKind::Backend, e.reason())),
            Err(panic) => Some(about.fault(FaultKind::Panic, panic_text(panic.as_ref()))),
        });
        Reply::Synced { request, fault }
    }

    /// Notes that the client hears of `fault`, so that a sync does not tell it again.
    fn reported(&mut self, fault: Arc<Fault>) -> Arc<Fault> {
        self.unreported
            .retain(|unreported| !Arc::ptr_eq(unreported, &fault));
        fault
    }
}

/// Why Burn's interpreter could not even try `op`, if so.
fn unsupported(op: &OperationIr) -> Option<&'static str> {
    let quantized = op
        .inputs()
        .chain(op.outputs())
        .any(|t| matches!(t.dtype, DType::QFloat(_)));
    match op {
        _ if quantized => Some("quantized tensors are not supported by Burn's router"),
        OperationIr::Distributed(DistributedOperationIr::AllReduce(_)) => {
            Some("this version of tensord has no collectives")
        }
        _ => None,
    }
}

/// Whether `op` draws random numbers.
fn draws(op: &OperationIr) -> bool {
    matches!(
        op,
        OperationIr::Float(_, FloatOperationIr::Random(_))
            | OperationIr::NumericInt(_, NumericOperationIr::IntRandom(_))
    )
}

/// The seed of random op number `draw`. SplitMix64's finalizer (Steele, Lea and
/// Flood, "Fast splittable pseudorandom number generators", 2014), so that
/// neighbouring draws share nothing.
fn mix(seed: u64, draw: u64) -> u64 {
    let mut z = seed.wrapping_add(draw.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "it said nothing".into())
}
