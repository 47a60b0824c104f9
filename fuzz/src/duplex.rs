//! Two ends of a session, and a connection between them that loses and repeats frames and
//! breaks. Each end must receive all bodies that the other one queued, once and in order.
//!
//! An input is a sequence of control bytes: the lowest bit selects the end that acts, and
//! the rest, modulo the number of `Step`s, its step.

use std::collections::VecDeque;

use bytes::Bytes;
use tensord_proto::v1::{Chunk, Ops, Seed, frame};
use tensord_transport::channel::duplex::Duplex;

use crate::input::Input;

/// Limits small enough that ends run out of credit, and large enough for any body.
const WINDOW_BYTES: u64 = 4 << 10;
const CAPACITY_BYTES: usize = 4 << 10;

/// A step of one end, in the order of the numbers.
#[derive(Debug, Clone, Copy)]
#[repr(u8)]
enum Step {
    /// Queues a body, which the following byte determines.
    Push,
    /// Sends a frame, if there is one and credit for it.
    Send,
    /// Receives the next frame.
    Deliver,
    /// Consumes the oldest received body, which returns its credit.
    Consume,
    /// Sends a ping.
    Beat,
    /// Loses the next frame in flight.
    Lose,
    /// Repeats the next frame in flight.
    Repeat,
    /// Replaces the connection, which loses all frames in flight.
    Cut,
}

const STEPS: [Step; 8] = [
    Step::Push,
    Step::Send,
    Step::Deliver,
    Step::Consume,
    Step::Beat,
    Step::Lose,
    Step::Repeat,
    Step::Cut,
];

/// Runs the target.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let mut session = Session::default();
    while !input.is_empty() {
        let control = input.byte();
        let step = STEPS[usize::from(control >> 1) % STEPS.len()];
        session.step(usize::from(control & 1), step, &mut input);
        session.check();
    }
    session.drain();
}

#[derive(Default)]
struct Session {
    ends: [Peer; 2],
}

struct Peer {
    duplex: Duplex,
    sent: Vec<frame::Body>,
    received: Vec<frame::Body>,
    /// Credit in bytes of received bodies that are not consumed.
    unconsumed: VecDeque<usize>,
    /// Frames on their way to this end.
    in_flight: VecDeque<Bytes>,
}

impl Default for Peer {
    fn default() -> Self {
        Self {
            duplex: Duplex::new(CAPACITY_BYTES, WINDOW_BYTES, WINDOW_BYTES),
            sent: Vec::new(),
            received: Vec::new(),
            unconsumed: VecDeque::new(),
            in_flight: VecDeque::new(),
        }
    }
}

impl Session {
    fn step(&mut self, at: usize, step: Step, input: &mut Input<'_>) {
        let [left, right] = &mut self.ends;
        let (end, other) = match at {
            0 => (left, right),
            _ => (right, left),
        };
        match step {
            Step::Push => end.push(input.byte()),
            Step::Send => {
                let frame = end.duplex.next_to_send();
                other
                    .in_flight
                    .extend(frame.map(|parts| parts.concat().into()));
            }
            Step::Deliver => self.deliver(at),
            Step::Consume => {
                if let Some(bytes) = end.unconsumed.pop_front() {
                    end.duplex.inbox().consume(bytes);
                }
            }
            Step::Beat => other.in_flight.push_back(end.duplex.ping()),
            Step::Lose => drop(end.in_flight.pop_front()),
            Step::Repeat => {
                if let Some(frame) = end.in_flight.front().cloned() {
                    end.in_flight.push_front(frame);
                }
            }
            Step::Cut => self.reconnect(),
        }
    }

    fn deliver(&mut self, at: usize) {
        let end = &mut self.ends[at];
        let Some(frame) = end.in_flight.pop_front() else {
            return;
        };
        match end.duplex.receive(frame) {
            Ok(Some((frame::Body::Ping(_), 0)) | None) => {}
            Ok(Some((body, bytes))) => {
                end.received.push(body);
                end.unconsumed.push_back(bytes);
            }
            // Both ends keep the rules, so a loss is the only possible error.
            Err(error) => {
                assert!(error.is_loss(), "{error}");
                self.reconnect();
            }
        }
    }

    fn reconnect(&mut self) {
        let received = self.ends.each_mut().map(|end| {
            end.in_flight.clear();
            end.duplex.inbox().acknowledge()
        });
        for (end, (received, credit)) in self.ends.iter_mut().zip(received.into_iter().rev()) {
            end.duplex
                .rewind(received, credit)
                .expect("the acknowledgement is valid");
        }
    }

    fn check(&self) {
        let [left, right] = &self.ends;
        assert!(left.sent.starts_with(&right.received));
        assert!(right.sent.starts_with(&left.received));
    }

    /// Exchanges frames on a connection without failures until everything has arrived.
    fn drain(&mut self) {
        self.reconnect();
        let rounds = 2 + self.ends.iter().map(|end| end.sent.len()).sum::<usize>();
        for _ in 0..rounds {
            for at in [0, 1] {
                let none = &mut Input(&[]);
                self.step(at, Step::Send, none);
                self.step(at, Step::Beat, none);
                (0..2).for_each(|_| self.step(1 - at, Step::Deliver, none));
                self.step(1 - at, Step::Consume, none);
            }
            for end in &mut self.ends {
                end.unconsumed
                    .drain(..)
                    .for_each(|bytes| end.duplex.inbox().consume(bytes));
            }
        }
        let [left, right] = &self.ends;
        assert!(left.sent == right.received && right.sent == left.received);
        for end in &self.ends {
            assert!(end.duplex.outbox().is_empty());
            assert_eq!(end.duplex.outbox().unacked_bytes(), 0);
        }
    }
}

impl Peer {
    fn push(&mut self, what: u8) {
        if self.duplex.outbox().is_full() {
            return;
        }
        let bytes = Bytes::from(vec![what; usize::from(what) * 4]);
        let body = match what % 4 {
            0 => frame::Body::Seed(Seed { seed: what.into() }),
            1 => frame::Body::Chunk(Chunk {
                size_bytes: what.into(),
                bytes,
            }),
            2 => frame::Body::Chunk(Chunk {
                size_bytes: 0,
                bytes,
            }),
            _ => frame::Body::Ops(Ops {
                count: u32::from(what) / 16,
                encoded: bytes,
                ..Ops::default()
            }),
        };
        self.sent.push(body.clone());
        self.duplex.push(body);
    }
}
