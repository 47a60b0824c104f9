//! The two directions of an open stream: a bounded outgoing queue and a reader task.
//!
//! The driver never waits for a peer. Outgoing messages are queued, and a peer whose queue
//! is full is cut off. A reader task passes incoming messages on; it waits while the driver
//! is busy, which slows its peer down by backpressure.

use std::{net::SocketAddr, pin::pin, sync::Arc, time::Duration};

use futures::{Stream, TryStreamExt as _, stream};
use tensord_proto::v1::{Beat, Error, ErrorCode, PoolMessage, pool_message};
use tensord_scheduler::StreamId;
use tensord_transport::control::ResponseStream;
use tokio::{
    sync::{
        OwnedSemaphorePermit, Semaphore,
        mpsc::{self, error::TrySendError},
    },
    task::AbortHandle,
    time::timeout,
};
use tonic::{Status, Streaming};

use super::convert;
use crate::grpc_status;

/// The capacity of the queue of outgoing messages that HTTP/2 has not taken yet. One event
/// can cause a message for each of a client's pending requests (64) and leases, so this is
/// enough for about ten events of a busy client.
pub(super) const OUTGOING_QUEUE: usize = 1024;

/// How many messages of a stream are in the driver's queue at a time: enough that the driver need not wait for the
/// reader, and few, as all streams share the queue, and as a message of 256 KiB can take more than 10 MB once it is
/// decoded.
const MAX_QUEUED: usize = 4;

/// An entry of the driver's queue.
pub(super) struct Queued<T> {
    pub(super) item: T,
    /// If the entry is a message of a stream, one of the [`MAX_QUEUED`] permits of that stream. The reader of the stream
    /// gets it back when this is dropped.
    pub(super) permit: Option<OwnedSemaphorePermit>,
}

impl<T> From<T> for Queued<T> {
    fn from(item: T) -> Self {
        Self { item, permit: None }
    }
}

/// The sending end of a peer's outgoing queue.
pub(super) type MessageSender<M> = mpsc::Sender<Result<M, Status>>;

/// A stream whose peer has identified itself.
pub(super) struct AcceptedStream<In, Out> {
    pub(super) incoming: Streaming<In>,
    pub(super) outgoing: MessageSender<Out>,
    /// The address of the peer.
    pub(super) peer: SocketAddr,
}

impl<In, Out> AcceptedStream<In, Out> {
    /// Creates a stream of `peer` and queues `answer` as its first message.
    pub(super) fn new(
        peer: SocketAddr,
        incoming: Streaming<In>,
        outgoing: MessageSender<Out>,
        answer: Out,
    ) -> Self {
        // The queue has room: nothing has been sent yet.
        let _ = outgoing.try_send(Ok(answer));
        Self {
            incoming,
            outgoing,
            peer,
        }
    }
}

/// The driver's record of an open stream. Dropping it ends the stream.
pub(super) struct OpenStream<Out> {
    pub(super) id: StreamId,
    /// The address of the peer.
    pub(super) peer: SocketAddr,
    outgoing: MessageSender<Out>,
    reader: AbortHandle,
}

impl<Out> OpenStream<Out> {
    pub(super) fn new(
        id: StreamId,
        peer: SocketAddr,
        outgoing: MessageSender<Out>,
        reader: AbortHandle,
    ) -> Self {
        Self {
            id,
            peer,
            outgoing,
            reader,
        }
    }

    /// Returns whether half of the queue of outgoing messages is full, so that messages should be left out
    /// that the peer can do without.
    pub(super) fn is_busy(&self) -> bool {
        self.outgoing.capacity() < OUTGOING_QUEUE / 2
    }

    /// Queues a message.
    ///
    /// # Errors
    ///
    /// If the peer is gone, or its queue is full because it does not read.
    pub(super) fn send(&self, message: Out) -> Result<(), Error> {
        self.outgoing.try_send(Ok(message)).map_err(|e| match e {
            TrySendError::Full(_) => Error::new(
                ErrorCode::Limit,
                format!("the peer does not read its messages, and {OUTGOING_QUEUE} are queued"),
            ),
            TrySendError::Closed(_) => {
                Error::new(ErrorCode::Cancelled, "the peer has closed its stream")
            }
        })
    }

    /// Ends the stream, with `error` as the reason if there is one.
    pub(super) fn end(self, error: Option<&Error>) {
        if let Some(error) = error {
            // A peer that does not read misses the error.
            let _ = self.outgoing.try_send(Err(grpc_status::status(error)));
        }
    }

    /// Ends the stream with `error`, and waits until the connection has taken the error. If
    /// the queue is full, drops the error and does not wait.
    pub(super) async fn end_and_flush(self, error: &Error) {
        if self
            .outgoing
            .try_send(Err(grpc_status::status(error)))
            .is_ok()
        {
            self.outgoing.closed().await;
        }
    }
}

impl<Out> Drop for OpenStream<Out> {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// The number of parts in which a peer's silence is counted. If the process did not run for
/// a while, at most one part elapses during the gap, so the process still reads what arrived
/// meanwhile.
const SILENCE_PARTS: u32 = 8;

/// Returns the result of `message`, or `None` after `silence` without it. Time in which
/// this process did not run does not count, apart from one part.
async fn with_silence_timeout<T>(silence: Duration, message: impl Future<Output = T>) -> Option<T> {
    let mut message = pin!(message);
    for _ in 0..SILENCE_PARTS {
        if let Ok(message) = timeout(silence / SILENCE_PARTS, &mut message).await {
            return Some(message);
        }
    }
    None
}

/// Passes a peer's messages, as `wrap` returns them, to `inputs` until the peer's stream ends. Waits while
/// [`MAX_QUEUED`] of them are there.
/// Returns an error if the peer sent nothing for `silence` (`None`: no limit), and `None` if
/// the stream ended or broke.
pub(super) async fn read<In, Input>(
    incoming: impl Stream<Item = Result<In, Status>>,
    silence: Option<Duration>,
    inputs: mpsc::Sender<Queued<Input>>,
    wrap: impl Fn(In) -> Input,
) -> Option<Error> {
    let mut incoming = pin!(incoming);
    let permits = Arc::new(Semaphore::new(MAX_QUEUED));
    loop {
        // Before the next message is decoded, so that it does not take memory in addition to those in the queue.
        let permit = permits.clone().acquire_owned().await.ok();
        let message = match silence {
            None => incoming.try_next().await,
            Some(silence) => match with_silence_timeout(silence, incoming.try_next()).await {
                Some(message) => message,
                None => {
                    let words = format!("the peer sent nothing for {silence:?}");
                    return Some(Error::new(ErrorCode::Protocol, words));
                }
            },
        };
        match message {
            Ok(Some(message)) => {
                let item = wrap(message);
                inputs.send(Queued { item, permit }).await.ok()?;
            }
            // A broken connection is treated like the end of the stream.
            Ok(None) | Err(_) => return None,
        }
    }
}

/// Returns the first message of a stream, which identifies the peer.
///
/// # Errors
///
/// If the message does not arrive within `deadline`, or the stream ends before it.
pub(super) async fn read_first<In>(
    incoming: &mut Streaming<In>,
    deadline: Duration,
) -> Result<In, Status> {
    let words = match timeout(deadline, incoming.message()).await {
        Ok(Ok(Some(message))) => return Ok(message),
        Ok(Ok(None)) => "the peer ended the stream before its first message".into(),
        Ok(Err(status)) => return Err(status),
        Err(_) => format!("the peer sent no first message within {deadline:?}"),
    };
    Err(grpc_status::status(&Error::new(ErrorCode::Protocol, words)))
}

/// Returns the outgoing side of a client's stream: `messages`, and a beat after every pause
/// of length `beat`.
pub(super) fn with_beats(
    messages: mpsc::Receiver<Result<PoolMessage, Status>>,
    beat: Duration,
) -> ResponseStream<PoolMessage> {
    Box::pin(stream::unfold(messages, move |mut messages| async move {
        let next = match timeout(beat, messages.recv()).await {
            Ok(next) => next?,
            Err(_) => Ok(convert::pool_message(pool_message::Body::Beat(Beat {}))),
        };
        Some((next, messages))
    }))
}

#[cfg(test)]
mod tests {
    use futures::poll;

    use super::*;

    #[tokio::test]
    async fn messages_of_a_stream_in_the_drivers_queue_are_bounded() {
        const MESSAGES: usize = 20;
        let (inputs, mut queue) = mpsc::channel(2 * MESSAGES);
        let messages = stream::iter((0..MESSAGES).map(Ok));
        let mut reading = pin!(read(messages, None, inputs, |message| message));
        let mut is_over = false;
        for expected in 0..MESSAGES {
            is_over = is_over || poll!(reading.as_mut()).is_ready();
            let left = MESSAGES - expected;
            assert_eq!(queue.len(), left.min(MAX_QUEUED));
            // The reader needs a permit to notice that the stream has ended.
            assert_eq!(is_over, left < MAX_QUEUED);
            // Dropped at once, as the driver does once it has handled the message.
            assert_eq!(queue.recv().await.map(|queued| queued.item), Some(expected));
        }
        assert!(queue.recv().await.is_none());
    }

    #[tokio::test]
    async fn unread_messages_to_a_peer_are_bounded() {
        let (outgoing, mut unread) = mpsc::channel(OUTGOING_QUEUE);
        let reader = tokio::spawn(std::future::pending::<()>());
        let peer = ([127, 0, 0, 1], 1).into();
        let open = OpenStream::new(StreamId(1), peer, outgoing, reader.abort_handle());
        for message in 0..OUTGOING_QUEUE {
            assert_eq!(open.send(message), Ok(()));
        }
        let error = open.send(0).unwrap_err();
        assert_eq!(error.code(), ErrorCode::Limit);
        assert_eq!(
            error.message,
            "the peer does not read its messages, and 1024 are queued"
        );
        open.end(Some(&error));
        assert!(reader.await.unwrap_err().is_cancelled());
        let mut read = 0;
        while unread.recv().await.is_some() {
            read += 1;
        }
        assert_eq!(read, OUTGOING_QUEUE);
    }
}
