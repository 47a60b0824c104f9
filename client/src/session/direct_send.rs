//! Lets a thread that reads or syncs send its request without the driver.
//!
//! To wake the driver takes a system call, a free processor and a context switch, which is
//! more work than the request. So the driver leaves its sender in a [`SenderSlot`] while it
//! waits. A thread that makes a request borrows the sender, encodes what was recorded and
//! writes the frames to the socket. The driver later writes what the socket did not accept
//! at once.
//!
//! The sender is either with the driver or in the slot, and is used there only under the
//! slot's lock. So only its owner takes the next frames.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tensord_session::Track;
use tensord_transport::{
    LinkSender,
    channel::{FrameParts, Look, Next},
};

/// How often a borrower looks for frames to send: once for its own request and the ops
/// before it, and a few times more for what other threads recorded meanwhile.
const MAX_PASSES: usize = 4;

/// Has the driver's sender while the driver waits.
#[derive(Default)]
pub(super) struct SenderSlot(Mutex<Option<LinkSender>>);

impl SenderSlot {
    fn lock(&self) -> MutexGuard<'_, Option<LinkSender>> {
        // If a borrower panicked, the driver will find the link broken.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lends `sender` to other threads until it is taken [back](LentSender::back), if it
    /// belongs to the track for ops and its carrier can send without blocking.
    pub(super) fn lend(&self, track: Track, sender: LinkSender) -> LentSender<'_> {
        if track != Track::Ops || !sender.can_send_now() {
            return LentSender(Place::Kept(sender));
        }
        *self.lock() = Some(sender);
        LentSender(Place::Slot(self))
    }

    /// Sends in the driver's place: the frames that `next` returns, each time after `on_send`
    /// was called with them. `rested` is whether the driver waits for acknowledgements, too.
    /// Returns whether the driver may go on waiting; otherwise the caller must wake it.
    pub(super) fn send_pending(
        &self,
        rested: bool,
        mut next: impl FnMut(Look) -> Next,
        on_send: impl Fn(&[FrameParts]),
    ) -> bool {
        let mut slot = self.lock();
        let Some(sender) = slot.as_mut() else {
            return false;
        };
        for pass in 0..MAX_PASSES {
            // Ops that other threads have recorded meanwhile are not urgent.
            let patient = pass > 0;
            match next(Look { patient, rested }) {
                Next::Frames(frames) => {
                    on_send(&frames);
                    // After an error the driver gets the same error.
                    if !matches!(sender.send_now(&frames), Ok(true)) {
                        return false;
                    }
                }
                // `next` has recorded again that the driver waits.
                Next::Nothing => return true,
                // A driver that is not rested wakes after `ack_delay` and sends the ack itself.
                Next::PendingAck => return !rested,
                Next::Later(_) | Next::Linger(_) | Next::Done | Next::Replaced => return false,
            }
        }
        false
    }
}

/// The driver's sender, which other threads may borrow until it is taken
/// [`back`](Self::back).
pub(super) struct LentSender<'a>(Place<'a>);

/// Where the sender is.
enum Place<'a> {
    /// In the slot, where other threads may borrow it.
    Slot(&'a SenderSlot),
    /// Not lent, because its track or carrier does not allow that.
    Kept(LinkSender),
    /// The driver has taken it back.
    Returned,
}

impl LentSender<'_> {
    pub(super) fn back(mut self) -> LinkSender {
        match std::mem::replace(&mut self.0, Place::Returned) {
            Place::Slot(slot) => slot
                .lock()
                .take()
                .expect("the sender stays in its slot while it is lent"),
            Place::Kept(sender) => sender,
            Place::Returned => unreachable!("the sender is returned only once"),
        }
    }
}

impl Drop for LentSender<'_> {
    /// Drops the sender if the driver was dropped while it waited: the link has ended.
    fn drop(&mut self) {
        if let Place::Slot(slot) = self.0 {
            drop(slot.lock().take());
        }
    }
}
