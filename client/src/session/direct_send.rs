//! How whoever waits for an answer sends the question by itself.
//!
//! To wake the driver takes a system call, a place on a processor and a switch to it,
//! which is more than there is to do for a question. So the driver leaves its sender in
//! the session while it waits, and a thread that asks takes the driver's part with it: it
//! makes frames of what was recorded and gives them to the system. What the system does
//! not take at once is the driver's again.
//!
//! The sender is in one place at a time, with the driver or here, and is used here under
//! the lock alone. So whoever has it is the only one to ask for the next frames.

use std::sync::{MutexGuard, PoisonError};

use tensord_transport::LinkSender;

use super::{DriverState, Session, State, Track, wire::NextFrames};

/// How often a borrower looks for more to say: once for ops and what was asked after
/// them, and a few times more for what others said meanwhile.
const MAX_PASSES: usize = 4;

impl Session {
    fn lent_sender(&self) -> MutexGuard<'_, Option<LinkSender>> {
        // A panic in a borrower was over a link that the driver will find broken.
        self.lent_sender
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Says at once what is recorded, if the driver waits; if it does not, it will see by
    /// itself.
    pub(super) fn send_now(&self, mut state: MutexGuard<'_, State>) {
        let waiting = std::mem::take(&mut state.driver);
        // The driver begins with this lock.
        drop(state);
        if waiting != DriverState::No && !self.send_pending(waiting == DriverState::ForAny) {
            self.wake.notify_one();
        }
    }

    /// Takes the part of the driver, which `rested` if it waits for acks as well: whether
    /// it may wait on.
    fn send_pending(&self, rested: bool) -> bool {
        let mut lent_sender = self.lent_sender();
        let Some(sender) = lent_sender.as_mut() else {
            return false;
        };
        for pass in 0..MAX_PASSES {
            // What others have recorded meanwhile is not urgent.
            let patient = pass > 0;
            match self.next_to_send(Track::Ops, patient, rested) {
                NextFrames::Frames(frames) => {
                    self.count_up(&frames);
                    // After an error the driver meets the same.
                    if !matches!(sender.send_now(&frames), Ok(true)) {
                        return false;
                    }
                }
                // The driver waits again, as it did.
                NextFrames::Nothing => return true,
                // It will see to an ack by itself, unless it sleeps.
                NextFrames::PendingAck => return !rested,
                NextFrames::Few(_) | NextFrames::Goodbye => return false,
            }
        }
        false
    }
}

/// The driver's sender, which others may use until it is taken [`back`](Self::back).
pub(super) struct LentSender<'a>(SenderSlot<'a>);

enum SenderSlot<'a> {
    /// In the session, for whoever asks something.
    Lent(&'a Session),
    /// It is of no use to others.
    Kept(LinkSender),
    /// The driver has it again.
    Back,
}

impl<'a> LentSender<'a> {
    pub(super) fn new(session: &'a Session, track: Track, sender: LinkSender) -> Self {
        if track != Track::Ops || !sender.sends_now() {
            return Self(SenderSlot::Kept(sender));
        }
        *session.lent_sender() = Some(sender);
        Self(SenderSlot::Lent(session))
    }

    pub(super) fn back(mut self) -> LinkSender {
        match std::mem::replace(&mut self.0, SenderSlot::Back) {
            SenderSlot::Lent(session) => {
                session.lent_sender().take().expect("nobody else takes it")
            }
            SenderSlot::Kept(sender) => sender,
            SenderSlot::Back => unreachable!("it can be taken once"),
        }
    }
}

impl Drop for LentSender<'_> {
    /// The driver has gone while it waited: its link has ended.
    fn drop(&mut self) {
        if let SenderSlot::Lent(session) = self.0 {
            drop(session.lent_sender().take());
        }
    }
}
