//! The receiving side of a direction.

use super::ResumeError;

/// Frames that may be received before the sender hears of it.
const DUE_FRAMES: u64 = 64;

/// The receiving side's memory: how far it got, and what it granted.
#[derive(Debug)]
pub struct Inbox {
    received: u64,
    received_bytes: u64,
    consumed_bytes: u64,
    window_bytes: u64,
    /// What the sender was last told, to know when it needs to hear more.
    acknowledged: Progress,
}

/// How far a receiving side got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Progress {
    received: u64,
    received_bytes: u64,
    credit: u64,
}

impl Inbox {
    /// An inbox that lets the sender be `window_bytes` ahead of what was
    /// [consumed](Self::consume). Must be no less than the largest body.
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

    /// Takes note of frame `seq` with a body of `bytes`. True: it is new and is
    /// to be acted on. False: it was received before.
    ///
    /// # Errors
    ///
    /// When a frame is missing, or goes beyond the credit.
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

    /// The peer says that it sent frame `seq`, and everything before it.
    ///
    /// # Errors
    ///
    /// [`ResumeError::Gap`] when that did not arrive.
    pub fn expect(&self, seq: u64) -> Result<(), ResumeError> {
        if seq > self.received {
            let expected = self.received + 1;
            return Err(ResumeError::Gap { seq, expected });
        }
        Ok(())
    }

    /// `bytes` of what was received no longer take memory here.
    pub fn consume(&mut self, bytes: usize) {
        self.consumed_bytes += bytes as u64;
    }

    /// The last frame received.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Bytes granted in all.
    pub fn credit(&self) -> u64 {
        self.consumed_bytes.saturating_add(self.window_bytes)
    }

    /// The ack and credit to put on an outgoing frame.
    pub fn acknowledge(&mut self) -> (u64, u64) {
        self.acknowledged = self.progress();
        (self.acknowledged.received, self.acknowledged.credit)
    }

    /// As [`acknowledge`](Self::acknowledge), with 0 for what the sender was told before: an ack or a
    /// credit of 0 says nothing new.
    pub fn acknowledge_changes(&mut self) -> (u64, u64) {
        let before = self.acknowledged;
        let (received, credit) = self.acknowledge();
        let changed = |now, before| if now == before { 0 } else { now };
        (
            changed(received, before.received),
            changed(credit, before.credit),
        )
    }

    /// Whether the sender should hear from us even if there is nothing else to
    /// say: it may be about to run out of credit or of room to keep bodies.
    pub fn is_ack_due(&self) -> bool {
        let (now, acknowledged) = (self.progress(), self.acknowledged);
        let due_bytes = self.window_bytes / 4;
        now.credit - acknowledged.credit >= due_bytes
            || now.received_bytes - acknowledged.received_bytes >= due_bytes
            || now.received - acknowledged.received >= DUE_FRAMES
    }

    /// Whether there is anything the sender was not told.
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
