//! The receiving half of a gRPC link.

use std::{error::Error, mem};

use bytes::Bytes;
use tensord_proto::{MAX_FRAME_BYTES, v1::Packet};
use tokio::{runtime::Handle, sync::oneshot, time::sleep};
use tonic::{Status, Streaming};

use super::send::Finished;
use crate::{
    admission::Full,
    connection::{Caller, Closer},
    link::{self, FIRST_FRAME_BYTES, IDLE_TIMEOUT, LinkError},
};

#[derive(Debug)]
pub(crate) struct Receiver {
    packets: Packets,
    closer: Closer,
    /// Set on the dialling side.
    dialled: Option<Dialled>,
    /// Set on the accepting side until the peer is admitted.
    stranger: Option<Caller>,
}

#[derive(Debug)]
enum Packets {
    /// On the dialling side, until the peer answers the call.
    Expected(oneshot::Receiver<Result<Streaming<Packet>, Status>>),
    Open {
        first: Option<Packet>,
        rest: Box<Streaming<Packet>>,
    },
    Over(Result<(), LinkError>),
}

/// What the dialling side needs when its receiver is dropped.
#[derive(Debug)]
struct Dialled {
    runtime: Handle,
    sender: Finished,
}

impl Receiver {
    /// Creates the receiver of a dialled link, whose call is answered by `answered`.
    pub(super) fn dialled(
        answered: oneshot::Receiver<Result<Streaming<Packet>, Status>>,
        closer: Closer,
        sender: Finished,
    ) -> Self {
        let runtime = Handle::current();
        Self {
            packets: Packets::Expected(answered),
            closer,
            dialled: Some(Dialled { runtime, sender }),
            stranger: None,
        }
    }

    /// Creates the receiver of an accepted link, which has received `first`, with `rest`
    /// to follow.
    pub(super) fn accepted(first: Option<Packet>, rest: Streaming<Packet>, caller: Caller) -> Self {
        let packets = match first {
            Some(_) => Packets::Open {
                first,
                rest: Box::new(rest),
            },
            None => Packets::Over(Ok(())),
        };
        Self {
            packets,
            closer: caller.closer.clone(),
            dialled: None,
            stranger: Some(caller),
        }
    }

    /// See [`LinkReceiver::admit`](crate::link::LinkReceiver::admit).
    pub(crate) fn admit(&mut self) -> Result<(), Full> {
        if let Some(caller) = &self.stranger {
            caller.admit(false)?;
        }
        self.stranger = None;
        Ok(())
    }

    pub(crate) async fn recv(&mut self) -> Result<Option<Bytes>, LinkError> {
        let received = self.next().await;
        match &received {
            Ok(Some(_)) => {}
            Ok(None) => self.packets = Packets::Over(Ok(())),
            Err(error) => {
                self.packets = Packets::Over(Err(error.clone()));
                // The peer may have broken the framing, so the connection cannot go on.
                self.closer.close();
            }
        }
        received
    }

    async fn next(&mut self) -> Result<Option<Bytes>, LinkError> {
        if let Packets::Expected(answered) = &mut self.packets {
            let answer = answered.await;
            let answer = answer.map_err(|_| LinkError::lost("the call ended"))?;
            let rest = Box::new(answer.map_err(status)?);
            self.packets = Packets::Open { first: None, rest };
        }
        let packet = match &mut self.packets {
            Packets::Expected(_) => unreachable!("it was answered above"),
            Packets::Over(end) => return end.clone().map(|()| None),
            Packets::Open { first, rest } => match first.take() {
                Some(packet) => Some(packet),
                None => rest.message().await.map_err(status)?,
            },
        };
        let limit = match self.stranger {
            Some(_) => FIRST_FRAME_BYTES,
            None => MAX_FRAME_BYTES,
        };
        let frame = packet.map(|packet| packet.frame);
        if let Some(frame) = &frame {
            link::check_received(frame.len(), limit)?;
        }
        Ok(frame)
    }
}

/// Converts a status. A status with a cause was made on this side, after an error in a
/// lower layer; only the innermost cause is informative.
fn status(status: Status) -> LinkError {
    let mut cause = status.source();
    while let Some(deeper) = cause.and_then(Error::source) {
        cause = Some(deeper);
    }
    match cause {
        Some(cause) => LinkError::lost(cause),
        None => LinkError::lost(status.message()),
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        if let Some(Dialled { runtime, sender }) = self.dialled.take() {
            let packets = mem::replace(&mut self.packets, Packets::Over(Ok(())));
            runtime.spawn(discard(packets, sender, self.closer.clone()));
        }
    }
}

/// Keeps a dialled call open for the frames that its sender still has in flight: a call
/// whose response is dropped is cancelled, and h2 then discards what it had to send. Ends
/// with the call, or at most twice [`IDLE_TIMEOUT`] after the finish.
async fn discard(packets: Packets, sender: Finished, closer: Closer) {
    let discarding = async {
        let mut rest = match packets {
            Packets::Expected(answered) => match answered.await {
                Ok(Ok(rest)) => Box::new(rest),
                _ => return,
            },
            Packets::Open { rest, .. } => rest,
            Packets::Over(_) => return,
        };
        while let Ok(Some(_)) = rest.message().await {}
    };
    let lingering = async {
        loop {
            let finished = sender.get();
            sleep(IDLE_TIMEOUT).await;
            if finished {
                return closer.close();
            }
        }
    };
    tokio::select! {
        () = discarding => {}
        () = lingering => {}
    }
}
