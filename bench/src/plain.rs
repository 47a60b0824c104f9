//! Plain sockets, the baseline for bulk transfers: TCP, and TLS over TCP.
//!
//! The baseline is what any program can reach with the same libraries: tokio and
//! tokio-rustls, TLS 1.3 with ring's first choice of cipher, as on tensord's own links. The
//! receiver allocates the buffer and reads the payload into it. An upload is complete when
//! the receiver's one-byte reply arrives.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use bytes::BytesMut;
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    crypto::ring::default_provider,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    version::TLS13,
};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use tensord_testkit::cluster::Process;
use tensord_transport::{identity::IdentityPem, tls::POOL_NAME};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    runtime::Runtime,
    task::JoinSet,
};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::process::{announce, start_server};

/// Direction of a transfer, seen from this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// To the other process.
    Up,
    /// From the other process.
    Down,
}

/// Largest payload that the server accepts, in bytes.
const MAX_BYTES: u64 = 1 << 30;

/// Timeout of connecting.
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);

#[derive(Debug, Serialize, Deserialize)]
struct Announcement {
    tcp: SocketAddr,
    tls: SocketAddr,
    chain: String,
}

/// Serves TCP and TLS until the process is killed.
///
/// # Errors
///
/// If no port can be bound.
pub(crate) fn serve(runtime: &Runtime) -> Result<()> {
    runtime.block_on(async {
        let identity = IdentityPem::new_pool()?;
        let acceptor = TlsAcceptor::from(Arc::new(server_config(&identity)?));
        let tcp = TcpListener::bind("127.0.0.1:0").await?;
        let tls = TcpListener::bind("127.0.0.1:0").await?;
        announce(&Announcement {
            tcp: tcp.local_addr()?,
            tls: tls.local_addr()?,
            chain: identity.chain,
        })?;
        let mut served = JoinSet::new();
        loop {
            tokio::select! {
                accepted = tcp.accept() => {
                    let stream = accepted?.0;
                    stream.set_nodelay(true)?;
                    served.spawn(serve_connection(stream));
                }
                accepted = tls.accept() => {
                    let stream = accepted?.0;
                    stream.set_nodelay(true)?;
                    let acceptor = acceptor.clone();
                    served.spawn(async move { serve_connection(acceptor.accept(stream).await?).await });
                }
                Some(ended) = served.join_next() => ended??,
            }
        }
    })
}

/// Receives or sends payloads until the peer is gone.
async fn serve_connection(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> Result<()> {
    let mut payload = Vec::new();
    loop {
        let Ok(direction) = stream.read_u8().await else {
            return Ok(());
        };
        let bytes = stream.read_u64().await?;
        ensure!(
            bytes <= MAX_BYTES,
            "the peer requested {bytes} bytes, which is more than the limit"
        );
        match direction {
            b'u' => {
                receive(&mut stream, bytes).await?;
                stream.write_u8(b'!').await?;
            }
            b'd' => {
                // The buffer grows once for each size. So filling it is only part of the
                // first sample, which does not count.
                payload.resize(bytes as usize, 7);
                stream.write_all(&payload).await?;
            }
            other => bail!("{other} is not a direction"),
        }
        stream.flush().await?;
    }
}

async fn receive(stream: &mut (impl AsyncRead + Unpin), bytes: u64) -> Result<BytesMut> {
    let mut payload = BytesMut::with_capacity(bytes as usize);
    let mut rest = stream.take(bytes);
    while rest.read_buf(&mut payload).await? > 0 {}
    ensure!(payload.len() as u64 == bytes, "the connection ended early");
    Ok(payload)
}

fn server_config(identity: &IdentityPem) -> Result<ServerConfig> {
    let chain = CertificateDer::pem_slice_iter(identity.chain.as_bytes());
    let chain = chain.collect::<Result<Vec<_>, _>>()?;
    let key = PrivateKeyDer::from_pem_slice(identity.key.as_bytes())?;
    let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_protocol_versions(&[&TLS13])?
        .with_no_client_auth();
    Ok(config.with_single_cert(chain, key)?)
}

fn client_config(chain: &str) -> Result<ClientConfig> {
    let chain = CertificateDer::pem_slice_iter(chain.as_bytes());
    let authority = chain.last().context("the certificate is missing")??;
    let mut roots = RootCertStore::empty();
    roots.add(authority)?;
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_protocol_versions(&[&TLS13])?
        .with_root_certificates(roots);
    Ok(config.with_no_client_auth())
}

trait ByteStream: AsyncRead + AsyncWrite + Unpin {}
impl<S: AsyncRead + AsyncWrite + Unpin> ByteStream for S {}

/// A connection to the server.
pub(crate) struct Socket<'a> {
    runtime: &'a Runtime,
    stream: Box<dyn ByteStream>,
}

/// The server, in a process of its own.
pub(crate) struct Server {
    announced: Announcement,
    _process: Process,
}

impl Server {
    /// Starts the server.
    ///
    /// # Errors
    ///
    /// If the server does not start.
    pub(crate) fn start(dir: &TempDir) -> Result<Self> {
        let (process, announced) = start_server(&["serve-plain"], dir)?;
        Ok(Self {
            announced,
            _process: process,
        })
    }

    /// Connects without TLS.
    ///
    /// # Errors
    ///
    /// If the server does not respond.
    pub(crate) fn tcp<'a>(&self, runtime: &'a Runtime) -> Result<Socket<'a>> {
        let stream = runtime.block_on(connect(self.announced.tcp))?;
        let stream = Box::new(stream);
        Ok(Socket { runtime, stream })
    }

    /// Connects with TLS.
    ///
    /// # Errors
    ///
    /// If the server does not respond, or TLS fails.
    pub(crate) fn tls<'a>(&self, runtime: &'a Runtime) -> Result<Socket<'a>> {
        let connector = TlsConnector::from(Arc::new(client_config(&self.announced.chain)?));
        let stream = runtime.block_on(async {
            let stream = connect(self.announced.tls).await?;
            let name = ServerName::try_from(POOL_NAME)?;
            anyhow::Ok(connector.connect(name, stream).await?)
        })?;
        let stream = Box::new(stream);
        Ok(Socket { runtime, stream })
    }
}

async fn connect(address: SocketAddr) -> Result<TcpStream> {
    let stream = tokio::time::timeout(CONNECT_DEADLINE, TcpStream::connect(address));
    let stream = stream
        .await
        .context("cannot connect to the peer in time")??;
    stream.set_nodelay(true)?;
    Ok(stream)
}

impl Socket<'_> {
    /// Sends `payload` and waits until the server has received it.
    ///
    /// # Errors
    ///
    /// If the connection fails.
    pub(crate) fn upload(&mut self, payload: &[u8]) -> Result<()> {
        self.runtime.block_on(async {
            send_request(&mut self.stream, b'u', payload.len()).await?;
            self.stream.write_all(payload).await?;
            self.stream.flush().await?;
            ensure!(
                self.stream.read_u8().await? == b'!',
                "the peer sent a wrong answer"
            );
            Ok(())
        })
    }

    /// Receives a payload of `bytes` bytes.
    ///
    /// # Errors
    ///
    /// If the connection fails.
    pub(crate) fn download(&mut self, bytes: usize) -> Result<()> {
        self.runtime.block_on(async {
            send_request(&mut self.stream, b'd', bytes).await?;
            self.stream.flush().await?;
            receive(&mut self.stream, bytes as u64).await?;
            Ok(())
        })
    }
}

async fn send_request(
    stream: &mut (impl AsyncWrite + Unpin),
    direction: u8,
    bytes: usize,
) -> Result<()> {
    let mut header = [direction; 9];
    header[1..].copy_from_slice(&(bytes as u64).to_be_bytes());
    Ok(stream.write_all(&header).await?)
}
