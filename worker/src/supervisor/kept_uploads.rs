//! The uploads that a worker keeps for its tenants, in shared memory: see
//! [`shared`](crate::blobs::shared).
//!
//! A tenant's uploads are in segments, each from one session. Small segments
//! are merged, as each takes a file descriptor here and in every process of the tenant.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    io,
    sync::Arc,
};

use tensord_proto::content::{Hash, MAX_HELD, kept_cost};

use crate::blobs::shared::Segment;

/// Maximum number of segments of a tenant.
pub(super) const MAX_SEGMENTS: usize = 16;

/// A segment, with the hashes of its uploads.
#[derive(Debug, Clone)]
pub(super) struct KeptSegment {
    pub(super) segment: Segment,
    pub(super) hashes: Vec<Hash>,
}

impl KeptSegment {
    fn cost_bytes(&self) -> u64 {
        let sizes = self.segment.sizes_bytes.iter();
        sizes.map(|&size| kept_cost(size as usize)).sum()
    }

    /// Returns whether a process has the segment.
    fn is_held(&self) -> bool {
        Arc::strong_count(&self.segment.file) > 1
    }

    /// Copies two segments into one. Blocks.
    ///
    /// # Errors
    ///
    /// When the system has no memory for the copy.
    pub(super) fn merge(self, other: Self) -> io::Result<Self> {
        let segment = Segment::concat(&self.segment, &other.segment)?;
        let mut hashes = self.hashes;
        hashes.extend(other.hashes);
        Ok(Self { segment, hashes })
    }
}

/// The kept uploads of all tenants, with a bound in bytes.
#[derive(Debug)]
pub(super) struct KeptUploads {
    capacity_bytes: u64,
    /// Each tenant's segments, latest first.
    tenants: HashMap<String, VecDeque<KeptSegment>>,
    /// Segments that are not passed on any more, as long as processes may still have them: their
    /// memory is not free.
    superseded: Vec<KeptSegment>,
}

/// What became of a new segment.
#[derive(Debug)]
pub(super) enum Added {
    /// It is kept.
    Kept,
    /// It is not: its uploads are known, or there is no room.
    Refused,
    /// It is kept, and these two were taken out: merge them and add the result.
    Merge(Box<[KeptSegment; 2]>),
}

impl KeptUploads {
    pub(super) fn new(capacity_bytes: u64) -> Self {
        Self {
            capacity_bytes,
            tenants: HashMap::new(),
            superseded: Vec::new(),
        }
    }

    /// Returns the maximum number of bytes of all uploads.
    pub(super) fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Returns the segments of a tenant, oldest first.
    pub(super) fn segments_of(&self, tenant: &str) -> Vec<KeptSegment> {
        let segments = self.tenants.get(tenant).into_iter().flatten();
        segments.rev().cloned().collect()
    }

    /// Adds a segment, unless all its uploads are known or there is no room. Only segments that no
    /// process has are evicted to make room.
    pub(super) fn add(&mut self, tenant: &str, new: KeptSegment) -> Added {
        let known = self.tenants.get(tenant).into_iter().flatten();
        let known: HashSet<_> = known.flat_map(|segment| &segment.hashes).collect();
        let is_known = new.hashes.iter().all(|hash| known.contains(hash));
        if is_known || !self.make_room(new.cost_bytes()) {
            return Added::Refused;
        }
        let segments = self.tenants.entry(tenant.to_owned()).or_default();
        segments.push_front(new);
        match segments.len() {
            0..=MAX_SEGMENTS => Added::Kept,
            _ => self.take_smallest(tenant),
        }
    }

    /// Takes out the two smallest segments of a tenant, which are to be merged. If they cannot be,
    /// drops the earlier one instead.
    fn take_smallest(&mut self, tenant: &str) -> Added {
        let used_bytes = self.used_bytes();
        let Some(segments) = self.tenants.get_mut(tenant) else {
            return Added::Kept;
        };
        let mut by_size: Vec<_> = (0..segments.len()).collect();
        by_size.sort_by_key(|&at| segments[at].cost_bytes());
        // The larger index first, as removing one moves those after it.
        let [smaller, larger] = [by_size[0].min(by_size[1]), by_size[0].max(by_size[1])];
        let (Some(second), Some(first)) = (segments.remove(larger), segments.remove(smaller))
        else {
            return Added::Kept;
        };
        let held_bytes = |segment: &KeptSegment| match segment.is_held() {
            true => segment.cost_bytes(),
            false => 0,
        };
        let more_bytes = held_bytes(&first) + held_bytes(&second);
        if fits(&first, &second) && used_bytes + more_bytes <= self.capacity_bytes {
            self.superseded.extend([first.clone(), second.clone()]);
            return Added::Merge(Box::new([first, second]));
        }
        segments.insert(smaller, first);
        self.superseded.push(second);
        Added::Kept
    }

    /// Returns the bytes of all segments that are kept or that processes still have.
    fn used_bytes(&self) -> u64 {
        let kept = self.tenants.values().flatten();
        let all = kept.chain(&self.superseded);
        all.map(KeptSegment::cost_bytes).sum()
    }

    /// Evicts the oldest segments of the tenant with the most bytes until `cost` fits. Returns
    /// false if it does not fit.
    fn make_room(&mut self, cost_bytes: u64) -> bool {
        if cost_bytes > self.capacity_bytes {
            return false;
        }
        let size = |segments: &VecDeque<KeptSegment>| -> u64 {
            segments.iter().map(KeptSegment::cost_bytes).sum()
        };
        self.superseded.retain(KeptSegment::is_held);
        loop {
            if self.used_bytes() + cost_bytes <= self.capacity_bytes {
                return true;
            }
            let Some(most) = self
                .tenants
                .values_mut()
                .max_by_key(|segments| size(segments))
            else {
                return true;
            };
            if most.back().is_none_or(KeptSegment::is_held) {
                return false;
            }
            most.pop_back();
        }
    }
}

/// Returns whether a session can be offered all uploads of both.
fn fits(one: &KeptSegment, other: &KeptSegment) -> bool {
    one.hashes.len() + other.hashes.len() <= MAX_HELD
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use tensord_proto::content::hash;

    use super::*;

    fn segment(contents: &[&[u8]]) -> KeptSegment {
        let contents: Vec<_> = contents
            .iter()
            .map(|content| Bytes::copy_from_slice(content))
            .collect();
        KeptSegment {
            hashes: contents.iter().map(|content| hash(content)).collect(),
            segment: Segment::of(&contents).unwrap(),
        }
    }

    fn hashes(kept: &KeptUploads, tenant: &str) -> Vec<Hash> {
        let segments = kept.segments_of(tenant).into_iter();
        segments.flat_map(|segment| segment.hashes).collect()
    }

    #[test]
    fn segments_belong_to_their_tenant() {
        let mut kept = KeptUploads::new(1000);
        assert!(matches!(kept.add("a", segment(&[b"1", b"2"])), Added::Kept));
        assert!(matches!(kept.add("b", segment(&[b"1"])), Added::Kept));
        assert!(matches!(kept.add("a", segment(&[b"2"])), Added::Refused));
        assert_eq!(hashes(&kept, "a"), [hash(b"1"), hash(b"2")]);
        assert_eq!(hashes(&kept, "b"), [hash(b"1")]);
        assert!(hashes(&kept, "c").is_empty());
    }

    #[test]
    fn oldest_segment_of_the_largest_tenant_is_evicted_unless_it_is_held() {
        let mut kept = KeptUploads::new(3 * kept_cost(1));
        assert!(matches!(kept.add("a", segment(&[b"1"])), Added::Kept));
        assert!(matches!(kept.add("b", segment(&[b"2"])), Added::Kept));
        assert!(matches!(kept.add("b", segment(&[b"3"])), Added::Kept));
        let held = kept.segments_of("b");
        assert!(matches!(kept.add("a", segment(&[b"4"])), Added::Refused));
        drop(held);
        assert!(matches!(kept.add("a", segment(&[b"4"])), Added::Kept));
        assert_eq!(hashes(&kept, "a"), [hash(b"1"), hash(b"4")]);
        assert_eq!(hashes(&kept, "b"), [hash(b"3")]);
        assert!(matches!(
            kept.add("a", segment(&[&[0; 900]])),
            Added::Refused
        ));
    }

    #[test]
    fn merged_segments_take_room_as_long_as_processes_have_them() {
        let count = MAX_SEGMENTS as u64 + 1;
        for (room, is_merged) in [(count, false), (count + 2, true)] {
            let mut kept = KeptUploads::new(room * kept_cost(1));
            let mut held = Vec::new();
            for i in 0..=MAX_SEGMENTS {
                let new = segment(&[&[i as u8]]);
                held.push(new.clone());
                let added = kept.add("a", new);
                let Added::Merge(pair) = added else {
                    assert!(matches!(added, Added::Kept));
                    continue;
                };
                let [one, other] = *pair;
                let merged = one.merge(other).unwrap();
                assert!(matches!(kept.add("a", merged), Added::Kept) && is_merged);
                held.extend(kept.segments_of("a"));
            }
            let left = MAX_SEGMENTS + usize::from(is_merged);
            assert_eq!(hashes(&kept, "a").len(), left);
            assert!(matches!(kept.add("b", segment(&[b"x"])), Added::Refused));
            drop(held);
            assert!(matches!(kept.add("b", segment(&[b"x"])), Added::Kept));
        }
    }

    #[test]
    fn small_segments_are_merged() {
        let mut kept = KeptUploads::new(1 << 20);
        for i in 0..=MAX_SEGMENTS {
            let content = vec![i as u8; 10 + 100 * (i % 3)];
            match kept.add("a", segment(&[&content])) {
                Added::Merge(pair) => {
                    assert_eq!(i, MAX_SEGMENTS);
                    let [one, other] = *pair;
                    let merged = one.merge(other).unwrap();
                    assert_eq!(merged.segment.sizes_bytes, [10, 10]);
                    assert!(matches!(kept.add("a", merged), Added::Kept));
                }
                added => assert!(matches!(added, Added::Kept) && i < MAX_SEGMENTS),
            }
        }
        assert_eq!(kept.segments_of("a").len(), MAX_SEGMENTS);
        assert_eq!(hashes(&kept, "a").len(), MAX_SEGMENTS + 1);
        // What a process reads from a merged segment is what it was.
        let (process, _) = crate::blobs::shared::SharedBlobs::new();
        for kept in kept.segments_of("a") {
            process.add(&kept.segment, kept.hashes);
        }
        for (expected, held) in crate::blobs::KeptBlobs::blobs_of(&*process, "a") {
            assert_eq!(hash(&held.bytes().unwrap()), expected);
        }
    }
}
