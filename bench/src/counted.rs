//! Burn's remote backend behind a relay that counts what it sends.

use std::{net::SocketAddr, time::Duration};

use anyhow::Result;
use burn::tensor::Device;
use tempfile::TempDir;
use tensord_tests::cluster::Process;

use crate::{
    relay::{Relay, Route},
    remote::{start_websocket, websocket_device},
};

/// The device, and the two processes behind it.
pub(crate) struct CountedRemote {
    device: Device,
    relay: Relay,
    _server: Process,
    _dir: TempDir,
}

impl CountedRemote {
    /// Starts both processes.
    ///
    /// # Errors
    ///
    /// When one does not start.
    pub(crate) fn start() -> Result<Self> {
        Self::start_delayed(Duration::ZERO)
    }

    /// Starts both; whatever passes arrives later by `delay`, each way.
    ///
    /// # Errors
    ///
    /// When one does not start.
    pub(crate) fn start_delayed(delay: Duration) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let (server, address) = start_websocket(&dir)?;
        let route = Route {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            to: address.parse()?,
            delay,
        };
        let relay = Relay::start(route, &dir)?;
        Ok(Self {
            device: websocket_device(&relay.address().to_string())?,
            relay,
            _server: server,
            _dir: dir,
        })
    }

    /// Its device.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Bytes up and down so far, TCP's own headers aside.
    ///
    /// # Errors
    ///
    /// When the relay is gone.
    pub(crate) fn traffic(&self) -> Result<(u64, u64)> {
        let count = self.relay.count()?;
        Ok((count.up, count.down))
    }
}
