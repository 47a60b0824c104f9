//! The thread that starts and reaps processes.

use std::{
    ffi::{OsStr, OsString},
    io,
    os::{
        fd::OwnedFd,
        unix::{net::UnixStream, process::CommandExt},
    },
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    time::Duration,
};

use rustix::thread::disable_transparent_huge_pages;
use tokio::{net::unix::pipe, sync::oneshot};
use tracing::warn;

use super::log::pass_on_log;
use crate::{
    options::ProcessProgram,
    supervisor::lease_cgroups::{LeaseCgroup, LeaseCgroups},
};

/// Interval of the checks for processes that have exited.
const REAP_INTERVAL: Duration = Duration::from_millis(20);

/// Prefixes of environment variables that may be secret: settings of this program, and credentials of
/// object storage, which only the worker itself uses. `IDENTITY_` and `MSI_` are Azure's.
const PRIVATE_PREFIXES: [&str; 7] = [
    "TENSORD_",
    "AWS_",
    "AZURE_",
    "GOOGLE_",
    "IDENTITY_",
    "MSI_",
    "SERVICE_ACCOUNT",
];

/// Starts processes on a thread of its own, which lives as long as a clone of this: Linux
/// kills a process when the *thread* that started it ends (`PR_SET_PDEATHSIG`, which the
/// processes request).
#[derive(Clone)]
pub(in crate::supervisor) struct Spawner(mpsc::Sender<Request>);

enum Request {
    Spawn(oneshot::Sender<io::Result<Spawned>>),
    Reap(Child, Option<LeaseCgroup>),
    /// Reply when all processes that are to be reaped have exited.
    AwaitExits(oneshot::Sender<()>),
}

struct Spawned {
    child: Child,
    cgroup: Option<LeaseCgroup>,
    channel: UnixStream,
    stderr: OwnedFd,
}

impl Spawner {
    /// Starts the thread. `cgroups` makes the control groups of the processes, if this worker may
    /// make any.
    ///
    /// # Errors
    ///
    /// When the system starts no thread.
    pub(in crate::supervisor) fn start(
        program: ProcessProgram,
        cgroups: Option<LeaseCgroups>,
    ) -> io::Result<Self> {
        // Processes inherit this. One enables huge pages again when it has many tensors; the worker
        // has none. An error means that the kernel has no huge pages.
        let _ = disable_transparent_huge_pages(true);
        let (requests, received) = mpsc::channel();
        let thread = std::thread::Builder::new().name("tensord-spawn".into());
        thread.spawn(move || serve(&program, cgroups.as_ref(), &received))?;
        Ok(Self(requests))
    }

    /// Returns a spawner that starts no process, for simulations and tests.
    #[cfg(any(test, feature = "testing"))]
    pub(in crate::supervisor) fn closed() -> Self {
        Self(mpsc::channel().0)
    }

    /// Starts a process, with a control group of its own. Its log becomes part of this process's
    /// log.
    pub(super) async fn spawn(&self) -> io::Result<(ChildProcess, tokio::net::UnixStream)> {
        let spawner = self.clone();
        // A task of its own goes on if the caller is cancelled, and drops the process then.
        let spawning = tokio::spawn(async move { spawner.spawn_child().await });
        spawning.await.map_err(io::Error::other)?
    }

    async fn spawn_child(self) -> io::Result<(ChildProcess, tokio::net::UnixStream)> {
        let ended = || io::Error::other("the thread that starts processes has ended");
        let (reply, replied) = oneshot::channel();
        self.0.send(Request::Spawn(reply)).map_err(|_| ended())?;
        let Spawned {
            child,
            cgroup,
            channel,
            stderr,
        } = replied.await.map_err(|_| ended())??;
        let child = ChildProcess {
            child: Some(child),
            cgroup,
            spawner: self,
        };
        channel.set_nonblocking(true)?;
        let stderr = pipe::Receiver::from_owned_fd(stderr)?;
        tokio::spawn(pass_on_log(child.id(), stderr));
        let channel = tokio::net::UnixStream::from_std(channel)?;
        Ok((child, channel))
    }

    /// Waits until all processes have exited, also those that are still in use.
    pub(in crate::supervisor) async fn wait_for_exits(&self) {
        let (reply, replied) = oneshot::channel();
        let _ = self.0.send(Request::AwaitExits(reply));
        let _ = replied.await;
    }
}

/// A process, and its control group if this worker may make any. Dropping it kills the process, and has the
/// spawner's thread wait for its end and remove the group.
pub(super) struct ChildProcess {
    /// Taken by `drop`.
    child: Option<Child>,
    pub(super) cgroup: Option<LeaseCgroup>,
    spawner: Spawner,
}

impl ChildProcess {
    fn id(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    /// Returns how the process has exited, or `None` if it has not.
    ///
    /// # Errors
    ///
    /// When the system does not know the process.
    pub(super) fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        match &mut self.child {
            Some(child) => child.try_wait(),
            None => Err(io::Error::other("it was dropped")),
        }
    }

    pub(super) fn kill(&mut self) {
        if let Some(child) = &mut self.child {
            // An error means that the process has exited.
            let _ = child.kill();
        }
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        self.kill();
        if let Some(child) = self.child.take() {
            // The thread lives as long as the spawner.
            let _ = self
                .spawner
                .0
                .send(Request::Reap(child, self.cgroup.take()));
        }
    }
}

fn serve(
    program: &ProcessProgram,
    cgroups: Option<&LeaseCgroups>,
    requests: &mpsc::Receiver<Request>,
) {
    let mut exiting: Vec<(Child, Option<LeaseCgroup>)> = Vec::new();
    let mut waiting = Vec::new();
    // The processes that have not been reaped, also those that are in use.
    let mut alive = 0;
    loop {
        let request = match exiting.is_empty() {
            true => requests.recv().map_err(|_| RecvTimeoutError::Disconnected),
            false => requests.recv_timeout(REAP_INTERVAL),
        };
        match request {
            Ok(Request::Spawn(reply)) => {
                let spawned = spawn(program, cgroups);
                alive += usize::from(spawned.is_ok());
                if let Err(Ok(spawned)) = reply.send(spawned) {
                    // Nobody waits for the process any more.
                    let Spawned {
                        mut child, cgroup, ..
                    } = spawned;
                    let _ = child.kill();
                    exiting.push((child, cgroup));
                }
            }
            Ok(Request::Reap(child, cgroup)) => exiting.push((child, cgroup)),
            Ok(Request::AwaitExits(reply)) => waiting.push(reply),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let before = exiting.len();
        exiting.retain_mut(|(child, _)| matches!(child.try_wait(), Ok(None)));
        alive -= before - exiting.len();
        if alive == 0 {
            for reply in waiting.drain(..) {
                // An error means that nobody waits any more.
                let _ = reply.send(());
            }
        }
    }
}

fn spawn(program: &ProcessProgram, cgroups: Option<&LeaseCgroups>) -> io::Result<Spawned> {
    let (channel, far) = UnixStream::pair()?;
    let mut command = Command::new(&program.path);
    command
        .arg0(&program.name)
        .args(&program.args)
        .stdin(Stdio::from(OwnedFd::from(far)))
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    for (name, _) in std::env::vars_os().filter(|(name, _)| is_private(name)) {
        command.env_remove(name);
    }
    let mut child = command.envs(program.env.iter().cloned()).spawn()?;
    let cgroup = cgroups.and_then(|cgroups| {
        let created = cgroups.create(child.id());
        created
            .inspect_err(|e| {
                warn!("the memory of a process is not bounded: cannot make a control group: {e}");
            })
            .ok()
    });
    match child.stderr.take() {
        Some(stderr) => Ok(Spawned {
            child,
            cgroup,
            channel,
            stderr: stderr.into(),
        }),
        None => {
            warn!("a process was started without a log");
            let _ = child.kill();
            let _ = child.wait();
            Err(io::Error::other("the process has no stderr"))
        }
    }
}

fn is_private(name: &OsStr) -> bool {
    let name: OsString = name.to_ascii_uppercase();
    let starts_with = |prefix: &str| name.as_encoded_bytes().starts_with(prefix.as_bytes());
    PRIVATE_PREFIXES.into_iter().any(starts_with)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_private() {
        for name in [
            "TENSORD_URL",
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN",
            "AZURE_STORAGE_ACCOUNT_NAME",
            "AZURE_STORAGE_ACCOUNT_KEY",
            "GOOGLE_APPLICATION_CREDENTIALS",
            "google_service_account",
            "IDENTITY_HEADER",
            "SERVICE_ACCOUNT",
        ] {
            assert!(is_private(name.as_ref()), "{name}");
        }
        for name in ["PATH", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "MY_AWS_"] {
            assert!(!is_private(name.as_ref()), "{name}");
        }
    }
}
