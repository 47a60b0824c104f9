//! A process, as its supervisor sees it.

mod end;
mod log;
mod spawner;

use std::{
    io,
    os::fd::BorrowedFd,
    time::{Duration, Instant},
};

use prost::Message;
use tensord_proto::text::{MESSAGE_CHARS, sanitize};
use tensord_transport::handoff;
use tokio::time::{sleep, timeout};

use self::spawner::ChildProcess;
pub(super) use self::spawner::Spawner;
use crate::{
    memory_file::MemoryFile,
    process_message::{BUILD, Event, FromProcess, Task, ToProcess},
};

/// How long a process may take to start.
const START_DEADLINE: Duration = Duration::from_secs(10);

/// How long a process may take to receive a message. One that is stopped, or hangs, is killed.
const SEND_DEADLINE: Duration = Duration::from_secs(2);

/// How long a process whose work is done may take to exit before it is killed.
pub(super) const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// Interval of the checks whether a process has exited.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Why there is no process.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProcessError {
    /// The system did not start the process.
    #[error("cannot start a process: {0}")]
    Spawn(io::Error),
    /// The process ended, or sent nothing, before it was ready.
    #[error("a new process is not ready: {0}")]
    NotReady(String),
}

/// Why a task was not sent.
#[derive(Debug, thiserror::Error)]
pub(super) enum SendError {
    /// The system refuses to send it. The process may go on without it.
    #[error(transparent)]
    Refused(handoff::SendError),
    /// The process is gone, or does not read. It must not be used any more.
    #[error("{0}")]
    Gone(String),
}

impl From<SendError> for String {
    fn from(error: SendError) -> Self {
        error.to_string()
    }
}

/// A process that was started by a [`Spawner`]. Dropping it kills the process.
pub(super) struct Process {
    child: ChildProcess,
    /// Taken by `drop`.
    channel: Option<(handoff::Sender, handoff::Receiver)>,
    /// Whether a message could not be sent because the process had closed its end.
    is_closed: bool,
}

impl Process {
    /// Starts a process, and waits until it is ready for its first task.
    pub(super) async fn start(spawner: &Spawner) -> Result<Self, ProcessError> {
        let (child, stream) = spawner.spawn().await.map_err(ProcessError::Spawn)?;
        let (sender, receiver) = handoff::channel(stream);
        let mut process = Self {
            child,
            channel: Some((sender, receiver.memory_files_only())),
            is_closed: false,
        };
        let reason = match timeout(START_DEADLINE, process.recv()).await {
            Ok(Some(Event::Hello(build))) if build == BUILD => return Ok(process),
            Ok(Some(Event::Hello(build))) => {
                let build = sanitize(&build, MESSAGE_CHARS);
                format!("it is of another build, {build}, and this is {BUILD}")
            }
            Ok(Some(_)) => "its first message is not its build".into(),
            Ok(None) => process.exit().await,
            Err(_) => format!("it sent nothing for {START_DEADLINE:?}"),
        };
        Err(ProcessError::NotReady(reason))
    }

    /// Sends a task, with a duplicate of `fd`.
    ///
    /// # Errors
    ///
    /// When the process is gone or does not read, or the system refuses to send the task.
    pub(super) async fn send(
        &mut self,
        task: Task,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), SendError> {
        let task = Some(task);
        let frame = ToProcess { task }.encode_to_vec();
        let Some((sender, _)) = &mut self.channel else {
            return Err(SendError::Gone("its channel is closed".into()));
        };
        match timeout(SEND_DEADLINE, sender.send(&frame, fd)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(e @ handoff::SendError::Refused(_))) => Err(SendError::Refused(e)),
            Ok(Err(e)) => {
                self.is_closed = true;
                Err(SendError::Gone(e.to_string()))
            }
            Err(_) => Err(SendError::Gone(format!(
                "the process read nothing for {SEND_DEADLINE:?}"
            ))),
        }
    }

    /// Returns the next event, or `None` if the process has closed its channel or sent
    /// something malformed. Cancel safe.
    pub(super) async fn recv(&mut self) -> Option<Event> {
        let (event, _) = self.recv_with().await?;
        Some(event)
    }

    /// As [`recv`](Self::recv), with the file in memory that came with the event.
    pub(super) async fn recv_with(&mut self) -> Option<(Event, Option<MemoryFile>)> {
        let (_, receiver) = self.channel.as_mut()?;
        let received = receiver.recv().await.ok()??;
        let event = FromProcess::decode(received.frame).ok()?.event?;
        Some((event, received.fd.map(MemoryFile::from)))
    }

    /// Bounds the memory of the process, which may take `device_bytes` for tensors, if this worker
    /// may.
    ///
    /// # Errors
    ///
    /// When the system refuses it.
    pub(super) fn limit_memory(&mut self, device_bytes: u64) -> io::Result<()> {
        let limited = self.child.cgroup.as_mut();
        limited.map_or(Ok(()), |cgroup| cgroup.limit(device_bytes))
    }

    /// Returns a description of the process's end if the kernel has killed it because it reached
    /// the limit of its memory.
    pub(super) fn out_of_memory(&self) -> Option<String> {
        self.child.cgroup.as_ref()?.out_of_memory()
    }

    /// Returns whether a message could not be sent because the process has closed the channel. It
    /// is then about to exit.
    pub(super) fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Returns whether the process has exited.
    pub(super) fn has_exited(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits until the process has exited, and kills it if that takes too long. Returns a
    /// description of its end.
    pub(super) async fn exit(&mut self) -> String {
        let until = Instant::now() + EXIT_TIMEOUT;
        let mut was_killed = false;
        loop {
            match self.child.try_wait() {
                Ok(Some(_)) if was_killed => {
                    return format!("it did not exit within {EXIT_TIMEOUT:?} and was killed");
                }
                Ok(Some(status)) => return end::describe(status),
                Err(e) => return format!("its end is unknown: {e}"),
                Ok(None) if Instant::now() > until && !was_killed => {
                    was_killed = true;
                    self.kill();
                }
                Ok(None) => {}
            }
            sleep(EXIT_POLL_INTERVAL).await;
        }
    }

    /// Kills the process.
    pub(super) fn kill(&mut self) {
        self.child.kill();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some((sender, receiver)) = self.channel.take() {
            handoff::close(sender, receiver);
        }
    }
}
