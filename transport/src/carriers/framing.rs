//! Frames on a byte stream of QUIC or TLS: a length (4 bytes, little endian) and that
//! many bytes.

use bytes::{Buf, BufMut, Bytes, BytesMut, buf::Limit};
use tensord_proto::MAX_FRAME_BYTES;

use super::{FIRST_FRAME_BYTES, LinkError, check_received};

/// Parts smaller than this are copied together: a copy costs less than a stream's work
/// for a separate piece.
const MIN_ZERO_COPY_BYTES: usize = 1024;

/// Size from which on a frame that has not arrived as a whole gets an allocation of its
/// own.
const LARGE_FRAME_BYTES: usize = 16 << 10;

/// Size up to which a frame's allocation is kept for the next frame.
const MAX_REUSED_BYTES: usize = 512 << 10;

/// While no large frame is being received, a read gets at least `MIN_READ_BYTES` (a TLS
/// record has up to 16 KiB); if the buffer has less room, `READ_BYTES` are reserved. The
/// part of a large frame that is read into this buffer is copied later.
const READ_BYTES: usize = 64 << 10;
const MIN_READ_BYTES: usize = 16 << 10;

/// `READ_BYTES` for a peer that is not admitted: enough for most such peers.
const UNADMITTED_READ_BYTES: usize = 2 << 10;

/// Appends frames, given in parts, to `queue`, each with its length in front.
pub(crate) fn queue_frames<'a>(queue: &mut Vec<Bytes>, frames: impl Iterator<Item = &'a [Bytes]>) {
    let mut copied = BytesMut::new();
    for parts in frames {
        let size = parts.iter().map(Bytes::len).sum::<usize>();
        let size = u32::try_from(size).expect("frames are limited to far less");
        copied.extend_from_slice(&size.to_le_bytes());
        for part in parts {
            if part.len() < MIN_ZERO_COPY_BYTES {
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

/// Decodes frames from a stream, whose bytes arrive in pieces of any size.
///
/// A large frame gets an allocation of its own: it then holds at most twice its size in
/// memory, and its bytes are written there directly. If large frames are dropped one by
/// one, each reuses the memory of the one before, which is still in the processor's
/// cache.
#[derive(Debug)]
pub(crate) struct FrameDecoder {
    /// Largest accepted frame, in bytes.
    limit: usize,
    /// Bytes of frames that are small or have only begun.
    buffer: BytesMut,
    /// The part of a large frame that has arrived, and the frame's size.
    large: Option<(BytesMut, usize)>,
    /// An empty handle to the last large frame's allocation, through which [`BytesMut`]
    /// can reuse it, and the size of the allocation.
    reusable: (BytesMut, usize),
}

impl FrameDecoder {
    /// Creates a decoder for a peer that this side dialled.
    pub(crate) fn dialled() -> Self {
        Self {
            limit: MAX_FRAME_BYTES,
            buffer: BytesMut::new(),
            large: None,
            reusable: Default::default(),
        }
    }

    /// Creates a decoder for a peer that is not admitted yet.
    pub(crate) fn accepted() -> Self {
        Self {
            limit: FIRST_FRAME_BYTES,
            ..Self::dialled()
        }
    }

    /// Accepts frames of up to [`MAX_FRAME_BYTES`] from now on.
    pub(crate) fn admit(&mut self) {
        self.limit = MAX_FRAME_BYTES;
    }

    /// Returns how many bytes have arrived of frames that are not complete.
    pub(crate) fn partial_bytes(&self) -> usize {
        let large = self.large.as_ref().map_or(0, |(frame, _)| frame.len());
        self.buffer.len() + large
    }

    /// Returns the next frame, if it has arrived as a whole.
    pub(crate) fn next_frame(&mut self) -> Result<Option<Bytes>, LinkError> {
        if let Some((mut frame, _)) = self.large.take_if(|(frame, size)| frame.len() == *size) {
            let whole = frame.split().freeze();
            if whole.len() <= MAX_REUSED_BYTES {
                self.reusable.0 = frame;
            }
            return Ok(Some(whole));
        }
        let Some(prefix) = self.buffer.first_chunk::<4>() else {
            return Ok(None);
        };
        let size = u32::from_le_bytes(*prefix) as usize;
        check_received(size, self.limit)?;
        if self.buffer.len() - 4 >= size {
            self.buffer.advance(4);
            return Ok(Some(self.buffer.split_to(size).freeze()));
        }
        if size >= LARGE_FRAME_BYTES {
            let mut frame = self.take_buffer(size);
            frame.extend_from_slice(&self.buffer[4..]);
            self.buffer.clear();
            self.large = Some((frame, size));
        }
        Ok(None)
    }

    /// Returns memory for a large frame: the last one's, if it is unused and fits.
    fn take_buffer(&mut self, size: usize) -> BytesMut {
        let (mut memory, all) = std::mem::take(&mut self.reusable);
        let fits = (size..=size * 2).contains(&all);
        if fits && memory.try_reclaim(size) {
            self.reusable.1 = all;
            return memory;
        }
        self.reusable.1 = size;
        BytesMut::with_capacity(size)
    }

    /// Returns the buffer for the next bytes of the stream. Must be called after
    /// [`next_frame`](Self::next_frame) found no frame.
    pub(crate) fn read_buffer(&mut self) -> Limit<&mut BytesMut> {
        match &mut self.large {
            Some((frame, size)) => {
                let missing = *size - frame.len();
                frame.limit(missing)
            }
            None => {
                let (least, most) = match self.limit < MAX_FRAME_BYTES {
                    true => (1, UNADMITTED_READ_BYTES),
                    false => (MIN_READ_BYTES, READ_BYTES),
                };
                if self.buffer.capacity() - self.buffer.len() < least {
                    self.buffer.reserve(most);
                }
                let room = self.buffer.capacity() - self.buffer.len();
                (&mut self.buffer).limit(room)
            }
        }
    }

    /// Adds bytes that have arrived.
    pub(crate) fn put(&mut self, mut bytes: &[u8]) {
        if let Some((frame, size)) = &mut self.large {
            let (these, rest) = bytes.split_at(bytes.len().min(*size - frame.len()));
            frame.extend_from_slice(these);
            bytes = rest;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns what a receiver returns once the peer has ended its stream: an error if the
    /// last frame is incomplete.
    pub(crate) fn end(&self) -> Result<Option<Bytes>, LinkError> {
        match self.large.is_none() && self.buffer.is_empty() {
            true => Ok(None),
            false => Err(LinkError::lost("the stream ended in the middle of a frame")),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_oversized_length_is_refused_before_it_is_buffered() {
        let mut decoder = FrameDecoder::dialled();
        decoder.put(&u32::MAX.to_le_bytes());
        let refused = Err(LinkError::TooLarge(u32::MAX as usize));
        assert_eq!(decoder.next_frame(), refused);
    }

    #[test]
    fn first_frame_has_its_own_limit() {
        let length = |size: usize| (size as u32).to_le_bytes();
        let mut decoder = FrameDecoder::accepted();
        decoder.put(&length(FIRST_FRAME_BYTES));
        decoder.put(&vec![7; FIRST_FRAME_BYTES]);
        assert_eq!(
            decoder.next_frame().unwrap().unwrap().len(),
            FIRST_FRAME_BYTES
        );
        decoder.put(&length(FIRST_FRAME_BYTES + 1));
        let refused = Err(LinkError::FirstTooLarge(FIRST_FRAME_BYTES + 1));
        assert_eq!(decoder.next_frame(), refused);
        // A peer that has sent little is given little memory.
        assert!(
            FrameDecoder::accepted().read_buffer().remaining_mut() <= 2 * UNADMITTED_READ_BYTES
        );
        decoder.admit();
        assert_eq!(decoder.next_frame(), Ok(None), "its length is fine now");
    }

    #[test]
    fn large_frame_gets_an_allocation_of_its_size() {
        let (size, mut decoder) = (300_000, FrameDecoder::dialled());
        let wire = [&(size as u32).to_le_bytes()[..], &vec![7; size], &[1]].concat();
        let mut rest = &wire[..];
        while decoder.next_frame().unwrap().is_none() {
            let mut room = decoder.read_buffer();
            let count = rest.len().min(room.remaining_mut()).min(9000);
            room.put_slice(&rest[..count]);
            rest = &rest[count..];
            if let Some((frame, _)) = &decoder.large {
                assert_eq!(frame.capacity(), size);
                if frame.len() == size {
                    break;
                }
            }
        }
        assert_eq!(rest, [1], "what is not of the frame was left where it was");
        assert_eq!(decoder.next_frame().unwrap().unwrap(), vec![7; size]);
        assert!(decoder.end().is_ok());
    }

    #[test]
    fn large_frames_reuse_memory_unless_it_is_held() {
        let mut decoder = FrameDecoder::dialled();
        let mut frame = |size: usize, with: u8| {
            decoder.put(&(size as u32).to_le_bytes());
            assert_eq!(decoder.next_frame(), Ok(None));
            decoder.put(&vec![with; size]);
            let frame = decoder.next_frame().unwrap().unwrap();
            assert_eq!(frame, vec![with; size]);
            frame
        };
        let first = frame(100_000, 1);
        let place = first.as_ptr();
        drop(first);
        let second = frame(60_000, 2);
        assert_eq!(second.as_ptr(), place);
        // Not reused: memory that is still in use, and memory of which a far smaller
        // frame would keep all alive.
        let third = frame(60_000, 3);
        assert!(third.as_ptr() != place && second == vec![2; 60_000]);
        drop(third);
        frame(20_000, 4);
        assert_eq!(decoder.reusable.1, 20_000);
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
            // In three parts each, as the callers send frames.
            let parts = frames.iter().map(|frame| {
                let whole = Bytes::from(frame.clone());
                let (a, b) = (whole.len() / 5, whole.len() / 4);
                [whole.slice(..a), whole.slice(a..b), whole.slice(b..)]
            });
            let parts: Vec<_> = parts.collect();
            let mut queue = Vec::new();
            queue_frames(&mut queue, parts.iter().map(<[Bytes; 3]>::as_slice));
            prop_assert!(queue.iter().all(|piece| !piece.is_empty()));
            let wire = queue.concat();
            let (mut decoder, mut got) = (FrameDecoder::dialled(), Vec::new());
            for mut chunk in wire.chunks(step) {
                while !chunk.is_empty() {
                    let count = match reads {
                        true => {
                            let mut room = decoder.read_buffer();
                            let count = chunk.len().min(room.remaining_mut());
                            room.put_slice(&chunk[..count]);
                            count
                        }
                        false => {
                            decoder.put(chunk);
                            chunk.len()
                        }
                    };
                    prop_assert!(count > 0);
                    chunk = &chunk[count..];
                    while let Some(frame) = decoder.next_frame().unwrap() {
                        got.push(frame.to_vec());
                    }
                }
            }
            prop_assert_eq!(got, frames);
            prop_assert!(decoder.end().is_ok());
        }
    }
}
