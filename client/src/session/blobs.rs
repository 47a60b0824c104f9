//! What the worker keeps of a session's uploads, so that nothing is sent twice.
//!
//! The client decides: it knows what was used last, and saying so costs less
//! than asking. Contents go by their BLAKE3 hash, in an order of latest use; what
//! has not been used for longest makes room. The worker only carries it out.

use std::collections::HashMap;

use lru::LruCache;
use tensord_proto::content::{HASH_BYTES, Hash, MAX_HELD, MAX_SLOTS, kept_cost};

/// Uploads below this size are always sent: their hash would say as much.
pub(super) const MIN_BYTES: usize = 128;

/// Where an upload is, or goes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum UploadSource {
    /// The worker has it in this slot.
    Slot(u32),
    /// The worker has it from an earlier session.
    Held(u32),
    /// It must be sent, and is kept where `keep` says; the slots in `forget` are
    /// needed no longer.
    New { keep: Option<u32>, forget: Vec<u32> },
}

/// What the worker keeps for one session.
#[derive(Debug)]
pub(super) struct Blobs {
    budget_bytes: u64,
    used_bytes: u64,
    /// Slot and cost of each content that is kept.
    slots: LruCache<Hash, (u32, u64)>,
    /// Slots that had something once.
    free: Vec<u32>,
    held: HashMap<Hash, u32>,
    is_held_known: bool,
}

impl Default for Blobs {
    fn default() -> Self {
        Self {
            budget_bytes: 0,
            used_bytes: 0,
            slots: LruCache::unbounded(),
            free: Vec::new(),
            held: HashMap::new(),
            is_held_known: false,
        }
    }
}

impl Blobs {
    /// The worker says how much it keeps.
    pub(super) fn set_budget(&mut self, bytes: u64) {
        self.budget_bytes = bytes;
    }

    /// The worker says what it has of earlier sessions, once.
    ///
    /// # Errors
    ///
    /// The rule that it broke.
    pub(super) fn set_held(&mut self, hashes: &[u8]) -> Result<(), String> {
        let (hashes, rest) = hashes.as_chunks();
        if !rest.is_empty() {
            let size = hashes.len() * HASH_BYTES + rest.len();
            return Err(format!(
                "its list of kept uploads has {size} bytes, no whole hashes"
            ));
        }
        if hashes.len() > MAX_HELD {
            let count = hashes.len();
            return Err(format!(
                "it lists {count} kept uploads; {MAX_HELD} are the limit"
            ));
        }
        if std::mem::replace(&mut self.is_held_known, true) {
            return Err("it lists kept uploads a second time".into());
        }
        self.held = (0..)
            .zip(hashes)
            .map(|(index, &hash)| (hash, index))
            .collect();
        Ok(())
    }

    /// Whether it is worth hashing an upload of `size` bytes.
    pub(super) fn wants(&self, size: usize) -> bool {
        let kept = kept_cost(size) <= self.budget_bytes || !self.held.is_empty();
        kept && size >= MIN_BYTES
    }

    /// Where the upload with this hash and size is. What is to be sent counts as
    /// kept from now on.
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
            let (_, (slot, freed)) = self.slots.pop_lru().expect("nothing is used by nothing");
            self.used_bytes -= freed;
            forget.push(slot);
        }
        // What is put into a slot takes the place of what was there.
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
    fn nothing_is_sent_twice_while_it_is_kept() {
        let mut blobs = Blobs::default();
        blobs.set_budget(2 * kept_cost(1000));
        assert_eq!(blobs.source(named(1), 1000), kept(0));
        assert_eq!(blobs.source(named(2), 1000), kept(1));
        assert_eq!(blobs.source(named(1), 1000), UploadSource::Slot(0));
        // 2 was used longest ago.
        assert_eq!(blobs.source(named(3), 1000), kept(1));
        assert_eq!(blobs.source(named(1), 1000), UploadSource::Slot(0));
        assert_eq!(blobs.source(named(2), 1000), kept(1));
    }

    #[test]
    fn a_large_one_takes_the_room_of_many_and_gives_their_slots_back() {
        let mut blobs = Blobs::default();
        blobs.set_budget(3 * kept_cost(1000));
        for n in 0..3 {
            assert_eq!(blobs.source(named(n), 1000), kept(u32::from(n)));
        }
        let placed = blobs.source(named(9), 2500);
        let forget = vec![0, 1];
        assert_eq!(
            placed,
            UploadSource::New {
                keep: Some(2),
                forget
            }
        );
        assert_eq!(blobs.source(named(4), 0), kept(1));
    }

    #[test]
    fn what_is_too_large_is_sent_each_time_and_what_is_held_never() {
        let mut blobs = Blobs::default();
        let sent = UploadSource::New {
            keep: None,
            forget: Vec::new(),
        };
        assert!(!blobs.wants(1000));
        assert_eq!(blobs.source(named(1), 1000), sent);
        blobs.set_held(&[named(5), named(1)].concat()).unwrap();
        assert!(blobs.wants(1000) && !blobs.wants(MIN_BYTES - 1));
        assert_eq!(blobs.source(named(1), 1000), UploadSource::Held(1));
        assert_eq!(blobs.source(named(2), 1000), sent);
    }
    #[test]
    fn a_list_of_kept_uploads_is_whole_short_and_said_once() {
        let mut blobs = Blobs::default();
        let long = vec![7; (MAX_HELD + 1) * HASH_BYTES];
        for (list, rule) in [
            (&long[..17], "no whole hashes"),
            (&long, "8192 are the limit"),
        ] {
            let broken = blobs.set_held(list).unwrap_err();
            assert!(broken.contains(rule), "{broken}");
            assert!(blobs.held.is_empty());
        }
        assert_eq!(blobs.set_held(&long[HASH_BYTES..]), Ok(()));
        assert!(blobs.set_held(&[]).unwrap_err().contains("a second time"));
    }
}
