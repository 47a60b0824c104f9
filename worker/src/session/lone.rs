//! A session on Flex by itself: no connection, no executor, no neighbours.
//!
//! The caller brings frames as a client's connection would, and gives the session its
//! turns one op at a time. It learns of each op what became of it.

use std::sync::Arc;

use burn_backend::TensorData;
use burn_flex::{Flex, FlexDevice};
use burn_ir::TensorIr;
use bytes::Bytes;
use tensord_proto::{
    codec::OpName,
    ids::WorkerId,
    v1::{self, FaultKind},
};
use tensord_transport::duplex::Duplex;

use super::{
    OUTBOX_BYTES, WINDOW_BYTES,
    intake::{Item, item},
    runner::{Reply, Request, Runner, Seen, Step, Together, Work},
    uploads::Uploads,
};
use crate::{
    backend::BurnDevice,
    collective::{Arrived, Failure, Roster},
    custom::CustomOps,
    memory::DeviceMemory,
};

/// What one session may keep of its uploads.
const KEPT_BYTES: u64 = 1 << 20;

/// A session on Flex, alone in its lease, in the caller's thread.
pub struct LoneSession {
    /// Its end of the wire.
    wire: Duplex,
    runner: Runner,
    memory: Arc<DeviceMemory>,
    replies: Vec<Reply>,
}

/// What one turn came to.
#[derive(Debug)]
pub enum Stepped {
    /// An op had its turn.
    Op(OpReport),
    /// Something else was carried out.
    Other,
    /// There is no work.
    Idle,
}

/// What became of one op.
#[derive(Debug)]
pub struct OpReport {
    /// Its name.
    pub name: OpName,
    /// Whether it was executed.
    pub became: Became,
    /// How an output that is there differs from what the op declares, if one does.
    pub differs: Option<String>,
}

/// Whether an op was executed.
#[derive(Debug, Clone, PartialEq)]
pub enum Became {
    /// The backend carried it out.
    Executed,
    /// It has a fault of its own: a rule that it breaks, or a panic of the backend.
    Refused(FaultKind, String),
    /// One of its inputs has no value, because of an earlier fault.
    Poisoned,
}

impl LoneSession {
    /// Opens a session on a device of `capacity_bytes`, with Burn's ops and `custom_ops`.
    pub fn open(capacity_bytes: u64, seed: u64, custom_ops: &CustomOps) -> Self {
        let device = BurnDevice::<Flex>::shared(FlexDevice, custom_ops);
        let memory = DeviceMemory::new(capacity_bytes);
        let share = v1::LeaseShare {
            worker_id: 1,
            worker: "lone".into(),
            ..v1::LeaseShare::default()
        };
        let together = Together {
            roster: Arc::new(Roster::new(vec![share], WorkerId(1))),
            place: 0,
            bucket_bytes: Arc::default(),
        };
        let runner = Runner::new(
            device.open(),
            memory.open(),
            "lone".into(),
            seed,
            Uploads::new(KEPT_BYTES, Vec::new()),
            together,
        );
        Self {
            wire: Duplex::new(OUTBOX_BYTES, u64::MAX, WINDOW_BYTES),
            runner,
            memory,
            replies: Vec::new(),
        }
    }

    /// Takes a frame of the client's.
    ///
    /// # Errors
    ///
    /// When it breaks a rule, which ends a session: this one must be closed.
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

    /// Gives the session a turn: for one op, or another piece of work.
    ///
    /// # Errors
    ///
    /// When a frame breaks a rule, or needs bytes that do not come: the session must be
    /// closed.
    pub fn step(&mut self) -> Result<Stepped, String> {
        let next = self.runner.next_planned();
        let next = next.map(|op| (OpName::of(op), op.outputs().cloned().collect::<Vec<_>>()));
        match self.runner.step().map_err(|e| e.to_string())? {
            Step::Ran(credit, reply) => {
                self.wire.inbox().consume(credit);
                self.replies.extend(reply);
            }
            Step::NeedsPayload => return Err("a payload that does not come".into()),
            Step::NeedsArrival | Step::Closed => {}
            Step::Idle => return Ok(Stepped::Idle),
        }
        while self.answer() {}
        let (Some((name, outputs)), Some(seen)) = (next, self.runner.take_seen()) else {
            return Ok(Stepped::Other);
        };
        let became = match seen {
            Seen::Ran => Became::Executed,
            Seen::Refused(kind, reason) => Became::Refused(kind, reason),
            Seen::Inherited => Became::Poisoned,
        };
        let differs = match became {
            Became::Executed => outputs.iter().find_map(|out| self.difference(out)),
            _ => None,
        };
        Ok(Stepped::Op(OpReport {
            name,
            became,
            differs,
        }))
    }

    /// How what the backend has for `out` differs from what was declared.
    fn difference(&mut self, out: &TensorIr) -> Option<String> {
        let Some((shape, dtype)) = self.runner.made(out) else {
            return Some(format!("there is no output {}", out.id.value()));
        };
        let differs = (&shape, dtype) != (&out.shape, out.dtype);
        differs.then(|| {
            format!(
                "the backend made {shape} of {dtype:?}, declared is {} of {:?}",
                out.shape, out.dtype
            )
        })
    }

    /// Answers what the session asks of its lease, where it is alone.
    fn answer(&mut self) -> bool {
        let requests = self.runner.take_requests(true);
        let any = !requests.is_empty();
        for request in requests {
            match request {
                Request::Call(call) => {
                    let reduced = match call.arrival.fault {
                        Some(fault) => Err(Failure::Inherited(fault)),
                        None => Ok(Arrived::Reduced(call.bytes)),
                    };
                    self.runner.arrive(call.ticket, reduced);
                }
                // There is nobody to take it, and nobody who offers.
                Request::Offer(..) | Request::Take(..) | Request::Later(_) => {}
            }
        }
        any
    }

    /// Reads a tensor.
    ///
    /// # Errors
    ///
    /// The fault, if it has no value.
    pub fn read(&mut self, tensor: TensorIr) -> Result<TensorData, String> {
        self.replies.clear();
        self.plan(Work::Read { request: 0, tensor }, 0)?;
        while !matches!(self.step()?, Stepped::Idle) {}
        match self.replies.pop() {
            Some(Reply::Value { result, .. }) => result.map_err(|fault| fault.to_string()),
            _ => Err("the read has no answer".into()),
        }
    }

    /// Number of its tensors, with a value or a fault.
    pub fn tensors(&self) -> usize {
        self.runner.tensors()
    }

    /// What it holds of its device's memory.
    pub fn live_bytes(&self) -> u64 {
        self.memory.live_bytes()
    }

    /// Ends the session, and says how much of the device's memory it did not give back.
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
