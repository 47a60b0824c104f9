//! Frames that survive their connection.
//!
//! Each direction of a session is a numbered sequence of *bodies*. The sender keeps a
//! body in its [`Outbox`] until the other side's [`Inbox`] has acknowledged it. After a
//! lost connection both sides exchange the numbers they have received, and each outbox
//! rewinds to there. So every body is delivered exactly once and in order, however often
//! the connection breaks, as long as both processes live.
//!
//! Pure state: no I/O, no time. The property test at the end runs an outbox and an inbox
//! over a connection that is cut at random, and loses what is in flight.

mod inbox;
mod outbox;

use bytes::Bytes;

pub use inbox::Inbox;
pub use outbox::Outbox;

/// A violation of the numbering by the peer. The session cannot go on, except after a
/// [`Gap`](Self::Gap), which a new connection repairs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResumeError {
    /// The peer acknowledged a frame that was never sent, or took an acknowledgement
    /// back.
    #[error(
        "frame {ack} was acknowledged, but the last frame sent is {sent} and {acked} was acknowledged before"
    )]
    Ack {
        /// The acknowledged frame.
        ack: u64,
        /// The last frame sent.
        sent: u64,
        /// The last frame acknowledged before.
        acked: u64,
    },
    /// A frame is missing.
    #[error("frame {seq} arrived instead of frame {expected}")]
    Gap {
        /// The frame that arrived.
        seq: u64,
        /// The frame that was expected.
        expected: u64,
    },
    /// The peer sent more bytes than were granted.
    #[error("frame {seq} exceeds the granted credit by {excess} bytes")]
    Credit {
        /// The frame that arrived.
        seq: u64,
        /// Number of bytes over the credit.
        excess: u64,
    },
}

/// A body as it is sent: an encoded head and, where there are bulk bytes, a tail that is
/// passed on without a copy.
#[derive(Debug, Clone, Default)]
pub struct EncodedBody {
    /// The first bytes.
    pub head: Bytes,
    /// The rest.
    pub tail: Bytes,
    /// Credit that the body takes on top of its bytes.
    pub extra_cost: usize,
}

impl EncodedBody {
    /// Returns the credit that the body takes, in bytes.
    fn cost(&self) -> usize {
        self.len() + self.extra_cost
    }

    fn len(&self) -> usize {
        self.head.len() + self.tail.len()
    }
}

impl From<Bytes> for EncodedBody {
    fn from(head: Bytes) -> Self {
        Self {
            head,
            tail: Bytes::new(),
            extra_cost: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

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
    fn body_waits_until_credit_covers_it() {
        let mut outbox = Outbox::new(100, 10);
        outbox.push(body(8));
        outbox.push(body(8));
        assert_eq!(outbox.next_to_send().unwrap().0, 1);
        assert!(outbox.next_to_send().is_none());
        outbox.grant(16);
        assert_eq!(outbox.next_to_send().unwrap().0, 2);
    }

    #[test]
    fn numbering_violations_are_reported() {
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
        outbox.push(body(1));
        let unsent = ResumeError::Ack {
            ack: 2,
            sent: 1,
            acked: 1,
        };
        assert_eq!(
            outbox.rewind(2),
            Err(unsent),
            "the peer knows what was said and never sent"
        );
        outbox.next_to_send();
        assert_eq!(outbox.rewind(1), Ok(()));
        assert_eq!(outbox.rewind(2), Ok(()), "what an earlier connection sent");
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

    #[test]
    fn abandoned_outbox_still_accepts_late_acks() {
        let mut outbox = Outbox::new(100, u64::MAX);
        for _ in 0..3 {
            outbox.push(body(60));
        }
        outbox.next_to_send().unwrap();
        outbox.next_to_send().unwrap();
        outbox.abandon();
        assert_eq!((outbox.unacked_bytes(), outbox.is_full()), (0, false));
        outbox.push(body(60));
        assert_eq!(outbox.unacked_bytes(), 0);
        assert!(outbox.next_to_send().is_none());
        assert_eq!(outbox.acknowledge(2), Ok(()));
        assert!(outbox.acknowledge(3).is_err());
    }

    #[test]
    fn journal_keeps_bodies_until_they_are_committed() {
        let mut outbox = Outbox::new(10, 100);
        outbox.begin_journal();
        for _ in 0..3 {
            outbox.push(body(6));
        }
        while outbox.next_to_send().is_some() {}
        outbox.acknowledge(3).unwrap();
        assert_eq!((outbox.unacked_bytes(), outbox.kept_bytes()), (0, 3 * 134));
        assert!(outbox.is_empty() && !outbox.is_full() && !outbox.has_unsent());
        outbox.commit(1);
        assert_eq!(outbox.kept_bytes(), 2 * 134);
        assert!(outbox.restore(0, 100).is_err(), "it was dropped");
        assert!(outbox.restore(4, 100).is_err(), "it was never sent");
        // The new peer lets less be sent than the old one did.
        outbox.restore(2, 17).unwrap();
        assert_eq!(outbox.unacked_bytes(), 6);
        assert!(outbox.next_to_send().is_none());
        outbox.grant(18);
        assert_eq!(outbox.next_to_send().unwrap().0, 3);
        // The peer falls back further than it did before, and then not as far.
        outbox.restore(1, 100).unwrap();
        assert!(outbox.rewind(3).is_err(), "this peer has not got it");
        outbox.restore(2, 100).unwrap();
        assert_eq!(outbox.next_to_send().unwrap().0, 3);
        outbox.end_journal();
        assert_eq!((outbox.unacked_bytes(), outbox.kept_bytes()), (6, 134));
        outbox.acknowledge(3).unwrap();
        assert_eq!(outbox.kept_bytes(), 0);
        outbox.commit(3);
        assert!(!outbox.has_journal());
    }

    #[test]
    fn an_ack_is_due_before_the_sender_runs_out_of_anything() {
        let mut inbox = Inbox::new(400);
        assert!(!inbox.is_ack_due() && !inbox.has_pending_ack());
        // Room in the outbox: what was received is not consumed yet.
        inbox.accept(1, 99).unwrap();
        assert!(!inbox.is_ack_due() && inbox.has_pending_ack());
        inbox.accept(2, 1).unwrap();
        assert!(inbox.is_ack_due());
        assert_eq!(inbox.acknowledge(), (2, 400));
        assert!(!inbox.is_ack_due() && !inbox.has_pending_ack());
        // Credit.
        inbox.consume(100);
        assert!(inbox.is_ack_due());
        assert_eq!(inbox.acknowledge_changes(), (0, 500));
        assert_eq!(inbox.acknowledge_changes(), (0, 0));
        assert_eq!(inbox.acknowledge(), (2, 500));
        // Empty bodies.
        (3..=66).for_each(|seq| assert_eq!(inbox.accept(seq, 0), Ok(true)));
        assert!(inbox.is_ack_due());
    }

    #[derive(Debug, Clone)]
    enum Step {
        Push(usize),
        Send,
        Deliver,
        Acknowledge,
        AcknowledgeChanges,
        Cut,
        /// The peer keeps a copy of its state.
        Snapshot,
        /// The latest copy is safe.
        Commit,
        /// The peer loses its state, and goes on from its latest copy.
        Lose,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            3 => (0usize..40).prop_map(Step::Push),
            4 => Just(Step::Send),
            4 => Just(Step::Deliver),
            2 => Just(Step::Acknowledge),
            2 => Just(Step::AcknowledgeChanges),
            1 => Just(Step::Cut),
            1 => Just(Step::Snapshot),
            1 => Just(Step::Commit),
            1 => Just(Step::Lose),
        ];
        prop::collection::vec(step, 0..300)
    }

    /// The peer's state at some moment.
    #[derive(Default)]
    struct Copied {
        received: u64,
        received_bytes: u64,
        delivered: Vec<usize>,
    }

    /// An outbox with a journal and an inbox, with a connection between them that may be cut
    /// at any moment, losing what is in flight both ways. The inbox may be lost, too.
    struct Wire {
        outbox: Outbox,
        inbox: Inbox,
        forward: VecDeque<(u64, EncodedBody)>,
        back: VecDeque<(u64, u64)>,
        pushed: Vec<usize>,
        delivered: Vec<usize>,
        copied: Copied,
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
                        && self.inbox.accept(seq, body.cost()).unwrap()
                    {
                        self.delivered.push(body.cost());
                        self.inbox.consume(body.cost());
                    }
                    if let Some((ack, credit)) = self.back.pop_front() {
                        self.outbox.acknowledge(ack).unwrap();
                        self.outbox.grant(credit);
                    }
                }
                Step::Acknowledge => {
                    let ack = self.inbox.acknowledge();
                    self.back.push_back(ack);
                }
                Step::AcknowledgeChanges => {
                    let ack = self.inbox.acknowledge_changes();
                    self.back.push_back(ack);
                }
                Step::Cut => {
                    self.forward.clear();
                    self.back.clear();
                    let (received, credit) = self.inbox.acknowledge();
                    self.outbox.rewind(received).unwrap();
                    self.outbox.grant(credit);
                }
                Step::Snapshot => {
                    let (received, received_bytes) = self.inbox.position();
                    self.copied = Copied {
                        received,
                        received_bytes,
                        delivered: self.delivered.clone(),
                    };
                }
                Step::Commit => self.outbox.commit(self.copied.received),
                Step::Lose => {
                    self.forward.clear();
                    self.back.clear();
                    let Copied {
                        received,
                        received_bytes,
                        ref delivered,
                    } = self.copied;
                    self.inbox = Inbox::restored(64, received, received_bytes);
                    self.delivered.clone_from(delivered);
                    let credit = self.inbox.credit();
                    self.outbox.restore(received, credit).unwrap();
                }
            }
        }
    }

    proptest! {
        #[test]
        fn bodies_are_delivered_once_in_order_despite_cuts_and_losses(steps in steps()) {
            let mut wire = Wire {
                outbox: Outbox::new(usize::MAX, 64),
                inbox: Inbox::new(64),
                forward: VecDeque::new(),
                back: VecDeque::new(),
                pushed: Vec::new(),
                delivered: Vec::new(),
                copied: Copied::default(),
            };
            wire.outbox.begin_journal();
            for step in steps {
                wire.run(step);
                prop_assert!(wire.pushed.starts_with(&wire.delivered));
            }
            // Without further cuts the rest arrives, and the outbox becomes empty.
            let in_flight = wire.forward.len() + wire.back.len();
            for _ in 0..2 * wire.pushed.len() + in_flight + 2 {
                wire.run(Step::Send);
                wire.run(Step::Deliver);
                wire.run(Step::AcknowledgeChanges);
                wire.run(Step::Deliver);
            }
            prop_assert_eq!(&wire.delivered, &wire.pushed);
            prop_assert!(wire.outbox.is_empty());
            prop_assert_eq!(wire.outbox.unacked_bytes(), 0);
            wire.outbox.end_journal();
            prop_assert_eq!(wire.outbox.kept_bytes(), 0);
        }
    }
}
