//! The sending side of a direction.

use std::collections::VecDeque;

use super::{EncodedBody, ResumeError};

/// Bytes of memory that a kept body takes in addition to its own.
const KEPT_FRAME_BYTES: usize = 128;

#[derive(Debug)]
struct KeptFrame {
    body: EncodedBody,
    /// Sum of the costs of all bodies up to and including this one.
    end_cost: u64,
}

/// The sending side's state: the bodies not yet acknowledged, and counters that relate to each
/// other, so that they are fields of one struct.
///
/// An outbox may also keep a *journal*: bodies then stay after they were acknowledged, until
/// they are [committed](Self::commit). If a peer falls back to its state after some body, the
/// outbox can send all later bodies [again](Self::restore).
#[derive(Debug)]
pub struct Outbox {
    kept: VecDeque<KeptFrame>,
    /// Number of the last body dropped; `kept[0]` has the next number.
    dropped: u64,
    /// Number of the last body acknowledged.
    acked: u64,
    /// How many of `kept` were passed to the current connection, or acknowledged on an earlier
    /// one.
    sent: usize,
    /// Number of the last body that was passed to any connection with this peer.
    ever_sent: u64,
    /// The same for all peers, which [restores](Self::restore) replaced by one another.
    sent_to_any_peer: u64,
    /// Sum of the costs of all bodies ever pushed.
    end_cost: u64,
    /// Sum of the costs that the peer lets this side send.
    credit: u64,
    unacked_bytes: usize,
    capacity_bytes: usize,
    /// Bytes of the bodies in `kept`.
    kept_bytes: usize,
    /// Number of the last body committed. `None` without a journal.
    committed: Option<u64>,
    /// Whether [`Outbox::abandon`] was called: bodies are then dropped instead of kept
    /// and sent.
    abandoned: bool,
}

impl Outbox {
    /// Creates an outbox that is full from `capacity_bytes` on, and may send `credit`
    /// bytes at first.
    pub fn new(capacity_bytes: usize, credit: u64) -> Self {
        Self {
            kept: VecDeque::new(),
            dropped: 0,
            acked: 0,
            sent: 0,
            ever_sent: 0,
            sent_to_any_peer: 0,
            end_cost: 0,
            credit,
            unacked_bytes: 0,
            capacity_bytes,
            kept_bytes: 0,
            committed: None,
            abandoned: false,
        }
    }

    /// Returns whether the caller should wait before it pushes more. A single body may
    /// exceed the capacity, so that any body can be sent.
    pub fn is_full(&self) -> bool {
        self.unacked_bytes >= self.capacity_bytes
    }

    /// Returns the cost of the unacknowledged bodies, in bytes.
    pub fn unacked_bytes(&self) -> usize {
        self.unacked_bytes
    }

    /// Returns the bytes of all bodies that are kept: those not acknowledged, and those of the
    /// journal.
    pub fn kept_bytes(&self) -> usize {
        self.kept_bytes
    }

    /// Returns whether everything pushed was acknowledged.
    pub fn is_empty(&self) -> bool {
        self.acked == self.pushed()
    }

    /// Returns whether a body was not passed to the current connection yet.
    pub fn has_unsent(&self) -> bool {
        self.sent < self.kept.len()
    }

    /// Returns the number of the last body passed to the current connection.
    pub fn sent(&self) -> u64 {
        self.dropped + self.sent as u64
    }

    /// Returns the number of the last body pushed, and the cost of all bodies up to it.
    pub fn end(&self) -> (u64, u64) {
        (self.pushed(), self.end_cost)
    }

    /// Returns the number of the last body pushed.
    pub fn pushed(&self) -> u64 {
        self.dropped + self.kept.len() as u64
    }

    /// Adds a body and returns its number.
    pub fn push(&mut self, body: impl Into<EncodedBody>) -> u64 {
        let mut body = body.into();
        if self.abandoned {
            body = EncodedBody::default();
        }
        let cost = body.cost();
        self.end_cost += cost as u64;
        self.unacked_bytes += cost;
        self.kept_bytes += body.len() + KEPT_FRAME_BYTES;
        self.kept.push_back(KeptFrame {
            body,
            end_cost: self.end_cost,
        });
        self.pushed()
    }

    /// Drops all bodies, and all that are pushed later: nothing more is sent. The numbers
    /// stay, so late acknowledgements are no errors.
    pub fn abandon(&mut self) {
        self.abandoned = true;
        self.end_journal();
        for kept in &mut self.kept {
            kept.body = EncodedBody::default();
        }
        (self.unacked_bytes, self.kept_bytes) = (0, 0);
    }

    /// Returns the next body to pass to the connection, with its number, if there is one
    /// and the peer's credit covers it.
    pub fn next_to_send(&mut self) -> Option<(u64, EncodedBody)> {
        let may_go = |kept: &&KeptFrame| kept.end_cost <= self.credit && !self.abandoned;
        let kept = self.kept.get(self.sent).filter(may_go)?;
        self.sent += 1;
        let number = self.dropped + self.sent as u64;
        self.ever_sent = self.ever_sent.max(number);
        self.sent_to_any_peer = self.sent_to_any_peer.max(number);
        Some((number, kept.body.clone()))
    }

    /// Records that the peer has received the bodies up to `ack`.
    ///
    /// # Errors
    ///
    /// [`ResumeError::Ack`] when `ack` was not sent on this connection. Old
    /// acknowledgements are accepted: a later one may have overtaken them.
    pub fn acknowledge(&mut self, ack: u64) -> Result<(), ResumeError> {
        let sent = self.sent();
        if ack > sent {
            return Err(ResumeError::Ack {
                ack,
                sent,
                acked: self.acked,
            });
        }
        self.set_acked(ack);
        Ok(())
    }

    /// Raises the credit to `credit` bytes in all.
    pub fn grant(&mut self, credit: u64) {
        self.credit = self.credit.max(credit);
    }

    /// Rewinds for a new connection: the peer has received everything up to `received`,
    /// and the bodies after it are sent again.
    ///
    /// # Errors
    ///
    /// [`ResumeError::Ack`] when `received` is before what the peer acknowledged, or was
    /// never sent.
    pub fn rewind(&mut self, received: u64) -> Result<(), ResumeError> {
        if received < self.acked || received > self.ever_sent {
            return Err(ResumeError::Ack {
                ack: received,
                sent: self.ever_sent,
                acked: self.acked,
            });
        }
        self.set_acked(received);
        self.sent = (received - self.dropped) as usize;
        Ok(())
    }

    fn set_acked(&mut self, ack: u64) {
        while self.acked < ack {
            let at = (self.acked - self.dropped) as usize;
            self.unacked_bytes -= self.kept[at].body.cost();
            self.acked += 1;
        }
        self.drop_settled();
    }

    /// Drops the bodies that are acknowledged and that no journal needs.
    fn drop_settled(&mut self) {
        let settled = self.acked.min(self.committed.unwrap_or(u64::MAX));
        while self.dropped < settled {
            let kept = self
                .kept
                .pop_front()
                .expect("an acknowledged body was pushed");
            self.kept_bytes = self
                .kept_bytes
                .saturating_sub(kept.body.len() + KEPT_FRAME_BYTES);
            self.dropped += 1;
            self.sent = self.sent.saturating_sub(1);
        }
    }
}

/// The journal.
impl Outbox {
    /// Begins the journal: bodies that are not dropped yet, and all that are pushed later, stay
    /// until they are committed.
    pub fn begin_journal(&mut self) {
        if !self.abandoned {
            self.committed.get_or_insert(self.dropped);
        }
    }

    /// Ends the journal: bodies are dropped once they are acknowledged.
    pub fn end_journal(&mut self) {
        self.committed = None;
        self.drop_settled();
    }

    /// Returns whether the outbox keeps a journal.
    pub fn has_journal(&self) -> bool {
        self.committed.is_some()
    }

    /// Commits the bodies up to `number`: they will not be needed again. Without a journal, does
    /// nothing.
    pub fn commit(&mut self, number: u64) {
        if let Some(committed) = &mut self.committed {
            *committed = number.max(*committed);
            self.drop_settled();
        }
    }

    /// Rewinds for a peer that has fallen back to its state after body `number`, and grants
    /// `credit` bytes in all. The bodies after `number` are sent again, acknowledged or not.
    ///
    /// # Errors
    ///
    /// [`ResumeError::Ack`] when a later body is not kept any more, or `number` was never sent.
    pub fn restore(&mut self, number: u64, credit: u64) -> Result<(), ResumeError> {
        // An earlier peer may have got further than the last one, and have left its state.
        if number < self.dropped || number > self.sent_to_any_peer {
            return Err(ResumeError::Ack {
                ack: number,
                sent: self.sent_to_any_peer,
                acked: self.dropped,
            });
        }
        let at = (number - self.dropped) as usize;
        let unacked = self.kept.iter().skip(at);
        self.unacked_bytes = unacked.map(|kept| kept.body.cost()).sum();
        self.acked = number;
        self.sent = at;
        self.ever_sent = number;
        self.credit = credit;
        self.drop_settled();
        Ok(())
    }
}
