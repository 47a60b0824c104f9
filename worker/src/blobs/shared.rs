//! Kept uploads that processes of leases share through their worker.
//!
//! When a session ends, or its client requests it, its process copies the kept uploads into a
//! *segment*, memory without a name that can never change again (a sealed `memfd`), and sends it to
//! the worker. The worker
//! hashes the segment itself, keeps it for the tenant, and passes it to the processes of the
//! tenant's leases. So no process can change what another one has, a process learns of its own
//! tenant's uploads only, and the bytes of an upload exist once, until a session uses them.

use std::{
    collections::HashSet,
    fs::File,
    io::{self, Read, Write},
    os::unix::fs::FileExt,
    sync::{Arc, Mutex, OnceLock},
};

use bytes::Bytes;
use rustix::fs::fcntl_add_seals;
use tensord_proto::{
    aligned, bulk,
    content::{Hash, MAX_HELD, hash_reader},
};
use tokio::{
    runtime::Handle,
    sync::{mpsc, oneshot, watch},
};

use super::{HeldBlob, Keeping, KeptBlobs};
use crate::{
    locks::lock,
    memory_file::{MemoryFile, SEALS, unnamed_memory},
};

/// Maximum number of segments queued for the worker. Further ones are dropped, as kept uploads
/// only save time.
const SEGMENT_QUEUE: usize = 16;

/// Uploads in shared memory, one after the other.
#[derive(Debug, Clone)]
pub(crate) struct Segment {
    pub(crate) file: Arc<MemoryFile>,
    /// Sizes of the uploads, in order.
    pub(crate) sizes_bytes: Vec<u64>,
}

/// A segment for the worker.
#[derive(Debug)]
pub(crate) struct NewSegment {
    pub(crate) segment: Segment,
    /// Receives a message when the worker has kept the segment, or refused it.
    pub(crate) done: oneshot::Sender<()>,
}

/// Why a segment of a process is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SegmentError {
    /// The system refused a call.
    #[error("kept uploads cannot be read: {0}")]
    Io(#[from] io::Error),
    /// The process broke a rule.
    #[error(
        "it sent kept uploads that are not sealed, have another size than announced, or are too many"
    )]
    Violation,
}

impl Segment {
    /// Copies `contents` into a segment.
    ///
    /// # Errors
    ///
    /// When the system has no memory for it.
    pub(crate) fn of(contents: &[Bytes]) -> io::Result<Self> {
        let mut file = unnamed_memory("tensord-uploads")?;
        contents
            .iter()
            .try_for_each(|content| file.write_all(content))?;
        fcntl_add_seals(&file, SEALS)?;
        let sizes = contents.iter().map(|content| content.len() as u64);
        Ok(Self {
            sizes_bytes: sizes.collect(),
            file: Arc::new(file.into()),
        })
    }

    /// Copies two segments into one.
    ///
    /// # Errors
    ///
    /// When the system has no memory for it.
    pub(crate) fn concat(one: &Self, other: &Self) -> io::Result<Self> {
        let mut file = unnamed_memory("tensord-uploads")?;
        for segment in [one, other] {
            let mut all = Part {
                file: &segment.file,
                at: 0,
                left: segment.size_bytes(),
            };
            io::copy(&mut all, &mut file)?;
        }
        fcntl_add_seals(&file, SEALS)?;
        Ok(Self {
            file: Arc::new(file.into()),
            sizes_bytes: [&one.sizes_bytes[..], &other.sizes_bytes].concat(),
        })
    }

    /// Checks a segment of at most `max_bytes` that another process has sent, and hashes its
    /// uploads. Blocks.
    ///
    /// # Errors
    ///
    /// When the memory can still change, does not have the sum of `sizes_bytes` as its size,
    /// exceeds a limit, or cannot be read.
    pub(crate) fn verify(
        file: MemoryFile,
        sizes_bytes: Vec<u64>,
        max_bytes: u64,
    ) -> Result<(Self, Vec<Hash>), SegmentError> {
        let file_bytes = file.sealed_bytes().map_err(|_| SegmentError::Violation)?;
        let sum = |sum: u64, size: &u64| sum.checked_add(*size);
        let size = sizes_bytes.iter().try_fold(0, sum);
        let is_plausible = size.is_some_and(|size| size <= max_bytes)
            && size == Some(file_bytes)
            && sizes_bytes.len() <= MAX_HELD;
        if !is_plausible {
            return Err(SegmentError::Violation);
        }
        let mut hashes = Vec::with_capacity(sizes_bytes.len());
        let mut at = 0;
        for &left in &sizes_bytes {
            hashes.push(hash_reader(Part {
                file: &file,
                at,
                left,
            })?);
            at += left;
        }
        let file = Arc::new(file);
        Ok((Self { file, sizes_bytes }, hashes))
    }

    /// Returns the number of bytes of all uploads.
    pub(crate) fn size_bytes(&self) -> u64 {
        self.sizes_bytes.iter().sum()
    }
}

/// Reads a part of a file, whatever position the file's other holders set.
struct Part<'a> {
    file: &'a File,
    at: u64,
    left: u64,
}

impl Read for Part<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.left).unwrap_or(usize::MAX);
        let most = left.min(buffer.len());
        let read = self.file.read_at(&mut buffer[..most], self.at)?;
        self.at += read as u64;
        self.left -= read as u64;
        Ok(read)
    }
}

/// An upload in a segment.
#[derive(Debug)]
pub(crate) struct SharedBlob {
    file: Arc<MemoryFile>,
    at: u64,
    size_bytes: u64,
    /// A copy in this process, made when a session uses the upload.
    copy: OnceLock<Bytes>,
}

impl SharedBlob {
    /// Returns a copy of the bytes, which is made once for this process.
    pub(crate) fn bytes(&self) -> io::Result<Bytes> {
        if let Some(copy) = self.copy.get() {
            return Ok(copy.clone());
        }
        let size = usize::try_from(self.size_bytes).map_err(io::Error::other)?;
        let mut copy = aligned::with_capacity(size);
        let mut part = Part {
            file: &self.file,
            at: self.at,
            left: self.size_bytes,
        };
        aligned::fill(&mut copy, &mut part, size)?;
        Ok(self.copy.get_or_init(|| bulk::shared(copy)).clone())
    }
}

/// The store of kept uploads in the process of a lease.
#[derive(Debug)]
pub(crate) struct SharedBlobs {
    /// The uploads that the worker has passed on, latest first.
    held: Mutex<Vec<(Hash, HeldBlob)>>,
    segments: mpsc::Sender<NewSegment>,
    /// Number of segments that are being made.
    pending: watch::Sender<usize>,
}

impl SharedBlobs {
    /// Creates a store. The receiver yields the segments that the process must send to the
    /// worker.
    pub(crate) fn new() -> (Arc<Self>, mpsc::Receiver<NewSegment>) {
        let (segments, queued) = mpsc::channel(SEGMENT_QUEUE);
        let blobs = Self {
            held: Mutex::default(),
            segments,
            pending: watch::Sender::new(0),
        };
        (Arc::new(blobs), queued)
    }

    /// Adds the uploads of a segment that the worker has passed on, with their hashes. An upload
    /// that is there already is not added again: a segment that the worker starts to keep while
    /// this process starts is passed on twice, and segments may have uploads in common.
    pub(crate) fn add(&self, segment: &Segment, hashes: impl IntoIterator<Item = Hash>) {
        let mut at = 0;
        let blobs = segment.sizes_bytes.iter().map(|&size_bytes| {
            let blob = SharedBlob {
                file: segment.file.clone(),
                at,
                size_bytes,
                copy: OnceLock::new(),
            };
            at += size_bytes;
            HeldBlob::Shared(Arc::new(blob))
        });
        let mut held = lock(&self.held);
        let mut known: HashSet<_> = held.iter().map(|(hash, _)| *hash).collect();
        let new: Vec<_> = hashes
            .into_iter()
            .zip(blobs)
            .filter(|(hash, _)| known.insert(*hash))
            .collect();
        held.splice(0..0, new);
        held.truncate(MAX_HELD);
    }
}

impl KeptBlobs for SharedBlobs {
    fn blobs_of(&self, _tenant: &str) -> Vec<(Hash, HeldBlob)> {
        // All sessions of the process are of one lease, and so of one tenant.
        lock(&self.held).clone()
    }

    fn keep(self: Arc<Self>, runtime: &Handle, _tenant: Arc<str>, contents: Vec<Bytes>) -> Keeping {
        let (done, keeping) = oneshot::channel();
        let pending = Pending::of(self);
        runtime.spawn_blocking(move || pending.0.store(contents, done));
        keeping
    }
}

impl SharedBlobs {
    /// Passes a copy of `contents` to the worker, which answers by `done`. Drops `done` if it cannot.
    fn store(&self, mut contents: Vec<Bytes>, done: oneshot::Sender<()>) {
        contents.truncate(MAX_HELD);
        if let Ok(segment) = Segment::of(&contents) {
            // The queue is full if the worker is slow.
            let _ = self.segments.try_send(NewSegment { segment, done });
        }
    }

    /// Waits until no more uploads are being copied. All segments are in the queue then.
    pub(crate) async fn idle(&self) {
        let mut pending = self.pending.subscribe();
        // The sender lives as long as `self`.
        let _ = pending.wait_for(|count| *count == 0).await;
    }
}

/// A guard that counts one segment in `pending` until it is dropped.
struct Pending(Arc<SharedBlobs>);

impl Pending {
    fn of(blobs: Arc<SharedBlobs>) -> Self {
        blobs.pending.send_modify(|count| *count += 1);
        Self(blobs)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.0.pending.send_modify(|count| *count -= 1);
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, SealFlags, memfd_create};
    use tensord_proto::content::hash;

    use super::*;

    fn contents() -> Vec<Bytes> {
        [&b"first"[..], b"", b"the third"]
            .map(Bytes::from_static)
            .into()
    }

    fn fd(file: &File) -> MemoryFile {
        file.try_clone().unwrap().into()
    }

    #[test]
    fn uploads_pass_through_a_segment() {
        let (process, mut segments) = SharedBlobs::new();
        process.store(contents(), oneshot::channel().0);
        let sent = segments.try_recv().unwrap().segment;
        let (verified, hashes) = Segment::verify(fd(&sent.file), sent.sizes_bytes, 14).unwrap();
        let expected: Vec<_> = contents().iter().map(|content| hash(content)).collect();
        assert_eq!(hashes, expected);
        let (other, _) = SharedBlobs::new();
        other.add(&verified, hashes);
        let held = other.blobs_of("t");
        let bytes: Vec<_> = held.iter().map(|(_, held)| held.bytes().unwrap()).collect();
        assert_eq!(bytes, contents());
        let again = held[2].1.bytes().unwrap();
        assert_eq!(again.as_ptr(), bytes[2].as_ptr(), "copied once");
    }

    #[test]
    fn upload_is_held_once() {
        let (process, _segments) = SharedBlobs::new();
        let add = |contents: &[&'static [u8]]| {
            let contents: Vec<_> = contents.iter().copied().map(Bytes::from_static).collect();
            let hashes = contents.iter().map(|content| hash(content));
            process.add(&Segment::of(&contents).unwrap(), hashes);
        };
        add(&[b"one", b"two"]);
        add(&[b"one", b"two"]);
        add(&[b"three", b"two", b"three"]);
        let held = process.blobs_of("t");
        let bytes: Vec<_> = held.iter().map(|(_, held)| held.bytes().unwrap()).collect();
        assert_eq!(bytes, [&b"three"[..], b"one", b"two"]);
    }

    #[test]
    fn segment_cannot_be_changed() {
        let segment = Segment::of(&contents()).unwrap();
        segment.file.write_at(b"x", 0).unwrap_err();
        segment.file.set_len(3).unwrap_err();
        segment.file.set_len(300).unwrap_err();
    }

    #[test]
    fn segments_that_break_a_rule_are_refused() {
        let refused = |file: &File, sizes: &[u64], max| {
            let verified = Segment::verify(fd(file), sizes.to_vec(), max);
            assert!(
                matches!(verified, Err(SegmentError::Violation)),
                "{sizes:?}"
            );
        };
        let good = Segment::of(&contents()).unwrap();
        refused(&good.file, &[5, 0, 9], 13);
        refused(&good.file, &[5, 0, 8], 100);
        refused(&good.file, &[5, 0, 10], 100);
        refused(&good.file, &[u64::MAX, 15], u64::MAX);
        // Memory that can still change, and files that are no such memory.
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut open = File::from(memfd_create("open", flags).unwrap());
        open.write_all(b"four").unwrap();
        refused(&open, &[4], 100);
        fcntl_add_seals(&open, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        refused(&open, &[4], 100);
        // Memory beyond the end of the file, for which nobody would be charged.
        let more = unnamed_memory("test").unwrap();
        let keep = rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&more, keep, 0, 1 << 20).unwrap();
        fcntl_add_seals(&more, SEALS).unwrap();
        refused(&more, &[], 100);
        refused(&File::open("/dev/zero").unwrap(), &[4], 100);
        refused(&tempfile::tempfile().unwrap(), &[], 100);
    }
}
