//! Burn's own remote backend: its server on Flex, and devices that connect to it.
//!
//! WebSocket is used as Burn ships it. Iroh has endpoints only on loopback, no relays and
//! no lookups, and segmentation offload off, which is what Burn sets for the endpoints it
//! binds itself.

use std::{net::TcpListener, sync::Arc};

use anyhow::{Context as _, Result, anyhow};
use burn::{
    remote::{IrohHost, RemoteHost},
    tensor::Device,
};
use burn_flex::{Flex, FlexDevice};
use burn_remote::{
    BURN_REMOTE_ALPN,
    server::{BackendServer, WebSocketTransport},
};
use burn_std::config::{BurnConfig, RuntimeConfig};
use iroh::{
    Endpoint, EndpointAddr, RelayMode,
    endpoint::{QuicTransportConfig, presets},
    protocol::Router,
};
use tempfile::TempDir;
use tensord_testkit::cluster::Process;
use tokio::runtime::Runtime;

use crate::process::{announce, start_server};

/// Serves a Flex device over WebSocket until the process is killed.
///
/// # Errors
///
/// If no port can be bound.
pub(crate) fn serve_websocket(runtime: &Runtime) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").context("cannot bind a loopback port")?;
    announce(&listener.local_addr()?.to_string())?;
    let server = BackendServer::<Flex>::new([FlexDevice]);
    let served = runtime.block_on(server.serve_async(WebSocketTransport::from_listener(listener)));
    served.context("Burn's server ended")
}

/// Serves a Flex device over Iroh until the process is killed.
///
/// # Errors
///
/// If no port can be bound.
pub(crate) fn serve_iroh(runtime: &Runtime) -> Result<()> {
    runtime.block_on(async {
        let endpoint = loopback_endpoint().await?;
        let server = BackendServer::<Flex>::new([FlexDevice]);
        let protocol = server.into_protocol(&endpoint)?;
        let router = Router::builder(endpoint.clone())
            .accept(BURN_REMOTE_ALPN, protocol)
            .spawn();
        announce(&endpoint.addr())?;
        endpoint.closed().await;
        router.shutdown().await.context("Iroh's router failed")
    })
}

async fn loopback_endpoint() -> Result<Endpoint> {
    let transport = QuicTransportConfig::builder().enable_segmentation_offload(false);
    let builder = Endpoint::builder(presets::Minimal)
        .relay_mode(RelayMode::Disabled)
        .transport_config(transport.build())
        .clear_ip_transports()
        .bind_addr("127.0.0.1:0")
        .map_err(|e| anyhow!("cannot parse the loopback address for Iroh: {e}"))?;
    let endpoint = builder.bind().await;
    endpoint.map_err(|e| anyhow!("Iroh cannot listen: {e}"))
}

/// Starts a server over WebSocket and returns its process and address.
///
/// # Errors
///
/// If the server does not start.
pub(crate) fn start_websocket(dir: &TempDir) -> Result<(Process, String)> {
    start_server(&["serve-websocket"], dir)
}

/// Connects to the device of the server over WebSocket at `address`.
///
/// # Errors
///
/// If the server does not respond.
pub(crate) fn websocket_device(address: &str) -> Result<Device> {
    websocket_device_with(address, BurnConfig::default())
}

/// Like [`websocket_device`], with Burn's configuration `config`.
///
/// # Errors
///
/// If the server does not respond.
pub(crate) fn websocket_device_with(address: &str, config: BurnConfig) -> Result<Device> {
    let host = RemoteHost::websocket(&format!("ws://{address}"));
    only_device(&host, config)
}

/// Starts a server over Iroh and returns its process and address.
///
/// # Errors
///
/// If the server does not start.
pub(crate) fn start_iroh(dir: &TempDir) -> Result<(Process, EndpointAddr)> {
    start_server(&["serve-iroh"], dir)
}

/// Connects to the device of the server over Iroh at `address`, dialled from `runtime`.
///
/// # Errors
///
/// If the server does not respond.
pub(crate) fn iroh_device(runtime: &Runtime, address: EndpointAddr) -> Result<Device> {
    let endpoint = runtime.block_on(loopback_endpoint())?;
    let host = RemoteHost::iroh(IrohHost::new(address).with_endpoint(endpoint));
    only_device(&host, BurnConfig::default())
}

fn only_device(host: &RemoteHost, config: BurnConfig) -> Result<Device> {
    // As in a separate program, regardless of earlier devices in this process.
    set_burn_config(Some(config));
    let devices = host.devices().context("cannot connect to Burn's server")?;
    devices
        .into_iter()
        .next()
        .context("Burn's server has no device")
}

/// Sets Burn's configuration. Burn reads it once per process, and a device reads it when it
/// connects. Setting it before each device gives every contender the configuration that it
/// would have in a program of its own. `None` leaves the choice to the library that
/// connects next.
pub(crate) fn set_burn_config(config: Option<BurnConfig>) {
    *BurnConfig::storage().lock() = config.map(Arc::new);
}
