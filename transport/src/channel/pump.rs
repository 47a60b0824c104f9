//! Exchanges a channel's frames on one connection.

use std::time::Duration;

use bytes::Bytes;
use tokio::{
    sync::Notify,
    time::{Instant, sleep, timeout, timeout_at},
};

use super::{Broken, Connection, Ended, FrameParts, Look, Next, Timing};
use crate::{Link, LinkError, LinkReceiver, LinkSender};

/// Maximum number of frames in a row; see [`Endpoint::on_frame`].
const MAX_ROW: usize = 256;

/// The owner of a channel, as the pump sees it.
pub trait Endpoint: Sync {
    /// Why the channel is over.
    type Reason: Send;

    /// Collects the effects of a row of frames for [`on_row`](Self::on_row), such as
    /// replies to deliver.
    type Row: Default + Send;

    /// Acts on a frame that was received on `connection`. Frames that arrived together are a
    /// row.
    ///
    /// # Errors
    ///
    /// When the connection must end.
    fn on_frame(
        &self,
        connection: Connection,
        frame: Bytes,
        row: &mut Self::Row,
    ) -> Result<(), Broken<Self::Reason>>;

    /// Acts on the end of a row of frames, also when the connection ends with the row.
    fn on_row(&self, row: &mut Self::Row) {
        let _ = row;
    }

    /// Returns the reason if `error` of the link ends the channel, and not only the
    /// connection.
    fn on_link_error(&self, error: &LinkError) -> Option<Self::Reason> {
        let _ = error;
        None
    }

    /// Returns what the writer of `connection` is to do next.
    fn next(&self, connection: Connection, look: Look) -> Next;

    /// Returns the [ping](super::Channel::ping) for `connection`.
    fn ping(&self, connection: Connection, must: bool) -> Option<FrameParts>;

    /// Returns the notification for which the writer waits. When there may be something to
    /// send, the endpoint must call [`Notify::notify_one`], which also reaches a writer
    /// that does not wait yet.
    fn wake(&self) -> &Notify;

    /// Is called before `frames` are sent; they are empty if the pump only flushes what
    /// [`wait`](Self::wait) may have left unsent.
    fn on_send(&self, sender: &LinkSender, frames: &[FrameParts]) {
        let _ = (sender, frames);
    }

    /// Waits until the writer is woken, or until `until`. Returns the sender, and whether the
    /// writer was woken. The endpoint may use the sender meanwhile.
    fn wait(
        &self,
        sender: LinkSender,
        until: Instant,
    ) -> impl Future<Output = (LinkSender, bool)> + Send {
        async move {
            let woken = timeout_at(until, self.wake().notified()).await;
            (sender, woken.is_ok())
        }
    }
}

/// Exchanges the frames of `endpoint` on `link`, which is its connection `connection`, until
/// the connection ends.
pub async fn pump<E: Endpoint>(
    endpoint: &E,
    connection: Connection,
    link: Link,
    timing: Timing,
) -> Ended<E::Reason> {
    let Link {
        sender, receiver, ..
    } = link;
    tokio::select! {
        ended = read(endpoint, connection, receiver, timing) => ended,
        ended = write(endpoint, connection, sender, timing) => ended,
    }
}

async fn read<E: Endpoint>(
    endpoint: &E,
    connection: Connection,
    mut receiver: LinkReceiver,
    timing: Timing,
) -> Ended<E::Reason> {
    let mut row = E::Row::default();
    loop {
        let Some(mut next) = receive(&mut receiver, timing.silence).await else {
            return Ended::Lost(format!("the peer sent nothing for {:?}", timing.silence));
        };
        let mut count = 0;
        let ended = loop {
            let frame = match next {
                Ok(Some(frame)) => frame,
                Ok(None) => break Some(Ended::Lost("the peer closed the connection".into())),
                Err(e) => {
                    let over = endpoint.on_link_error(&e).map(Ended::Over);
                    break Some(over.unwrap_or_else(|| Ended::Lost(e.to_string())));
                }
            };
            match endpoint.on_frame(connection, frame, &mut row) {
                Ok(()) => {}
                Err(Broken::Loss(reason)) => break Some(Ended::Lost(reason)),
                Err(Broken::Replaced) => break Some(Ended::Replaced),
                Err(Broken::Over(reason, grace)) => {
                    endpoint.on_row(&mut row);
                    sleep(grace).await;
                    return Ended::Over(reason);
                }
            }
            count += 1;
            if count == MAX_ROW {
                break None;
            }
            next = match receiver.try_recv() {
                Some(try_recv) => try_recv,
                None => break None,
            };
        };
        endpoint.on_row(&mut row);
        if let Some(ended) = ended {
            return ended;
        }
    }
}

/// Returns the result of [`LinkReceiver::recv`], or `None` if nothing arrives for `silence`. On a
/// slow link, the bytes of one frame may arrive over a longer time.
pub(super) async fn receive(
    receiver: &mut LinkReceiver,
    silence: Duration,
) -> Option<Result<Option<Bytes>, LinkError>> {
    loop {
        let partial_bytes = receiver.partial_bytes();
        if let Ok(received) = timeout(silence, receiver.recv()).await {
            return Some(received);
        }
        if receiver.partial_bytes() == partial_bytes {
            return None;
        }
    }
}

async fn write<E: Endpoint>(
    endpoint: &E,
    connection: Connection,
    mut sender: LinkSender,
    timing: Timing,
) -> Ended<E::Reason> {
    let mut later: Option<Instant> = None;
    let mut rested = false;
    loop {
        let patient = later.is_none_or(|until| Instant::now() < until);
        let wait = match endpoint.next(connection, Look { patient, rested }) {
            Next::Frames(frames) => {
                if let Err(ended) = send(endpoint, &mut sender, &frames).await {
                    return ended;
                }
                (later, rested) = (None, false);
                continue;
            }
            Next::Later(time) => {
                let until = *later.get_or_insert_with(|| Instant::now() + time);
                (sender, _) = endpoint.wait(sender, until).await;
                // Sends the rest of what the endpoint began to send during the wait.
                if let Err(ended) = send(endpoint, &mut sender, &[]).await {
                    return ended;
                }
                continue;
            }
            Next::Nothing if rested => timing.ping,
            // Frames that arrive during this short wait need not wake the writer for an
            // acknowledgement: the wait ends soon, and most replies are followed by a
            // request that can carry it.
            Next::PendingAck | Next::Nothing => timing.ack_delay,
            Next::Done => {
                sender.finish().await;
                return Ended::Done;
            }
            Next::Linger(time) => {
                sleep(time).await;
                return Ended::Done;
            }
            Next::Replaced => return Ended::Replaced,
        };
        later = None;
        let woken;
        (sender, woken) = endpoint.wait(sender, Instant::now() + wait).await;
        if let Err(ended) = send(endpoint, &mut sender, &[]).await {
            return ended;
        }
        if woken {
            continue;
        }
        let ping = endpoint.ping(connection, rested);
        rested = true;
        if let Some(ping) = ping
            && let Err(ended) = send(endpoint, &mut sender, &[ping]).await
        {
            return ended;
        }
    }
}

async fn send<E: Endpoint>(
    endpoint: &E,
    sender: &mut LinkSender,
    frames: &[FrameParts],
) -> Result<(), Ended<E::Reason>> {
    endpoint.on_send(sender, frames);
    let sent = sender.send_all(frames).await;
    sent.map_err(|e| Ended::Lost(e.to_string()))
}
