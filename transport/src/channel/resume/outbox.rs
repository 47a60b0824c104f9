//! The sending side of a direction.

use std::collections::VecDeque;

use super::{EncodedBody, ResumeError};

#[derive(Debug)]
struct UnackedFrame {
    body: EncodedBody,
    /// Sum of the costs of all bodies up to and including this one.
    end_cost: u64,
}

/// The sending side's state: the bodies not yet acknowledged.
#[derive(Debug)]
pub struct Outbox {
    unacked: VecDeque<UnackedFrame>,
    /// Number of the last body acknowledged; `unacked[0]` has the next number.
    acked: u64,
    /// How many of `unacked` were passed to the current connection.
    sent: usize,
    /// Number of the last body that was passed to any connection.
    ever_sent: u64,
    /// Sum of the costs of all bodies ever pushed.
    end_cost: u64,
    /// Sum of the costs that the peer lets this side send.
    credit: u64,
    unacked_bytes: usize,
    capacity_bytes: usize,
    /// Whether [`Outbox::abandon`] was called: bodies are then dropped instead of kept
    /// and sent.
    abandoned: bool,
}

impl Outbox {
    /// Creates an outbox that is full from `capacity_bytes` on, and may send `credit`
    /// bytes at first.
    pub fn new(capacity_bytes: usize, credit: u64) -> Self {
        Self {
            unacked: VecDeque::new(),
            acked: 0,
            sent: 0,
            ever_sent: 0,
            end_cost: 0,
            credit,
            unacked_bytes: 0,
            capacity_bytes,
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

    /// Returns whether everything pushed was acknowledged.
    pub fn is_empty(&self) -> bool {
        self.unacked.is_empty()
    }

    /// Returns whether a body was not passed to the current connection yet.
    pub fn has_unsent(&self) -> bool {
        self.sent < self.unacked.len()
    }

    /// Returns the number of the last body passed to the current connection.
    pub fn sent(&self) -> u64 {
        self.acked + self.sent as u64
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
        self.unacked.push_back(UnackedFrame {
            body,
            end_cost: self.end_cost,
        });
        self.acked + self.unacked.len() as u64
    }

    /// Drops all unacknowledged bodies, and all that are pushed later: nothing more is
    /// sent. The numbers stay, so late acknowledgements are no errors.
    pub fn abandon(&mut self) {
        self.abandoned = true;
        for unacked in &mut self.unacked {
            unacked.body = EncodedBody::default();
        }
        self.unacked_bytes = 0;
    }

    /// Returns the next body to pass to the connection, with its number, if there is one
    /// and the peer's credit covers it.
    pub fn next_to_send(&mut self) -> Option<(u64, EncodedBody)> {
        let may_go = |unacked: &&UnackedFrame| unacked.end_cost <= self.credit && !self.abandoned;
        let unacked = self.unacked.get(self.sent).filter(may_go)?;
        self.sent += 1;
        let number = self.acked + self.sent as u64;
        self.ever_sent = self.ever_sent.max(number);
        Some((number, unacked.body.clone()))
    }

    /// Drops the bodies up to `ack`, which the peer has received.
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
        self.drop_acked(ack);
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
        self.drop_acked(received);
        self.sent = 0;
        Ok(())
    }

    fn drop_acked(&mut self, ack: u64) {
        while self.acked < ack {
            let unacked = self
                .unacked
                .pop_front()
                .expect("checked against what was kept");
            self.unacked_bytes -= unacked.body.cost();
            self.acked += 1;
            self.sent = self.sent.saturating_sub(1);
        }
    }
}
