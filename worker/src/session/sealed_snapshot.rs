//! Snapshots as they leave the process of a lease: encrypted with a key that the session's client has
//! made. Workers that do not run the lease never get the key, so they cannot read the snapshots that
//! they keep, nor change them unnoticed.
//!
//! A sealed snapshot is a salt of 32 bytes and chunks, each of [`CHUNK_BYTES`] of the snapshot but
//! the last one, with a tag of 16 bytes. The chunks are encrypted by AES-256-GCM with a key that is
//! derived from the session's key and the salt, so no two snapshots share one. A chunk's nonce is its
//! number and whether it is the last one, as in the STREAM construction (Hoang, Reyhanitabar, Rogaway
//! and Vizár, CRYPTO 2015): chunks cannot be left out, repeated or reordered, and the end cannot be
//! cut off. The session and the mark are authenticated with each chunk. The base of a snapshot is sealed in
//! the same way, with its id instead of the mark.

use std::{
    fmt,
    io::{self, Read, Write},
};

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use tensord_proto::ids::SessionId;

/// Bytes of a snapshot in a chunk: enough that the tags cost little, and few enough that they stay
/// in the processor's cache between copying and encrypting.
const CHUNK_BYTES: usize = 64 << 10;

const SALT_BYTES: usize = 32;
const TAG_BYTES: usize = 16;

/// The key of a session's snapshots, which the client has made.
#[derive(Clone)]
pub(crate) struct SnapshotKey([u8; 32]);

impl SnapshotKey {
    /// Returns `None` if `key` does not have 32 bytes: the session then has no snapshots.
    pub(crate) fn from_message(key: &[u8]) -> Option<Self> {
        key.try_into().ok().map(Self)
    }

    /// Returns the cipher for the snapshot with this salt.
    fn cipher(&self, salt: &[u8; SALT_BYTES]) -> LessSafeKey {
        let key = blake3::keyed_hash(&self.0, salt);
        let key = UnboundKey::new(&AES_256_GCM, key.as_bytes());
        LessSafeKey::new(key.expect("a hash has as many bytes as the key"))
    }
}

impl fmt::Debug for SnapshotKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SnapshotKey")
    }
}

/// What is sealed; authenticated with each chunk.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SnapshotName {
    pub(crate) session: SessionId,
    pub(crate) content: SealedContent,
}

/// Which part of a session's snapshots is sealed.
#[derive(Debug, Clone, Copy)]
pub(crate) enum SealedContent {
    /// The snapshot of this mark, without its base.
    Mark(u64),
    /// The base with this id.
    Base(u64),
}

impl SnapshotName {
    fn aad(self) -> Aad<[u8; 17]> {
        let (kind, number) = match self.content {
            SealedContent::Mark(mark) => (0, mark),
            SealedContent::Base(id) => (1, id),
        };
        let mut bytes = [kind; 17];
        bytes[1..9].copy_from_slice(&self.session.0.to_le_bytes());
        bytes[9..].copy_from_slice(&number.to_le_bytes());
        Aad::from(bytes)
    }
}

fn nonce(chunk: u64, is_last: bool) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[0] = is_last.into();
    nonce[NONCE_LEN - 8..].copy_from_slice(&chunk.to_le_bytes());
    Nonce::assume_unique_for_key(nonce)
}

/// Returns the size of a snapshot of `size_bytes` once it is sealed.
pub(crate) fn sealed_size(size_bytes: u64) -> u64 {
    let chunks = size_bytes.div_ceil(CHUNK_BYTES as u64).max(1);
    SALT_BYTES as u64 + size_bytes + chunks * TAG_BYTES as u64
}

/// Seals what is written to it. [`finish`](Self::finish) must follow the last write.
pub(crate) struct SealingWriter<W> {
    out: W,
    cipher: LessSafeKey,
    name: SnapshotName,
    /// The chunk that is being filled.
    chunk: Vec<u8>,
    /// Its number.
    number: u64,
}

impl<W: Write> SealingWriter<W> {
    /// Starts to write the snapshot called `name`. `salt` must be random.
    ///
    /// # Errors
    ///
    /// Those of `out`.
    pub(crate) fn new(
        mut out: W,
        key: &SnapshotKey,
        name: SnapshotName,
        salt: [u8; SALT_BYTES],
    ) -> io::Result<Self> {
        out.write_all(&salt)?;
        Ok(Self {
            out,
            cipher: key.cipher(&salt),
            name,
            chunk: Vec::with_capacity(CHUNK_BYTES + TAG_BYTES),
            number: 0,
        })
    }

    /// Writes the last chunk, and returns what was written to.
    ///
    /// # Errors
    ///
    /// Those of `out`.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.seal_chunk(true)?;
        Ok(self.out)
    }

    fn seal_chunk(&mut self, is_last: bool) -> io::Result<()> {
        let (nonce, aad) = (nonce(self.number, is_last), self.name.aad());
        let sealed = self
            .cipher
            .seal_in_place_append_tag(nonce, aad, &mut self.chunk);
        sealed.map_err(|_| io::Error::other("a chunk is too large to encrypt"))?;
        self.out.write_all(&self.chunk)?;
        self.chunk.clear();
        self.number += 1;
        Ok(())
    }
}

impl<W: Write> Write for SealingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // A full chunk waits for more bytes, as it may be the last one.
        if self.chunk.len() == CHUNK_BYTES && !bytes.is_empty() {
            self.seal_chunk(false)?;
        }
        let count = bytes.len().min(CHUNK_BYTES - self.chunk.len());
        self.chunk.extend_from_slice(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads a snapshot that was sealed. Returns only bytes that passed authentication.
pub(crate) struct OpeningReader<R> {
    from: R,
    cipher: LessSafeKey,
    name: SnapshotName,
    /// Sealed bytes that are not read yet.
    left_bytes: u64,
    /// The present chunk, and how much of it is read.
    chunk: Vec<u8>,
    at: usize,
    /// The number of the next chunk.
    number: u64,
    /// Whether a chunk could not be read: then there are no more.
    has_failed: bool,
}

impl<R: Read> OpeningReader<R> {
    /// Starts to read the snapshot called `name`, which has `size_bytes` with all that sealing adds.
    ///
    /// # Errors
    ///
    /// When there are too few bytes, and those of `from`.
    pub(crate) fn new(
        mut from: R,
        size_bytes: u64,
        key: &SnapshotKey,
        name: SnapshotName,
    ) -> io::Result<Self> {
        let mut salt = [0; SALT_BYTES];
        from.read_exact(&mut salt)?;
        let left_bytes = size_bytes.checked_sub(SALT_BYTES as u64);
        Ok(Self {
            from,
            cipher: key.cipher(&salt),
            name,
            left_bytes: left_bytes.ok_or(io::ErrorKind::UnexpectedEof)?,
            chunk: Vec::new(),
            at: 0,
            number: 0,
            has_failed: false,
        })
    }

    /// Reads and opens the next chunk, and returns its size.
    fn open_chunk(&mut self) -> io::Result<usize> {
        let sealed_bytes = self.left_bytes.min((CHUNK_BYTES + TAG_BYTES) as u64);
        self.left_bytes -= sealed_bytes;
        self.chunk.resize(sealed_bytes as usize, 0);
        self.from.read_exact(&mut self.chunk)?;
        let (nonce, aad) = (nonce(self.number, self.left_bytes == 0), self.name.aad());
        let opened = self.cipher.open_in_place(nonce, aad, &mut self.chunk);
        let opened_bytes = opened.map(|opened| opened.len());
        self.number += 1;
        opened_bytes.map_err(|_| {
            let reason = "it was changed, or sealed with another key, or for another mark";
            io::Error::new(io::ErrorKind::InvalidData, reason)
        })
    }
}

impl<R: Read> Read for OpeningReader<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let is_unread = self.left_bytes > 0 || self.number == 0;
        if self.at == self.chunk.len() && is_unread && !self.has_failed {
            let opened = self.open_chunk();
            self.has_failed = opened.is_err();
            // What has not passed authentication must not be read.
            self.chunk.truncate(*opened.as_ref().unwrap_or(&0));
            self.at = 0;
            opened?;
        }
        let count = into.len().min(self.chunk.len() - self.at);
        into[..count].copy_from_slice(&self.chunk[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use proptest::{prelude::*, sample::Index};

    use super::*;

    const NAME: SnapshotName = SnapshotName {
        session: SessionId(7),
        content: SealedContent::Mark(3),
    };
    const KEY: SnapshotKey = SnapshotKey([5; 32]);

    fn seal(parts: &[&[u8]]) -> Vec<u8> {
        let mut out = SealingWriter::new(Vec::new(), &KEY, NAME, [9; SALT_BYTES]).unwrap();
        for part in parts {
            out.write_all(part).unwrap();
        }
        out.finish().unwrap()
    }

    fn open(sealed: &[u8], key: &SnapshotKey, name: SnapshotName) -> io::Result<Vec<u8>> {
        let mut opened = Vec::new();
        let reader = OpeningReader::new(sealed, sealed.len() as u64, key, name);
        reader?.read_to_end(&mut opened)?;
        Ok(opened)
    }

    fn bytes(count: usize) -> Vec<u8> {
        (0..count).map(|at| (at * 31 % 251) as u8).collect()
    }

    #[test]
    fn sealed_bytes_have_the_size_and_the_content() {
        let sizes = [
            0,
            1,
            CHUNK_BYTES - 1,
            CHUNK_BYTES,
            CHUNK_BYTES + 1,
            3 * CHUNK_BYTES,
        ];
        for size in sizes {
            let plain = bytes(size);
            let sealed = seal(&[&plain]);
            assert_eq!(sealed.len() as u64, sealed_size(size as u64), "{size}");
            assert!(open(&sealed, &KEY, NAME).unwrap() == plain, "{size}");
        }
    }

    #[test]
    fn nothing_of_the_content_is_visible() {
        let sealed = seal(&[&[0xab; 4096]]);
        assert!(!sealed.windows(4).any(|window| window == [0xab; 4]));
    }

    #[test]
    fn other_key_session_mark_or_order_is_refused() {
        let plain = bytes(3 * CHUNK_BYTES + 5);
        let sealed = seal(&[&plain]);
        let other_session = SnapshotName {
            session: SessionId(8),
            ..NAME
        };
        let of = |content| SnapshotName { content, ..NAME };
        for (key, name) in [
            (SnapshotKey([6; 32]), NAME),
            (KEY, other_session),
            (KEY, of(SealedContent::Mark(4))),
            (KEY, of(SealedContent::Base(3))),
        ] {
            let error = open(&sealed, &key, name).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
        let chunk = CHUNK_BYTES + TAG_BYTES;
        let [first, second] = [SALT_BYTES, SALT_BYTES + chunk];
        let mut swapped = sealed.clone();
        swapped[first..second + chunk].rotate_left(chunk);
        assert!(open(&swapped, &KEY, NAME).is_err());
        // Chunks are left out, at the end and before it.
        assert!(open(&sealed[..second], &KEY, NAME).is_err());
        let without = [&sealed[..first], &sealed[second..]].concat();
        assert!(open(&without, &KEY, NAME).is_err());
        assert!(open(&sealed[..SALT_BYTES], &KEY, NAME).is_err());
        assert!(open(&sealed[..SALT_BYTES - 1], &KEY, NAME).is_err());
    }

    proptest! {
        #[test]
        fn any_parts_come_back_and_any_changed_bit_is_found(
            sizes in prop::collection::vec(0..2 * CHUNK_BYTES, 0..4),
            changed: Index,
            bit in 0..8_u32,
        ) {
            let parts: Vec<_> = sizes.into_iter().map(bytes).collect();
            let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
            let mut sealed = seal(&parts);
            prop_assert!(open(&sealed, &KEY, NAME).unwrap() == parts.concat());
            let changed = changed.index(sealed.len());
            sealed[changed] ^= 1_u8 << bit;
            prop_assert!(open(&sealed, &KEY, NAME).is_err());
        }
    }
}
