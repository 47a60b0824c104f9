//! Lets a thread that reads or syncs send its request without the driver.
//!
//! To wake the driver takes a system call, a free processor and a context switch, which is
//! more work than the request. So the driver leaves its sender in the session while it
//! waits. A thread that makes a request borrows the sender, encodes what was recorded and
//! writes the frames to the socket. The driver later writes what the socket did not accept
//! at once.
//!
//! The sender is either with the driver or here, and is used here only under the lock. So
//! only its owner takes the next frames.

use std::sync::{MutexGuard, PoisonError};

use tensord_transport::{
    LinkSender,
    channel::{Look, Next},
};

use super::{DriverWait, Session, State, Track};

/// How often a borrower looks for frames to send: once for its own request and the ops
/// before it, and a few times more for what other threads recorded meanwhile.
const MAX_PASSES: usize = 4;

impl Session {
    fn lent_sender(&self) -> MutexGuard<'_, Option<LinkSender>> {
        // If a borrower panicked, the driver will find the link broken.
        self.lent_sender
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends what is recorded if the driver waits; a driver that does not wait will do that
    /// by itself.
    pub(super) fn send_now(&self, mut state: MutexGuard<'_, State>) {
        let waiting = std::mem::take(&mut state.driver);
        // The driver takes this lock first when it wakes.
        drop(state);
        if waiting != DriverWait::No && !self.send_pending(waiting == DriverWait::ForFramesOrAcks) {
            self.wake.notify_one();
        }
    }

    /// Sends in the driver's place; `rested` if the driver waits for acks, too. Returns
    /// whether the driver may go on waiting.
    fn send_pending(&self, rested: bool) -> bool {
        let mut lent_sender = self.lent_sender();
        let Some(sender) = lent_sender.as_mut() else {
            return false;
        };
        for pass in 0..MAX_PASSES {
            // Ops that other threads have recorded meanwhile are not urgent.
            let patient = pass > 0;
            match self.next_to_send(Track::Ops, Look { patient, rested }) {
                Next::Frames(frames) => {
                    self.count_up(&frames);
                    // After an error the driver gets the same error.
                    if !matches!(sender.send_now(&frames), Ok(true)) {
                        return false;
                    }
                }
                // The driver's waiting state was set again.
                Next::Nothing => return true,
                // The driver sends an ack by itself, unless it waits without a timeout.
                Next::PendingAck => return !rested,
                Next::Later(_) | Next::Linger(_) | Next::Done | Next::Replaced => return false,
            }
        }
        false
    }
}

/// The driver's sender, which other threads may borrow until it is taken
/// [`back`](Self::back).
pub(super) struct LentSender<'a>(SenderSlot<'a>);

enum SenderSlot<'a> {
    /// In the session, where other threads may borrow it.
    Lent(&'a Session),
    /// Not lent, because its track or carrier does not allow that.
    Kept(LinkSender),
    /// The driver has taken it back.
    Returned,
}

impl<'a> LentSender<'a> {
    pub(super) fn new(session: &'a Session, track: Track, sender: LinkSender) -> Self {
        if track != Track::Ops || !sender.can_send_now() {
            return Self(SenderSlot::Kept(sender));
        }
        *session.lent_sender() = Some(sender);
        Self(SenderSlot::Lent(session))
    }

    pub(super) fn back(mut self) -> LinkSender {
        match std::mem::replace(&mut self.0, SenderSlot::Returned) {
            SenderSlot::Lent(session) => session
                .lent_sender()
                .take()
                .expect("the sender stays in its slot while it is lent"),
            SenderSlot::Kept(sender) => sender,
            SenderSlot::Returned => unreachable!("the sender is returned only once"),
        }
    }
}

impl Drop for LentSender<'_> {
    /// Drops the sender if the driver was dropped while it waited: the link has ended.
    fn drop(&mut self) {
        if let SenderSlot::Lent(session) = self.0 {
            drop(session.lent_sender().take());
        }
    }
}
