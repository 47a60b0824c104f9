//! Burn's remote backend behind a relay that counts its traffic.

use std::{net::SocketAddr, time::Duration};

use anyhow::Result;
use burn::tensor::Device;
use tempfile::TempDir;
use tensord_testkit::cluster::Process;

use crate::{
    relay::{Relay, Route},
    remote::{start_websocket, websocket_device},
};

/// The device, and the server and relay behind it.
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
    /// If a process does not start.
    pub(crate) fn start() -> Result<Self> {
        Self::start_delayed(Duration::ZERO)
    }

    /// Starts both processes. The relay delays all data by `delay` in each direction.
    ///
    /// # Errors
    ///
    /// If a process does not start.
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

    /// Returns the device.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the bytes sent up and down so far, without TCP headers.
    ///
    /// # Errors
    ///
    /// If the relay is gone.
    pub(crate) fn traffic(&self) -> Result<(u64, u64)> {
        let count = self.relay.count()?;
        Ok((count.up, count.down))
    }
}
