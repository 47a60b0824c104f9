//! The process of a lease: runs the sessions of one lease for a worker.
//!
//! The worker's [`Supervisor`](crate::supervisor::Supervisor) starts this process with a
//! channel on stdin, and passes on the sockets of the lease's connections. The process ends
//! their TLS with a key of its own and runs the sessions in a
//! [`Registry`](crate::registry::Registry) that has only the lease's devices. It has no
//! listening socket and no secret of the pool, the worker or another lease. It ends with its
//! lease, and when the worker is gone.
//!
//! Before a process is given a lease it is a spare: it waits on a single thread and has
//! opened no device. Then it [confines](confinement) itself further, and starts its other threads.

mod channel;
mod confinement;
mod device_tests;
mod driver_caches;
mod lease_run;
pub(crate) mod snapshots;
mod terminal;

use std::{io, path::PathBuf, process::ExitCode};

use rustix::{
    net::Shutdown,
    process::{Signal, set_parent_process_death_signal},
    thread::set_name,
};
use tensord_backend::CustomOps;
use tensord_transport::handoff::{HandoffError, SendError};
use tokio::{
    runtime::{Builder, Runtime},
    signal::unix::{SignalKind, signal},
};
use tracing::warn;

use self::{
    channel::Channel,
    confinement::{Needs, restrict_calls, restrict_to},
    device_tests::{describe_devices, probe_device},
    lease_run::LeaseRun,
    terminal::leave_terminal,
};
use crate::{
    devices::DeviceSelection,
    process_message::{BUILD, Empty, Event, OfferedDevice, Start, Task},
};

/// The `oom_score_adj` of this process. When the host has no memory left, the kernel kills
/// processes with a higher value first: so a lease's process before the worker, which all leases
/// need.
const OOM_SCORE: &str = "500";

/// Why the process ended before its lease.
#[derive(Debug, thiserror::Error)]
enum ProcessError {
    #[error("the channel to the worker: {0}")]
    Channel(#[from] HandoffError),
    #[error("a message to the worker: {0}")]
    Send(#[from] SendError),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("the worker sent a message that is malformed or out of place")]
    Message,
}

/// Runs the process of a lease, which a [`Worker`](crate::Worker) of the same program started
/// with [`Isolation::Processes`](crate::Isolation::Processes). A program must call this before
/// it starts a second thread, when its arguments are those of
/// [`ProcessProgram::args`](crate::ProcessProgram::args).
///
/// The process runs a lease, or lists or tests devices. It calls `started` once, after it has
/// confined itself and before it opens devices. `started` may start threads that the program
/// needs for as long as it runs.
///
/// Logs go to stderr, which the worker reads line by line: a level, and a message.
pub fn run_lease_process(custom_ops: CustomOps, started: impl FnOnce()) -> ExitCode {
    match run(&custom_ops, started) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            warn!("the process of a lease ends: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run(custom_ops: &CustomOps, started: impl FnOnce()) -> Result<(), ProcessError> {
    // The kernel kills this process when the worker dies. The closed channel is not enough, as a
    // process that hangs does not read it.
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(io::Error::from)?;
    leave_terminal();
    // The worker runs `/proc/self/exe`, so `top` would show the name `exe`.
    let _ = set_name(c"tensord-spare");
    // An error means that the kernel chooses by size alone, as it does without this.
    let _ = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE);
    let calls = restrict_calls();
    let waiting = Builder::new_current_thread().enable_io().build()?;
    let first = waiting.block_on(async {
        ignore_stop_signals()?;
        let mut channel = Channel::of_stdin()?;
        channel.send(Event::Hello(BUILD.into())).await?;
        let first = channel.recv().await?;
        Ok::<_, ProcessError>(first.map(|first| (first, channel)))
    });
    let Some((first, channel)) = first? else {
        return Ok(());
    };
    let channel = channel.detach()?;
    drop(waiting);
    let has_filters = calls == Ok(None);
    let files = match &first {
        (Task::Start(start), Some(_)) => restrict_to(&needs(start), has_filters),
        (Task::Probe(probe), None) => {
            let needs = needs_of(std::slice::from_ref(probe), None, Vec::new());
            restrict_to(&needs, has_filters)
        }
        // Drivers look for devices in all places.
        (Task::Describe(_), None) => Ok(None),
        _ => return Err(ProcessError::Message),
    };
    let confined = calls.clone().and(files);
    if let (Task::Start(Start { settings, .. }), true) = (&first.0, confined.is_ok())
        && let Some(kernels) = &settings.kernel_cache
    {
        driver_caches::place(&bytes_to_path(kernels));
    }
    let _ = set_name(match first.0 {
        Task::Start(_) => c"tensord-lease",
        _ => c"tensord-devices",
    });
    started();
    let runtime = Builder::new_multi_thread().enable_all().build()?;
    let ran = runtime.block_on(async {
        let mut channel = channel.attach()?;
        let reply = match first {
            (Task::Describe(describe), _) => describe_devices(describe, custom_ops, calls).await,
            _ if let Err(reason) = confined => Event::Failed(reason),
            (Task::Probe(device), _) => probe_device(device, custom_ops).await,
            (Task::Start(start), Some(fd)) => match LeaseRun::start(start, fd, custom_ops).await {
                Ok(run) => {
                    channel.send(Event::Started(Empty {})).await?;
                    return run.serve(channel).await;
                }
                Err(reason) => Event::Failed(reason),
            },
            _ => return Err(ProcessError::Message),
        };
        channel.send(reply).await
    });
    // The worker learns of the end from this, even if a driver hangs while the process exits.
    let _ = rustix::net::shutdown(io::stdin(), Shutdown::Both);
    // An op may never return.
    Runtime::shutdown_background(runtime);
    ran
}

/// Ignores the signals by which a host stops a worker with all its processes: the worker
/// decides when its leases end. The handlers stay for as long as the process runs.
fn ignore_stop_signals() -> io::Result<()> {
    for kind in [SignalKind::terminate(), SignalKind::interrupt()] {
        drop(signal(kind)?);
    }
    Ok(())
}

/// Returns what the process of a lease needs.
fn needs(start: &Start) -> Needs {
    let hidden = start.hidden.iter().map(|path| bytes_to_path(path));
    let kernel_cache = start.settings.kernel_cache.as_deref().map(bytes_to_path);
    needs_of(&start.devices, kernel_cache, hidden.collect())
}

fn needs_of(
    devices: &[OfferedDevice],
    kernel_cache: Option<PathBuf>,
    hidden: Vec<PathBuf>,
) -> Needs {
    let mut selections = devices.iter().map(|device| device.name.clone().into());
    Needs {
        has_drivers: selections.any(|selection: DeviceSelection| selection.has_driver()),
        kernel_cache,
        hidden,
    }
}

/// Returns the path that the supervisor has sent as bytes.
fn bytes_to_path(bytes: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStrExt;
    std::ffi::OsStr::from_bytes(bytes).into()
}
