//! Both directions of a session over its current link.
//!
//! Combines an [`Outbox`] and an [`Inbox`] with the encoding of frames, for the client's
//! and the worker's end alike. It does no I/O: it converts between bodies and the byte
//! parts of frames.

use bytes::{Bytes, BytesMut};
use prost::{
    Message,
    encoding::{WireType, encode_key, encode_varint, encoded_len_varint, key_len},
};
use tensord_proto::v1::{Frame, Ping, frame};

use crate::resume::{EncodedBody, Inbox, Outbox, ResumeError};

/// Credit that a frame takes on top of its body: about the memory that even an empty
/// frame costs its receiver until it is processed. Without it, frames of a few bytes
/// could pile up by the million.
const FRAME_COST_BYTES: usize = 256;

/// Credit that an op takes. With a window of 32 MiB, a program can be a quarter of a
/// million ops ahead, which is most of a second's work for a fast worker.
const OP_COST_BYTES: usize = 128;

/// Size from which on a batch of frames is complete: what a carrier sends in one write,
/// and hardly more than one frame where frames are large.
const TARGET_BATCH_BYTES: usize = 64 << 10;

/// Field numbers in a frame of the messages that have bulk bytes.
const CHUNK_FIELD: u32 = 50;
const PIECE_FIELD: u32 = 61;
const FETCHED_FIELD: u32 = 64;

/// Why a frame was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The bytes are not a frame.
    #[error("a frame of {size} bytes is malformed: {reason}")]
    Malformed {
        /// Size of the frame in bytes.
        size: usize,
        /// The decoder's error.
        reason: String,
    },
    /// The frame breaks the numbering.
    #[error(transparent)]
    Numbering(#[from] ResumeError),
    /// The frame has no number, and its body takes credit.
    #[error("a frame of {size} bytes has no number; only a ping may omit it")]
    Unnumbered {
        /// Size of the frame in bytes.
        size: usize,
    },
}

impl FrameError {
    /// Returns whether the link lost a frame, which a new connection repairs. The peer
    /// did nothing wrong.
    pub fn is_loss(&self) -> bool {
        matches!(self, Self::Numbering(ResumeError::Gap { .. }))
    }
}

/// Decodes a frame.
///
/// # Errors
///
/// [`FrameError::Malformed`].
pub fn decode(bytes: Bytes) -> Result<Frame, FrameError> {
    let size = bytes.len();
    Frame::decode(bytes).map_err(|e| FrameError::Malformed {
        size,
        reason: e.to_string(),
    })
}

/// Encodes a frame that is not part of the numbered sequence.
pub fn encode(body: frame::Body) -> Bytes {
    Frame {
        body: Some(body),
        ..Frame::default()
    }
    .encode_to_vec()
    .into()
}

/// One end of a session.
#[derive(Debug)]
pub struct Duplex {
    outbox: Outbox,
    inbox: Inbox,
}

impl Duplex {
    /// Creates an end that keeps about `capacity_bytes` of unacknowledged bodies, may
    /// send `credit` bytes at first, and lets the peer send `window_bytes`.
    pub fn new(capacity_bytes: usize, credit: u64, window_bytes: u64) -> Self {
        Self {
            outbox: Outbox::new(capacity_bytes, credit),
            inbox: Inbox::new(window_bytes),
        }
    }

    /// Creates an end that replaces a lost one. The lost end had received the frames up to number
    /// `received`, which cost `received_bytes`; the new one numbers its own frames from 1. The
    /// other arguments are as for [`new`](Self::new).
    pub fn restored(
        capacity_bytes: usize,
        credit: u64,
        window_bytes: u64,
        (received, received_bytes): (u64, u64),
    ) -> Self {
        Self {
            outbox: Outbox::new(capacity_bytes, credit),
            inbox: Inbox::restored(window_bytes, received, received_bytes),
        }
    }

    /// Returns the outbox, to keep its journal.
    pub fn outbox_mut(&mut self) -> &mut Outbox {
        &mut self.outbox
    }

    /// Continues with a peer whose end was lost and replaced: sends all frames after `number`
    /// again, and expects the peer's frames to be numbered from 1. The peer grants `credit` bytes
    /// in all.
    ///
    /// # Errors
    ///
    /// When a frame after `number` is not kept any more.
    pub fn restore(&mut self, number: u64, credit: u64) -> Result<(), ResumeError> {
        self.outbox.restore(number, credit)?;
        self.inbox = self.inbox.anew();
        Ok(())
    }

    /// Returns the outbox: the bodies that wait to be sent or acknowledged.
    pub fn outbox(&self) -> &Outbox {
        &self.outbox
    }

    /// Returns the inbox: how much was received and granted.
    pub fn inbox(&mut self) -> &mut Inbox {
        &mut self.inbox
    }

    /// Queues `body` for sending.
    pub fn push(&mut self, body: frame::Body) {
        let extra_cost = extra_cost(&body);
        let body = EncodedBody {
            extra_cost,
            ..encode_body(body)
        };
        self.outbox.push(body);
    }

    /// Drops all unacknowledged bodies; nothing more is sent.
    pub fn abandon(&mut self) {
        self.outbox.abandon();
    }

    /// Returns the parts of the next frame to send, if there is one and the credit covers
    /// it.
    pub fn next_to_send(&mut self) -> Option<[Bytes; 3]> {
        let (seq, body) = self.outbox.next_to_send()?;
        let ack = self.inbox.acknowledge_changes();
        Some([header(seq, ack), body.head, body.tail])
    }

    /// Returns the parts of the next frames to send, about 64 KiB in all.
    pub fn next_frames(&mut self) -> Vec<[Bytes; 3]> {
        let mut frames = Vec::new();
        let mut size = 0;
        while size < TARGET_BATCH_BYTES
            && let Some(parts) = self.next_to_send()
        {
            size += parts.iter().map(Bytes::len).sum::<usize>();
            frames.push(parts);
        }
        frames
    }

    /// Returns a ping frame, which carries the acknowledgement, the credit, and the
    /// number of the last frame sent.
    pub fn ping(&mut self) -> Bytes {
        let header = header(0, self.inbox.acknowledge());
        let sent = self.outbox.sent();
        let ping = encode(frame::Body::Ping(Ping { sent }));
        [header, ping].concat().into()
    }

    /// Processes a frame from the peer. Returns its body if it is new, and the number of
    /// bytes to [consume](Inbox::consume) once the body has been acted on.
    ///
    /// # Errors
    ///
    /// When the frame is malformed or breaks the numbering; the session cannot go on
    /// after that, except after a [loss](FrameError::is_loss).
    pub fn receive(&mut self, bytes: Bytes) -> Result<Option<(frame::Body, usize)>, FrameError> {
        let size = bytes.len();
        let frame = decode(bytes)?;
        self.outbox.acknowledge(frame.ack)?;
        self.outbox.grant(frame.credit_bytes);
        let Some(body) = frame.body else {
            return Ok(None);
        };
        if let frame::Body::Ping(ping) = &body {
            self.inbox.check_arrived(ping.sent)?;
        }
        if frame.seq == 0 {
            // Any other body would escape the limit that credit sets.
            return match body {
                frame::Body::Ping(_) => Ok(Some((body, 0))),
                _ => Err(FrameError::Unnumbered { size }),
            };
        }
        let header = Frame {
            body: None,
            ..frame
        }
        .encoded_len();
        let bytes = size
            .saturating_sub(header)
            .saturating_add(extra_cost(&body));
        let new = self.inbox.accept(frame.seq, bytes)?;
        Ok(new.then_some((body, bytes)))
    }

    /// Resumes on a new connection, whose peer has received everything up to `received`
    /// and grants `credit` bytes in all.
    ///
    /// # Errors
    ///
    /// When `received` contradicts what was sent and acknowledged.
    pub fn rewind(&mut self, received: u64, credit: u64) -> Result<(), ResumeError> {
        self.outbox.grant(credit);
        self.outbox.rewind(received)
    }
}

/// Encodes the first part of a frame: everything but its body.
fn header(seq: u64, (ack, credit_bytes): (u64, u64)) -> Bytes {
    Frame {
        seq,
        ack,
        credit_bytes,
        body: None,
    }
    .encode_to_vec()
    .into()
}

/// Returns the credit that `body` takes on top of its bytes. A run of ops is only a few
/// bytes, however many ops it has, and so are reads; without this cost a program could
/// run ahead without limit.
fn extra_cost(body: &frame::Body) -> usize {
    let count = match body {
        frame::Body::Ops(ops) => ops.count as usize,
        frame::Body::Reads(reads) => reads.tensors.len(),
        _ => 0,
    };
    count
        .saturating_mul(OP_COST_BYTES)
        .saturating_add(FRAME_COST_BYTES)
}

/// Encodes a body without copying its bulk bytes.
fn encode_body(body: frame::Body) -> EncodedBody {
    use std::mem::take;
    match body {
        frame::Body::Chunk(mut chunk) => {
            let bulk = take(&mut chunk.bytes);
            with_bulk(CHUNK_FIELD, &chunk, 2, bulk)
        }
        frame::Body::Piece(mut piece) => {
            let bulk = take(&mut piece.bytes);
            with_bulk(PIECE_FIELD, &piece, 3, bulk)
        }
        frame::Body::Fetched(mut fetched) => {
            let bulk = take(&mut fetched.bytes);
            with_bulk(FETCHED_FIELD, &fetched, 4, bulk)
        }
        body => EncodedBody::from(encode(body)),
    }
}

/// Encodes `message` as the field `field` of a frame, with `bulk` as the message's field
/// `bulk_field`, after all others.
fn with_bulk(field: u32, message: &impl Message, bulk_field: u32, bulk: Bytes) -> EncodedBody {
    let bulk_len = bulk.len() as u64;
    let rest = message.encoded_len();
    let whole = rest + key_len(bulk_field) + encoded_len_varint(bulk_len) + bulk.len();
    let mut head = BytesMut::with_capacity(rest + 32);
    encode_key(field, WireType::LengthDelimited, &mut head);
    encode_varint(whole as u64, &mut head);
    head.extend_from_slice(&message.encode_to_vec());
    encode_key(bulk_field, WireType::LengthDelimited, &mut head);
    encode_varint(bulk_len, &mut head);
    EncodedBody {
        head: head.freeze(),
        tail: bulk,
        extra_cost: 0,
    }
}

#[cfg(test)]
mod tests {
    use tensord_proto::v1::{Chunk, Fetched, Piece, PieceKind, Seed};

    use super::*;

    fn pair() -> (Duplex, Duplex) {
        (
            Duplex::new(1 << 20, 1 << 20, 1 << 20),
            Duplex::new(1 << 20, 1 << 20, 1 << 20),
        )
    }

    fn bodies() -> Vec<frame::Body> {
        let chunk = |size_bytes, bytes: &'static [u8]| Chunk {
            size_bytes,
            bytes: Bytes::from_static(bytes),
        };
        vec![
            frame::Body::Seed(Seed { seed: 7 }),
            frame::Body::Chunk(chunk(300, b"abc")),
            frame::Body::Chunk(chunk(0, &[9; 300])),
            frame::Body::Piece(Piece {
                group: vec![0, 300],
                kind: PieceKind::Ring.into(),
                bytes: Bytes::from_static(&[8; 500]),
            }),
            frame::Body::Fetched(Fetched {
                capability: Bytes::from_static(&[7; 16]),
                bytes: Bytes::from_static(b"xyz"),
                ..Fetched::default()
            }),
        ]
    }

    fn joined(parts: [Bytes; 3]) -> Bytes {
        parts.concat().into()
    }

    #[test]
    fn bodies_arrive_unchanged_with_their_cost() {
        let (mut a, mut b) = pair();
        bodies().into_iter().for_each(|body| a.push(body));
        for expected in bodies() {
            let (body, bytes) = b
                .receive(joined(a.next_to_send().unwrap()))
                .unwrap()
                .unwrap();
            assert_eq!(body, expected);
            assert_eq!(bytes, encode(expected).len() + FRAME_COST_BYTES);
        }
        assert!(a.next_to_send().is_none());
        a.receive(b.ping()).unwrap();
        assert!(a.outbox().is_empty());
    }

    #[test]
    fn duplicate_frame_is_ignored() {
        let (mut a, mut b) = pair();
        a.push(bodies().remove(0));
        let frame = joined(a.next_to_send().unwrap());
        assert!(b.receive(frame.clone()).unwrap().is_some());
        assert!(b.receive(frame).unwrap().is_none());
    }

    #[test]
    fn ping_reveals_that_the_last_frame_was_lost() {
        let (mut a, mut b) = pair();
        a.push(bodies().remove(0));
        a.next_to_send().unwrap();
        let error = b.receive(a.ping()).unwrap_err();
        let gap = ResumeError::Gap {
            seq: 1,
            expected: 1,
        };
        assert_eq!(error, FrameError::Numbering(gap));
        assert!(error.is_loss());
    }

    #[test]
    fn batches_are_bounded_and_replayed_unchanged() {
        let (mut a, mut b) = pair();
        let body = |n: u8| {
            frame::Body::Chunk(Chunk {
                size_bytes: 0,
                bytes: vec![n; 10_000].into(),
            })
        };
        (0..20).for_each(|n| a.push(body(n)));
        let take = |a: &mut Duplex| {
            let mut frames = Vec::new();
            loop {
                let row = a.next_frames();
                if row.is_empty() {
                    return frames;
                }
                let bytes: usize = row.as_flattened().iter().map(Bytes::len).sum();
                assert!(bytes < TARGET_BATCH_BYTES + 11_000, "{bytes} bytes at once");
                frames.extend(row.into_iter().map(joined));
            }
        };
        let first = take(&mut a);
        assert_eq!(first.len(), 20);
        for (n, frame) in first[..7].iter().enumerate() {
            let (taken, _) = b.receive(frame.clone()).unwrap().unwrap();
            assert_eq!(taken, body(n as u8));
        }
        // The connection is lost within a batch: the frames from there on are sent again.
        let received = b.inbox().received();
        a.rewind(received, 1 << 20).unwrap();
        assert_eq!(take(&mut a), first[7..]);
    }

    #[test]
    fn only_pings_may_be_unnumbered() {
        let (mut a, mut b) = pair();
        assert!(b.receive(a.ping()).unwrap().is_some());
        for body in bodies() {
            let frame = encode(body);
            let size = frame.len();
            assert_eq!(b.receive(frame), Err(FrameError::Unnumbered { size }));
        }
        a.push(bodies().remove(0));
        let frame = joined(a.next_to_send().unwrap());
        assert!(b.receive(frame).unwrap().is_some(), "it goes on");
    }

    #[test]
    fn garbage_is_an_error() {
        let (mut a, _) = pair();
        let error = a.receive(Bytes::from_static(&[0xff; 9])).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("a frame of 9 bytes is malformed"),
            "{error}"
        );
    }
}
