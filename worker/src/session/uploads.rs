//! The bytes of uploads: finds them at the places that the frame's contents list names, and keeps
//! those that the client assigns to a slot, for reuse.

use std::collections::HashMap;

use burn_backend::{AllocationProperty, BoolStore, DType, TensorData};
use burn_ir::TensorIr;
use bytes::Bytes;
use tensord_proto::{
    aligned, bulk,
    codec::{CodecError, tensor_bytes},
    content::{Content, Contents, Entry, MAX_SLOTS, kept_cost},
    v1::FaultKind,
};

use super::{
    dataflow::Refusal,
    runner::CapturedSlot,
    snapshot::{Snapshot, SnapshotError},
};
use crate::{blobs::HeldBlob, memory::SessionMemory};

/// The most bytes of uploads that a session may keep.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KeptLimits {
    /// For a session that begins at this worker.
    pub(crate) new: u64,
    /// For one that goes on here, if the worker at which it began has granted it more than
    /// [`new`](Self::new): its client has filled its slots accordingly.
    pub(crate) restored: u64,
}

impl KeptLimits {
    /// Returns the limit of a session to which an earlier worker has granted `granted_bytes`.
    fn restored(self, granted_bytes: u64) -> u64 {
        self.new.max(granted_bytes.min(self.restored))
    }
}

/// A received payload, and the memory taken for it.
pub(crate) struct Payload {
    pub(crate) bytes: burn_backend::Bytes,
    pub(crate) memory: Result<SessionMemory, Refusal>,
}

/// The bytes of one upload.
#[derive(Debug)]
pub(super) enum UploadBytes {
    /// Used by this upload only.
    Owned(burn_backend::Bytes),
    /// Shared with the copy that is kept for later uploads.
    Kept(Bytes),
}

/// Where the bytes of an upload are.
#[derive(Debug)]
enum UploadLocation {
    Available(UploadBytes),
    /// In the next payload, which is to be kept in this slot if there is one.
    Payload(Option<u32>),
}

/// An upload that is kept in a slot.
struct Slot {
    bytes: Bytes,
    /// Different for each upload of the session.
    version: u64,
}

/// The uploads that a session keeps, and the contents list of the current frame.
pub(super) struct Uploads {
    contents: Contents,
    slots: HashMap<u32, Slot>,
    /// Number of uploads that were kept so far.
    kept: u64,
    /// Version of the last upload that was given away to be shared.
    shared: u64,
    used_bytes: u64,
    limits: KeptLimits,
    limit_bytes: u64,
    /// The uploads that the session was offered. An entry is `None` if the worker no longer had
    /// that upload when the session was restored.
    held: Vec<Option<HeldBlob>>,
    /// The upload that waits for its payload, and the slot to keep the payload in, if
    /// any.
    awaited: Option<(TensorIr, Option<u32>)>,
}

impl Uploads {
    pub(super) fn new(limits: KeptLimits, held: Vec<Option<HeldBlob>>) -> Self {
        Self {
            contents: Contents::default(),
            slots: HashMap::new(),
            kept: 0,
            shared: 0,
            used_bytes: 0,
            limits,
            limit_bytes: limits.new,
            held,
            awaited: None,
        }
    }

    /// Returns the most bytes of uploads that the session may keep.
    pub(super) fn kept_limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Begins a frame with this contents list.
    pub(super) fn begin(&mut self, list: Bytes) {
        self.contents = Contents::new(list);
    }

    /// Checks that the frame's list is used up.
    pub(super) fn finish(&self) -> Result<(), CodecError> {
        match self.contents.is_empty() {
            true => Ok(()),
            false => Err(self
                .contents
                .error("the list has more entries than the frame has uploads")),
        }
    }

    /// Returns the bytes of the next upload, which makes the tensor `out`, and their number
    /// as `out` declares it. Returns `None` if they are in the next payload, which
    /// [`complete`](Self::complete) then needs.
    pub(super) fn start(
        &mut self,
        out: &TensorIr,
    ) -> Result<Option<(UploadBytes, usize)>, CodecError> {
        let size = tensor_bytes(&out.shape, out.dtype).ok_or_else(|| {
            self.contents
                .error("the upload is too large to be addressed")
        })?;
        match self.next(size)? {
            UploadLocation::Available(source) => Ok(Some((source, size))),
            UploadLocation::Payload(keep) => {
                self.awaited = Some((out.clone(), keep));
                Ok(None)
            }
        }
    }

    /// Returns whether an upload waits for its payload.
    pub(super) fn awaits_payload(&self) -> bool {
        self.awaited.is_some()
    }

    /// Returns the tensor and the bytes of the upload that waits for this payload. The
    /// payload is kept even if the device has no room for the tensor, as the client relies
    /// on the slot.
    ///
    /// # Panics
    ///
    /// When no upload waits.
    pub(super) fn complete(
        &mut self,
        payload: burn_backend::Bytes,
    ) -> Result<(TensorIr, UploadBytes), CodecError> {
        let (out, keep) = self
            .awaited
            .take()
            .expect("a payload is passed only to an upload that awaits it");
        Ok((out, self.keep(payload, keep)?))
    }

    /// Returns where the next upload is, which is of a tensor of `size` bytes.
    fn next(&mut self, size: usize) -> Result<UploadLocation, CodecError> {
        loop {
            let content = match self.contents.next(size)? {
                Entry::Upload(content) => content,
                Entry::Forget(slot) => {
                    self.forget(slot);
                    continue;
                }
            };
            let kept = |bytes: Option<Bytes>, what: &str| match bytes {
                Some(bytes) => Ok(UploadLocation::Available(UploadBytes::Kept(bytes))),
                None => Err(self.contents.error(format!("{what} has no upload"))),
            };
            return match content {
                Content::Slot(slot) => {
                    let bytes = self.slots.get(&slot).map(|slot| slot.bytes.clone());
                    kept(bytes, &format!("slot {slot}"))
                }
                Content::Held(at) => {
                    let held = self.held.get(at as usize).and_then(Option::as_ref);
                    let held = held.map(HeldBlob::bytes);
                    let unreadable = |e| self.contents.error(format!("place {at}: {e}"));
                    kept(
                        held.transpose().map_err(unreadable)?,
                        &format!("place {at}"),
                    )
                }
                Content::Payload { keep } => Ok(UploadLocation::Payload(keep)),
                // A copy is aligned, and does not keep the frame alive.
                Content::Inline { bytes, keep } => self
                    .keep(aligned::copy(&bytes), keep)
                    .map(UploadLocation::Available),
            };
        }
    }

    /// Keeps `bytes` in `slot`, if there is one.
    fn keep(
        &mut self,
        bytes: burn_backend::Bytes,
        slot: Option<u32>,
    ) -> Result<UploadBytes, CodecError> {
        let Some(slot) = slot else {
            return Ok(UploadBytes::Owned(bytes));
        };
        self.forget(slot);
        self.used_bytes += kept_cost(bytes.len());
        let (used_bytes, limit_bytes) = (self.used_bytes, self.limit_bytes);
        if used_bytes > limit_bytes {
            let rule =
                format!("the kept uploads take {used_bytes} bytes, more than {limit_bytes} bytes");
            return Err(self.contents.error(rule));
        }
        if self.slots.len() >= MAX_SLOTS as usize {
            let rule = format!("the session keeps an upload in each of {MAX_SLOTS} slots");
            return Err(self.contents.error(rule));
        }
        let bytes = bulk::shared(bytes);
        self.insert(slot, bytes.clone());
        Ok(UploadBytes::Kept(bytes))
    }

    fn insert(&mut self, slot: u32, bytes: Bytes) {
        self.kept += 1;
        let version = self.kept;
        self.slots.insert(slot, Slot { bytes, version });
    }

    fn forget(&mut self, slot: u32) {
        if let Some(Slot { bytes, .. }) = self.slots.remove(&slot) {
            self.used_bytes -= kept_cost(bytes.len());
        }
    }

    /// Returns the kept uploads, in no order.
    pub(super) fn capture(&self) -> Vec<CapturedSlot> {
        let slots = self.slots.iter().map(|(slot, kept)| CapturedSlot {
            slot: *slot,
            version: kept.version,
            bytes: kept.bytes.clone(),
        });
        slots.collect()
    }

    /// Returns a number for each slot of a snapshot, in its order, which changes with the contents.
    pub(super) fn versions(&self, snapshot: &Snapshot) -> Vec<u64> {
        let slots = snapshot.header.slots.iter();
        let versions = slots.map(|image| self.slots.get(&image.slot).map_or(0, |it| it.version));
        versions.collect()
    }

    /// Restores the kept uploads of a snapshot.
    pub(super) fn restore(&mut self, snapshot: &Snapshot) -> Result<(), SnapshotError> {
        self.limit_bytes = self.limits.restored(snapshot.header.kept_limit_bytes);
        for (image, bytes) in snapshot.header.slots.iter().zip(&snapshot.slots) {
            self.used_bytes += kept_cost(bytes.len());
            self.insert(image.slot, bytes.clone());
        }
        let (used_bytes, limit_bytes) = (self.used_bytes, self.limit_bytes);
        if used_bytes > limit_bytes {
            return Err(SnapshotError::OutOfMemory(format!(
                "the session keeps {used_bytes} bytes of uploads, and this worker keeps at most {limit_bytes} bytes for a session; start the worker with a larger --upload-cache"
            )));
        }
        let is_valid = self.slots.len() <= MAX_SLOTS as usize
            && self.slots.len() == snapshot.header.slots.len();
        match is_valid {
            true => Ok(()),
            false => Err(SnapshotError::malformed(
                "the slots of kept uploads are too many, or one is there twice",
            )),
        }
    }

    /// Returns the uploads in all slots that no earlier call has returned. So however often a client
    /// has them shared, each upload that it sends is copied once.
    pub(super) fn take_unshared(&mut self) -> Vec<Bytes> {
        let shared = std::mem::replace(&mut self.shared, self.kept);
        if shared == self.kept {
            return Vec::new();
        }
        let slots = self.slots.values();
        let unshared = slots.filter(|slot| slot.version > shared);
        unshared.map(|slot| slot.bytes.clone()).collect()
    }
}

impl UploadBytes {
    /// Converts the bytes to Burn's data for the tensor `out`.
    pub(super) fn into_data(self, out: &TensorIr) -> Result<TensorData, Refusal> {
        let mismatch = |reason: String| Refusal::New(FaultKind::Mismatch, reason);
        let bytes = match &self {
            Self::Owned(bytes) => &**bytes,
            Self::Kept(bytes) => bytes,
        };
        let is_byte_bool = matches!(out.dtype, DType::Bool(BoolStore::Native | BoolStore::U8));
        if is_byte_bool && let Some(at) = bytes.iter().position(|&byte| byte > 1) {
            // Any other byte is not a valid Rust `bool`.
            let reason = format!("byte {at} of a bool tensor is {}, not 0 or 1", bytes[at]);
            return Err(mismatch(reason));
        }
        let bytes = match self {
            Self::Owned(bytes) => bytes,
            // Burn does not write to these bytes: it copies shared bytes before it changes them.
            Self::Kept(bytes) => {
                burn_backend::Bytes::from_shared(bytes, AllocationProperty::Native)
            }
        };
        TensorData::try_from_bytes(bytes, out.shape.clone(), out.dtype)
            .map_err(|e| mismatch(e.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use tensord_proto::content::put;

    use super::{
        super::snapshot::{Header, SlotImage},
        *,
    };

    const LIMITS: KeptLimits = KeptLimits {
        new: 2 * kept_cost(4),
        restored: 3 * kept_cost(4),
    };

    fn uploads(entries: &[Entry]) -> Uploads {
        let mut uploads = Uploads::new(
            LIMITS,
            vec![Some(HeldBlob::Local(Bytes::from_static(b"held")))],
        );
        let mut list = Vec::new();
        entries.iter().for_each(|entry| put(&mut list, entry));
        uploads.begin(list.into());
        uploads
    }

    fn inline(bytes: &'static [u8], keep: Option<u32>) -> Entry {
        let bytes = Bytes::from_static(bytes);
        Entry::Upload(Content::Inline { bytes, keep })
    }

    fn bytes(next: UploadLocation) -> Vec<u8> {
        match next {
            UploadLocation::Available(UploadBytes::Owned(bytes)) => bytes.to_vec(),
            UploadLocation::Available(UploadBytes::Kept(bytes)) => bytes.to_vec(),
            UploadLocation::Payload(_) => panic!("it is here"),
        }
    }

    #[test]
    fn cached_payload_can_be_reused() {
        let mut uploads = uploads(&[
            inline(b"abcd", Some(7)),
            inline(b"xyzw", None),
            Entry::Upload(Content::Slot(7)),
            Entry::Upload(Content::Held(0)),
            Entry::Upload(Content::Payload { keep: Some(7) }),
        ]);
        for expected in [b"abcd", b"xyzw", b"abcd", b"held"] {
            assert_eq!(bytes(uploads.next(4).unwrap()), expected);
        }
        assert!(matches!(
            uploads.next(4),
            Ok(UploadLocation::Payload(Some(7)))
        ));
        uploads.keep(aligned::copy(b"1234"), Some(7)).unwrap();
        assert!(uploads.finish().is_ok());
        assert_eq!(uploads.take_unshared(), [&b"1234"[..]]);
    }

    #[test]
    fn upload_is_shared_once() {
        let mut uploads = uploads(&[]);
        assert!(uploads.take_unshared().is_empty());
        uploads.keep(aligned::copy(b"1234"), Some(0)).unwrap();
        assert_eq!(uploads.take_unshared(), [&b"1234"[..]]);
        assert!(uploads.take_unshared().is_empty());
        uploads.keep(aligned::copy(b"5678"), Some(1)).unwrap();
        // It is dropped before it is shared.
        uploads.keep(aligned::copy(b"9012"), Some(0)).unwrap();
        uploads.forget(0);
        assert_eq!(uploads.take_unshared(), [&b"5678"[..]]);
    }

    #[test]
    fn restored_session_keeps_the_limit_that_another_worker_has_granted() {
        let snapshot = |slots: u32, kept_limit_bytes| {
            let image = |slot| SlotImage {
                slot,
                size_bytes: 4,
                base_offset: None,
            };
            let header = Header {
                slots: (0..slots).map(image).collect(),
                kept_limit_bytes,
                ..Header::default()
            };
            Snapshot {
                header,
                slots: vec![Bytes::from_static(b"kept"); slots as usize],
                ..Snapshot::default()
            }
        };
        let restored = |slots, granted| {
            let mut uploads = uploads(&[]);
            let restored = uploads.restore(&snapshot(slots, granted));
            (
                restored.map_err(|e| e.to_string()),
                uploads.kept_limit_bytes(),
            )
        };
        let bytes = |slots| slots * kept_cost(4);
        assert_eq!(
            restored(2, bytes(1)),
            (Ok(()), bytes(2)),
            "it may have less"
        );
        assert_eq!(restored(3, bytes(3)), (Ok(()), bytes(3)));
        let (refused, limit) = restored(4, bytes(4));
        assert_eq!(limit, bytes(3));
        let refused = refused.unwrap_err();
        assert!(refused.contains("272 bytes of uploads"), "{refused}");
    }

    #[test]
    fn upload_violations_are_reported() {
        let error = |entries: &[Entry]| {
            let mut uploads = uploads(entries);
            let next = (0..entries.len()).try_for_each(|_| uploads.next(4).map(drop));
            next.unwrap_err().to_string()
        };
        let slot = Entry::Upload(Content::Slot(3));
        let gone = [inline(b"abcd", Some(3)), Entry::Forget(3), slot.clone()];
        assert!(error(&[slot]).contains("slot 3 has no upload"));
        assert!(error(&gone).contains("slot 3 has no upload"));
        let beyond = Entry::Upload(Content::Held(1));
        assert!(error(&[beyond]).contains("place 1 has no upload"));
        let more: Vec<_> = (0..3).map(|slot| inline(b"abcd", Some(slot))).collect();
        assert!(error(&more).contains("the kept uploads take 204 bytes, more than 136 bytes"));
        let left = uploads(&more).finish().unwrap_err();
        assert!(
            left.to_string()
                .contains("more entries than the frame has uploads")
        );
    }
}
