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
    /// On the dialling side.
    dialled: Option<Dialled>,
    /// On the accepting side, until the peer is admitted.
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
    /// The half of a link that `answered` is to answer.
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

    /// The half of a link from which `first` came, and then `rest`.
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

    /// As [`LinkReceiver::admit`](crate::link::LinkReceiver::admit).
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
                // The peer may have broken the framing: there is no way to go on.
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

/// A status with a cause was made on this side, of what went wrong below; the
/// layers between have nothing to add.
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

/// Keeps a dialled call going for the frames its sender still has under way:
/// a call whose answer is dropped is cancelled, and h2 then discards what it
/// was given to send. Ends with the call, or some time after the finish.
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
