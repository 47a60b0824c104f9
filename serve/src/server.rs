//! A server: what it serves, where, and to whom; and its life from the first lease to its end.

use std::{
    fmt,
    net::{SocketAddr, ToSocketAddrs},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use tensord_client::{Pool, Secret};
use tokio::{net::TcpListener, runtime::Runtime, sync::watch, task::JoinSet};
use tokio_rustls::TlsAcceptor;
use tracing::{error, info};

use crate::{
    access::{Access, random_token},
    api::Api,
    declarations::{check_models, check_pages, check_tokens},
    fleet::Fleet,
    grpc,
    http::{self, Page},
    limits::{BodyBudget, LONGEST, Limits},
    listener::Listener,
    metrics::Metrics,
    model::Model,
    served::Served,
    tls::Identity,
};

/// How often [`Server::wait_ready`] looks whether the server is ready.
const READY_POLL: Duration = Duration::from_millis(10);

/// How long the end of a server waits for its replicas, beyond the time for the requests.
const FLEET_GRACE: Duration = Duration::from_secs(10);

/// A server that is being set up.
///
/// ```no_run
/// # fn digits() -> tensord_serve::Model { unimplemented!() }
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tensord_client::Pool;
/// use tensord_serve::Serve;
///
/// let server = Serve::new(Pool::connect_env()?)
///     .model(digits())
///     .token(std::env::var("SERVE_TOKEN")?)
///     .certificate("server.pem", "server.key")
///     .bind("0.0.0.0:8000")?;
/// println!("{}", server.url());
/// server.run_until_signal(); // Until SIGTERM or Ctrl+C.
/// # Ok(()) }
/// ```
#[must_use = "a server runs once it is bound to an address"]
#[derive(Debug)]
pub struct Serve {
    pool: Pool,
    models: Vec<Model>,
    tokens: Vec<Secret>,
    pages: Vec<Page>,
    limits: Limits,
    grace: Duration,
    tls: Tls,
    is_open: bool,
}

#[derive(Debug)]
enum Tls {
    SelfSigned,
    Files(std::path::PathBuf, std::path::PathBuf),
    None,
}

/// Why a server could not be started.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ServeError(String);

impl Serve {
    /// Begins a server whose models run on devices of a pool.
    pub fn new(pool: Pool) -> Self {
        Self {
            pool,
            models: Vec::new(),
            tokens: Vec::new(),
            pages: Vec::new(),
            limits: Limits::default(),
            grace: Duration::from_secs(30),
            tls: Tls::SelfSigned,
            is_open: false,
        }
    }

    /// Adds a model, or a version of one.
    pub fn model(mut self, model: Model) -> Self {
        self.models.push(model);
        self
    }

    /// Adds a token that clients may send: `Authorization: Bearer <token>`. Without any, [`bind`](Self::bind) makes one
    /// at random.
    pub fn token(mut self, token: impl Into<String>) -> Self {
        self.tokens.push(Secret::new(token));
        self
    }

    /// Uses the certificate chain and the private key in these files, which are PEM text. Otherwise
    /// [`bind`](Self::bind) makes a certificate for `localhost` and its address, which clients must be given.
    pub fn certificate(mut self, chain: impl AsRef<Path>, key: impl AsRef<Path>) -> Self {
        self.tls = Tls::Files(chain.as_ref().into(), key.as_ref().into());
        self
    }

    /// Does without TLS, for a proxy on this host that has it. [`bind`](Self::bind) refuses other addresses than
    /// loopback then.
    pub fn plaintext_on_loopback(mut self) -> Self {
        self.tls = Tls::None;
        self
    }

    /// Answers clients without a token, also if tokens were added. [`bind`](Self::bind) refuses other addresses than
    /// loopback then.
    pub fn without_token_on_loopback(mut self) -> Self {
        self.is_open = true;
        self
    }

    /// Sets what the server takes from its clients at most.
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Sets how long requests may take that have begun when the server ends; 30 s otherwise.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Adds a page of HTML, which needs no token. Its script can send requests to the server.
    pub fn page(mut self, path: impl Into<String>, html: &'static str) -> Self {
        let path = path.into();
        self.pages.push(Page { path, html });
        self
    }

    /// Starts the server, and leases devices for its models. Does not wait until there are any:
    /// [`Server::wait_ready`] does. Port 0 is one that is free.
    ///
    /// # Errors
    ///
    /// If the address or a file cannot be used, or a declaration is wrong; the text names it.
    pub fn bind(self, address: impl ToSocketAddrs + fmt::Debug) -> Result<Server, ServeError> {
        self.start(&address).map_err(ServeError)
    }

    fn start(mut self, address: &(impl ToSocketAddrs + fmt::Debug)) -> Result<Server, String> {
        check_models(&self.models)?;
        check_pages(&self.pages)?;
        check_tokens(&self.tokens)?;
        self.limits = self.limits.clamped();
        self.grace = self.grace.min(LONGEST);
        let (listener, address) = self.listen(address)?;
        if self.tokens.is_empty() && !self.is_open {
            self.tokens.push(random_token());
        }
        let access = match self.is_open {
            true => Access::ThisHost,
            false => Access::new(&self.tokens),
        };
        let identity = match &self.tls {
            Tls::SelfSigned => Some(Identity::self_signed(address)?),
            Tls::Files(chain, key) => Some(Identity::new(read(chain)?, read(key)?)),
            Tls::None => None,
        };
        let tls = identity.as_ref().map(Identity::server_config).transpose()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .thread_name("serve")
            .enable_all()
            .build()
            .map_err(|error| format!("cannot start the runtime of the server: {error}"))?;
        let listener = {
            let _entered = runtime.enter();
            TcpListener::from_std(listener)
                .map_err(|error| format!("cannot listen on {address}: {error}"))?
        };
        let metrics = Arc::new(Metrics::new());
        let served = self.models.into_iter().map(|model| {
            let of_model = metrics.of_model(&model.name, &model.version);
            Arc::new(Served::new(model, of_model))
        });
        let served: Vec<_> = served.collect();
        let budget = BodyBudget::new(&self.limits);
        let api = Arc::new(Api::new(&served, access, budget, metrics));
        let routes = http::routes(api.clone(), &self.pages).merge(grpc::routes(api.clone()));
        let http = Listener {
            tls: tls.map(TlsAcceptor::from),
            routes,
            limits: self.limits,
        };
        let (stop_listener, listener_stops) = watch::channel(false);
        let (stop_fleets, fleets_stop) = watch::channel(false);
        let mut tasks = JoinSet::new();
        let serving = http.run(listener, listener_stops, self.grace);
        tasks.spawn_on(serving, runtime.handle());
        let mut fleets = JoinSet::new();
        for served in served {
            let fleet = Fleet::new(served, self.pool.clone());
            fleets.spawn_on(fleet.run(fleets_stop.clone()), runtime.handle());
        }
        info!(%address, "serving");
        Ok(Server {
            address,
            token: self.tokens.into_iter().next(),
            identity,
            api,
            running: Some(Running {
                runtime,
                listener: tasks,
                fleets,
                stop_listener,
                stop_fleets,
            }),
        })
    }

    /// Binds a socket to an address, which must be loopback if it is not safe otherwise.
    fn listen(
        &self,
        wanted: &(impl ToSocketAddrs + fmt::Debug),
    ) -> Result<(std::net::TcpListener, SocketAddr), String> {
        let failed = |error: std::io::Error| format!("cannot listen on {wanted:?}: {error}");
        let addresses: Vec<_> = wanted.to_socket_addrs().map_err(failed)?.collect();
        if let Some(address) = addresses.iter().find(|it| !it.ip().is_loopback()) {
            let risk = match (&self.tls, self.is_open) {
                (Tls::None, _) => Some("without TLS"),
                (_, true) => Some("without a token"),
                (_, false) => None,
            };
            if let Some(risk) = risk {
                return Err(format!(
                    "refused to serve {risk} on {address}, which other hosts can reach; use an address of loopback"
                ));
            }
        }
        let listener = std::net::TcpListener::bind(&addresses[..]).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok((listener, address))
    }
}

fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path)
        .map_err(|error| format!("cannot read {}: {error}", path.display()))
}

/// A server that runs. When it is dropped, it ends at once; [`shutdown`](Self::shutdown) lets requests finish.
pub struct Server {
    address: SocketAddr,
    token: Option<Secret>,
    identity: Option<Identity>,
    api: Arc<Api>,
    /// `None` once it has ended.
    running: Option<Running>,
}

struct Running {
    runtime: Runtime,
    listener: JoinSet<()>,
    fleets: JoinSet<()>,
    stop_listener: watch::Sender<bool>,
    stop_fleets: watch::Sender<bool>,
}

impl Server {
    /// Returns the address that the server listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the URL of the server for clients on this host, such as `https://localhost:8000`.
    pub fn url(&self) -> String {
        let scheme = if self.identity.is_some() {
            "https"
        } else {
            "http"
        };
        let host = match self.address.ip() {
            ip if ip.is_unspecified() || ip.is_loopback() => "localhost".into(),
            std::net::IpAddr::V4(ip) => ip.to_string(),
            std::net::IpAddr::V6(ip) => format!("[{ip}]"),
        };
        format!("{scheme}://{host}:{}", self.address.port())
    }

    /// Returns the token that clients send, the first if there are several; `None` if they need none.
    pub fn token(&self) -> Option<&Secret> {
        self.token.as_ref()
    }

    /// Returns the certificate chain, as PEM text, by which clients know the server; `None` without TLS.
    pub fn certificate(&self) -> Option<&str> {
        self.identity.as_ref().map(|it| it.chain.as_str())
    }

    /// Returns whether all models answer requests.
    pub fn is_ready(&self) -> bool {
        self.api.is_ready()
    }

    /// Waits until all models answer requests. Returns whether they do so within the time.
    #[must_use]
    pub fn wait_ready(&self, timeout: Duration) -> bool {
        let until = Instant::now() + timeout.min(LONGEST);
        while !self.is_ready() {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(READY_POLL);
        }
        true
    }

    /// Runs until the process gets SIGTERM or SIGINT (Ctrl+C), then [shuts down](Self::shutdown).
    ///
    /// # Panics
    ///
    /// On a thread of an async runtime; call it there in `tokio::task::spawn_blocking`.
    pub fn run_until_signal(mut self) {
        if let Some(running) = &self.running {
            running.runtime.block_on(signal());
        }
        self.end();
    }

    /// Ends the server: it is not ready any more, finishes the requests that it has, within the
    /// [grace](Serve::grace), and gives its devices back.
    ///
    /// # Panics
    ///
    /// As [`run_until_signal`](Self::run_until_signal).
    pub fn shutdown(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(mut running) = self.running.take() else {
            return;
        };
        info!("ending: requests that have begun are finished");
        self.api.end();
        running.stop_listener.send_replace(true);
        running.runtime.block_on(async {
            join_all(&mut running.listener).await;
            running.stop_fleets.send_replace(true);
            let fleets = join_all(&mut running.fleets);
            if tokio::time::timeout(FLEET_GRACE, fleets).await.is_err() {
                info!("some replicas did not end within {FLEET_GRACE:?}");
            }
        });
        running.runtime.shutdown_background();
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(running) = self.running.take() {
            // Leases end with the threads of their replicas.
            running.stop_fleets.send_replace(true);
            running.runtime.shutdown_background();
        }
    }
}

/// Waits for tasks, and logs if one has failed.
async fn join_all(tasks: &mut JoinSet<()>) {
    while let Some(ended) = tasks.join_next().await {
        if let Err(error) = ended {
            error!("a task of the server failed: {error}");
        }
    }
}

/// Waits for SIGTERM or SIGINT.
async fn signal() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
            return;
        }
    }
    let _ = tokio::signal::ctrl_c().await;
}
