//! Exchanges a channel's frames on one connection.

use std::{fmt, time::Duration};

use bytes::Bytes;
use tokio::{
    sync::Notify,
    time::{Instant, sleep, timeout, timeout_at},
};

use super::{Connection, FrameParts, Timing};
use crate::{Link, LinkError, LinkReceiver, LinkSender};

/// Maximum number of frames in a row; see [`Endpoint::on_frame`].
const MAX_ROW: usize = 256;

/// What a writer knows when it looks for frames to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Look {
    /// Whether frames that may be batched with later ones may still wait for them: the
    /// delay of [`Next::Later`] has not passed.
    pub patient: bool,
    /// Whether the writer has had nothing to send for [`Timing::ack_delay`]; after
    /// [`Next::Nothing`] it then waits for [`Timing::ping`].
    pub rested: bool,
}

/// What a writer is to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Next {
    /// Send these frames.
    Frames(Vec<FrameParts>),
    /// Look again once this time has passed since the first look with this result: there is
    /// something to send, and more of it may come.
    Later(Duration),
    /// Wait to be woken; if that takes [`Timing::ack_delay`], send the pending
    /// acknowledgement in a ping.
    PendingAck,
    /// Wait to be woken; a writer that stays idle sends a ping every [`Timing::ping`].
    Nothing,
    /// Finish the link: everything was sent, and acknowledged as far as the endpoint
    /// requires.
    Done,
    /// Everything was sent: give the peer this time to close the connection.
    Linger(Duration),
    /// End: a later connection has replaced this one.
    Replaced,
}

/// Why a connection ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended<R> {
    /// The connection was lost, for this reason. Another one can resume the channel.
    Lost(String),
    /// A later connection has replaced this one.
    Replaced,
    /// Everything was sent.
    Done,
    /// The [`Endpoint`] ended the channel; holds the reason that it gave.
    Over(R),
}

impl<R: fmt::Display> fmt::Display for Ended<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost(reason) => f.write_str(reason),
            Self::Over(reason) => reason.fmt(f),
            Self::Replaced => f.write_str("a later connection replaced this one"),
            Self::Done => f.write_str("everything was sent"),
        }
    }
}

/// Why an endpoint does not accept a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Broken<R> {
    /// Frames are missing; holds a description. A new connection repairs this.
    Loss(String),
    /// A later connection has replaced this one.
    Replaced,
    /// The channel is over, for this reason. The writer gets this time to send its last
    /// frames.
    Over(R, Duration),
}

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
        let Ok(mut next) = timeout(timing.silence, receiver.recv()).await else {
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
