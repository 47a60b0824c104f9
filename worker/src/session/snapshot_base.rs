//! Decides which contents of a session's snapshots are stored once, in a *base* that several snapshots
//! share: those of tensors and kept uploads that did not change between two marks, as a data set on the
//! device does not.
//!
//! Tensors never change, and their ids are not used again. So the storage of a tensor that was there at
//! an earlier mark has the same bytes; it also keeps the memory of all its other tensors from being
//! reused.
//!
//! A snapshot refers to one base at most. What has become stable since the base was made is part of each
//! snapshot, until it is a quarter of all that is stable; then a new base replaces the old one. So
//! contents are copied a few times, however many marks they outlive.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, OnceLock},
};

use burn_ir::TensorId;
use foldhash::fast::RandomState;
use tensord_proto::codec::decode_tensor;

use super::snapshot::{Header, Snapshot};

/// A base has at least as many bytes, by default. Fewer are not worth a file of their own.
pub(super) const MIN_BASE_BYTES: u64 = 1 << 20;

/// At most one in `MAX_OUTSIDE` of the stable bytes may lie outside of the base.
const MAX_OUTSIDE: u64 = 4;

/// Number of snapshots that go on with the present base after one with a new base was refused: there may be no
/// room for two.
const RENEWALS_OFF: u32 = 16;

/// The outcome of a snapshot: whether it is kept. Unset until that is known.
pub(crate) type Outcome = Arc<OnceLock<bool>>;

/// What the next snapshot of a session may refer to.
pub(super) struct BaseTracker {
    min_bytes: u64,
    /// The base that is kept with the last snapshot.
    base: Option<Arc<Base>>,
    /// The tensors and the uploads, by slot and version, that the last snapshot has.
    seen_tensors: HashSet<TensorId, RandomState>,
    seen_slots: HashSet<(u32, u64), RandomState>,
    /// The last snapshot, if it is not known whether that is kept.
    pending: Option<Pending>,
    /// Number of snapshots since the last one that is known to be kept.
    failures: u32,
    /// Number of snapshots for which no new base replaces the present one.
    renewals_off: u32,
}

/// A snapshot that may be kept.
struct Pending {
    base: Option<Arc<Base>>,
    has_new_base: bool,
    outcome: Outcome,
}

/// A base, and which tensors and uploads lie where in it.
struct Base {
    id: u64,
    size_bytes: u64,
    /// The place of each tensor's storage, and where the tensor begins in that. On a GPU, a storage is a
    /// range of a buffer, which depends on the tensors that are in it.
    tensors: HashMap<TensorId, (Place, u64), RandomState>,
    slots: HashMap<(u32, u64), Place, RandomState>,
}

/// Where contents lie in a base.
#[derive(Clone, Copy, PartialEq)]
struct Place {
    offset: u64,
    size_bytes: u64,
}

/// A storage or an upload of the next snapshot.
struct Part {
    size_bytes: u64,
    /// Where it lies in the present base.
    place: Option<Place>,
    /// Whether it was there at the last mark.
    is_stable: bool,
}

impl Default for BaseTracker {
    fn default() -> Self {
        Self {
            min_bytes: MIN_BASE_BYTES,
            base: None,
            seen_tensors: HashSet::default(),
            seen_slots: HashSet::default(),
            pending: None,
            failures: 0,
            renewals_off: 0,
        }
    }
}

impl BaseTracker {
    /// Sets the least bytes of a base.
    pub(super) fn set_min_bytes(&mut self, min_bytes: u64) {
        self.min_bytes = min_bytes;
    }

    /// Decides which contents of a snapshot are in its base, and marks these in the header. `versions`
    /// has a number for each upload slot of the header, in order, which changes with its contents.
    /// `new_id` is the id of the base if a new one is made. The caller must not keep this snapshot while
    /// the [`Outcome`] of the one before is unknown.
    pub(super) fn assign(&mut self, snapshot: &mut Snapshot, versions: &[u64], new_id: u64) {
        self.settle();
        let mut tensors = vec![Vec::new(); snapshot.header.storages.len()];
        for (image, id) in snapshot.header.tensors.iter().zip(&snapshot.tensor_ids) {
            tensors[image.storage as usize].push((*id, image.offset));
        }
        let slots = snapshot.header.slots.iter().zip(versions);
        let slots: Vec<_> = slots
            .map(|(image, version)| ((image.slot, *version), image.size_bytes))
            .collect();
        let storages = snapshot.header.storages.iter().zip(&tensors);
        let mut parts: Vec<_> = storages
            .map(|(image, tensors)| self.storage_part(image.size_bytes, tensors))
            .collect();
        parts.extend(slots.iter().map(|(key, size)| self.slot_part(*key, *size)));
        let base = self.base.as_deref();
        let min_bytes = self.min_bytes;
        let may_renew = base.is_none() || self.renewals_off == 0;
        let must_renew = may_renew && must_renew(&parts, base, min_bytes);
        let (id, size_bytes, is_new) = match (must_renew, base) {
            (true, _) => (new_id, renew(&mut parts, min_bytes), true),
            (false, Some(base)) => (base.id, base.size_bytes, false),
            (false, None) => (0, 0, false),
        };
        let is_used = size_bytes > 0;
        let header = &mut snapshot.header;
        (header.base, header.base_bytes) = if is_used { (id, size_bytes) } else { (0, 0) };
        let (of_storages, of_slots) = parts.split_at(header.storages.len());
        set_offsets(header, of_storages, of_slots);
        snapshot.has_new_base = is_new && is_used;
        if !snapshot.has_new_base {
            snapshot.drop_contents_in_base();
        }
        // A base that is not new has other tensors, too: aliases of those that it had.
        let next = is_used.then(|| {
            let tensors = tensors.iter().zip(of_storages).flat_map(|(tensors, part)| {
                let place = part.place;
                let tensors = tensors.iter();
                tensors.filter_map(move |(id, offset)| Some((*id, (place?, *offset))))
            });
            let slots = slots.iter().zip(of_slots);
            let slots = slots.filter_map(|((key, _), part)| Some((*key, part.place?)));
            Arc::new(Base {
                id,
                size_bytes,
                tensors: tensors.collect(),
                slots: slots.collect(),
            })
        });
        self.seen_tensors = snapshot.tensor_ids.iter().copied().collect();
        self.seen_slots = slots.iter().map(|(key, _)| *key).collect();
        self.renewals_off = self.renewals_off.saturating_sub(1);
        self.pending = Some(Pending {
            base: next,
            has_new_base: snapshot.has_new_base,
            outcome: snapshot.outcome.clone(),
        });
    }

    /// Goes on from a snapshot that was restored, which the worker keeps with its base.
    pub(super) fn restore(&mut self, snapshot: &Snapshot, versions: &[u64]) {
        let header = &snapshot.header;
        let mut base = Base {
            id: header.base,
            size_bytes: header.base_bytes,
            tensors: HashMap::default(),
            slots: HashMap::default(),
        };
        for image in &header.tensors {
            let Ok(tensor) = decode_tensor(&image.tensor) else {
                continue;
            };
            self.seen_tensors.insert(tensor.id);
            let storage = header.storages.get(image.storage as usize);
            if let Some(storage) = storage
                && let Some(offset) = storage.base_offset
            {
                let size_bytes = storage.size_bytes;
                let place = Place { offset, size_bytes };
                base.tensors.insert(tensor.id, (place, image.offset));
            }
        }
        for (image, version) in header.slots.iter().zip(versions) {
            let key = (image.slot, *version);
            self.seen_slots.insert(key);
            if let Some(offset) = image.base_offset {
                let size_bytes = image.size_bytes;
                base.slots.insert(key, Place { offset, size_bytes });
            }
        }
        self.base = (header.base != 0).then(|| Arc::new(base));
    }

    /// Applies the outcome of the last snapshot. If that was refused, or is not known, the base before it is assumed
    /// to be kept still, with the snapshot that the client has committed. After two failures in a row, the base is
    /// given up.
    fn settle(&mut self) {
        let Some(last) = self.pending.take() else {
            return;
        };
        if last.outcome.get() == Some(&true) {
            (self.base, self.failures) = (last.base, 0);
            return;
        }
        self.failures += 1;
        if last.has_new_base {
            self.renewals_off = RENEWALS_OFF;
        }
        if self.failures > 1 {
            self.base = None;
        }
    }

    /// `tensors` are those of the storage, each with where it begins in it.
    fn storage_part(&self, size_bytes: u64, tensors: &[(TensorId, u64)]) -> Part {
        let base = self.base.as_deref();
        let mut places = tensors.iter().filter_map(|(id, offset)| {
            let (place, begin) = base?.tensors.get(id)?;
            (begin == offset && place.size_bytes == size_bytes).then_some(*place)
        });
        Part {
            size_bytes,
            place: places.next(),
            is_stable: tensors.iter().any(|(id, _)| self.seen_tensors.contains(id)),
        }
    }

    fn slot_part(&self, key: (u32, u64), size_bytes: u64) -> Part {
        let place = self.base.as_deref().and_then(|base| base.slots.get(&key));
        Part {
            size_bytes,
            place: place.copied(),
            is_stable: self.seen_slots.contains(&key),
        }
    }
}

/// Records in a header where the contents of its storages and slots are in the base.
fn set_offsets(header: &mut Header, of_storages: &[Part], of_slots: &[Part]) {
    let offset = |part: &Part| part.place.map(|place| place.offset);
    for (image, part) in header.storages.iter_mut().zip(of_storages) {
        image.base_offset = offset(part);
    }
    for (image, part) in header.slots.iter_mut().zip(of_slots) {
        image.base_offset = offset(part);
    }
}

/// Returns whether a new base must replace the present one: too many stable bytes are not in it, or most
/// of its bytes are not needed any more.
fn must_renew(parts: &[Part], base: Option<&Base>, min_bytes: u64) -> bool {
    let sum = |is_counted: fn(&Part) -> bool| -> u64 {
        let counted = parts.iter().filter(|part| is_counted(part));
        counted.map(|part| part.size_bytes).sum()
    };
    let inside = sum(|part| part.place.is_some());
    let outside = sum(|part| part.is_stable && part.place.is_none());
    let is_sparse = base.is_some_and(|base| base.size_bytes > 2 * inside + min_bytes);
    let is_incomplete = outside >= min_bytes && outside * MAX_OUTSIDE >= inside + outside;
    is_sparse || is_incomplete
}

/// Places all stable parts in a new base. Returns its size, which is 0 if a base is not worth it.
fn renew(parts: &mut [Part], min_bytes: u64) -> u64 {
    let stable = parts.iter().filter(|part| part.is_stable);
    let stable_bytes: u64 = stable.map(|part| part.size_bytes).sum();
    let mut offset = 0;
    for part in parts {
        let is_inside = stable_bytes >= min_bytes && part.is_stable && part.size_bytes > 0;
        let size_bytes = part.size_bytes;
        part.place = is_inside.then_some(Place { offset, size_bytes });
        offset += if is_inside { size_bytes } else { 0 };
    }
    offset
}
