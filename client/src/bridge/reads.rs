//! The reading half of an [`Exchange`].
//!
//! Burn's client does much for an op: it passes through a ring of 32 places, whose
//! users spin while it is full, and through an encoder, a socket and a decoder. So
//! reads that are asked for in a row share one op. Whoever asks leaves the tensor's
//! name here and goes on. Whoever first waits has Burn's client send all there are; if
//! nobody does for a moment, a thread of the runtime has. The worker's answers go from
//! the session straight to whoever waits for them.
//!
//! The tensor itself is [`Held`] meanwhile, or its drop could come before the op.
//! And it is let go on the thread that asked. Burn counts a tensor's holders, and
//! the last one says that it is dropped; but an op that another thread has just
//! begun no longer counts, and is said a moment later.

use std::{
    sync::{Arc, MutexGuard, PoisonError, Weak},
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

use burn::backend::{Remote, tensor::FloatTensor};
use burn_backend::{ExecutionError, TensorData};
use burn_ir::{BackendIr, CustomOpIr, HandleContainer, ScalarIr, TensorIr};
use burn_router::{RouterTensor, get_client};
use tokio::sync::oneshot;

use super::exchange::{Exchange, Tickets};
use crate::{
    backend::{Tensord, TensordChannel, TensordClient, TensordDevice, wait},
    session::Answer,
};

/// Custom op that has its inputs sent to those who wait for them.
pub(super) const READ: &str = "tensord.read";

/// How long reads that nobody waits for are gathered: the timer's own grain.
const GATHER: Duration = Duration::from_millis(1);

/// Reads that wait to be sent, at most; who asks for more sends them first.
const WAITING_READS: usize = 256;

/// Tensors that wait for the threads that asked for them, at most: a thread may
/// never ask again. Reads are sent by whoever asks while there are so many.
const LEFT_TENSORS: usize = 256;

/// What the threads that ask and those that send leave for each other.
#[derive(Default)]
pub(super) struct Reads {
    unsent: Vec<Read>,
    /// Of the last read asked for.
    number: u64,
    /// They are sent in a moment if nobody does it before.
    due: bool,
    /// Burn's client was given reads since it was told to send.
    unflushed: bool,
    /// Tensors to be let go, by the threads that asked for them.
    left: Vec<(ThreadId, FloatTensor<Remote>)>,
}

struct Read {
    number: u64,
    tensor: TensorIr,
    answer: Answer<TensorData>,
}

/// A read that was asked for.
pub(crate) struct Asked {
    answered: oneshot::Receiver<Result<TensorData, ExecutionError>>,
    held: Option<Held>,
}

/// A tensor that is asked for.
struct Held {
    /// Taken when dropped.
    tensor: Option<FloatTensor<Remote>>,
    exchange: Weak<Exchange>,
    number: u64,
    by: ThreadId,
    answered: bool,
}

impl Asked {
    pub(crate) async fn answer(mut self) -> Result<TensorData, ExecutionError> {
        if let Some(held) = &self.held {
            held.send();
        }
        let answer = (&mut self.answered).await;
        if let (Ok(_), Some(held)) = (&answer, &mut self.held) {
            held.answered = true;
        }
        answer.unwrap_or_else(|_| Err(unanswered()))
    }
}

impl Held {
    /// Has the read sent, with all that wait, if it waits itself.
    fn send(&self) {
        let Some(exchange) = self.exchange.upgrade() else {
            return;
        };
        if exchange.lock().reads.has_unsent(self.number) {
            exchange.send();
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // Without the bridge nobody reads it any more.
        let Some(exchange) = self.exchange.upgrade() else {
            return;
        };
        if !self.answered {
            // Not sent, it is sent no more; about to be, it is sent after this.
            let _giving = exchange.giving();
            let unsent = &mut exchange.lock().reads.unsent;
            unsent.retain(|read| read.number != self.number);
        }
        if self.by != thread::current().id() {
            let left = self.tensor.take().map(|tensor| (self.by, tensor));
            exchange.lock().reads.left.extend(left);
        }
    }
}

fn unanswered() -> ExecutionError {
    ExecutionError::with_context("the bridge to the leased device has ended, and the read with it")
}

impl Exchange {
    /// Reads a tensor, waiting for it.
    pub(crate) fn read(&self, tensor: FloatTensor<Remote>) -> Result<TensorData, ExecutionError> {
        let asked = self.ask_now(tensor);
        self.flush()?;
        wait(asked.answer())
    }

    /// Asks for a tensor; it is on its way when it is waited for, or soon.
    pub(crate) fn ask(self: &Arc<Self>, tensor: FloatTensor<Remote>) -> Asked {
        let me = thread::current().id();
        let (mine, full) = {
            let left = &mut self.lock().reads.left;
            let mine: Vec<_> = left.extract_if(.., |(by, _)| *by == me).collect();
            (mine, left.len() >= LEFT_TENSORS)
        };
        // Says so to Burn's client, which may wait.
        drop(mine);
        let asked = match full {
            true => self.ask_now(tensor),
            false => self.leave(tensor, me),
        };
        // Once it is there: a timer that finds nothing is over.
        self.send_soon();
        asked
    }

    /// Leaves a tensor's name to be sent, unless enough wait.
    fn leave(self: &Arc<Self>, tensor: FloatTensor<Remote>, by: ThreadId) -> Asked {
        let (answer, answered) = oneshot::channel();
        // Of a clone, it lets go of nothing.
        let ir = tensor.clone().into_ir();
        let (number, full) = {
            let reads = &mut self.lock().reads;
            reads.number += 1;
            reads.unsent.push(Read {
                number: reads.number,
                tensor: ir,
                answer,
            });
            (reads.number, reads.unsent.len() >= WAITING_READS)
        };
        if full {
            self.give(None);
        }
        let held = Held {
            tensor: Some(tensor),
            exchange: Arc::downgrade(self),
            number,
            by,
            answered: false,
        };
        Asked {
            answered,
            held: Some(held),
        }
    }

    /// Gives Burn's client a read, and those that wait.
    fn ask_now(&self, tensor: FloatTensor<Remote>) -> Asked {
        let (answer, answered) = oneshot::channel();
        self.give(Some((tensor, answer)));
        Asked {
            answered,
            held: None,
        }
    }

    /// Held while names become an op.
    fn giving(&self) -> MutexGuard<'_, ()> {
        self.giving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives Burn's client the reads that wait, and one more.
    fn give(&self, more: Option<(FloatTensor<Remote>, Answer<TensorData>)>) {
        let _giving = self.giving();
        let unsent = std::mem::take(&mut self.lock().reads.unsent);
        let unsent = unsent.into_iter().map(|read| (read.tensor, read.answer));
        let more = more.map(|(tensor, answer)| (tensor.into_ir(), answer));
        let (inputs, answers): (Vec<_>, Vec<_>) = unsent.chain(more).unzip();
        if inputs.is_empty() {
            return;
        }
        let ticket = {
            let mut tickets = self.lock();
            let ticket = tickets.next();
            tickets.asked.insert(ticket, (answers, Instant::now()));
            ticket
        };
        self.burn().client.register(CustomOpIr {
            id: READ.to_owned(),
            inputs,
            outputs: Vec::new(),
            scalars: vec![ScalarIr::UInt(ticket)],
        });
        self.lock().reads.unflushed = true;
    }

    /// Has Burn's client send what it was given. Waits until it took note.
    fn flush(&self) -> Result<(), ExecutionError> {
        {
            let mut tickets = self.lock();
            if !std::mem::take(&mut tickets.reads.unflushed) {
                return Ok(());
            }
            tickets.unsent_bytes = 0;
        }
        self.burn().device.flush()
    }

    /// Has Burn's client send what waits.
    fn send(&self) {
        self.give(None);
        if self.flush().is_err() {
            // Whoever waits hears of it, as the answers are dropped.
            self.give_up_all();
        }
    }

    /// Has what waits sent by another thread, unless somebody does it before.
    fn send_soon(self: &Arc<Self>) {
        if std::mem::replace(&mut self.lock().reads.due, true) {
            return;
        }
        let exchange = self.clone();
        self.runtime.spawn(async move {
            tokio::time::sleep(GATHER).await;
            if exchange.lock().reads.are_due() {
                // Burn's client takes note when it gets to it.
                let send = move || {
                    while exchange.lock().reads.are_due() {
                        exchange.send();
                    }
                };
                tokio::task::spawn_blocking(send);
            }
        });
    }
}

impl Reads {
    /// Whether there are reads for whoever has them sent when they are due. If not,
    /// none are due any more.
    fn are_due(&mut self) -> bool {
        self.due = self.unflushed || !self.unsent.is_empty();
        self.due
    }

    /// Whether the read of this number may not be on its way.
    fn has_unsent(&self, number: u64) -> bool {
        let unsent = |read: &Read| read.number == number;
        self.unflushed || self.unsent.iter().any(unsent)
    }
}

impl Tickets {
    fn take_asked(&mut self, ticket: &ScalarIr) -> Option<Vec<Answer<TensorData>>> {
        let (answers, _) = self.asked.remove(&ticket.elem::<u64>())?;
        Some(answers)
    }
}

type Handles = HandleContainer<<Tensord as BackendIr>::Handle>;

/// Carries the op out.
pub(super) fn read(
    exchange: &Exchange,
    handles: &mut Handles,
    ir: &CustomOpIr,
    device: TensordDevice,
) {
    let ticket = ir.scalars.first();
    let answers = ticket.and_then(|ticket| exchange.lock().take_asked(ticket));
    let mut answers = answers.into_iter().flatten();
    let mut reads = Vec::with_capacity(ir.inputs.len());
    for tensor in &ir.inputs {
        let answer = answers.next();
        let error = handles.take_error(tensor);
        if let Some(error) = error {
            // The reader may have gone.
            let _ = answer.map(|answer| answer.send(Err(error.cause().clone())));
            continue;
        }
        // Kinds differ in their types alone: all have the router's handle.
        let tensor: RouterTensor<TensordClient> = handles.get_float_tensor::<Tensord>(tensor);
        reads.extend(answer.map(|answer| (tensor.into_ir(), answer)));
    }
    get_client::<TensordChannel>(&device).read(reads);
}
