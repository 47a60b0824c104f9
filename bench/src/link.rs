//! The bare link of tensord's transport: frames that another process sends back.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use tensord_testkit::cluster::Process;
use tensord_transport::{
    Dialer, Identity, Link, Listener, TransportChoice,
    tls::{Fingerprint, Trust},
};
use tokio::{runtime::Runtime, task::JoinSet};

use crate::process::{announce, start_server};

/// Timeout of dialling.
const DIAL_DEADLINE: Duration = Duration::from_secs(10);

/// The frame that is sent back and forth; about as large as the frames of a small read.
const FRAME: &[u8] = &[7; 32];

/// The process's address and certificate fingerprint.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct EchoAddress {
    address: SocketAddr,
    fingerprint: String,
}

/// Sends every frame back until the process is killed.
///
/// # Errors
///
/// If no port can be bound.
pub(crate) fn serve_echo(runtime: &Runtime) -> Result<()> {
    runtime.block_on(async {
        let identity = Identity::self_signed()?;
        let mut listener = Listener::bind("127.0.0.1:0".parse()?, &identity).await?;
        announce(&EchoAddress {
            address: listener.address(),
            fingerprint: identity.fingerprint().to_string(),
        })?;
        let mut links = JoinSet::new();
        loop {
            links.spawn(echo(listener.accept().await));
            // Discards links that ended.
            while links.try_join_next().is_some() {}
        }
    })
}

async fn echo(mut link: Link) -> Result<()> {
    link.receiver.admit()?;
    while let Some(frame) = link.receiver.recv().await? {
        link.sender.send(&[frame]).await?;
    }
    Ok(())
}

/// The process that sends frames back.
pub(crate) struct EchoServer {
    address: EchoAddress,
    _process: Process,
}

/// A link to the echo process.
pub(crate) struct EchoLink<'a> {
    runtime: &'a Runtime,
    link: Link,
}

impl EchoServer {
    /// Starts the process.
    ///
    /// # Errors
    ///
    /// If the process does not start.
    pub(crate) fn start(dir: &TempDir) -> Result<Self> {
        let (process, address) = start_server(&["serve-echo"], dir)?;
        Ok(Self {
            address,
            _process: process,
        })
    }

    /// Returns the process's address.
    pub(crate) fn address(&self) -> &EchoAddress {
        &self.address
    }
}

impl EchoAddress {
    /// Dials the process.
    ///
    /// # Errors
    ///
    /// If the process does not respond.
    pub(crate) fn dial<'a>(
        &self,
        runtime: &'a Runtime,
        transport: TransportChoice,
    ) -> Result<EchoLink<'a>> {
        let pin = self.fingerprint.parse::<Fingerprint>();
        let trust = Trust::Pin(pin.map_err(anyhow::Error::msg)?);
        let address = self.address.to_string();
        let dialer = Dialer::new(transport);
        let link = runtime.block_on(dialer.dial(&address, &trust, DIAL_DEADLINE))?;
        Ok(EchoLink { runtime, link })
    }
}

impl EchoLink<'_> {
    /// Sends a frame and waits until it comes back, `count` times.
    ///
    /// # Errors
    ///
    /// If the link ends.
    pub(crate) fn ping(&mut self, count: usize) -> Result<()> {
        let Link {
            sender, receiver, ..
        } = &mut self.link;
        self.runtime.block_on(async {
            for _ in 0..count {
                sender.send(&[Bytes::from_static(FRAME)]).await?;
                let back = receiver.recv().await?.context("the link ended")?;
                ensure!(back == FRAME, "the peer returned a different frame");
            }
            Ok(())
        })
    }
}
