//! The bare link of tensord's transport, without anything on top: frames that
//! another process sends back.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use tensord_tests::cluster::Process;
use tensord_transport::{
    Dialer, Identity, Link, Listener, TransportChoice,
    tls::{Fingerprint, Trust},
};
use tokio::{runtime::Runtime, task::JoinSet};

use crate::process::{announce, serve};

/// How long dialling may take.
const DIAL_DEADLINE: Duration = Duration::from_secs(10);

/// What goes back and forth; about what a read of a small tensor takes.
const FRAME: &[u8] = &[7; 32];

/// Where the process is, and what it is known by.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct EchoAddress {
    address: SocketAddr,
    fingerprint: String,
}

/// Sends every frame back, until the process is ended.
///
/// # Errors
///
/// When it cannot listen.
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
            // A link that ended is of no interest.
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

/// A link to it.
pub(crate) struct Echo<'a> {
    runtime: &'a Runtime,
    link: Link,
}

impl EchoServer {
    /// Starts it.
    ///
    /// # Errors
    ///
    /// When it does not start.
    pub(crate) fn start(dir: &TempDir) -> Result<Self> {
        let (process, address) = serve(&["serve-echo"], dir)?;
        Ok(Self {
            address,
            _process: process,
        })
    }

    /// Where it is.
    pub(crate) fn address(&self) -> &EchoAddress {
        &self.address
    }
}

impl EchoAddress {
    /// Dials it.
    ///
    /// # Errors
    ///
    /// When it does not answer.
    pub(crate) fn dial<'a>(
        &self,
        runtime: &'a Runtime,
        transport: TransportChoice,
    ) -> Result<Echo<'a>> {
        let pin = self.fingerprint.parse::<Fingerprint>();
        let trust = Trust::Pin(pin.map_err(anyhow::Error::msg)?);
        let address = self.address.to_string();
        let dialer = Dialer::new(transport);
        let link = runtime.block_on(dialer.dial(&address, &trust, DIAL_DEADLINE))?;
        Ok(Echo { runtime, link })
    }
}

impl Echo<'_> {
    /// Sends a frame and waits for it to come back, `count` times.
    ///
    /// # Errors
    ///
    /// When the link ends.
    pub(crate) fn ping(&mut self, count: usize) -> Result<()> {
        let Link {
            sender, receiver, ..
        } = &mut self.link;
        self.runtime.block_on(async {
            for _ in 0..count {
                sender.send(&[Bytes::from_static(FRAME)]).await?;
                let back = receiver.recv().await?.context("the link ended")?;
                ensure!(back == FRAME, "another frame came back");
            }
            Ok(())
        })
    }
}
