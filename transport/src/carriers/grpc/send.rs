//! The sending half of a gRPC link, and the stream that HTTP/2 takes from it.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
};

use bytes::{Bytes, BytesMut};
use tensord_proto::v1::Packet;
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};
use tokio_stream::Stream;

use crate::{
    carriers::{IDLE_TIMEOUT, LinkError},
    connection::Closer,
};

/// Queue length for frames that HTTP/2 has not taken yet.
const SEND_QUEUE: usize = 4;

/// Creates a sender, and the stream to give to HTTP/2.
pub(super) fn channel(closer: Closer) -> (Sender, SendBody) {
    let (packets, outgoing) = mpsc::channel(SEND_QUEUE);
    let (drain_signal, drained) = oneshot::channel();
    let finished = FinishedFlag::default();
    let guard = CloseUnlessFinished {
        finished: finished.clone(),
        closer,
    };
    let sender = Sender {
        packets,
        drained,
        guard,
    };
    let outgoing = SendBody {
        packets: outgoing,
        finished,
        _drain_signal: drain_signal,
    };
    (sender, outgoing)
}

/// Whether a sender was finished, rather than dropped.
#[derive(Debug, Clone, Default)]
pub(super) struct FinishedFlag(Arc<AtomicBool>);

impl FinishedFlag {
    pub(super) fn get(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

#[derive(Debug)]
pub(crate) struct Sender {
    packets: mpsc::Sender<Packet>,
    drained: oneshot::Receiver<()>,
    guard: CloseUnlessFinished,
}

impl Sender {
    pub(super) fn finished(&self) -> FinishedFlag {
        self.guard.finished.clone()
    }

    pub(crate) async fn send(&mut self, parts: &[Bytes]) -> Result<(), LinkError> {
        let frame = match parts {
            [frame] => frame.clone(),
            parts => {
                let mut frame = BytesMut::with_capacity(parts.iter().map(Bytes::len).sum());
                parts.iter().for_each(|part| frame.extend_from_slice(part));
                frame.freeze()
            }
        };
        let sent = self.packets.send(Packet { frame }).await;
        sent.map_err(|_| LinkError::lost("the gRPC stream ended"))
    }

    pub(crate) async fn finish(self) {
        self.guard.finished.0.store(true, Ordering::Release);
        drop(self.packets);
        // HTTP/2 has taken all frames, or the connection is gone: there is no more to do.
        let _ = timeout(IDLE_TIMEOUT, self.drained).await;
    }
}

/// Closes the connection if its sender is dropped before it finished.
#[derive(Debug)]
struct CloseUnlessFinished {
    finished: FinishedFlag,
    closer: Closer,
}

impl Drop for CloseUnlessFinished {
    fn drop(&mut self) {
        if !self.finished.get() {
            self.closer.close();
        }
    }
}

/// The stream from which HTTP/2 takes packets. It ends when the sender has finished, and
/// never when the sender was dropped: the peer would take that for a proper end.
pub(super) struct SendBody {
    packets: mpsc::Receiver<Packet>,
    finished: FinishedFlag,
    /// Dropped with the stream, once HTTP/2 has taken all of it or given it up.
    _drain_signal: oneshot::Sender<()>,
}

impl Stream for SendBody {
    type Item = Packet;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Packet>> {
        match ready!(self.packets.poll_recv(cx)) {
            // The guard closes the connection, which drops this stream.
            None if !self.finished.get() => Poll::Pending,
            packet => Poll::Ready(packet),
        }
    }
}
