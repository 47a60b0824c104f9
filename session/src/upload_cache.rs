//! Which uploads of a session the worker keeps, so that no content is sent twice.
//!
//! The client decides, as it knows which contents were used last, and a decision costs less
//! than a query. It identifies contents by their BLAKE3 hash and evicts the least recently
//! used. The worker only executes the decisions.

use std::collections::HashMap;

use lru::LruCache;
use tensord_proto::content::{HASH_BYTES, Hash, MAX_HELD, MAX_SLOTS, kept_cost};

/// Uploads below this size, in bytes, are always sent: reusing them would save little.
pub(super) const MIN_BYTES: usize = 128;

/// Where the content of an upload comes from.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum UploadSource {
    /// The worker has the content in this slot.
    Slot(u32),
    /// The worker has the content from an earlier session, at this index of its list.
    Held(u32),
    /// The worker does not have the content, so the client sends it. The worker keeps the
    /// content in slot `keep`, if there is one, and frees the slots in `forget`.
    New { keep: Option<u32>, forget: Vec<u32> },
}

/// The contents that the worker keeps for one session.
#[derive(Debug)]
pub(super) struct UploadCache {
    budget_bytes: u64,
    used_bytes: u64,
    /// Slot and cost in bytes of each content.
    slots: LruCache<Hash, (u32, u64)>,
    /// Slots that were used and are free.
    free: Vec<u32>,
    held: HashMap<Hash, u32>,
    is_held_known: bool,
    /// Whether the worker sends the list.
    expects_held: bool,
}

impl Default for UploadCache {
    fn default() -> Self {
        Self {
            budget_bytes: 0,
            used_bytes: 0,
            slots: LruCache::unbounded(),
            free: Vec::new(),
            held: HashMap::new(),
            is_held_known: false,
            expects_held: false,
        }
    }
}

impl UploadCache {
    /// Sets how many bytes the worker keeps.
    pub(super) fn set_budget(&mut self, bytes: u64) {
        self.budget_bytes = bytes;
    }

    /// Records that the worker sends the list of contents that it has from earlier sessions.
    pub(super) fn expect_held(&mut self) {
        self.expects_held = true;
    }

    /// Returns whether the list is yet to come. Until then, contents that the worker has may be sent
    /// once more.
    pub(super) fn awaits_held(&self) -> bool {
        self.expects_held && !self.is_held_known
    }

    /// Forgets the contents that the worker has from earlier sessions: the session goes on in
    /// another process, maybe at another worker, which may not have them.
    pub(super) fn forget_held(&mut self) {
        self.held.clear();
    }

    /// Sets the contents that the worker has from earlier sessions. The worker sends this
    /// list once.
    ///
    /// # Errors
    ///
    /// The rule that the worker broke.
    pub(super) fn set_held(&mut self, hashes: &[u8]) -> Result<(), String> {
        let (hashes, rest) = hashes.as_chunks();
        if !rest.is_empty() {
            let size = hashes.len() * HASH_BYTES + rest.len();
            return Err(format!(
                "the list of kept uploads has {size} bytes, which is not a whole number of hashes"
            ));
        }
        if hashes.len() > MAX_HELD {
            let count = hashes.len();
            return Err(format!(
                "the list of kept uploads has {count} entries; the limit is {MAX_HELD}"
            ));
        }
        if std::mem::replace(&mut self.is_held_known, true) {
            return Err("the worker sent a second list of kept uploads".into());
        }
        self.held = (0..)
            .zip(hashes)
            .map(|(index, &hash)| (hash, index))
            .collect();
        Ok(())
    }

    /// Returns whether the worker may keep an upload of `size` bytes, or may have it from an
    /// earlier session, so that the caller must hash the upload.
    pub(super) fn is_cacheable(&self, size: usize) -> bool {
        let kept = kept_cost(size) <= self.budget_bytes || !self.held.is_empty();
        kept && size >= MIN_BYTES
    }

    /// Returns where the content with this hash and size comes from. A content that has to be
    /// sent counts as kept from now on, unless it alone exceeds the budget.
    pub(super) fn source(&mut self, hash: Hash, size: usize) -> UploadSource {
        if let Some((slot, _)) = self.slots.get(&hash) {
            return UploadSource::Slot(*slot);
        }
        if let Some(&index) = self.held.get(&hash) {
            return UploadSource::Held(index);
        }
        let cost = kept_cost(size);
        if cost > self.budget_bytes {
            return UploadSource::New {
                keep: None,
                forget: Vec::new(),
            };
        }
        let mut forget = Vec::new();
        while self.used_bytes + cost > self.budget_bytes || self.slots.len() >= MAX_SLOTS as usize {
            let (_, (slot, freed)) = self.slots.pop_lru().expect("used bytes belong to a slot");
            self.used_bytes -= freed;
            forget.push(slot);
        }
        // The new content takes the slot of an evicted one if there is any; that slot need not
        // be freed first.
        let slot = forget.pop().or_else(|| self.free.pop());
        let slot = slot.unwrap_or(self.slots.len() as u32);
        self.free.extend(&forget);
        self.slots.put(hash, (slot, cost));
        self.used_bytes += cost;
        UploadSource::New {
            keep: Some(slot),
            forget,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(n: u8) -> Hash {
        [n; HASH_BYTES]
    }

    fn kept(slot: u32) -> UploadSource {
        UploadSource::New {
            keep: Some(slot),
            forget: Vec::new(),
        }
    }

    #[test]
    fn kept_content_is_not_sent_again() {
        let mut upload_cache = UploadCache::default();
        upload_cache.set_budget(2 * kept_cost(1000));
        assert_eq!(upload_cache.source(named(1), 1000), kept(0));
        assert_eq!(upload_cache.source(named(2), 1000), kept(1));
        assert_eq!(upload_cache.source(named(1), 1000), UploadSource::Slot(0));
        // 2 was used longest ago.
        assert_eq!(upload_cache.source(named(3), 1000), kept(1));
        assert_eq!(upload_cache.source(named(1), 1000), UploadSource::Slot(0));
        assert_eq!(upload_cache.source(named(2), 1000), kept(1));
    }

    #[test]
    fn large_upload_evicts_small_ones_and_frees_their_slots() {
        let mut upload_cache = UploadCache::default();
        upload_cache.set_budget(3 * kept_cost(1000));
        for n in 0..3 {
            assert_eq!(upload_cache.source(named(n), 1000), kept(u32::from(n)));
        }
        let placed = upload_cache.source(named(9), 2500);
        let forget = vec![0, 1];
        assert_eq!(
            placed,
            UploadSource::New {
                keep: Some(2),
                forget
            }
        );
        assert_eq!(upload_cache.source(named(4), 0), kept(1));
    }

    #[test]
    fn oversized_uploads_are_always_sent_and_held_ones_never() {
        let mut upload_cache = UploadCache::default();
        let sent = UploadSource::New {
            keep: None,
            forget: Vec::new(),
        };
        assert!(!upload_cache.is_cacheable(1000));
        assert_eq!(upload_cache.source(named(1), 1000), sent);
        upload_cache
            .set_held(&[named(5), named(1)].concat())
            .unwrap();
        assert!(upload_cache.is_cacheable(1000) && !upload_cache.is_cacheable(MIN_BYTES - 1));
        assert_eq!(upload_cache.source(named(1), 1000), UploadSource::Held(1));
        assert_eq!(upload_cache.source(named(2), 1000), sent);
    }

    #[test]
    fn held_content_is_sent_once_it_is_forgotten() {
        let mut upload_cache = UploadCache::default();
        upload_cache.set_budget(kept_cost(1000));
        upload_cache.set_held(&named(1)).unwrap();
        assert_eq!(upload_cache.source(named(1), 1000), UploadSource::Held(0));
        upload_cache.forget_held();
        assert_eq!(upload_cache.source(named(1), 1000), kept(0));
        assert_eq!(upload_cache.source(named(1), 1000), UploadSource::Slot(0));
    }

    #[test]
    fn held_list_must_be_well_formed_bounded_and_sent_once() {
        let mut upload_cache = UploadCache::default();
        let long = vec![7; (MAX_HELD + 1) * HASH_BYTES];
        for (list, rule) in [
            (&long[..17], "not a whole number of hashes"),
            (&long, "the limit is 8192"),
        ] {
            let broken = upload_cache.set_held(list).unwrap_err();
            assert!(broken.contains(rule), "{broken}");
            assert!(upload_cache.held.is_empty());
        }
        assert_eq!(upload_cache.set_held(&long[HASH_BYTES..]), Ok(()));
        assert!(
            upload_cache
                .set_held(&[])
                .unwrap_err()
                .contains("a second list")
        );
    }
}
