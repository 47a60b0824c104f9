//! Frames on a byte stream, of QUIC or TLS: a length (4 bytes, little endian) and that many
//! bytes.

use bytes::{Buf, Bytes, BytesMut};
use tensord_proto::MAX_FRAME_BYTES;

use crate::link::LinkError;

/// Queues a frame of `size` bytes in all, given in parts, for its stream.
pub(crate) fn put_frame(queue: &mut Vec<Bytes>, parts: &[Bytes], size: usize) {
    let size = u32::try_from(size).expect("frames are limited to far less");
    queue.push(Bytes::copy_from_slice(&size.to_le_bytes()));
    let parts = parts.iter().filter(|part| !part.is_empty());
    queue.extend(parts.cloned());
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
            frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..50), 0..10),
            step in 1usize..17,
        ) {
            let mut wire = Vec::new();
            for frame in &frames {
                wire.extend((frame.len() as u32).to_le_bytes());
                wire.extend(frame);
            }
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
