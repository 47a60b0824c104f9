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

use self::reads::{READ, ReadQueue, session_ended_error};
use super::{
    cast::{CAST_INT, cast_int},
    forward::{FORWARD, Handles, forward},
};
use crate::backend::{Tensord, TensordChannel, TensordDevice};

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
    uploads: HashMap<u64, (TensorData, Instant)>,
    /// By ticket of a read op: where to send the values of its inputs.
    requested: HashMap<u64, (Vec<Answer<TensorData>>, Instant)>,
    reads: ReadQueue,
    /// Bytes in `uploads`.
    waiting_bytes: usize,
    /// Bytes uploaded since Burn's client was last flushed.
    unsent_bytes: usize,
}

impl Tickets {
    pub(super) fn new_ticket(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    fn remove(&mut self, ticket: u64) -> Option<TensorData> {
        let (data, _) = self.uploads.remove(&ticket)?;
        self.waiting_bytes -= data.bytes().len();
        Some(data)
    }

    /// The newest ticket, if any ticket is older than [`TICKET_TIMEOUT`].
    fn newest_if_expired(&self) -> Option<u64> {
        let uploads = self.uploads.values().map(|(_, since)| since);
        let mut waiting = uploads.chain(self.requested.values().map(|(_, since)| since));
        waiting
            .any(|since| since.elapsed() >= TICKET_TIMEOUT)
            .then_some(self.last)
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
            tickets.waiting_bytes += bytes;
            tickets.unsent_bytes += bytes;
            let send = tickets.unsent_bytes >= FLUSH_BYTES;
            if send {
                tickets.unsent_bytes = 0;
            }
            let ticket = tickets.new_ticket();
            tickets.uploads.insert(ticket, (data, Instant::now()));
            (ticket, send)
        };
        let registered = register(&burn.client, ScalarIr::UInt(ticket));
        if send {
            // If the flush fails, the device's reads report the error.
            let _ = burn.device.flush();
        }
        registered
    }

    fn wait_for_room(&self) -> MutexGuard<'_, Tickets> {
        let full = |tickets: &mut Tickets| tickets.waiting_bytes > MAX_QUEUED_BYTES;
        // This wait ends: all queued bytes but the last `FLUSH_BYTES` were flushed, so the
        // bridge takes them or `drop_expired_tickets` drops them.
        self.room
            .wait_while(self.lock(), full)
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn take_upload(&self, ticket: &ScalarIr) -> Option<TensorData> {
        let data = self.lock().remove(ticket.elem());
        self.room.notify_all();
        data
    }

    /// Drops all tickets.
    pub(super) fn drop_all(&self) {
        let last = self.lock().last;
        self.drop_until(last);
    }

    /// Drops all tickets up to `last`, which the bridge did not take. The reads of those tickets
    /// fail.
    fn drop_until(&self, last: u64) {
        let mut tickets = self.lock();
        let mut old: Vec<u64> = tickets.uploads.keys().copied().collect();
        old.retain(|&ticket| ticket <= last);
        for ticket in old {
            tickets.remove(ticket);
        }
        let abandoned = tickets.requested.extract_if(|&ticket, _| ticket <= last);
        for answer in abandoned.flat_map(|(_, (answers, _))| answers) {
            // The reader may have been dropped.
            let _ = answer.send(Err(session_ended_error()));
        }
        drop(tickets);
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
        let Some(last) = exchange.lock().newest_if_expired() else {
            continue;
        };
        // After this sync, every op registered before it has been processed. The
        // sync may take long, as it waits for tensors that are being computed.
        let device = device.clone();
        // An error means that the session is dead, and the tickets with it.
        let _ = runtime.spawn_blocking(move || device.sync()).await;
        exchange.drop_until(last);
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
