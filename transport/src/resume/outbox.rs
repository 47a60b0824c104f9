//! The sending side of a direction.

use std::collections::VecDeque;

use super::{Body, ResumeError};

#[derive(Debug)]
struct SentFrame {
    body: Body,
    /// Sum of all bodies' bytes up to and including this one.
    end: u64,
}

/// The sending side's memory: what was said and not yet acknowledged.
#[derive(Debug)]
pub struct Outbox {
    kept: VecDeque<SentFrame>,
    /// Number of the last body acknowledged; `kept[0]` has the next number.
    acked: u64,
    /// How many of `kept` were handed to the current connection.
    sent: usize,
    /// Number of the last body that was handed to any connection.
    ever_sent: u64,
    /// Sum of all bodies' bytes ever pushed.
    end: u64,
    /// Sum of bytes the peer lets us send.
    credit: u64,
    kept_bytes: usize,
    capacity_bytes: usize,
    /// The bodies are gone.
    abandoned: bool,
}

impl Outbox {
    /// An outbox that reports being full beyond `capacity_bytes`, and may send
    /// `credit` bytes at first.
    pub fn new(capacity_bytes: usize, credit: u64) -> Self {
        Self {
            kept: VecDeque::new(),
            acked: 0,
            sent: 0,
            ever_sent: 0,
            end: 0,
            credit,
            kept_bytes: 0,
            capacity_bytes,
            abandoned: false,
        }
    }

    /// Whether the caller should wait before it pushes more. A single body may
    /// go over the capacity, so that any body can be sent.
    pub fn is_full(&self) -> bool {
        self.kept_bytes >= self.capacity_bytes
    }

    /// Bytes kept.
    pub fn kept_bytes(&self) -> usize {
        self.kept_bytes
    }

    /// Whether everything pushed was acknowledged.
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// Whether something was not handed to the current connection yet.
    pub fn has_unsent(&self) -> bool {
        self.sent < self.kept.len()
    }

    /// Number of the last body handed to the current connection.
    pub fn sent(&self) -> u64 {
        self.acked + self.sent as u64
    }

    /// Adds a body and returns its number.
    pub fn push(&mut self, body: impl Into<Body>) -> u64 {
        let mut body = body.into();
        if self.abandoned {
            body = Body::default();
        }
        let cost = body.cost();
        self.end += cost as u64;
        self.kept_bytes += cost;
        self.kept.push_back(SentFrame {
            body,
            end: self.end,
        });
        self.acked + self.kept.len() as u64
    }

    /// Lets go of the bodies that were not acknowledged, and of all that come: nothing is
    /// sent any more. Their numbers stay, so late acknowledgements are no errors.
    pub fn abandon(&mut self) {
        self.abandoned = true;
        for kept in &mut self.kept {
            kept.body = Body::default();
        }
        self.kept_bytes = 0;
    }

    /// The next body to hand to the connection, if there is one and the peer's
    /// credit covers it.
    pub fn next_to_send(&mut self) -> Option<(u64, Body)> {
        let may_go = |kept: &&SentFrame| kept.end <= self.credit && !self.abandoned;
        let kept = self.kept.get(self.sent).filter(may_go)?;
        self.sent += 1;
        let number = self.acked + self.sent as u64;
        self.ever_sent = self.ever_sent.max(number);
        Some((number, kept.body.clone()))
    }

    /// The peer received everything up to `ack`.
    ///
    /// # Errors
    ///
    /// [`ResumeError::Ack`] when that cannot be. Old acknowledgements are fine:
    /// they may have been overtaken.
    pub fn acknowledge(&mut self, ack: u64) -> Result<(), ResumeError> {
        let sent = self.sent();
        if ack > sent {
            return Err(ResumeError::Ack {
                ack,
                sent,
                acked: self.acked,
            });
        }
        self.forget(ack);
        Ok(())
    }

    /// The peer grants `credit` bytes in all.
    pub fn grant(&mut self, credit: u64) {
        self.credit = self.credit.max(credit);
    }

    /// A new connection: the peer has received everything up to `received`;
    /// what comes after is sent again.
    ///
    /// # Errors
    ///
    /// [`ResumeError::Ack`] when the peer forgot what it acknowledged, or knows
    /// what was never said.
    pub fn rewind(&mut self, received: u64) -> Result<(), ResumeError> {
        if received < self.acked || received > self.ever_sent {
            return Err(ResumeError::Ack {
                ack: received,
                sent: self.ever_sent,
                acked: self.acked,
            });
        }
        self.forget(received);
        self.sent = 0;
        Ok(())
    }

    fn forget(&mut self, ack: u64) {
        while self.acked < ack {
            let kept = self
                .kept
                .pop_front()
                .expect("checked against what was kept");
            self.kept_bytes -= kept.body.cost();
            self.acked += 1;
            self.sent = self.sent.saturating_sub(1);
        }
    }
}
