//! Leased devices as ordinary Burn devices.
//!
//! The only Burn `Device` that can be implemented outside Burn is its remote
//! device. So the client runs Burn's remote server on loopback, in its own process,
//! over [`Tensord`]; Burn's remote client connects to it, and users get that
//! client's devices. All devices of a lease are devices of one such host, as
//! Burn's data-parallel strategies do not span hosts.

mod cast;
mod exchange;
pub(crate) mod forward;
mod lagging;
mod leased;
mod tune;

use std::{net::TcpListener, sync::Arc};

use burn::{remote::RemoteHost, tensor::Device};
use burn_remote::server::{BackendServer, ServeError, TokenAuthorizer, WebSocketTransport};
use rand::Rng;
use tensord_session::Cohort;
use tensord_transport::Secret;
use tokio::{runtime::Handle, task::AbortHandle};
use tracing::error;

pub(crate) use self::{cast::CAST_INT, exchange::UPLOAD, leased::leased};
use self::{exchange::Exchange, lagging::flush_lagging_ranks, leased::set_exchange};
use crate::backend::{Tensord, TensordDevice};

/// A running bridge. Dropping it stops the server.
pub(crate) struct Bridge {
    devices: Vec<Device>,
    exchanges: Vec<Arc<Exchange>>,
    tasks: Vec<AbortHandle>,
}

impl Bridge {
    /// Starts a bridge on `runtime` for `devices`, whose sessions form `cohort`. Blocks while
    /// Burn's client connects to the bridge. Returns the reason if the start fails.
    pub(crate) fn start(
        runtime: &Handle,
        devices: Vec<TensordDevice>,
        cohort: Arc<Cohort>,
    ) -> Result<Self, String> {
        tune::set_batch_size();
        let listener = TcpListener::bind(("127.0.0.1", 0));
        let listener = listener.map_err(|e| format!("cannot bind a loopback port: {e}"))?;
        let address = listener.local_addr().map_err(|e| e.to_string())?;
        let token = new_token();
        let exchange = |_| Arc::new(Exchange::new(runtime.clone()));
        let exchanges: Vec<_> = devices.iter().map(exchange).collect();
        let by_device = devices.iter().copied().zip(exchanges.clone()).collect();
        let serving = exchange::install(server(devices, &token), by_device);
        let serving = serving.serve_async(WebSocketTransport::from_listener(listener));
        let serving = runtime.spawn(async move {
            if let Err(e) = serving.await {
                error!("the bridge to Burn ended: {e}");
            }
        });
        // Dropping this stops the server if the steps below fail.
        let mut bridge = Self {
            devices: Vec::new(),
            exchanges,
            tasks: vec![serving.abort_handle()],
        };
        let host = RemoteHost::websocket(&format!("ws://{address}"))
            .with_credential(token.reveal().to_owned());
        let devices = host.devices().map_err(|e| e.to_string())?;
        bridge.devices = devices.into_iter().collect();
        let flushing = flush_lagging_ranks(cohort, bridge.devices.clone(), runtime.clone());
        bridge.tasks.push(runtime.spawn(flushing).abort_handle());
        for (device, exchange) in bridge.devices.iter().zip(&bridge.exchanges) {
            set_exchange(device, Some(exchange));
            let exchange = Arc::downgrade(exchange);
            let watching =
                exchange::drop_expired_tickets(exchange, device.clone(), runtime.clone());
            bridge.tasks.push(runtime.spawn(watching).abort_handle());
        }
        Ok(bridge)
    }

    pub(crate) fn devices(&self) -> &[Device] {
        &self.devices
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        for device in &self.devices {
            set_exchange(device, None);
        }
        self.tasks.iter().for_each(AbortHandle::abort);
        // Other threads may be reading, or wait until there is room for an upload.
        self.exchanges.iter().for_each(|exchange| exchange.close());
    }
}

/// Serves `devices` on `listener` to Burn's remote clients that present `token`.
pub(crate) fn serve(
    devices: Vec<TensordDevice>,
    listener: TcpListener,
    token: &Secret,
) -> impl Future<Output = Result<(), ServeError>> + Send + 'static + use<> {
    server(devices, token).serve_async(WebSocketTransport::from_listener(listener))
}

fn server(devices: Vec<TensordDevice>, token: &Secret) -> BackendServer<Tensord> {
    let authorizer = TokenAuthorizer::new(token.reveal().to_owned());
    BackendServer::new(devices).with_authorizer(authorizer.expect("the token is not empty"))
}

/// 256 random bits in hexadecimal.
pub(crate) fn new_token() -> Secret {
    let mut bytes = [0u8; 32];
    rand::rng().fill_bytes(&mut bytes);
    Secret::new(bytes.map(|byte| format!("{byte:02x}")).concat())
}
