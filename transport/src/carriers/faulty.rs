//! The halves of a link that fails at the command of a [`FaultSwitch`].

use std::{pin::Pin, sync::Arc};

use bytes::Bytes;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch},
    task::{JoinSet, unconstrained},
    time::{Instant, sleep_until, timeout},
};

use super::{IDLE_TIMEOUT, LinkError, poll_once};
use crate::faults::{FaultSwitch, Mode, SwitchView};

/// Maximum number of bytes in flight on a link; `send` then waits, as on a full network
/// path.
const MAX_IN_FLIGHT_BYTES: usize = 8 << 20;

/// Bytes that a frame counts on top of its own, so that empty frames are limited, too.
const FRAME_OVERHEAD_BYTES: usize = 64;

/// Boxed, because a half may be one that is under the control of another switch.
pub(crate) type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The sending half that is under the control of a switch.
pub(crate) trait InnerSender: Send + 'static {
    fn can_send_now(&self) -> bool;
    fn send<'a>(&'a mut self, parts: &'a [Bytes]) -> BoxFuture<'a, Result<(), LinkError>>;
    fn finish(self) -> BoxFuture<'static, ()>;
}

/// The receiving half that is under the control of a switch.
pub(crate) trait InnerReceiver {
    fn recv(&mut self) -> BoxFuture<'_, Result<Option<Bytes>, LinkError>>;
    fn partial_bytes(&self) -> usize;
    fn admit(&mut self) -> Result<(), LinkError>;
}

/// Puts both halves of a link under the control of `faults`.
pub(crate) fn wrap<S: InnerSender, R: InnerReceiver>(
    sender: S,
    receiver: R,
    faults: &FaultSwitch,
) -> (Sender, Receiver<R>) {
    faults.count_link();
    let receiver = Receiver {
        inner: Box::new(receiver),
        view: faults.view(),
    };
    (Sender::new(sender, faults.view(), faults.view()), receiver)
}

/// A frame in flight.
#[derive(Debug)]
struct DelayedFrame {
    parts: Vec<Bytes>,
    due: Instant,
    _room: OwnedSemaphorePermit,
}

/// Sends into a line: a task that owns the wrapped sender, and passes each frame on once
/// its delay is over and the switch is healthy.
#[derive(Debug)]
pub(crate) struct Sender {
    /// Limited by `room`. `None` finishes the link.
    in_flight: mpsc::UnboundedSender<Option<DelayedFrame>>,
    room: Arc<Semaphore>,
    ended: watch::Receiver<Option<LinkError>>,
    task: JoinSet<()>,
    view: SwitchView,
    can_send_now: bool,
    /// Whether a frame of `send_now` was lost because the line was full.
    overflowed: bool,
}

impl Sender {
    fn new(inner: impl InnerSender, view: SwitchView, line_view: SwitchView) -> Self {
        let can_send_now = inner.can_send_now();
        let (in_flight, frames) = mpsc::unbounded_channel();
        let (end, ended) = watch::channel(None);
        let mut task = JoinSet::new();
        task.spawn(async move {
            if let Err(error) = forward_frames(frames, inner, line_view).await {
                end.send_replace(Some(error));
            }
        });
        Self {
            in_flight,
            room: Arc::new(Semaphore::new(MAX_IN_FLIGHT_BYTES)),
            ended,
            task,
            view,
            can_send_now,
            overflowed: false,
        }
    }

    /// Returns whether the wrapped link sends without waiting.
    pub(crate) fn can_send_now(&self) -> bool {
        self.can_send_now
    }

    pub(crate) async fn send(&mut self, parts: &[Bytes]) -> Result<(), LinkError> {
        let size: usize = parts.iter().map(Bytes::len).sum();
        let permits = u32::try_from(size + FRAME_OVERHEAD_BYTES).expect("no frame is that large");
        let room = tokio::select! {
            biased;
            error = self.view.wait_for_cut() => return Err(error),
            Ok(error) = self.ended.wait_for(Option::is_some) => {
                return Err(error.clone().expect("waited for"));
            }
            room = self.room.clone().acquire_many_owned(permits) => room,
        };
        if self.view.take_drop() {
            return Ok(());
        }
        let delayed = DelayedFrame {
            parts: parts.to_vec(),
            due: Instant::now() + self.view.delay(),
            _room: room.expect("the semaphore is never closed"),
        };
        let sent = self.in_flight.send(Some(delayed));
        sent.map_err(|_| LinkError::lost("the link ended"))
    }

    /// Sends frames without waiting. If too many bytes are in flight for a frame, that frame
    /// is lost and the link fails.
    pub(crate) fn send_now<'a>(
        &mut self,
        mut frames: impl Iterator<Item = &'a [Bytes]>,
    ) -> Result<(), LinkError> {
        frames.try_for_each(|parts| {
            // A task that has used up its cooperative budget would get `Pending`.
            poll_once(unconstrained(self.send(parts))).unwrap_or_else(|| {
                self.overflowed = true;
                self.check()
            })
        })
    }

    /// Returns an error if a frame was lost because the line was full.
    pub(crate) fn check(&self) -> Result<(), LinkError> {
        match self.overflowed {
            true => Err(LinkError::lost("the line was full")),
            false => Ok(()),
        }
    }

    pub(crate) async fn finish(mut self) {
        // If the line has ended already, there is no more to do.
        let _ = self.in_flight.send(None);
        let _ = timeout(IDLE_TIMEOUT, self.task.join_next()).await;
        self.task.detach_all();
    }
}

/// Passes frames on until the link is finished, dropped or lost.
async fn forward_frames(
    mut frames: mpsc::UnboundedReceiver<Option<DelayedFrame>>,
    mut inner: impl InnerSender,
    mut view: SwitchView,
) -> Result<(), LinkError> {
    let mut cut = view.clone();
    let passing = async {
        while let Some(frame) = frames.recv().await {
            let Some(delayed) = frame else {
                view.wait_for_mode(Mode::Healthy).await;
                inner.finish().await;
                break;
            };
            sleep_until(delayed.due).await;
            view.wait_for_mode(Mode::Healthy).await;
            inner.send(&delayed.parts).await?;
        }
        Ok(())
    };
    tokio::select! {
        biased;
        error = cut.wait_for_cut() => Err(error),
        passed = passing => passed,
    }
}

#[derive(Debug)]
pub(crate) struct Receiver<R> {
    /// Boxed, because `R` may contain a receiver of this type.
    inner: Box<R>,
    view: SwitchView,
}

impl<R: InnerReceiver> Receiver<R> {
    /// Admits the peer on the wrapped link.
    pub(crate) fn admit(&mut self) -> Result<(), LinkError> {
        self.inner.admit()
    }

    /// Returns how many bytes have arrived of a frame that is not complete.
    pub(crate) fn partial_bytes(&self) -> usize {
        self.inner.partial_bytes()
    }

    pub(crate) async fn recv(&mut self) -> Result<Option<Bytes>, LinkError> {
        let Self { inner, view } = self;
        let (mut cut, mut stop) = (view.clone(), view.clone());
        let receiving = async {
            loop {
                view.wait_for_mode(Mode::Healthy).await;
                tokio::select! {
                    biased;
                    () = stop.wait_for_mode(Mode::HalfOpen) => {}
                    received = inner.recv() => return received,
                }
            }
        };
        tokio::select! {
            biased;
            error = cut.wait_for_cut() => Err(error),
            received = receiving => received,
        }
    }
}
