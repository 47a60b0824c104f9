//! A link that fails on command, for tests.
//!
//! A [`FaultSwitch`] sits between a process and its links. Tests switch it while the
//! process runs, so that failures happen at chosen moments instead of by chance.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch},
    task::{JoinSet, unconstrained},
    time::{Instant, sleep_until, timeout},
};

use crate::link::{
    self, IDLE_TIMEOUT, Link, LinkError, LinkReceiver, LinkSender, ReceiverKind, SenderKind,
};

/// Bytes that a switch holds in flight for a link, as a network would.
const MAX_IN_FLIGHT_BYTES: usize = 8 << 20;

/// Bytes that a frame counts on top of its own, so that empty frames are limited, too.
const FRAME_OVERHEAD_BYTES: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Healthy,
    /// Both halves look alive, but nothing passes.
    HalfOpen,
}

#[derive(Debug)]
struct Shared {
    mode: watch::Sender<Mode>,
    /// Number of cuts. Links opened before the latest cut are dead.
    cuts: watch::Sender<u64>,
    drop_next: AtomicU64,
    delay_us: AtomicU64,
    links: AtomicU64,
}

/// Controls the links it wrapped. Clones control the same links.
#[derive(Debug, Clone)]
pub struct FaultSwitch(Arc<Shared>);

impl Default for FaultSwitch {
    fn default() -> Self {
        Self(Arc::new(Shared {
            mode: watch::Sender::new(Mode::Healthy),
            cuts: watch::Sender::new(0),
            drop_next: AtomicU64::new(0),
            delay_us: AtomicU64::new(0),
            links: AtomicU64::new(0),
        }))
    }
}

impl FaultSwitch {
    /// Ends every open link; new ones work.
    pub fn cut(&self) {
        self.0.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Lets nothing pass, without an error, until [`heal`](Self::heal). Nothing is lost,
    /// as on a network that stalls: frames sent so far stay in flight, and when the line
    /// is full, sending waits.
    pub fn half_open(&self) {
        self.0.mode.send_replace(Mode::HalfOpen);
    }

    /// Ends [`half_open`](Self::half_open).
    pub fn heal(&self) {
        self.0.mode.send_replace(Mode::Healthy);
    }

    /// Drops the next `frames` frames that are sent.
    pub fn drop_next(&self, frames: u64) {
        self.0.drop_next.store(frames, Ordering::Relaxed);
    }

    /// Delays every frame sent from now on by `delay`. Frames overlap, as on a long
    /// network path, and keep their order.
    pub fn delay(&self, delay: Duration) {
        let us = u64::try_from(delay.as_micros()).unwrap_or(u64::MAX);
        self.0.delay_us.store(us, Ordering::Relaxed);
    }

    /// Returns the number of links wrapped so far.
    pub fn links(&self) -> u64 {
        self.0.links.load(Ordering::Relaxed)
    }

    /// Puts `link` under the control of this switch.
    pub fn wrap(&self, link: Link) -> Link {
        self.0.links.fetch_add(1, Ordering::Relaxed);
        let view = || SwitchView {
            shared: self.0.clone(),
            mode: self.0.mode.subscribe(),
            cuts: self.0.cuts.subscribe(),
            cuts_at_open: *self.0.cuts.borrow(),
        };
        let receiver = Receiver {
            inner: Box::new(link.receiver),
            view: view(),
        };
        let sender = Sender::new(link.sender, view(), view());
        Link {
            sender: LinkSender(SenderKind::Faulty(sender)),
            receiver: LinkReceiver(ReceiverKind::Faulty(receiver)),
            ..link
        }
    }
}

/// One half's view of the switch.
#[derive(Debug, Clone)]
struct SwitchView {
    shared: Arc<Shared>,
    mode: watch::Receiver<Mode>,
    cuts: watch::Receiver<u64>,
    cuts_at_open: u64,
}

impl SwitchView {
    /// Waits until the link is cut, and returns the error.
    async fn wait_for_cut(&mut self) -> LinkError {
        let cuts_at_open = self.cuts_at_open;
        // Never an error: this half keeps the channel's sender.
        let _ = self.cuts.wait_for(|cuts| *cuts > cuts_at_open).await;
        LinkError::lost("the test cut the link")
    }

    /// Waits until the switch is in `mode`.
    async fn wait_for_mode(&mut self, mode: Mode) {
        // Never an error: this half keeps the channel's sender.
        let _ = self.mode.wait_for(|now| *now == mode).await;
    }

    fn delay(&self) -> Duration {
        Duration::from_micros(self.shared.delay_us.load(Ordering::Relaxed))
    }

    /// Returns whether to drop the current frame, and counts it if so.
    fn take_drop(&self) -> bool {
        let take = |left: u64| left.checked_sub(1);
        let order = Ordering::Relaxed;
        self.shared
            .drop_next
            .fetch_update(order, order, take)
            .is_ok()
    }
}

/// A frame in flight.
#[derive(Debug)]
struct DelayedFrame {
    parts: Vec<Bytes>,
    due: Instant,
    _room: OwnedSemaphorePermit,
}

/// Sends into a line: a task that has the real sender and passes frames on when the
/// switch lets it.
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
    fn new(inner: LinkSender, view: SwitchView, line_view: SwitchView) -> Self {
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

    /// Sends frames without waiting. A frame that does not fit the line is lost, and the
    /// link has failed.
    pub(crate) fn send_now<'a>(
        &mut self,
        mut frames: impl Iterator<Item = &'a [Bytes]>,
    ) -> Result<(), LinkError> {
        frames.try_for_each(|parts| {
            // A task that has used up its cooperative budget would get `Pending`.
            link::poll_once(unconstrained(self.send(parts))).unwrap_or_else(|| {
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
    mut inner: LinkSender,
    mut view: SwitchView,
) -> Result<(), LinkError> {
    let mut cut = view.clone();
    let passing = async {
        while let Some(frame) = frames.recv().await {
            let Some(delayed) = frame else {
                view.wait_for_mode(Mode::Healthy).await;
                Box::pin(inner.finish()).await;
                break;
            };
            sleep_until(delayed.due).await;
            view.wait_for_mode(Mode::Healthy).await;
            Box::pin(inner.send(&delayed.parts)).await?;
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
pub(crate) struct Receiver {
    inner: Box<LinkReceiver>,
    view: SwitchView,
}

impl Receiver {
    /// Admits the peer on the wrapped link.
    pub(crate) fn admit(&mut self) -> Result<(), LinkError> {
        self.inner.admit()
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
                    received = Box::pin(inner.recv()) => return received,
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
