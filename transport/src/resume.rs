//! Frames that survive their connection.
//!
//! Each direction of a session is a numbered sequence of *bodies*. The sender
//! keeps a body in its [`Outbox`] until the other side's [`Inbox`] acknowledged
//! it; after a lost connection both say what they received and the outbox goes
//! back to there. So every body is delivered exactly once and in order, however
//! often the connection breaks, as long as both processes live.
//!
//! Pure state: no I/O, no time. The property test at the end runs both over a
//! link that loses, cuts and replays at random.

use std::collections::VecDeque;

use bytes::Bytes;

/// A rule of the numbering that the peer broke. The session cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResumeError {
    /// An acknowledgement of what was never sent, or took one back.
    #[error(
        "frame {ack} was acknowledged; the last sent is {sent} and {acked} were acknowledged before"
    )]
    Ack {
        /// What was acknowledged.
        ack: u64,
        /// What was sent.
        sent: u64,
        /// What was acknowledged before.
        acked: u64,
    },
    /// A frame is missing.
    #[error("frame {seq} came where {expected} was due")]
    Gap {
        /// The frame that came.
        seq: u64,
        /// The frame that was due.
        expected: u64,
    },
    /// More bytes than were granted.
    #[error("frame {seq} goes {excess} bytes over the granted credit")]
    Credit {
        /// The frame that came.
        seq: u64,
        /// By how much.
        excess: u64,
    },
}

/// What is sent: a head that was encoded and, where there is bulk, a tail that
/// is passed on without a copy.
#[derive(Debug, Clone, Default)]
pub struct Body {
    /// The first bytes.
    pub head: Bytes,
    /// The rest.
    pub tail: Bytes,
}

impl Body {
    fn len(&self) -> usize {
        self.head.len() + self.tail.len()
    }
}

impl From<Bytes> for Body {
    fn from(head: Bytes) -> Self {
        Self {
            head,
            tail: Bytes::new(),
        }
    }
}

#[derive(Debug)]
struct Kept {
    body: Body,
    /// Sum of all bodies' bytes up to and including this one.
    end: u64,
}

/// The sending side's memory: what was said and not yet acknowledged.
#[derive(Debug)]
pub struct Outbox {
    kept: VecDeque<Kept>,
    /// Number of the last body acknowledged; `kept[0]` has the next number.
    acked: u64,
    /// How many of `kept` were handed to the current connection.
    sent: usize,
    /// Sum of all bodies' bytes ever pushed.
    end: u64,
    /// Sum of bytes the peer lets us send.
    credit: u64,
    kept_bytes: usize,
    capacity_bytes: usize,
}

impl Outbox {
    /// An outbox that reports being full beyond `capacity_bytes`, and may send
    /// `credit` bytes at first.
    pub fn new(capacity_bytes: usize, credit: u64) -> Self {
        Self {
            kept: VecDeque::new(),
            acked: 0,
            sent: 0,
            end: 0,
            credit,
            kept_bytes: 0,
            capacity_bytes,
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

    /// Adds a body and returns its number.
    pub fn push(&mut self, body: impl Into<Body>) -> u64 {
        let body = body.into();
        self.end += body.len() as u64;
        self.kept_bytes += body.len();
        self.kept.push_back(Kept {
            body,
            end: self.end,
        });
        self.acked + self.kept.len() as u64
    }

    /// The next body to hand to the connection, if there is one and the peer's
    /// credit covers it.
    pub fn next_to_send(&mut self) -> Option<(u64, Body)> {
        let kept = self
            .kept
            .get(self.sent)
            .filter(|kept| kept.end <= self.credit)?;
        self.sent += 1;
        Some((self.acked + self.sent as u64, kept.body.clone()))
    }

    /// The peer received everything up to `ack`.
    ///
    /// # Errors
    ///
    /// [`ResumeError::Ack`] when that cannot be. Old acknowledgements are fine:
    /// they may have been overtaken.
    pub fn acknowledge(&mut self, ack: u64) -> Result<(), ResumeError> {
        let sent = self.acked + self.sent as u64;
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
        let pushed = self.acked + self.kept.len() as u64;
        if received < self.acked || received > pushed {
            return Err(ResumeError::Ack {
                ack: received,
                sent: pushed,
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
            self.kept_bytes -= kept.body.len();
            self.acked += 1;
            self.sent = self.sent.saturating_sub(1);
        }
    }
}

/// The receiving side's memory: how far it got, and what it granted.
#[derive(Debug)]
pub struct Inbox {
    received: u64,
    received_bytes: u64,
    consumed_bytes: u64,
    window_bytes: u64,
    /// What the sender was last told, to know when it needs to hear more.
    told: (u64, u64),
}

impl Inbox {
    /// An inbox that lets the sender be `window_bytes` ahead of what was
    /// [consumed](Self::consume).
    pub fn new(window_bytes: u64) -> Self {
        Self {
            received: 0,
            received_bytes: 0,
            consumed_bytes: 0,
            window_bytes,
            told: (0, window_bytes),
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
    pub fn tell(&mut self) -> (u64, u64) {
        self.told = (self.received, self.credit());
        self.told
    }

    /// Whether the sender should hear from us even if there is nothing else to
    /// say: it may be about to run out of credit or of room to keep bodies.
    pub fn is_telling_due(&self) -> bool {
        let (ack, credit) = self.told;
        self.credit() - credit >= self.window_bytes / 4 || self.received - ack >= 64
    }

    /// Whether there is anything the sender was not told.
    pub fn has_news(&self) -> bool {
        self.told != (self.received, self.credit())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn body(size: usize) -> Bytes {
        Bytes::from(vec![7; size])
    }

    #[test]
    fn bodies_are_kept_until_acknowledged() {
        let mut outbox = Outbox::new(10, 100);
        assert_eq!(outbox.push(body(6)), 1);
        assert!(!outbox.is_full());
        assert_eq!(outbox.push(body(6)), 2);
        assert!(outbox.is_full());
        assert_eq!(outbox.next_to_send().unwrap().0, 1);
        outbox.acknowledge(1).unwrap();
        assert!(!outbox.is_full());
        assert_eq!(outbox.next_to_send().unwrap().0, 2);
        assert!(outbox.next_to_send().is_none());
    }

    #[test]
    fn credit_holds_back_what_it_does_not_cover() {
        let mut outbox = Outbox::new(100, 10);
        outbox.push(body(8));
        outbox.push(body(8));
        assert_eq!(outbox.next_to_send().unwrap().0, 1);
        assert!(outbox.next_to_send().is_none());
        outbox.grant(16);
        assert_eq!(outbox.next_to_send().unwrap().0, 2);
    }

    #[test]
    fn a_peer_that_breaks_the_rules_is_named() {
        let mut outbox = Outbox::new(100, 100);
        outbox.push(body(1));
        assert_eq!(
            outbox.acknowledge(1),
            Err(ResumeError::Ack {
                ack: 1,
                sent: 0,
                acked: 0
            })
        );
        outbox.next_to_send();
        outbox.acknowledge(1).unwrap();
        assert!(
            outbox.rewind(0).is_err(),
            "the peer forgot what it acknowledged"
        );
        assert!(
            outbox.rewind(2).is_err(),
            "the peer knows what was never said"
        );
        let mut inbox = Inbox::new(10);
        assert_eq!(
            inbox.accept(2, 1),
            Err(ResumeError::Gap {
                seq: 2,
                expected: 1
            })
        );
        assert_eq!(
            inbox.accept(1, 11),
            Err(ResumeError::Credit { seq: 1, excess: 1 })
        );
        assert_eq!(inbox.accept(1, 10), Ok(true));
        assert_eq!(inbox.accept(1, 10), Ok(false));
    }

    #[derive(Debug, Clone)]
    enum Step {
        Push(usize),
        Send,
        Deliver,
        Tell,
        Cut,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            3 => (0usize..40).prop_map(Step::Push),
            4 => Just(Step::Send),
            4 => Just(Step::Deliver),
            2 => Just(Step::Tell),
            1 => Just(Step::Cut),
        ];
        prop::collection::vec(step, 0..300)
    }

    /// An outbox and an inbox with a connection between them that may be cut
    /// at any moment, losing what is in flight both ways.
    struct Wire {
        outbox: Outbox,
        inbox: Inbox,
        forward: VecDeque<(u64, Body)>,
        back: VecDeque<(u64, u64)>,
        pushed: Vec<usize>,
        delivered: Vec<usize>,
    }

    impl Wire {
        fn run(&mut self, step: Step) {
            match step {
                Step::Push(size) => {
                    self.outbox.push(body(size));
                    self.pushed.push(size);
                }
                Step::Send => self.forward.extend(self.outbox.next_to_send()),
                Step::Deliver => {
                    if let Some((seq, body)) = self.forward.pop_front()
                        && self.inbox.accept(seq, body.len()).unwrap()
                    {
                        self.delivered.push(body.len());
                        self.inbox.consume(body.len());
                    }
                    if let Some((ack, credit)) = self.back.pop_front() {
                        self.outbox.acknowledge(ack).unwrap();
                        self.outbox.grant(credit);
                    }
                }
                Step::Tell => {
                    let news = self.inbox.tell();
                    self.back.push_back(news);
                }
                Step::Cut => {
                    self.forward.clear();
                    self.back.clear();
                    let (received, credit) = self.inbox.tell();
                    self.outbox.rewind(received).unwrap();
                    self.outbox.grant(credit);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn everything_is_delivered_once_in_order_over_a_wire_that_is_cut(steps in steps()) {
            let mut wire = Wire {
                outbox: Outbox::new(usize::MAX, 64),
                inbox: Inbox::new(64),
                forward: VecDeque::new(),
                back: VecDeque::new(),
                pushed: Vec::new(),
                delivered: Vec::new(),
            };
            for step in steps {
                wire.run(step);
                prop_assert!(wire.pushed.starts_with(&wire.delivered));
            }
            // Left alone, the rest arrives and nothing stays behind.
            for _ in 0..2 * wire.pushed.len() + 2 {
                wire.run(Step::Send);
                wire.run(Step::Deliver);
                wire.run(Step::Tell);
                wire.run(Step::Deliver);
            }
            prop_assert_eq!(&wire.delivered, &wire.pushed);
            prop_assert!(wire.outbox.is_empty());
            prop_assert_eq!(wire.outbox.kept_bytes(), 0);
        }
    }
}
