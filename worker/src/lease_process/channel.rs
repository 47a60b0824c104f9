//! The process's end of the channel to the worker.

use std::{
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use prost::Message;
use tensord_transport::handoff::{self, Received};

use super::ProcessError;
use crate::process_message::{Event, FromProcess, Task, ToProcess};

/// A message of the worker, with the file descriptor that came with it.
pub(super) type WithFd = (Task, Option<OwnedFd>);

/// The channel, on a runtime.
pub(super) struct Channel {
    sender: handoff::Sender,
    receiver: handoff::Receiver,
}

/// The channel, between two runtimes.
pub(super) struct DetachedChannel(handoff::Detached);

impl DetachedChannel {
    pub(super) fn attach(self) -> io::Result<Channel> {
        let (sender, receiver) = self.0.attach()?;
        Ok(Channel { sender, receiver })
    }
}

impl Channel {
    /// Takes the channel that the worker has put on stdin.
    pub(super) fn of_stdin() -> io::Result<Self> {
        let stdin = io::stdin().as_fd().try_clone_to_owned()?;
        DetachedChannel(handoff::Detached::new(UnixStream::from(stdin))).attach()
    }

    pub(super) fn detach(self) -> io::Result<DetachedChannel> {
        handoff::detach(self.sender, self.receiver).map(DetachedChannel)
    }

    pub(super) async fn send(&mut self, event: Event) -> Result<(), ProcessError> {
        self.send_with(event, None).await
    }

    /// Sends an event, and a duplicate of `fd` with it.
    pub(super) async fn send_with(
        &mut self,
        event: Event,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), ProcessError> {
        let event = Some(event);
        let frame = FromProcess { event }.encode_to_vec();
        Ok(self.sender.send(&frame, fd).await?)
    }

    /// Returns the next message, or `None` if the worker is gone or needs this process no
    /// more.
    pub(super) async fn recv(&mut self) -> Result<Option<WithFd>, ProcessError> {
        let Some(Received { frame, fd }) = self.receiver.recv().await? else {
            return Ok(None);
        };
        let decoded = ToProcess::decode(frame).map_err(|_| ProcessError::Message)?;
        let task = decoded.task.ok_or(ProcessError::Message)?;
        Ok(Some((task, fd)))
    }
}
