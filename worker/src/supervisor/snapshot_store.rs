//! A snapshot store: a directory, or a prefix in a bucket of object storage, in which workers keep the
//! snapshots of their leases, in addition to memory.
//!
//! A store outlives its workers, and several hosts can share one. The first worker that opens a store
//! generates its id, by which the scheduler knows the workers that have the same store open. The path of
//! a snapshot's object has the pool, the lease, the part of the lease (what the lease has on one worker),
//! and a name with the session, its mark, its epoch and its base, which is an object of its own. So a
//! store needs no index, which could be out of date.
//!
//! Snapshots are encrypted by the process of their lease. Whoever can write to the store can delete
//! them, and cannot change them unnoticed.

mod objects;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    fmt,
    fs::File,
    io::{self, Write},
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use memmap2::MmapOptions;
use object_store::{
    ObjectStore, ObjectStoreExt, PutPayload, WriteMultipart, path::Path as ObjectPath,
};
use rustix::fs::fcntl_add_seals;
use tensord_proto::{
    ids::{LeaseId, StoreId},
    v1::SnapshotId,
};
use tokio::{sync::oneshot, task::spawn_blocking, time::timeout};
use tracing::debug;

pub(crate) use self::objects::credential_paths;
use super::snapshots::{KeptBase, KeptSnapshot, order};
use crate::{
    StoreLocation,
    memory_file::{MemoryFile, SEALS, unnamed_memory},
    process_message::SnapshotInfo,
};

/// How long after a base was stored a snapshot that needs it may follow.
const ABANDONED_AGE: Duration = Duration::from_secs(3600);

/// How often loading is tried.
const LOAD_ATTEMPTS: u32 = 3;

/// How long the store may take to be opened.
const OPEN_DEADLINE: Duration = Duration::from_secs(10);

/// Bytes of one request to object storage: far more than what a round trip carries, and few enough to
/// arrive within the 30 s that a request may take.
const PART_BYTES: usize = 16 << 20;

/// Maximum number of parts of one object; S3 takes 10,000.
const MAX_PARTS: usize = 5_000;

/// Requests for parts of one object at once.
const PARTS_AT_ONCE: usize = 4;

/// The error when a snapshot store cannot be opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot open the snapshot store {location}: {reason}")]
pub struct OpenStoreError {
    /// The directory or bucket.
    pub location: StoreLocation,
    /// What went wrong.
    pub reason: String,
}

/// An open snapshot store.
#[derive(Clone)]
pub(crate) struct SnapshotStore {
    objects: Arc<dyn ObjectStore>,
    id: StoreId,
    location: StoreLocation,
}

impl SnapshotStore {
    /// Opens the store in a directory, which is made if it is missing, for this user alone, or in a
    /// bucket.
    ///
    /// # Errors
    ///
    /// If the directory or bucket cannot be read or written, or its object for the id has something else
    /// in it.
    pub(crate) async fn open(location: &StoreLocation) -> Result<Self, OpenStoreError> {
        let error = |reason: String| OpenStoreError {
            location: location.clone(),
            reason,
        };
        let opening = async {
            let objects = objects::open(location).await?;
            let id = objects::read_id(&*objects).await?;
            Ok((objects, id))
        };
        let opened = timeout(OPEN_DEADLINE, opening).await;
        let opened = opened.map_err(|_| format!("it did not answer within {OPEN_DEADLINE:?}"));
        let (objects, id) = opened.flatten().map_err(error)?;
        Ok(Self {
            objects,
            id,
            location: location.clone(),
        })
    }

    pub(crate) fn id(&self) -> StoreId {
        self.id
    }

    /// Returns what the store has of a part of a lease in the pool whose lease tokens this key verifies.
    pub(super) fn part(&self, lease_key: &[u8], lease: LeaseId, part: u32) -> StoredPart {
        StoredPart {
            store: self.clone(),
            prefix: lease_prefix(lease_key, lease).join(part.to_string()),
        }
    }

    /// Returns the leases of a pool of which the store has snapshots.
    pub(super) async fn leases(&self, lease_key: &[u8]) -> Result<Vec<LeaseId>, String> {
        let pool = pool_prefix(lease_key);
        let listed = self.objects.list_with_delimiter(Some(&pool)).await;
        let listed = listed.map_err(|e| e.to_string())?;
        let leases = listed.common_prefixes.iter();
        let lease = |path: &ObjectPath| {
            let name = path.parts().next_back()?;
            u64::from_str_radix(name.as_ref(), 16).ok().map(LeaseId)
        };
        Ok(leases.filter_map(lease).collect())
    }

    /// Deletes all that the store has of a lease.
    pub(super) async fn delete_lease(
        &self,
        lease_key: &[u8],
        lease: LeaseId,
    ) -> Result<(), String> {
        let prefix = lease_prefix(lease_key, lease);
        let Some(directory) = self.directory_of(&prefix) else {
            let listed = self.objects.list(Some(&prefix));
            let paths = listed.map_ok(|object| object.location).boxed();
            let deleted = self.objects.delete_stream(paths);
            let missing =
                |error: &object_store::Error| matches!(error, object_store::Error::NotFound { .. });
            let failed = deleted.filter_map(async |it| it.err().filter(|error| !missing(error)));
            let failed: Vec<_> = failed.take(1).collect().await;
            return failed
                .first()
                .map_or(Ok(()), |error| Err(error.to_string()));
        };
        let deleting = spawn_blocking(move || match std::fs::remove_dir_all(directory) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e.to_string()),
            Ok(()) | Err(_) => Ok(()),
        });
        deleting.await.map_err(|e| e.to_string())?
    }

    /// Returns the directory of a prefix, if the store is in a directory.
    fn directory_of(&self, prefix: &ObjectPath) -> Option<PathBuf> {
        let directory = self.location.directory()?;
        Some(directory.join(prefix.as_ref()))
    }
}

impl fmt::Debug for SnapshotStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, location, .. } = self;
        let mut debug = f.debug_struct("SnapshotStore");
        debug.field("id", id).field("location", location).finish()
    }
}

impl fmt::Display for SnapshotStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.location.fmt(f)
    }
}

/// Returns the prefix of a pool's objects. Another pool must not take them for leftovers of its own.
fn pool_prefix(lease_key: &[u8]) -> ObjectPath {
    let hash = blake3::hash(lease_key).to_hex();
    ObjectPath::from(format!("pool-{}", &hash[..16]))
}

fn lease_prefix(lease_key: &[u8], lease: LeaseId) -> ObjectPath {
    pool_prefix(lease_key).join(lease.to_string())
}

/// What a store has of one part of a lease.
#[derive(Debug, Clone)]
pub(super) struct StoredPart {
    pub(super) store: SnapshotStore,
    prefix: ObjectPath,
}

/// What a store has of a part.
#[derive(Debug, Default)]
pub(super) struct Listed {
    /// The snapshots, in ascending order, each with its size in bytes.
    pub(super) snapshots: Vec<(StoredName, u64)>,
    /// The bases.
    pub(super) bases: BTreeMap<StoredBase, ListedBase>,
}

/// A base that a store has.
#[derive(Debug, Clone, Copy)]
pub(super) struct ListedBase {
    size_bytes: u64,
    stored_at: SystemTime,
}

impl ListedBase {
    /// Returns whether the base was stored so long ago that its first snapshot is not on its way any more.
    pub(super) fn is_old(&self) -> bool {
        let age = self.stored_at.elapsed();
        age.is_ok_and(|age| age >= ABANDONED_AGE)
    }
}

/// The contents of the name of a stored snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StoredName {
    pub(super) id: SnapshotId,
    /// The mark that the client had committed when the snapshot was taken; 0 if none.
    pub(super) committed: u64,
}

/// The contents of the name of an object in a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ObjectName {
    Snapshot(StoredName),
    /// Contents that snapshots of a session share.
    Base(StoredBase),
}

/// The base of snapshots of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct StoredBase {
    session_id: u64,
    id: u64,
}

impl ObjectName {
    fn parse(name: &str) -> Option<Self> {
        let Some(base) = name.strip_prefix("base-") else {
            return StoredName::parse(name).map(Self::Snapshot);
        };
        let [session_id, id] = fields(base)?;
        Some(Self::Base(StoredBase { session_id, id }))
    }
}

impl fmt::Display for StoredBase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "base-{:016x}-{:016x}", self.session_id, self.id)
    }
}

/// Returns the numbers of a name, each of 16 hexadecimal digits.
fn fields<const N: usize>(name: &str) -> Option<[u64; N]> {
    let fields = name.split('-').map(|field| match field.len() {
        16 => u64::from_str_radix(field, 16).ok(),
        _ => None,
    });
    fields.collect::<Option<Vec<_>>>()?.try_into().ok()
}

impl StoredName {
    /// Returns the base that the snapshot needs.
    pub(super) fn base(&self) -> Option<StoredBase> {
        let SnapshotId {
            session_id,
            base_id: id,
            ..
        } = self.id;
        (id != 0).then_some(StoredBase { session_id, id })
    }

    pub(super) fn of(snapshot: &KeptSnapshot) -> Self {
        Self {
            id: snapshot.id(),
            committed: snapshot.info.committed,
        }
    }

    fn parse(name: &str) -> Option<Self> {
        let [session_id, epoch, mark, committed, base_id] = fields(name)?;
        let id = SnapshotId {
            session_id,
            mark,
            epoch,
            base_id,
        };
        Some(Self { id, committed })
    }
}

impl fmt::Display for StoredName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SnapshotId {
            session_id,
            mark,
            epoch,
            base_id,
        } = self.id;
        let committed = self.committed;
        write!(
            f,
            "{session_id:016x}-{epoch:016x}-{mark:016x}-{committed:016x}-{base_id:016x}"
        )
    }
}

impl StoredPart {
    /// Returns what is stored.
    pub(super) async fn list(&self) -> Result<Listed, String> {
        let objects = self.store.objects.list(Some(&self.prefix));
        let objects: Result<Vec<_>, _> = objects.try_collect().await;
        let mut listed = Listed::default();
        for object in objects.map_err(|e| e.to_string())? {
            let name = object.location.filename().and_then(ObjectName::parse);
            match name {
                Some(ObjectName::Snapshot(name)) => listed.snapshots.push((name, object.size)),
                Some(ObjectName::Base(base)) => {
                    let stored = ListedBase {
                        size_bytes: object.size,
                        stored_at: object.last_modified.into(),
                    };
                    listed.bases.insert(base, stored);
                }
                None => {}
            }
        }
        listed.snapshots.sort_by_key(|(name, _)| order(name.id));
        Ok(listed)
    }

    /// Stores a snapshot, whose base must be stored. When this returns, the snapshot outlives this host or,
    /// in a directory on a disk of this host, a crash of the host.
    pub(super) async fn put(&self, snapshot: &KeptSnapshot) -> Result<(), String> {
        self.put_file(self.path(&StoredName::of(snapshot)), &snapshot.file)
            .await
    }

    /// Stores the base of snapshots.
    pub(super) async fn put_base(&self, name: &StoredBase, file: &File) -> Result<(), String> {
        self.put_file(self.path(name), file).await
    }

    async fn put_file(&self, path: ObjectPath, file: &File) -> Result<(), String> {
        let bytes = map(file).map_err(|e| e.to_string())?;
        if self.store.location.bucket().is_some() && bytes.len() > PART_BYTES {
            return self.put_parts(&path, bytes).await;
        }
        let put = self.store.objects.put(&path, PutPayload::from(bytes));
        put.await.map(drop).map_err(|e| e.to_string())
    }

    /// Stores an object in parts, as object storage takes no request of several GiB. The object is there
    /// once all parts are.
    ///
    /// The upload is a task of its own, so that its parts are deleted if this future is dropped, as when
    /// the lease ends. If the worker is killed, the storage has the parts until a rule of the bucket
    /// deletes incomplete uploads.
    async fn put_parts(&self, path: &ObjectPath, bytes: Bytes) -> Result<(), String> {
        let (cancel, cancelled) = oneshot::channel();
        let (objects, path) = (self.store.objects.clone(), path.clone());
        let uploading =
            tokio::spawn(async move { upload_parts(&*objects, &path, bytes, cancelled).await });
        let uploaded = uploading.await.map_err(|e| e.to_string())?;
        // Dropped before this line, it ends the upload.
        drop(cancel);
        uploaded.map_err(|e| e.to_string())
    }

    /// Deletes a snapshot or a base, if it is there.
    pub(super) async fn delete(&self, name: &impl fmt::Display) -> Result<(), String> {
        match self.store.objects.delete(&self.path(name)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(e) => Err(e.to_string()),
        }
    }

    /// Deletes what is left of snapshots that were not written whole, as their worker was killed.
    pub(super) async fn delete_incomplete(&self) -> Result<(), String> {
        let Some(directory) = self.store.directory_of(&self.prefix) else {
            // Object storage does not list them.
            return Ok(());
        };
        let deleting = spawn_blocking(move || {
            for entry in std::fs::read_dir(directory).into_iter().flatten() {
                let path = entry?.path();
                // The library writes to a file with this sign in its name, and then renames it.
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                if name.contains('#') {
                    std::fs::remove_file(&path)?;
                }
            }
            Ok::<_, io::Error>(())
        });
        let deleted = deleting.await.map_err(|e| e.to_string())?;
        deleted.map_err(|e| e.to_string())
    }

    /// Loads from each session the snapshots from which its client may go on: the last one, and that of
    /// the mark which the client had committed then.
    ///
    /// # Errors
    ///
    /// If a snapshot cannot be read, or all are larger than `max_bytes`.
    pub(super) async fn load(&self, max_bytes: u64) -> Result<Vec<KeptSnapshot>, String> {
        for _ in 1..LOAD_ATTEMPTS {
            // The worker that ran the lease last may still replace a snapshot by a later one.
            if let Ok(loaded) = self.try_load(max_bytes).await {
                return Ok(loaded);
            }
        }
        self.try_load(max_bytes).await
    }

    async fn try_load(&self, max_bytes: u64) -> Result<Vec<KeptSnapshot>, String> {
        let Listed {
            snapshots: mut names,
            mut bases,
        } = self.list().await?;
        let stored: Vec<_> = names.iter().map(|(name, _)| *name).collect();
        names.retain(|(name, _)| is_needed(name, &stored));
        // A client may be able to go on from another one.
        let is_broken = |base: &StoredBase| !bases.contains_key(base);
        let broken = names.extract_if(.., |(name, _)| name.base().as_ref().is_some_and(is_broken));
        let broken = broken.last();
        if let Some((name, _)) = broken.filter(|_| names.is_empty()) {
            return Err(format!("the base of {} is missing", self.path(&name)));
        }
        let is_used = |base: &StoredBase| names.iter().any(|(name, _)| name.base() == Some(*base));
        bases.retain(|base, _| is_used(base));
        let sizes = names.iter().map(|(_, size_bytes)| *size_bytes);
        let of_bases = bases.values().map(|base| base.size_bytes);
        let size_bytes = sizes.chain(of_bases).sum::<u64>();
        if size_bytes > max_bytes {
            return Err(format!(
                "the snapshots have {size_bytes} bytes, and --snapshot-memory lets the lease have {max_bytes}"
            ));
        }
        let mut loaded_bases = BTreeMap::new();
        for (name, ListedBase { size_bytes, .. }) in bases {
            let file = self.load_one(&name, size_bytes).await?;
            let base = KeptBase {
                id: name.id,
                size_bytes,
                file: Arc::new(file),
            };
            loaded_bases.insert(name, base);
        }
        let mut loaded = Vec::new();
        for (name, size_bytes) in names {
            let base = name.base();
            let base = base.and_then(|base| loaded_bases.get(&base).cloned());
            let file = self.load_one(&name, size_bytes).await?;
            let info = SnapshotInfo {
                session_id: name.id.session_id,
                mark: name.id.mark,
                committed: name.committed,
                size_bytes,
                base_id: name.id.base_id,
            };
            loaded.push(KeptSnapshot::new(name.id.epoch, info, file, base));
        }
        Ok(loaded)
    }

    /// Copies a snapshot or a base to sealed memory.
    async fn load_one(
        &self,
        name: &impl fmt::Display,
        size_bytes: u64,
    ) -> Result<MemoryFile, String> {
        let path = &self.path(name);
        let mut memory = unnamed_memory("tensord-snapshot").map_err(|e| e.to_string())?;
        let parts = (0..size_bytes).step_by(PART_BYTES).map(|start| {
            let range = start..size_bytes.min(start + PART_BYTES as u64);
            async move {
                let part = self.store.objects.get_range(path, range.clone()).await;
                let part = part.map_err(|e| e.to_string())?;
                let expected = range.end - range.start;
                (part.len() as u64 == expected)
                    .then_some(part)
                    .ok_or_else(|| {
                        format!(
                            "{path} is shorter than the {size_bytes} bytes with which it was listed"
                        )
                    })
            }
        });
        let mut parts = stream::iter(parts).buffered(PARTS_AT_ONCE);
        while let Some(part) = parts.try_next().await? {
            let writing = spawn_blocking(move || memory.write_all(&part).map(|()| memory));
            let written = writing.await.map_err(|e| e.to_string())?;
            memory = written.map_err(|e| e.to_string())?;
        }
        fcntl_add_seals(&memory, SEALS).map_err(|e| e.to_string())?;
        Ok(memory.into())
    }

    fn path(&self, name: &impl fmt::Display) -> ObjectPath {
        self.prefix.clone().join(name.to_string())
    }
}

/// Stores an object in parts. Deletes the parts if it fails, or if the sender of `cancelled` is dropped.
async fn upload_parts(
    objects: &dyn ObjectStore,
    path: &ObjectPath,
    bytes: Bytes,
    cancelled: oneshot::Receiver<()>,
) -> Result<(), object_store::Error> {
    let part_bytes = PART_BYTES.max(bytes.len().div_ceil(MAX_PARTS));
    let upload = objects.put_multipart(path).await?;
    let mut upload = WriteMultipart::new_with_chunk_size(upload, part_bytes);
    let send_all = async {
        for start in (0..bytes.len()).step_by(part_bytes) {
            upload.wait_for_capacity(PARTS_AT_ONCE).await?;
            upload.put(bytes.slice(start..bytes.len().min(start + part_bytes)));
        }
        upload.wait_for_capacity(0).await
    };
    let sent = tokio::select! {
        sent = send_all => Some(sent),
        _ = cancelled => None,
    };
    if let Some(Ok(())) = sent {
        return upload.finish().await.map(drop);
    }
    if let Err(e) = upload.abort().await {
        debug!("the parts of {path} are not deleted: {e}");
    }
    sent.unwrap_or(Ok(()))
}

/// Returns whether a session's client may go on from one of the `stored` snapshots, which are in
/// ascending order: from the session's last one, or from that of the mark which the client had
/// committed then.
pub(super) fn is_needed(name: &StoredName, stored: &[StoredName]) -> bool {
    let session_id = name.id.session_id;
    let mut of_session = stored.iter().filter(|it| it.id.session_id == session_id);
    let Some(last) = of_session.next_back() else {
        return false;
    };
    name == last || of_session.rfind(|it| it.id.mark == last.committed) == Some(name)
}

/// Returns the contents of sealed memory without a copy.
#[expect(unsafe_code, reason = "a mapping of a file")]
fn map(file: &File) -> io::Result<Bytes> {
    if file.metadata()?.len() == 0 {
        return Ok(Bytes::new());
    }
    // SAFETY: The mapping must stay valid and must not be changed by others. Each `KeptSnapshot` is
    // sealed memory: `Snapshots::add` has checked that, or `load_one` has sealed it. Its seals keep
    // everybody from writing to it and from changing its size.
    // The mapping is private, as kernels before 6.7 refuse a shared one of sealed memory.
    let mapped = unsafe { MmapOptions::new().map_copy_read_only(file)? };
    Ok(Bytes::from_owner(mapped))
}
