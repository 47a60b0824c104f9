//! Uploads of sessions, kept for later sessions.
//!
//! A program that is started again uploads the same data again, and so does one that runs a model
//! several times. So when a session ends, or when its client requests it, its kept uploads are
//! stored here by tenant and BLAKE3 hash, and a new session of the tenant receives the list of
//! hashes. A session cannot find out whether another tenant has a
//! blob: hashes are looked up only within one tenant, and bytes are hashed here, whatever
//! hash the client claimed.
//!
//! [`BlobStore`] is for a worker that runs all leases itself. The processes of leases share
//! blobs through their worker: see [`shared`].

#[cfg(target_os = "linux")]
pub(crate) mod shared;

use std::{
    collections::HashMap,
    fmt, io,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use lru::LruCache;
use tensord_proto::content::{Hash, MAX_HELD, hash, kept_cost};
use tokio::{runtime::Handle, sync::oneshot};

use crate::locks::lock;

/// A store of uploads: new sessions look up the uploads of earlier sessions, and these add theirs
/// when they end, or earlier.
pub(crate) trait KeptBlobs: fmt::Debug + Send + Sync {
    /// Returns the uploads kept for `tenant`, latest first. An upload is not evicted while
    /// a session holds it.
    fn blobs_of(&self, tenant: &str) -> Vec<(Hash, HeldBlob)>;

    /// Keeps uploads of a session of `tenant`, as far as there is room, in the background: on a
    /// thread of `runtime` that may block.
    fn keep(self: Arc<Self>, runtime: &Handle, tenant: Arc<str>, contents: Vec<Bytes>) -> Keeping;
}

/// Completes when sessions that open later are offered the uploads, or when there is no room for
/// them. Which of the two, nobody needs to know, as kept uploads only save time.
pub(crate) type Keeping = oneshot::Receiver<()>;

/// An upload that was kept of an earlier session.
#[derive(Debug, Clone)]
pub(crate) enum HeldBlob {
    /// In this process's memory.
    Local(Bytes),
    /// In memory that the worker shares.
    #[cfg(target_os = "linux")]
    Shared(Arc<shared::SharedBlob>),
}

impl HeldBlob {
    /// Returns the bytes.
    ///
    /// # Errors
    ///
    /// When shared memory cannot be read.
    pub(crate) fn bytes(&self) -> io::Result<Bytes> {
        match self {
            Self::Local(bytes) => Ok(bytes.clone()),
            #[cfg(target_os = "linux")]
            Self::Shared(blob) => blob.bytes(),
        }
    }
}

/// The kept uploads of all tenants, with a bound in bytes.
#[derive(Debug)]
pub(crate) struct BlobStore {
    capacity_bytes: u64,
    tenants: Mutex<HashMap<String, TenantBlobs>>,
}

/// One tenant's uploads, in the order of their latest use.
#[derive(Debug)]
struct TenantBlobs {
    by_hash: LruCache<Hash, Bytes>,
    bytes: u64,
}

impl Default for TenantBlobs {
    fn default() -> Self {
        Self {
            by_hash: LruCache::unbounded(),
            bytes: 0,
        }
    }
}

impl BlobStore {
    pub(crate) fn new(capacity_bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            capacity_bytes,
            tenants: Mutex::default(),
        })
    }

    /// Returns the bytes kept.
    #[cfg(test)]
    fn bytes(&self) -> u64 {
        lock(&self.tenants).values().map(|blobs| blobs.bytes).sum()
    }
}

impl KeptBlobs for BlobStore {
    fn blobs_of(&self, tenant: &str) -> Vec<(Hash, HeldBlob)> {
        let tenants = lock(&self.tenants);
        let blobs = tenants.get(tenant).into_iter();
        blobs
            .flat_map(|blobs| &blobs.by_hash)
            .take(MAX_HELD)
            .map(|(hash, bytes)| (*hash, HeldBlob::Local(bytes.clone())))
            .collect()
    }

    fn keep(self: Arc<Self>, runtime: &Handle, tenant: Arc<str>, contents: Vec<Bytes>) -> Keeping {
        let (done, keeping) = oneshot::channel();
        runtime.spawn_blocking(move || {
            self.store(&tenant, contents);
            // The session may have ended.
            let _ = done.send(());
        });
        keeping
    }
}

impl BlobStore {
    /// Keeps uploads of `tenant`, as far as there is room. Hashing takes about a millisecond
    /// for each few MiB.
    fn store(&self, tenant: &str, contents: Vec<Bytes>) {
        for content in contents {
            let hash = hash(&content);
            let cost = kept_cost(content.len());
            let mut tenants = lock(&self.tenants);
            let known = tenants
                .get_mut(tenant)
                .and_then(|blobs| blobs.by_hash.get(&hash));
            if known.is_some() || !make_room(&mut tenants, self.capacity_bytes, cost) {
                continue;
            }
            let blobs = tenants.entry(tenant.to_owned()).or_default();
            blobs.by_hash.put(hash, content);
            blobs.bytes += cost;
        }
    }
}

/// Evicts the least recently used blobs of the tenant with the most bytes until `cost`
/// fits. Returns false if it does not fit, or if a session still holds the next blob to
/// evict.
fn make_room(tenants: &mut HashMap<String, TenantBlobs>, capacity: u64, cost: u64) -> bool {
    if cost > capacity {
        return false;
    }
    loop {
        let used: u64 = tenants.values().map(|blobs| blobs.bytes).sum();
        if used + cost <= capacity {
            return true;
        }
        let most = tenants.values_mut().max_by_key(|blobs| blobs.bytes);
        let most = most.expect("used bytes belong to a tenant");
        let oldest = most.by_hash.peek_lru();
        if !oldest.is_some_and(|(_, bytes)| bytes.is_unique()) {
            return false;
        }
        let (_, bytes) = most
            .by_hash
            .pop_lru()
            .expect("the oldest blob was just found");
        most.bytes -= kept_cost(bytes.len());
    }
}

#[cfg(test)]
mod tests {
    use tensord_proto::content::HASH_BYTES;

    use super::*;

    fn blob(n: u8) -> Bytes {
        Bytes::from(vec![n; 1000])
    }

    fn held(store: &BlobStore, tenant: &str) -> Vec<u8> {
        store
            .blobs_of(tenant)
            .iter()
            .map(|(_, held)| held.bytes().unwrap()[0])
            .collect()
    }

    fn room_for(blobs: u64) -> Arc<BlobStore> {
        BlobStore::new(blobs * kept_cost(1000))
    }

    #[test]
    fn blobs_are_visible_to_their_tenant_only() {
        let store = room_for(4);
        store.store("a", vec![blob(1), blob(2)]);
        store.store("b", vec![blob(3), blob(1)]);
        assert_eq!(held(&store, "a"), [2, 1]);
        assert_eq!(held(&store, "b"), [1, 3]);
        assert!(held(&store, "c").is_empty());
        let (hash, held) = store.blobs_of("a").remove(0);
        assert_eq!(
            hash,
            blake3::hash(&held.bytes().unwrap()).as_bytes()[..HASH_BYTES]
        );
    }

    #[test]
    fn oldest_blob_of_the_largest_tenant_is_evicted() {
        let store = room_for(3);
        store.store("a", vec![blob(1)]);
        store.store("b", vec![blob(2), blob(3)]);
        // Blob 2 is used again, so it is not the oldest any more.
        store.store("b", vec![blob(2), blob(4)]);
        assert_eq!(
            (held(&store, "a"), held(&store, "b")),
            (vec![1], vec![4, 2])
        );
        assert_eq!(store.bytes(), 3 * kept_cost(1000));
    }

    #[test]
    fn limit_holds_while_sessions_use_blobs() {
        let store = room_for(2);
        store.store("a", vec![blob(1), blob(2)]);
        let session = store.blobs_of("a");
        store.store("a", vec![blob(3), Bytes::from(vec![0; 9999])]);
        assert_eq!(held(&store, "a"), [2, 1]);
        drop(session);
        store.store("a", vec![blob(3)]);
        assert_eq!(held(&store, "a"), [3, 2]);
    }
}
