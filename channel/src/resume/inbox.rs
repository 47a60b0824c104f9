//! The receiving side of a direction.

use super::ResumeError;

/// Number of frames received since the last acknowledgement at which the next one is due.
const ACK_AFTER_FRAMES: u64 = 64;

/// The receiving side's state: what was received, and what was granted.
#[derive(Debug)]
pub struct Inbox {
    received: u64,
    received_bytes: u64,
    consumed_bytes: u64,
    window_bytes: u64,
    /// The progress that was last sent to the peer, to decide when the next
    /// acknowledgement is due.
    acknowledged: Progress,
}

/// How far the receiving side has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Progress {
    received: u64,
    received_bytes: u64,
    credit: u64,
}

impl Inbox {
    /// Creates an inbox that lets the sender be `window_bytes` ahead of what was
    /// [consumed](Self::consume). The window must not be smaller than the largest body.
    pub fn new(window_bytes: u64) -> Self {
        Self {
            received: 0,
            received_bytes: 0,
            consumed_bytes: 0,
            window_bytes,
            acknowledged: Progress {
                received: 0,
                received_bytes: 0,
                credit: window_bytes,
            },
        }
    }

    /// Creates an inbox that goes on after what another one has received and consumed: see
    /// [`position`](Self::position).
    pub fn restored(window_bytes: u64, received: u64, received_bytes: u64) -> Self {
        let mut inbox = Self::new(window_bytes);
        inbox.received = received;
        (inbox.received_bytes, inbox.consumed_bytes) = (received_bytes, received_bytes);
        inbox.acknowledged = inbox.progress();
        inbox
    }

    /// Returns a new inbox with the same window.
    pub fn anew(&self) -> Self {
        Self::new(self.window_bytes)
    }

    /// Returns the number of the last frame received, and the cost of all frames up to it.
    pub fn position(&self) -> (u64, u64) {
        (self.received, self.received_bytes)
    }

    /// Accepts frame `seq`, whose body costs `bytes`. Returns `true` if the frame is new
    /// and must be processed, `false` if it was received before.
    ///
    /// # Errors
    ///
    /// When a frame is missing, or the frame exceeds the credit.
    pub fn accept(&mut self, seq: u64, bytes: usize) -> Result<bool, ResumeError> {
        if seq <= self.received {
            return Ok(false);
        }
        if seq != self.received + 1 {
            return Err(ResumeError::Gap {
                seq,
                expected: self.received + 1,
            });
        }
        let end = self.received_bytes.saturating_add(bytes as u64);
        if end > self.credit() {
            return Err(ResumeError::Credit {
                seq,
                excess: end - self.credit(),
            });
        }
        self.received = seq;
        self.received_bytes = end;
        Ok(true)
    }

    /// Checks that frame `seq`, which the peer reports as sent, has arrived.
    ///
    /// # Errors
    ///
    /// [`ResumeError::Gap`] when it has not.
    pub fn check_arrived(&self, seq: u64) -> Result<(), ResumeError> {
        if seq > self.received {
            let expected = self.received + 1;
            return Err(ResumeError::Gap { seq, expected });
        }
        Ok(())
    }

    /// Gives `bytes` of what was received back to the sender as credit: they no longer
    /// take memory here.
    pub fn consume(&mut self, bytes: usize) {
        self.consumed_bytes = self.consumed_bytes.saturating_add(bytes as u64);
    }

    /// Returns the number of the last frame received.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Returns the bytes granted in all.
    pub fn credit(&self) -> u64 {
        self.consumed_bytes.saturating_add(self.window_bytes)
    }

    /// Returns the ack and the credit for an outgoing frame, and records them as sent.
    pub fn acknowledge(&mut self) -> (u64, u64) {
        self.acknowledged = self.progress();
        (self.acknowledged.received, self.acknowledged.credit)
    }

    /// Returns the same as [`acknowledge`](Self::acknowledge), but 0 for an ack or a
    /// credit that has not changed since it was last sent.
    pub fn acknowledge_changes(&mut self) -> (u64, u64) {
        let before = self.acknowledged;
        let (received, credit) = self.acknowledge();
        let changed = |now, before| if now == before { 0 } else { now };
        (
            changed(received, before.received),
            changed(credit, before.credit),
        )
    }

    /// Returns whether an acknowledgement must be sent even if there is nothing else to
    /// send: the peer may be about to run out of credit or of room in its outbox.
    pub fn is_ack_due(&self) -> bool {
        let (now, acknowledged) = (self.progress(), self.acknowledged);
        let due_bytes = self.window_bytes / 4;
        now.credit - acknowledged.credit >= due_bytes
            || now.received_bytes - acknowledged.received_bytes >= due_bytes
            || now.received - acknowledged.received >= ACK_AFTER_FRAMES
    }

    /// Returns whether there is progress that was not sent to the peer.
    pub fn has_pending_ack(&self) -> bool {
        self.acknowledged != self.progress()
    }

    fn progress(&self) -> Progress {
        Progress {
            received: self.received,
            received_bytes: self.received_bytes,
            credit: self.credit(),
        }
    }
}
