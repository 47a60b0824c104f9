//! Frames on a byte stream, of QUIC or TLS: a length (4 bytes, little endian) and that many
//! bytes.

use bytes::{Buf, BufMut, Bytes, BytesMut, buf::Limit};
use tensord_proto::MAX_FRAME_BYTES;

use crate::link::{self, FIRST_FRAME_BYTES, LinkError};

/// Parts below this size are copied together: what a stream does for each piece
/// that it is given costs more.
const COPIED_BYTES: usize = 1024;

/// From this size on a frame that is not there as a whole gets memory of its own.
const LARGE_BYTES: usize = 16 << 10;

/// Up to this size the memory of a frame is kept for the next.
const KEPT_BYTES: usize = 512 << 10;

/// Bytes that are asked of a stream at once for frames whose size is not known, and
/// the fewest: a TLS record has 16 KiB. What comes of a large frame is copied.
const READ_BYTES: usize = 64 << 10;
const LEAST_READ_BYTES: usize = 16 << 10;

/// The same for a peer that was not admitted: what most such peers need.
const UNADMITTED_READ_BYTES: usize = 2 << 10;

/// Queues frames, given in parts, for their stream.
pub(crate) fn put_frames<'a>(queue: &mut Vec<Bytes>, frames: impl Iterator<Item = &'a [Bytes]>) {
    let mut copied = BytesMut::new();
    for parts in frames {
        let size = parts.iter().map(Bytes::len).sum::<usize>();
        let size = u32::try_from(size).expect("frames are limited to far less");
        copied.extend_from_slice(&size.to_le_bytes());
        for part in parts {
            if part.len() < COPIED_BYTES {
                copied.extend_from_slice(part);
                continue;
            }
            if !copied.is_empty() {
                queue.push(copied.split().freeze());
            }
            queue.push(part.clone());
        }
    }
    if !copied.is_empty() {
        queue.push(copied.freeze());
    }
}

/// Takes frames off a stream, whose bytes come in pieces of any size.
///
/// Large frames get memory of their own: what a frame holds in memory is then at most twice
/// itself, and its bytes are put there at once. Of a row of them that are let go one by
/// one, all are put in the same place, which the processor's cache still has.
#[derive(Debug)]
pub(crate) struct Incoming {
    /// The largest frame.
    limit: usize,
    /// Bytes of frames that are small, or have only begun.
    buffer: BytesMut,
    /// A large frame with what came of it, and its size.
    large: Option<(BytesMut, usize)>,
    /// The end of the memory of the last large frame, and the size of all of it.
    last: (BytesMut, usize),
}

impl Incoming {
    /// Frames of a peer that this side dialled.
    pub(crate) fn dialled() -> Self {
        Self {
            limit: MAX_FRAME_BYTES,
            buffer: BytesMut::new(),
            large: None,
            last: Default::default(),
        }
    }

    /// Frames of a peer that is not admitted yet.
    pub(crate) fn accepted() -> Self {
        Self {
            limit: FIRST_FRAME_BYTES,
            ..Self::dialled()
        }
    }

    /// Takes frames of any size from here on.
    pub(crate) fn admit(&mut self) {
        self.limit = MAX_FRAME_BYTES;
    }

    /// Takes the next frame, if it is there as a whole.
    pub(crate) fn take(&mut self) -> Result<Option<Bytes>, LinkError> {
        if let Some((mut frame, _)) = self.large.take_if(|(frame, size)| frame.len() == *size) {
            let whole = frame.split().freeze();
            if whole.len() <= KEPT_BYTES {
                self.last.0 = frame;
            }
            return Ok(Some(whole));
        }
        let Some(prefix) = self.buffer.first_chunk::<4>() else {
            return Ok(None);
        };
        let size = u32::from_le_bytes(*prefix) as usize;
        link::check_received(size, self.limit)?;
        if self.buffer.len() - 4 >= size {
            self.buffer.advance(4);
            return Ok(Some(self.buffer.split_to(size).freeze()));
        }
        if size >= LARGE_BYTES {
            let mut frame = self.memory(size);
            frame.extend_from_slice(&self.buffer[4..]);
            self.buffer.clear();
            self.large = Some((frame, size));
        }
        Ok(None)
    }

    /// Memory for a large frame: that of the last, if nobody has it any more.
    fn memory(&mut self, size: usize) -> BytesMut {
        let (mut memory, all) = std::mem::take(&mut self.last);
        let fits = (size..=size * 2).contains(&all);
        if fits && memory.try_reclaim(size) {
            self.last.1 = all;
            return memory;
        }
        self.last.1 = size;
        BytesMut::with_capacity(size)
    }

    /// Where the next bytes of the stream are to be put: after [`take`](Self::take) found
    /// no frame.
    pub(crate) fn room(&mut self) -> Limit<&mut BytesMut> {
        match &mut self.large {
            Some((frame, size)) => {
                let missing = *size - frame.len();
                frame.limit(missing)
            }
            None => {
                let (least, most) = match self.limit < MAX_FRAME_BYTES {
                    true => (1, UNADMITTED_READ_BYTES),
                    false => (LEAST_READ_BYTES, READ_BYTES),
                };
                if self.buffer.capacity() - self.buffer.len() < least {
                    self.buffer.reserve(most);
                }
                let room = self.buffer.capacity() - self.buffer.len();
                (&mut self.buffer).limit(room)
            }
        }
    }

    /// Puts bytes that came.
    pub(crate) fn put(&mut self, mut bytes: &[u8]) {
        if let Some((frame, size)) = &mut self.large {
            let (these, rest) = bytes.split_at(bytes.len().min(*size - frame.len()));
            frame.extend_from_slice(these);
            bytes = rest;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// Whether the stream is between frames.
    pub(crate) fn is_between(&self) -> bool {
        self.large.is_none() && self.buffer.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_oversized_length_is_refused_before_it_is_buffered() {
        let mut incoming = Incoming::dialled();
        incoming.put(&u32::MAX.to_le_bytes());
        let refused = Err(LinkError::TooLarge(u32::MAX as usize));
        assert_eq!(incoming.take(), refused);
    }

    #[test]
    fn a_first_frame_has_a_bound_of_its_own() {
        let length = |size: usize| (size as u32).to_le_bytes();
        let mut incoming = Incoming::accepted();
        incoming.put(&length(FIRST_FRAME_BYTES));
        incoming.put(&vec![7; FIRST_FRAME_BYTES]);
        assert_eq!(incoming.take().unwrap().unwrap().len(), FIRST_FRAME_BYTES);
        incoming.put(&length(FIRST_FRAME_BYTES + 1));
        let refused = Err(LinkError::FirstTooLarge(FIRST_FRAME_BYTES + 1));
        assert_eq!(incoming.take(), refused);
        // Little memory is given to who has said little.
        assert!(Incoming::accepted().room().remaining_mut() <= 2 * UNADMITTED_READ_BYTES);
        incoming.admit();
        assert_eq!(incoming.take(), Ok(None), "its length is fine now");
    }

    #[test]
    fn a_large_frame_has_memory_of_its_own_size() {
        let (size, mut incoming) = (300_000, Incoming::dialled());
        let wire = [&(size as u32).to_le_bytes()[..], &vec![7; size], &[1]].concat();
        let mut rest = &wire[..];
        while incoming.take().unwrap().is_none() {
            let mut room = incoming.room();
            let count = rest.len().min(room.remaining_mut()).min(9000);
            room.put_slice(&rest[..count]);
            rest = &rest[count..];
            if let Some((frame, _)) = &incoming.large {
                assert_eq!(frame.capacity(), size);
                if frame.len() == size {
                    break;
                }
            }
        }
        assert_eq!(rest, [1], "what is not of the frame was left where it was");
        assert_eq!(incoming.take().unwrap().unwrap(), vec![7; size]);
        assert!(incoming.is_between());
    }

    #[test]
    fn large_frames_share_memory_unless_somebody_has_it() {
        let mut incoming = Incoming::dialled();
        let mut frame = |size: usize, with: u8| {
            incoming.put(&(size as u32).to_le_bytes());
            assert_eq!(incoming.take(), Ok(None));
            incoming.put(&vec![with; size]);
            let frame = incoming.take().unwrap().unwrap();
            assert_eq!(frame, vec![with; size]);
            frame
        };
        let first = frame(100_000, 1);
        let place = first.as_ptr();
        drop(first);
        let second = frame(60_000, 2);
        assert_eq!(second.as_ptr(), place);
        // Somebody has it, and what is far smaller would hold all of it.
        let third = frame(60_000, 3);
        assert!(third.as_ptr() != place && second == vec![2; 60_000]);
        drop(third);
        frame(20_000, 4);
        assert_eq!(incoming.last.1, 20_000);
    }

    proptest! {
        #[test]
        fn frames_survive_any_chunking(
            sizes in prop::collection::vec(prop_oneof![0usize..3000, 0usize..90_000], 0..10),
            step in 1usize..40_000,
            reads in any::<bool>(),
        ) {
            let frame = |(number, size): (usize, usize)| -> Vec<u8> {
                (0..size).map(|at| (at / 7 + number) as u8).collect()
            };
            let frames: Vec<_> = sizes.into_iter().enumerate().map(frame).collect();
            // In three parts each, as frames come.
            let parts = frames.iter().map(|frame| {
                let whole = Bytes::from(frame.clone());
                let (a, b) = (whole.len() / 5, whole.len() / 4);
                [whole.slice(..a), whole.slice(a..b), whole.slice(b..)]
            });
            let parts: Vec<_> = parts.collect();
            let mut queue = Vec::new();
            put_frames(&mut queue, parts.iter().map(<[Bytes; 3]>::as_slice));
            prop_assert!(queue.iter().all(|piece| !piece.is_empty()));
            let wire = queue.concat();
            let (mut incoming, mut got) = (Incoming::dialled(), Vec::new());
            for mut chunk in wire.chunks(step) {
                while !chunk.is_empty() {
                    let count = match reads {
                        true => {
                            let mut room = incoming.room();
                            let count = chunk.len().min(room.remaining_mut());
                            room.put_slice(&chunk[..count]);
                            count
                        }
                        false => {
                            incoming.put(chunk);
                            chunk.len()
                        }
                    };
                    prop_assert!(count > 0);
                    chunk = &chunk[count..];
                    while let Some(frame) = incoming.take().unwrap() {
                        got.push(frame.to_vec());
                    }
                }
            }
            prop_assert_eq!(got, frames);
            prop_assert!(incoming.is_between());
        }
    }
}
