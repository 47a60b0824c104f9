//! A real pool to measure: `tensord up` in a process of its own.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tempfile::TempDir;
use tensord_client::{Durability, Lease, LeaseRequest, Pool, PoolUrl};
use tensord_testkit::cluster::Process;
use tensord_transport::TransportChoice;

use crate::{
    process::{remove_settings, tensord_path},
    remote::set_burn_config,
};

/// A pool on loopback. It ends when this handle is dropped.
pub(crate) struct LocalPool {
    process: Process,
    url: PoolUrl,
    dir: TempDir,
}

impl LocalPool {
    /// Starts a pool with `devices`, such as `flex*2`.
    ///
    /// # Errors
    ///
    /// If there is no `tensord` binary, or the pool does not start.
    pub(crate) fn start(devices: &str) -> Result<Self> {
        Self::start_advertising(devices, None)
    }

    /// Starts a pool whose worker writes snapshots to a directory, too.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start).
    pub(crate) fn start_with_store(devices: &str) -> Result<Self> {
        Self::start_any(&tensord_path()?, devices, None, true, &[])
    }

    /// Starts a pool with additional arguments.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start).
    pub(crate) fn start_with(devices: &str, more: &[&str]) -> Result<Self> {
        Self::start_any(&tensord_path()?, devices, None, false, more)
    }

    /// Starts a pool with the `tensord` at `binary`.
    ///
    /// # Errors
    ///
    /// If the pool does not start.
    pub(crate) fn start_binary(binary: &Path, devices: &str) -> Result<Self> {
        Self::start_any(binary, devices, None, false, &[])
    }

    /// Starts a pool whose worker advertises the address `host`.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start).
    pub(crate) fn start_advertising(devices: &str, host: Option<&str>) -> Result<Self> {
        Self::start_any(&tensord_path()?, devices, host, false, &[])
    }

    fn start_any(
        binary: &Path,
        devices: &str,
        host: Option<&str>,
        has_store: bool,
        more: &[&str],
    ) -> Result<Self> {
        let dir = tempfile::tempdir().context("cannot create a temporary directory")?;
        let mut command = Command::new(binary);
        let listen = ["up", "--listen", "127.0.0.1:0", "--devices", devices];
        command.args(listen).arg("--state").arg(state_path(&dir));
        if let Some(host) = host {
            command.args(["--advertise", host]);
        }
        command.args(more);
        if has_store {
            let store = dir.path().join("snapshots");
            command.arg("--snapshots").arg(store);
        }
        remove_settings(&mut command);
        let process = Process::spawn(command, dir.path().join("pool.log"));
        let url = printed_url(&process, "program")?;
        // The scheduler is at its listening address, whatever the worker advertises.
        let url = PoolUrl {
            host: "127.0.0.1".into(),
            ..url
        };
        Ok(Self { process, url, dir })
    }

    /// Returns the id of the pool's process.
    pub(crate) fn process_id(&self) -> u32 {
        self.process.id()
    }

    /// Runs a command of an administrator, such as `usage`, and returns its JSON.
    ///
    /// # Errors
    ///
    /// If the command fails.
    pub(crate) fn administer(&self, args: &[&str]) -> Result<Value> {
        let mut command = Command::new(tensord_path()?);
        command.args(args).arg("--json");
        command.arg("--state").arg(state_path(&self.dir));
        remove_settings(&mut command);
        let output = command.output().context("cannot start tensord")?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "tensord {args:?} failed: {error}");
        serde_json::from_slice(&output.stdout).context("a command printed malformed JSON")
    }

    /// Returns the pool's URL, with op streams over `transport`.
    pub(crate) fn url(&self, transport: TransportChoice) -> PoolUrl {
        PoolUrl {
            transport,
            ..self.url.clone()
        }
    }

    /// Connects to the pool.
    ///
    /// # Errors
    ///
    /// If the pool does not respond.
    pub(crate) fn connect(&self, transport: TransportChoice) -> Result<Pool> {
        connect(self.url(transport))
    }

    /// Connects to the pool and leases a device.
    ///
    /// # Errors
    ///
    /// If the pool does not respond, or has no device.
    pub(crate) fn lease(&self, transport: TransportChoice) -> Result<(Pool, Lease)> {
        lease(self.url(transport))
    }
}

/// Returns the state directory of a pool in `dir`.
fn state_path(dir: &TempDir) -> PathBuf {
    dir.path().join("state")
}

/// Connects to the pool at `url` and leases a device.
///
/// # Errors
///
/// If the pool does not respond, or has no device.
pub(crate) fn lease(url: PoolUrl) -> Result<(Pool, Lease)> {
    lease_as(url, LeaseRequest::devices(1).durable(durability()))
}

/// Whether leases are durable.
static IS_DURABLE: AtomicBool = AtomicBool::new(true);

/// Sets whether the leases of this process, and of the parts that it starts, are durable where that
/// is possible, as they are by default.
pub(crate) fn set_durable(is_durable: bool) {
    IS_DURABLE.store(is_durable, Ordering::Relaxed);
}

/// Returns whether leases are durable.
pub(crate) fn is_durable() -> bool {
    IS_DURABLE.load(Ordering::Relaxed)
}

/// Returns the durability of leases, except for those of the bench that measures it.
pub(crate) fn durability() -> Durability {
    durability_if(is_durable())
}

/// Returns the durability of a lease that is to have snapshots, or none.
pub(crate) fn durability_if(is_durable: bool) -> Durability {
    match is_durable {
        true => Durability::Auto,
        false => Durability::Off,
    }
}

/// Connects to the pool at `url` and makes a request.
///
/// # Errors
///
/// If the pool does not respond, or refuses the request.
pub(crate) fn lease_as(url: PoolUrl, request: LeaseRequest) -> Result<(Pool, Lease)> {
    let pool = connect(url)?;
    set_burn_config(None);
    let lease = pool.lease(request);
    Ok((pool, lease.context("cannot lease a device")?))
}

fn connect(url: PoolUrl) -> Result<Pool> {
    let pool = Pool::connect_url(url);
    pool.context("cannot connect to the pool")
}

/// Returns the next URL that `process` prints for `role`: `program` or `worker`.
///
/// # Errors
///
/// If the printed text is not a pool URL.
pub(crate) fn printed_url(process: &Process, role: &str) -> Result<PoolUrl> {
    let url = process.printed_url(role);
    url.parse().context("a pool printed a malformed URL")
}
