//! Passes tensor bytes between the program and the bridge in memory, past the
//! loopback connection.
//!
//! Burn's remote client encodes a tensor's bytes for its WebSocket, byte by
//! byte, which is the slowest step between a program and a worker. But both ends
//! of that WebSocket are in this process. So the bytes are stored here under a
//! *ticket*, and only the ticket's number goes through Burn, as the scalar of a
//! custom op that keeps its place among the other ops.
//!
//! The bridge takes a ticket within moments, unless the session between Burn's client and
//! the bridge has died. [`drop_expired_tickets`] then drops the tickets that are left, so
//! nothing waits for ever.

mod reads;

use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    time::{Duration, Instant},
};

use burn::{backend::RemoteDevice, remote::CustomOpClient, tensor::Device};
use burn_backend::{ExecutionError, TensorData};
use burn_ir::{CustomOpIr, ScalarIr, TensorError};
use burn_remote::server::BackendServer;
use burn_router::{RouterClient, get_client};
use tensord_session::Answer;
use tokio::runtime::Handle;

use self::reads::{READ, ReadQueue, fail_reads, no_reply_error, session_ended_error};
use super::{
    cast::{CAST_INT, cast_int},
    forward::{FORWARD, Handles, forward},
};
use crate::backend::{BRIDGE_ORDER, Tensord, TensordChannel, TensordDevice};

/// The custom op that makes a tensor of the bytes under a ticket.
pub(crate) const UPLOAD: &str = "tensord.upload";

/// Bytes that may be queued for the bridge. While there are more, the next upload
/// blocks.
const MAX_QUEUED_BYTES: usize = 32 << 20;

/// Burn's client is flushed after this many uploaded bytes. Its own limit on buffered bytes
/// does not count them, as the ops that it buffers only carry tickets.
const FLUSH_BYTES: usize = 1 << 20;

/// Age from which [`drop_expired_tickets`] suspects that the bridge will never take a ticket.
const TICKET_TIMEOUT: Duration = Duration::from_secs(5);

/// The uploads and reads of one device that are on their way from Burn's client to the
/// bridge, by ticket. Each device has its own exchange, as Burn flushes each separately.
pub(crate) struct Exchange {
    tickets: Mutex<Tickets>,
    /// Locked while queued reads become an op. A thread that locks both locks this before
    /// `tickets`.
    read_op_lock: Mutex<()>,
    /// Notified when uploads were taken by the bridge or dropped.
    room: Condvar,
    /// Runs the timer after which queued reads are sent, and the sending, which may block.
    runtime: Handle,
    burn: OnceLock<BurnSide>,
}

/// Burn's client for the device. Cached, because making one takes several
/// allocations.
pub(crate) struct BurnSide {
    pub(crate) client: CustomOpClient,
    device: Device,
}

#[derive(Default)]
struct Tickets {
    last: u64,
    uploads: HashMap<u64, Ticket<TensorData>>,
    /// By ticket of a read op: where to send the values of its inputs.
    requested: HashMap<u64, Ticket<Vec<Answer<TensorData>>>>,
    reads: ReadQueue,
    /// Whether the bridge has ended, so that it takes no ticket any more.
    is_closed: bool,
    /// Bytes in `uploads`.
    waiting_bytes: usize,
    /// Bytes uploaded since Burn's client was last flushed.
    unsent_bytes: usize,
}

/// Records, when it is dropped, that Burn's client has the op of a ticket, or has panicked: then the
/// ticket must not stay for ever, either.
struct SetRegistered<'a> {
    exchange: &'a Exchange,
    ticket: u64,
}

impl<'a> SetRegistered<'a> {
    fn new(exchange: &'a Exchange, ticket: u64) -> Self {
        Self { exchange, ticket }
    }
}

impl Drop for SetRegistered<'_> {
    fn drop(&mut self) {
        let mut tickets = self.exchange.lock();
        if let Some(upload) = tickets.uploads.get_mut(&self.ticket) {
            upload.is_registered = true;
        }
        if let Some(requested) = tickets.requested.get_mut(&self.ticket) {
            requested.is_registered = true;
        }
    }
}

/// What waits for the bridge under a ticket.
struct Ticket<T> {
    value: T,
    since: Instant,
    /// Whether Burn's client has the op that carries the ticket.
    is_registered: bool,
}

impl<T> Ticket<T> {
    fn new(value: T) -> Self {
        Self {
            value,
            since: Instant::now(),
            is_registered: false,
        }
    }
}

impl Tickets {
    pub(super) fn new_ticket(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Returns all tickets.
    fn numbers(&self) -> Vec<u64> {
        let numbers = self.uploads.keys().chain(self.requested.keys());
        numbers.copied().collect()
    }

    fn remove(&mut self, ticket: u64) -> Option<TensorData> {
        let data = self.uploads.remove(&ticket)?.value;
        self.waiting_bytes -= data.bytes().len();
        Some(data)
    }

    /// Returns the tickets whose ops are registered with Burn's client, if one of them is older
    /// than [`TICKET_TIMEOUT`].
    fn registered_if_expired(&self) -> Vec<u64> {
        let uploads = self.uploads.iter();
        let uploads = uploads.map(|(number, it)| (*number, it.since, it.is_registered));
        let reads = self.requested.iter();
        let reads = reads.map(|(number, it)| (*number, it.since, it.is_registered));
        let registered = uploads.chain(reads).filter(|(.., registered)| *registered);
        let registered: Vec<_> = registered.collect();
        let is_expired = |(_, since, _): &(u64, Instant, bool)| since.elapsed() >= TICKET_TIMEOUT;
        match registered.iter().any(is_expired) {
            true => registered.into_iter().map(|(number, ..)| number).collect(),
            false => Vec::new(),
        }
    }
}

impl Exchange {
    pub(crate) fn new(runtime: Handle) -> Self {
        Self {
            tickets: Mutex::default(),
            read_op_lock: Mutex::default(),
            room: Condvar::new(),
            runtime,
            burn: OnceLock::new(),
        }
    }

    /// Sets Burn's device, once, before the exchange can be looked up.
    pub(crate) fn set_burn(&self, remote: &RemoteDevice, device: &Device) {
        let client = CustomOpClient::new(remote);
        let device = device.clone();
        // If it is set already, it is the same device.
        let _ = self.burn.set(BurnSide { client, device });
    }

    /// Returns Burn's client for the device.
    ///
    /// # Panics
    ///
    /// When [`set_burn`](Self::set_burn) was not called before.
    pub(crate) fn burn(&self) -> &BurnSide {
        self.burn
            .get()
            .expect("`set_burn` was called before the exchange was published")
    }

    fn lock(&self) -> MutexGuard<'_, Tickets> {
        // Poison is ignored: no foreign code runs under this lock, and ours leaves
        // the tickets consistent.
        self.tickets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores `data` for the bridge under a ticket. `register` must register the op that
    /// carries the ticket with Burn's client; its result is returned. Blocks while more than
    /// [`MAX_QUEUED_BYTES`] are queued.
    pub(crate) fn stage_upload<T>(
        &self,
        data: TensorData,
        register: impl FnOnce(&CustomOpClient, ScalarIr) -> T,
    ) -> T {
        let burn = self.burn();
        let bytes = data.bytes().len();
        let (ticket, send) = {
            let mut tickets = self.wait_for_room();
            if tickets.is_closed {
                let ticket = tickets.new_ticket();
                drop(tickets);
                return register(&burn.client, ScalarIr::UInt(ticket));
            }
            tickets.waiting_bytes += bytes;
            tickets.unsent_bytes += bytes;
            let send = tickets.unsent_bytes >= FLUSH_BYTES;
            if send {
                tickets.unsent_bytes = 0;
            }
            let ticket = tickets.new_ticket();
            tickets.uploads.insert(ticket, Ticket::new(data));
            (ticket, send)
        };
        let registered = {
            let _registered = SetRegistered::new(self, ticket);
            register(&burn.client, ScalarIr::UInt(ticket))
        };
        if send {
            // If the flush fails, the device's reads report the error.
            let _ = burn.device.flush();
        }
        registered
    }

    fn wait_for_room(&self) -> MutexGuard<'_, Tickets> {
        let full =
            |tickets: &mut Tickets| tickets.waiting_bytes > MAX_QUEUED_BYTES && !tickets.is_closed;
        // This wait ends: all queued bytes but the last `FLUSH_BYTES` were flushed, so the
        // bridge takes them, or `drop_expired_tickets` drops them, or the bridge ends.
        self.room
            .wait_while(self.lock(), full)
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn take_upload(&self, ticket: &ScalarIr) -> Option<TensorData> {
        let data = self.lock().remove(ticket.elem());
        self.room.notify_all();
        data
    }

    /// Drops all tickets, and fails all reads, also those that follow: the bridge has ended.
    pub(crate) fn close(&self) {
        let mut tickets = self.lock();
        tickets.is_closed = true;
        let unsent = tickets.reads.take_unsent();
        let numbers = tickets.numbers();
        drop(tickets);
        fail_reads(unsent, no_reply_error);
        self.drop_tickets(&numbers, no_reply_error);
    }

    /// Drops all tickets, as the session with the bridge is dead.
    pub(super) fn drop_all(&self) {
        let numbers = self.lock().numbers();
        self.drop_tickets(&numbers, session_ended_error);
    }

    /// Drops tickets that the bridge did not take. The reads of those tickets fail.
    fn drop_tickets(&self, numbers: &[u64], error: fn() -> ExecutionError) {
        let mut tickets = self.lock();
        let mut answers = Vec::new();
        for number in numbers {
            tickets.remove(*number);
            let requested = tickets.requested.remove(number);
            answers.extend(requested.into_iter().flat_map(|it| it.value));
        }
        drop(tickets);
        fail_reads(answers, error);
        self.room.notify_all();
    }
}

/// Drops tickets of `device` that the bridge will never take. Ends when the exchange
/// is dropped.
pub(crate) async fn drop_expired_tickets(
    exchange: Weak<Exchange>,
    device: Device,
    runtime: Handle,
) {
    loop {
        tokio::time::sleep(TICKET_TIMEOUT).await;
        let Some(exchange) = exchange.upgrade() else {
            return;
        };
        let registered = exchange.lock().registered_if_expired();
        if registered.is_empty() {
            continue;
        }
        // After this sync, the bridge has processed every op that was registered before. The sync may take long, as
        // the bridge waits while too much is recorded.
        let device = device.clone();
        let sync = move || BRIDGE_ORDER.executes(|| device.sync());
        // An error means that the session is dead, and the tickets with it.
        let _ = runtime.spawn_blocking(sync).await;
        exchange.drop_tickets(&registered, session_ended_error);
    }
}

/// The exchange of each device of a bridge.
pub(crate) type Exchanges = HashMap<TensordDevice, Arc<Exchange>>;

/// Registers the bridge's custom ops with `server`.
pub(crate) fn install(
    server: BackendServer<Tensord>,
    exchanges: Exchanges,
) -> BackendServer<Tensord> {
    let for_uploads = Arc::new(exchanges);
    let for_reads = for_uploads.clone();
    server
        .with_custom_op(UPLOAD, move |handles, ir, device| {
            upload(&for_uploads[device], handles, ir, *device);
        })
        .with_custom_op(READ, move |handles, ir, device| {
            reads::read(&for_reads[device], handles, ir, *device);
        })
        .with_custom_op(FORWARD, move |handles, ir, device| {
            forward(handles, ir, *device);
        })
        .with_custom_op(CAST_INT, |handles, ir, _| cast_int(handles, ir))
}

fn upload(exchange: &Exchange, handles: &mut Handles, ir: &CustomOpIr, device: TensordDevice) {
    let ([], [out]) = ir.as_fixed();
    let Some(data) = ir.scalars.first().and_then(|t| exchange.take_upload(t)) else {
        let lost = ExecutionError::with_context("the bytes of an upload were dropped as stale");
        return handles.set_error(out.id, TensorError::new(lost));
    };
    let client = get_client::<TensordChannel>(&device);
    handles.register_float_tensor::<Tensord>(&out.id, client.register_tensor_data(data));
}
