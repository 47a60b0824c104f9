//! Tensor bytes between the program and the bridge without the loopback.
//!
//! Burn's remote client encodes a tensor's bytes for its WebSocket, byte by
//! byte, which is the slowest thing on the way to a worker. Both ends of that
//! WebSocket are in this process, though. So the bytes are left here under a
//! *ticket*, and only its number goes through Burn, as the scalar of a custom
//! op that keeps its place among the other ops.
//!
//! A ticket is taken by the bridge within moments, unless Burn's own session
//! there has died. What then stays behind is given up by [`watch`], so nothing
//! waits for ever.

use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    time::{Duration, Instant},
};

use burn::{backend::RemoteDevice, remote::CustomOpClient, tensor::Device};
use burn_backend::{ExecutionError, TensorData};
use burn_ir::{BackendIr, CustomOpIr, HandleContainer, ScalarIr, TensorError};
use burn_remote::server::BackendServer;
use burn_router::{RouterClient, get_client};
use tokio::runtime::Handle;

use super::{
    forward::{FORWARD, forward},
    reads::{self, READ, Reads},
};
use crate::{
    backend::{Tensord, TensordChannel, TensordDevice},
    session::Answer,
};

/// Custom op that makes a tensor of the bytes under a ticket.
pub(crate) const UPLOAD: &str = "tensord.upload";

/// Bytes that may wait for the bridge; a program that is further ahead waits.
const WAITING_BYTES: usize = 32 << 20;

/// Burn's client gathers ops, and cannot see the bytes behind a ticket: when there
/// are so many it is told to send, as it would by itself.
const FLUSH_BYTES: usize = 1 << 20;

/// A ticket that was not taken for so long may never be.
const PATIENCE: Duration = Duration::from_secs(5);

/// What waits to change sides for one device, by ticket. Each has its own, as each
/// is told apart what to send.
pub(crate) struct Exchange {
    tickets: Mutex<Tickets>,
    /// Held while reads become an op; before `tickets`.
    pub(super) giving: Mutex<()>,
    /// Signals that bytes were taken.
    room: Condvar,
    /// Where Burn's client is told to send, by whoever must not wait for it.
    pub(super) runtime: Handle,
    burn: OnceLock<BurnSide>,
}

/// The device as Burn's client knows it. Kept, as to make one takes several
/// allocations.
pub(crate) struct BurnSide {
    pub(crate) client: CustomOpClient,
    pub(super) device: Device,
}

#[derive(Default)]
pub(super) struct Tickets {
    last: u64,
    uploads: HashMap<u64, (TensorData, Instant)>,
    /// Who waits for the tensors of an op.
    pub(super) asked: HashMap<u64, (Vec<Answer<TensorData>>, Instant)>,
    pub(super) reads: Reads,
    /// Bytes in `uploads`.
    waiting_bytes: usize,
    /// Bytes since Burn's client was last told to send.
    pub(super) unsent_bytes: usize,
}

impl Tickets {
    pub(super) fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    fn remove(&mut self, ticket: u64) -> Option<TensorData> {
        let (data, _) = self.uploads.remove(&ticket)?;
        self.waiting_bytes -= data.bytes().len();
        Some(data)
    }

    /// Tickets up to the last of now that have waited for too long.
    fn overdue(&self) -> Option<u64> {
        let uploads = self.uploads.values().map(|(_, since)| since);
        let mut waiting = uploads.chain(self.asked.values().map(|(_, since)| since));
        waiting
            .any(|since| since.elapsed() >= PATIENCE)
            .then_some(self.last)
    }
}

impl Exchange {
    pub(crate) fn new(runtime: Handle) -> Self {
        Self {
            tickets: Mutex::default(),
            giving: Mutex::default(),
            room: Condvar::new(),
            runtime,
            burn: OnceLock::new(),
        }
    }

    /// Says which device of Burn's this is, once, before anybody can ask for it.
    pub(crate) fn set_burn(&self, remote: &RemoteDevice, device: &Device) {
        let client = CustomOpClient::new(remote);
        let device = device.clone();
        // It is the same device each time.
        let _ = self.burn.set(BurnSide { client, device });
    }

    /// Burn's side of the device.
    ///
    /// # Panics
    ///
    /// When it was not [set](Self::set_burn).
    pub(crate) fn burn(&self) -> &BurnSide {
        self.burn.get().expect("set before it is found")
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Tickets> {
        // No code of others runs under this lock, and ours leaves it whole.
        self.tickets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves `data` for the bridge. `register` gives Burn's client the op with the
    /// ticket.
    pub(crate) fn hand_over<T>(
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
            let ticket = tickets.next();
            tickets.uploads.insert(ticket, (data, Instant::now()));
            (ticket, send)
        };
        let registered = register(&burn.client, ScalarIr::UInt(ticket));
        if send {
            // A device that cannot send says so when it is read.
            let _ = burn.device.flush();
        }
        registered
    }

    fn wait_for_room(&self) -> MutexGuard<'_, Tickets> {
        let full = |tickets: &mut Tickets| tickets.waiting_bytes > WAITING_BYTES;
        // Ends: what waits was flushed, and is taken by the bridge or given up.
        self.room
            .wait_while(self.lock(), full)
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn take_upload(&self, ticket: &ScalarIr) -> Option<TensorData> {
        let data = self.lock().remove(ticket.elem());
        self.room.notify_all();
        data
    }

    /// Drops all tickets there are.
    pub(super) fn give_up_all(&self) {
        let last = self.lock().last;
        self.give_up(last);
    }

    /// Drops all tickets up to `last`; whoever waits for them hears of it.
    fn give_up(&self, last: u64) {
        let mut tickets = self.lock();
        let mut old: Vec<u64> = tickets.uploads.keys().copied().collect();
        old.retain(|&ticket| ticket <= last);
        for ticket in old {
            tickets.remove(ticket);
        }
        tickets.asked.retain(|&ticket, _| ticket > last);
        drop(tickets);
        self.room.notify_all();
    }
}

/// Gives up tickets for `device` that nobody will come for. Ends with the exchange.
pub(crate) async fn watch(exchange: Weak<Exchange>, device: Device, runtime: Handle) {
    loop {
        tokio::time::sleep(PATIENCE).await;
        let Some(exchange) = exchange.upgrade() else {
            return;
        };
        let Some(last) = exchange.lock().overdue() else {
            continue;
        };
        // Whatever was registered before is through once this is. It may take
        // long, as a tensor may be waited for that is still being computed.
        let device = device.clone();
        // An error is a dead session, which is what is looked for.
        let _ = runtime.spawn_blocking(move || device.sync()).await;
        exchange.give_up(last);
    }
}

/// The exchange of each device of a bridge.
pub(crate) type Exchanges = HashMap<TensordDevice, Arc<Exchange>>;

/// Makes `server` carry out the ops with tickets.
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
}

type Handles = HandleContainer<<Tensord as BackendIr>::Handle>;

fn upload(exchange: &Exchange, handles: &mut Handles, ir: &CustomOpIr, device: TensordDevice) {
    let ([], [out]) = ir.as_fixed();
    let Some(data) = ir.scalars.first().and_then(|t| exchange.take_upload(t)) else {
        let lost = ExecutionError::with_context("the bytes of an upload were given up");
        return handles.set_error(out.id, TensorError::new(lost));
    };
    let client = get_client::<TensordChannel>(&device);
    handles.register_float_tensor::<Tensord>(&out.id, client.register_tensor_data(data));
}
