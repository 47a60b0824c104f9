//! Frames on a byte stream, of QUIC or TLS: a length (4 bytes, little endian) and that many
//! bytes.

use bytes::{Buf, Bytes, BytesMut};
use tensord_proto::MAX_FRAME_BYTES;

use crate::link::LinkError;

/// Parts below this size are copied together: what a stream does for each piece
/// that it is given costs more.
const COPIED_BYTES: usize = 1024;

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
            } else {
                queue.extend([copied.split().freeze(), part.clone()]);
            }
        }
    }
    if !copied.is_empty() {
        queue.push(copied.freeze());
    }
}

/// Takes one whole frame off the front of `buffer`, if it is there.
pub(crate) fn take_frame(buffer: &mut BytesMut) -> Result<Option<Bytes>, LinkError> {
    let Some(prefix) = buffer.first_chunk::<4>() else {
        return Ok(None);
    };
    let size = u32::from_le_bytes(*prefix) as usize;
    if size > MAX_FRAME_BYTES {
        return Err(LinkError::TooLarge(size));
    }
    if buffer.len() < 4 + size {
        buffer.reserve(4 + size - buffer.len());
        return Ok(None);
    }
    buffer.advance(4);
    Ok(Some(buffer.split_to(size).freeze()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_oversized_length_is_refused_before_it_is_buffered() {
        let mut buffer = BytesMut::from(&u32::MAX.to_le_bytes()[..]);
        assert_eq!(
            take_frame(&mut buffer),
            Err(LinkError::TooLarge(u32::MAX as usize))
        );
    }

    proptest! {
        #[test]
        fn frames_survive_any_chunking(
            frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..3000), 0..10),
            step in 1usize..1700,
        ) {
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
            let (mut buffer, mut got) = (BytesMut::new(), Vec::new());
            for chunk in wire.chunks(step) {
                buffer.extend_from_slice(chunk);
                while let Some(frame) = take_frame(&mut buffer).unwrap() {
                    got.push(frame.to_vec());
                }
            }
            prop_assert_eq!(got, frames);
            prop_assert!(buffer.is_empty());
        }
    }
}
