//! A pool whose workers are processes on different hosts of a network, with a lease on all
//! their devices.

use std::{
    net::SocketAddr,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use burn::tensor::Device;
use tempfile::TempDir;
use tensord_client::{Lease, LeaseRequest, Pool, PoolUrl};
use tensord_testkit::cluster::{Process, START_DEADLINE};
use tensord_transport::TransportChoice;

use crate::{
    network::{ConnectedLinks, Network},
    pool::{durability, printed_url},
    process::{remove_settings, tensord_path},
    relay::mesh::Endpoint,
    remote::set_burn_config,
};

/// Polling interval while workers register.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The pool, and a device on each worker. All end when this handle is dropped.
pub(crate) struct Fleet<'a> {
    // The lease is dropped before its pool, and both before the processes.
    lease: Lease,
    _pool: Pool,
    links: ConnectedLinks<'a>,
    _workers: Vec<Process>,
    _scheduler: Process,
    _dir: TempDir,
}

impl<'a> Fleet<'a> {
    /// Starts `world` workers on as many hosts, and leases all devices. Each worker
    /// computes with `threads` threads, or with one for each core of the machine.
    ///
    /// # Errors
    ///
    /// If a process does not start.
    pub(crate) fn start(
        network: &'a Network,
        world: usize,
        threads: Option<usize>,
    ) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let (scheduler, program_url, worker_url) = start_scheduler(network, dir.path())?;
        let workers: Vec<Process> = (0..world)
            .map(|host| start_worker(network, host, &worker_url, threads, dir.path()))
            .collect::<Result<_>>()?;
        let pool = Pool::connect_url(program_url);
        let pool = pool.context("cannot connect to the pool")?;
        let endpoints = endpoints(&pool, &workers)?;
        let links = network.connect(&endpoints, &dir)?;
        set_burn_config(None);
        let lease = pool.lease(LeaseRequest::devices(u32::try_from(world)?).durable(durability()));
        Ok(Self {
            lease: lease.context("cannot lease the devices")?,
            _pool: pool,
            links,
            _workers: workers,
            _scheduler: scheduler,
            _dir: dir,
        })
    }

    /// Returns the devices, one on each worker.
    pub(crate) fn devices(&self) -> &[Device] {
        self.lease.devices()
    }

    /// Returns the lease on the devices.
    pub(crate) fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Returns the bytes that each worker has sent so far; see [`ConnectedLinks::sent`].
    ///
    /// # Errors
    ///
    /// If the counters cannot be read.
    pub(crate) fn sent(&self) -> Result<Option<Vec<u64>>> {
        self.links.sent()
    }
}

fn start_scheduler(network: &Network, dir: &Path) -> Result<(Process, PoolUrl, PoolUrl)> {
    let mut command = Command::new(tensord_path()?);
    remove_settings(&mut command);
    let listen = SocketAddr::new(network.hub_address(), 0).to_string();
    command.args(["scheduler", "--listen", &listen, "--state"]);
    command.arg(dir.join("state"));
    let process = Process::spawn(command, dir.join("scheduler.log"));
    let program_url = printed_url(&process, "program")?;
    let workers = printed_url(&process, "worker")?;
    let program_url = PoolUrl {
        transport: TransportChoice::Auto,
        ..program_url
    };
    Ok((process, program_url, workers))
}

fn start_worker(
    network: &Network,
    host: usize,
    url: &PoolUrl,
    threads: Option<usize>,
    dir: &Path,
) -> Result<Process> {
    let mut command = network.command(host, &tensord_path()?);
    remove_settings(&mut command);
    let name = name(host);
    let listen = SocketAddr::new(network.listen_address(host), 0).to_string();
    let advertised = network.advertised_address(host).to_string();
    command.args(["worker", "--devices", "flex", "--name", &name]);
    command.args(["--listen", &listen, "--advertise", &advertised]);
    command.env("TENSORD_URL", url.reveal());
    if let Some(threads) = threads {
        command.env("RAYON_NUM_THREADS", threads.to_string());
    }
    Ok(Process::spawn(command, dir.join(format!("{name}.log"))))
}

fn name(host: usize) -> String {
    format!("worker-{host}")
}

/// Returns the workers' listening ports and processes, once all have registered.
fn endpoints(pool: &Pool, workers: &[Process]) -> Result<Vec<Endpoint>> {
    let until = Instant::now() + START_DEADLINE;
    let status = loop {
        let status = pool.status()?;
        if status.workers.len() == workers.len() {
            break status;
        }
        let logs = || workers.iter().map(Process::log).collect::<String>();
        ensure!(
            Instant::now() < until,
            "not all workers have joined:\n{}",
            logs()
        );
        std::thread::sleep(POLL_INTERVAL);
    };
    let endpoints = workers.iter().enumerate().map(|(host, process)| {
        let mut joined = status.workers.iter();
        let worker = joined.find(|worker| worker.name == name(host));
        let address = &worker.context("another worker joined")?.address;
        let address: SocketAddr = address.parse().context("the worker's address")?;
        Ok(Endpoint {
            port: address.port(),
            process: process.id(),
        })
    });
    endpoints.collect()
}
