//! A switch that makes links fail on command, for tests.
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

use tokio::sync::watch;

use crate::carriers::LinkError;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
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

    /// Returns the view of one half of a link that is opened now.
    pub(crate) fn view(&self) -> SwitchView {
        SwitchView {
            shared: self.0.clone(),
            mode: self.0.mode.subscribe(),
            cuts: self.0.cuts.subscribe(),
            cuts_at_open: *self.0.cuts.borrow(),
        }
    }

    /// Counts a link that was put under the control of this switch.
    pub(crate) fn count_link(&self) {
        self.0.links.fetch_add(1, Ordering::Relaxed);
    }
}

/// One half's view of the switch.
#[derive(Debug, Clone)]
pub(crate) struct SwitchView {
    shared: Arc<Shared>,
    mode: watch::Receiver<Mode>,
    cuts: watch::Receiver<u64>,
    cuts_at_open: u64,
}

impl SwitchView {
    /// Waits until the link is cut, and returns the error.
    pub(crate) async fn wait_for_cut(&mut self) -> LinkError {
        let cuts_at_open = self.cuts_at_open;
        // Never an error: this half keeps the channel's sender.
        let _ = self.cuts.wait_for(|cuts| *cuts > cuts_at_open).await;
        LinkError::lost("the test cut the link")
    }

    /// Waits until the switch is in `mode`.
    pub(crate) async fn wait_for_mode(&mut self, mode: Mode) {
        // Never an error: this half keeps the channel's sender.
        let _ = self.mode.wait_for(|now| *now == mode).await;
    }

    pub(crate) fn delay(&self) -> Duration {
        Duration::from_micros(self.shared.delay_us.load(Ordering::Relaxed))
    }

    /// Returns whether to drop the current frame, and counts it if so.
    pub(crate) fn take_drop(&self) -> bool {
        let take = |left: u64| left.checked_sub(1);
        let order = Ordering::Relaxed;
        self.shared
            .drop_next
            .fetch_update(order, order, take)
            .is_ok()
    }
}
