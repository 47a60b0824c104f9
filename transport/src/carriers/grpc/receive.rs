//! The receiving half of a gRPC link.

use std::{error::Error, mem};

use bytes::Bytes;
use tensord_proto::{MAX_FRAME_BYTES, v1::Packet};
use tokio::{runtime::Handle, sync::oneshot, time::sleep};
use tonic::{Status, Streaming};

use super::send::FinishedFlag;
use crate::{
    admission::AdmissionLimitError,
    carriers::{self, FIRST_FRAME_BYTES, IDLE_TIMEOUT, LinkError},
    connection::{Closer, PeerHandle},
};

#[derive(Debug)]
pub(crate) struct Receiver {
    packets: PacketStream,
    closer: Closer,
    /// Set on the dialling side.
    dialled: Option<DrainContext>,
    /// Set on the accepting side until the peer is admitted.
    unadmitted: Option<PeerHandle>,
}

#[derive(Debug)]
enum PacketStream {
    /// On the dialling side, until the peer answers the call.
    AwaitingResponse(oneshot::Receiver<Result<Streaming<Packet>, Status>>),
    Open {
        first: Option<Packet>,
        rest: Box<Streaming<Packet>>,
    },
    Ended(Result<(), LinkError>),
}

/// What the dialling side needs when its receiver is dropped.
#[derive(Debug)]
struct DrainContext {
    runtime: Handle,
    sender: FinishedFlag,
}

impl Receiver {
    /// Creates the receiver of a dialled link, whose call is answered by `response_receiver`.
    pub(super) fn dialled(
        response_receiver: oneshot::Receiver<Result<Streaming<Packet>, Status>>,
        closer: Closer,
        sender: FinishedFlag,
    ) -> Self {
        let runtime = Handle::current();
        Self {
            packets: PacketStream::AwaitingResponse(response_receiver),
            closer,
            dialled: Some(DrainContext { runtime, sender }),
            unadmitted: None,
        }
    }

    /// Creates the receiver of an accepted link, which has received `first`, with `rest`
    /// to follow.
    pub(super) fn accepted(
        first: Option<Packet>,
        rest: Streaming<Packet>,
        peer_handle: PeerHandle,
    ) -> Self {
        let packets = match first {
            Some(_) => PacketStream::Open {
                first,
                rest: Box::new(rest),
            },
            None => PacketStream::Ended(Ok(())),
        };
        Self {
            packets,
            closer: peer_handle.closer.clone(),
            dialled: None,
            unadmitted: Some(peer_handle),
        }
    }

    /// See [`LinkReceiver::admit`](crate::link::LinkReceiver::admit).
    pub(crate) fn admit(&mut self) -> Result<(), AdmissionLimitError> {
        if let Some(peer_handle) = &self.unadmitted {
            peer_handle.admit(false)?;
        }
        self.unadmitted = None;
        Ok(())
    }

    pub(crate) async fn recv(&mut self) -> Result<Option<Bytes>, LinkError> {
        let received = self.next().await;
        match &received {
            Ok(Some(_)) => {}
            Ok(None) => self.packets = PacketStream::Ended(Ok(())),
            Err(error) => {
                self.packets = PacketStream::Ended(Err(error.clone()));
                // The peer may have broken the framing, so the connection cannot go on.
                self.closer.close();
            }
        }
        received
    }

    async fn next(&mut self) -> Result<Option<Bytes>, LinkError> {
        if let PacketStream::AwaitingResponse(response_receiver) = &mut self.packets {
            let answer = response_receiver.await;
            let answer = answer.map_err(|_| LinkError::lost("the call ended"))?;
            let rest = Box::new(answer.map_err(link_error)?);
            self.packets = PacketStream::Open { first: None, rest };
        }
        let packet = match &mut self.packets {
            PacketStream::AwaitingResponse(_) => unreachable!("the call was answered above"),
            PacketStream::Ended(end) => return end.clone().map(|()| None),
            PacketStream::Open { first, rest } => match first.take() {
                Some(packet) => Some(packet),
                None => rest.message().await.map_err(link_error)?,
            },
        };
        let limit = match self.unadmitted {
            Some(_) => FIRST_FRAME_BYTES,
            None => MAX_FRAME_BYTES,
        };
        let frame = packet.map(|packet| packet.frame);
        if let Some(frame) = &frame {
            carriers::check_received(frame.len(), limit)?;
        }
        Ok(frame)
    }
}

/// Converts a status. A status with a cause was made on this side, after an error in a
/// lower layer; only the innermost cause is informative.
fn link_error(status: Status) -> LinkError {
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
        if let Some(DrainContext { runtime, sender }) = self.dialled.take() {
            let packets = mem::replace(&mut self.packets, PacketStream::Ended(Ok(())));
            runtime.spawn(drain(packets, sender, self.closer.clone()));
        }
    }
}

/// Keeps a dialled call open for the frames that its sender still has in flight: a call
/// whose response is dropped is cancelled, and h2 then discards what it had to send. Ends
/// with the call, or at most twice [`IDLE_TIMEOUT`] after the finish.
async fn drain(packets: PacketStream, sender: FinishedFlag, closer: Closer) {
    let draining = async {
        let mut rest = match packets {
            PacketStream::AwaitingResponse(response_receiver) => match response_receiver.await {
                Ok(Ok(rest)) => Box::new(rest),
                _ => return,
            },
            PacketStream::Open { rest, .. } => rest,
            PacketStream::Ended(_) => return,
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
        () = draining => {}
        () = lingering => {}
    }
}
