//! The reading half of an [`Exchange`].
//!
//! An op is costly in Burn's client: it passes through a ring buffer of 32 entries, on
//! which threads spin while it is full, and through an encoder, a socket and a decoder. So
//! successive reads share one op. A read queues the tensor's id here and returns.
//! The first reader that waits has Burn's client send all queued reads; if none waits
//! within [`BATCH_DELAY`], a thread of the runtime sends them. The worker's answers go from
//! the session straight to the readers.
//!
//! [`RequestedTensor`] keeps the tensor alive meanwhile; otherwise its drop could be
//! registered before the read. The tensor is dropped on the thread that requested the read.
//! Burn counts a tensor's handles, and dropping the last one registers a drop. An op of the
//! requesting thread gives up its handle a moment before the op is registered. If another
//! thread dropped the last handle in between, the drop would be registered before the op.

use std::{
    sync::{Arc, MutexGuard, PoisonError, Weak},
    thread::{self, ThreadId},
    time::Duration,
};

use burn::backend::{Remote, tensor::FloatTensor};
use burn_backend::{ExecutionError, TensorData};
use burn_ir::{CustomOpIr, ScalarIr, TensorIr};
use burn_router::{RouterTensor, get_client};
use tensord_session::Answer;
use tokio::sync::oneshot;

use super::{Exchange, SetRegistered, Ticket, Tickets};
use crate::{
    backend::{Tensord, TensordChannel, TensordClient, TensordDevice, block_on},
    bridge::forward::Handles,
};

/// The custom op that reads its inputs and sends their values to the readers.
pub(super) const READ: &str = "tensord.read";

/// How long reads that nobody awaits are queued before they are sent: the resolution
/// of the runtime's timer.
const BATCH_DELAY: Duration = Duration::from_millis(1);

/// Most reads that may be queued. The read that reaches the limit gives all of them to
/// Burn's client.
const MAX_QUEUED_READS: usize = 256;

/// Most tensors that may wait to be dropped by the threads that requested their reads, as a
/// thread may never read again. At this limit, each read goes to Burn's client at once.
const MAX_TENSORS_TO_DROP: usize = 256;

/// State shared by the threads that request reads and those that send them.
#[derive(Default)]
pub(super) struct ReadQueue {
    unsent: Vec<QueuedRead>,
    /// Number of the last read that was queued.
    number: u64,
    /// A timer or thread is running that will send the queued reads.
    send_scheduled: bool,
    /// Whether Burn's client has received reads since its last flush.
    unflushed: bool,
    /// Tensors, each with the thread that must drop the tensor.
    tensors_to_drop: Vec<(ThreadId, FloatTensor<Remote>)>,
}

struct QueuedRead {
    number: u64,
    tensor: TensorIr,
    answer: Answer<TensorData>,
}

/// A read that was requested.
pub(crate) struct ReadHandle {
    answered: oneshot::Receiver<Result<TensorData, ExecutionError>>,
    held: Option<RequestedTensor>,
}

/// Keeps the tensor of a pending read alive.
struct RequestedTensor {
    /// `None` once [`Drop`] has queued the tensor for its owner thread.
    tensor: Option<FloatTensor<Remote>>,
    exchange: Weak<Exchange>,
    number: u64,
    owner_thread: ThreadId,
    answered: bool,
}

impl ReadHandle {
    pub(crate) async fn answer(mut self) -> Result<TensorData, ExecutionError> {
        if let Some(held) = &self.held {
            held.send();
        }
        let answer = (&mut self.answered).await;
        if let (Ok(_), Some(held)) = (&answer, &mut self.held) {
            held.answered = true;
        }
        answer.unwrap_or_else(|_| Err(no_reply_error()))
    }
}

impl RequestedTensor {
    /// Sends all queued reads, if this read may still be queued.
    fn send(&self) {
        let Some(exchange) = self.exchange.upgrade() else {
            return;
        };
        if exchange.lock().reads.has_unsent(self.number) {
            exchange.send();
        }
    }
}

impl Drop for RequestedTensor {
    fn drop(&mut self) {
        // Without the bridge there is no read to cancel.
        let Some(exchange) = self.exchange.upgrade() else {
            return;
        };
        if !self.answered {
            // Cancels the read if it is still queued. If another thread is making
            // an op of it, this lock waits until the op is registered.
            let _giving = exchange.read_op_lock();
            let unsent = &mut exchange.lock().reads.unsent;
            unsent.retain(|read| read.number != self.number);
        }
        if self.owner_thread != thread::current().id() {
            let tensors_to_drop = self.tensor.take().map(|tensor| (self.owner_thread, tensor));
            exchange
                .lock()
                .reads
                .tensors_to_drop
                .extend(tensors_to_drop);
        }
    }
}

/// The error of reads whose bridge has ended.
pub(super) fn no_reply_error() -> ExecutionError {
    ExecutionError::with_context("the read failed: the bridge to the leased device has ended")
}

/// The error of reads that the bridge did not take, as Burn's server panicked. It executes ops
/// in a thread of this process, before tensord's client gets them.
pub(super) fn session_ended_error() -> ExecutionError {
    ExecutionError::with_context(
        "the read failed: Burn 0.22.1 has ended its session with this device, as an earlier op \
         made it panic, which it has printed with the place. A cast from one integer type to \
         another (BaseInt(Cast)) does that on every remote device: use \
         tensord_client::data::cast_int, or make tensors of the right type; then request a new \
         lease. Other devices and leases are not affected",
    )
}

/// Fails the reads that wait for these answers.
pub(super) fn fail_reads(answers: Vec<Answer<TensorData>>, error: fn() -> ExecutionError) {
    for answer in answers {
        // The reader may have been dropped.
        let _ = answer.send(Err(error()));
    }
}

impl Exchange {
    /// Reads a tensor and waits for its value.
    pub(crate) fn read(&self, tensor: FloatTensor<Remote>) -> Result<TensorData, ExecutionError> {
        let requested = self.submit_now(tensor);
        self.flush()?;
        block_on(requested.answer())
    }

    /// Requests a tensor. The read is sent when its answer is awaited, or within
    /// [`BATCH_DELAY`].
    pub(crate) fn request(self: &Arc<Self>, tensor: FloatTensor<Remote>) -> ReadHandle {
        let me = thread::current().id();
        let (mine, full) = {
            let tensors_to_drop = &mut self.lock().reads.tensors_to_drop;
            let mine: Vec<_> = tensors_to_drop
                .extract_if(.., |(owner_thread, _)| *owner_thread == me)
                .collect();
            (mine, tensors_to_drop.len() >= MAX_TENSORS_TO_DROP)
        };
        // Outside the lock: this registers drops with Burn's client, which may block.
        drop(mine);
        let requested = match full {
            true => self.submit_now(tensor),
            false => self.queue(tensor, me),
        };
        // The read must be queued before this: a timer that finds no reads ends.
        self.schedule_send();
        requested
    }

    /// Queues a read. With [`MAX_QUEUED_READS`] queued, passes all of them to Burn's client.
    fn queue(self: &Arc<Self>, tensor: FloatTensor<Remote>, owner_thread: ThreadId) -> ReadHandle {
        let (answer, answered) = oneshot::channel();
        // `into_ir` of a clone does not release the tensor.
        let ir = tensor.clone().into_ir();
        let (number, full) = {
            let reads = &mut self.lock().reads;
            reads.number += 1;
            reads.unsent.push(QueuedRead {
                number: reads.number,
                tensor: ir,
                answer,
            });
            (reads.number, reads.unsent.len() >= MAX_QUEUED_READS)
        };
        if full {
            self.submit_reads(None);
        }
        let held = RequestedTensor {
            tensor: Some(tensor),
            exchange: Arc::downgrade(self),
            number,
            owner_thread,
            answered: false,
        };
        ReadHandle {
            answered,
            held: Some(held),
        }
    }

    /// Passes a read of `tensor`, and all queued reads, to Burn's client.
    fn submit_now(&self, tensor: FloatTensor<Remote>) -> ReadHandle {
        let (answer, answered) = oneshot::channel();
        self.submit_reads(Some((tensor, answer)));
        ReadHandle {
            answered,
            held: None,
        }
    }

    /// Acquires the lock that a thread holds while it makes an op of queued reads; blocks
    /// meanwhile.
    fn read_op_lock(&self) -> MutexGuard<'_, ()> {
        self.read_op_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes one op for all queued reads and `more` to Burn's client.
    fn submit_reads(&self, more: Option<(FloatTensor<Remote>, Answer<TensorData>)>) {
        let _giving = self.read_op_lock();
        let unsent = std::mem::take(&mut self.lock().reads.unsent);
        let unsent = unsent.into_iter().map(|read| (read.tensor, read.answer));
        let more = more.map(|(tensor, answer)| (tensor.into_ir(), answer));
        let (inputs, answers): (Vec<_>, Vec<_>) = unsent.chain(more).unzip();
        if inputs.is_empty() {
            return;
        }
        let ticket = {
            let mut tickets = self.lock();
            if tickets.is_closed {
                drop(tickets);
                return fail_reads(answers, no_reply_error);
            }
            let ticket = tickets.new_ticket();
            tickets.requested.insert(ticket, Ticket::new(answers));
            ticket
        };
        let registered = SetRegistered::new(self, ticket);
        self.burn().client.register(CustomOpIr {
            id: READ.to_owned(),
            inputs,
            outputs: Vec::new(),
            scalars: vec![ScalarIr::UInt(ticket)],
        });
        drop(registered);
        self.lock().reads.unflushed = true;
    }

    /// Flushes Burn's client if it has received reads since its last flush. Blocks until the
    /// client has accepted the flush.
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

    /// Has Burn's client send all queued reads.
    fn send(&self) {
        self.submit_reads(None);
        if self.flush().is_err() {
            // The readers get an error, as this drops their answers.
            self.drop_all();
        }
    }

    /// Has another thread send the queued reads after [`BATCH_DELAY`], unless they were
    /// sent by then.
    fn schedule_send(self: &Arc<Self>) {
        if std::mem::replace(&mut self.lock().reads.send_scheduled, true) {
            return;
        }
        let exchange = self.clone();
        self.runtime.spawn(async move {
            tokio::time::sleep(BATCH_DELAY).await;
            if exchange.lock().reads.has_more_to_send() {
                // `send` blocks until Burn's client accepts the flush.
                let send = move || {
                    while exchange.lock().reads.has_more_to_send() {
                        exchange.send();
                    }
                };
                tokio::task::spawn_blocking(send);
            }
        });
    }
}

impl ReadQueue {
    /// Takes the answers of all reads that are not sent.
    pub(super) fn take_unsent(&mut self) -> Vec<Answer<TensorData>> {
        let unsent = std::mem::take(&mut self.unsent);
        unsent.into_iter().map(|read| read.answer).collect()
    }

    /// Returns whether there are reads left to send, and sets `send_scheduled` to that.
    fn has_more_to_send(&mut self) -> bool {
        self.send_scheduled = self.unflushed || !self.unsent.is_empty();
        self.send_scheduled
    }

    /// Returns whether the read with this number may still have to be sent.
    fn has_unsent(&self, number: u64) -> bool {
        let unsent = |read: &QueuedRead| read.number == number;
        self.unflushed || self.unsent.iter().any(unsent)
    }
}

impl Tickets {
    fn take_requested(&mut self, ticket: &ScalarIr) -> Option<Vec<Answer<TensorData>>> {
        let requested = self.requested.remove(&ticket.elem::<u64>())?;
        Some(requested.value)
    }
}

/// Executes [`READ`].
pub(super) fn read(
    exchange: &Exchange,
    handles: &mut Handles,
    ir: &CustomOpIr,
    device: TensordDevice,
) {
    let ticket = ir.scalars.first();
    let answers = ticket.and_then(|ticket| exchange.lock().take_requested(ticket));
    let mut answers = answers.into_iter().flatten();
    let mut reads = Vec::with_capacity(ir.inputs.len());
    for tensor in &ir.inputs {
        let answer = answers.next();
        let error = handles.take_error(tensor);
        if let Some(error) = error {
            // The reader may have been dropped.
            let _ = answer.map(|answer| answer.send(Err(error.cause().clone())));
            continue;
        }
        // Tensors of all kinds have the router's handle type.
        let tensor: RouterTensor<TensordClient> = handles.get_float_tensor::<Tensord>(tensor);
        reads.extend(answer.map(|answer| (tensor.into_ir(), answer)));
    }
    get_client::<TensordChannel>(&device).read(reads);
}
