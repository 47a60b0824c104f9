//! A snapshot store: a directory in which workers keep the snapshots of their leases, in addition to
//! memory.
//!
//! A store outlives its workers, and several hosts can share one. Its id, which the first worker that
//! opens it generates, tells the scheduler which workers have the same store open. The directory has a
//! subdirectory for each pool, in it one for each lease, and in that one for each part of the lease:
//! what the lease has on one worker. The name of a snapshot's file says what the snapshot is, so that
//! there is no index that could be out of date.
//!
//! Snapshots are encrypted by the process of their lease. Whoever can write to the store can delete
//! them, and cannot change them unnoticed.

#[cfg(test)]
mod tests;

use std::{
    fmt,
    fs::{DirBuilder, File},
    io::{self, Write},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use memmap2::MmapOptions;
use object_store::{
    GetResultPayload, ObjectStore, ObjectStoreExt, PutMode, PutPayload, local::LocalFileSystem,
    path::Path as ObjectPath,
};
use rustix::fs::fcntl_add_seals;
use tensord_proto::{
    ids::{LeaseId, StoreId},
    v1::SnapshotId,
};
use tokio::{task::spawn_blocking, time::timeout};
use tokio_stream::StreamExt;

use super::snapshots::{KeptSnapshot, order};
use crate::{
    blobs::shared::{SEALS, unnamed_memory},
    process_message::SnapshotInfo,
};

/// The object that has the store's id, as 16 hex digits.
const ID_OBJECT: &str = "tensord-store-id";

/// How often loading is tried.
const LOAD_ATTEMPTS: u32 = 3;

/// How long the store may take to be opened.
const OPEN_DEADLINE: Duration = Duration::from_secs(10);

/// The error when a snapshot store cannot be opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot open the snapshot store {}: {reason}", location.display())]
pub struct OpenStoreError {
    /// The directory.
    pub location: PathBuf,
    /// What went wrong.
    pub reason: String,
}

/// An open snapshot store.
#[derive(Clone)]
pub(crate) struct SnapshotStore {
    objects: Arc<dyn ObjectStore>,
    id: StoreId,
    location: PathBuf,
}

impl SnapshotStore {
    /// Opens the store in a directory, which is made if it is missing, for this user alone.
    ///
    /// # Errors
    ///
    /// If the directory cannot be made, read or written, or its file for the id has something else in it.
    pub(crate) async fn open(location: &Path) -> Result<Self, OpenStoreError> {
        let error = |reason: String| OpenStoreError {
            location: location.to_owned(),
            reason,
        };
        let directory = location.to_owned();
        let opening = async {
            let opened = spawn_blocking(move || open_directory(&directory)).await;
            let objects = opened.map_err(|e| e.to_string())??;
            let id = read_id(&*objects).await?;
            Ok((objects, id))
        };
        let opened = timeout(OPEN_DEADLINE, opening).await;
        let opened = opened.map_err(|_| format!("it did not answer within {OPEN_DEADLINE:?}"));
        let (objects, id) = opened.flatten().map_err(error)?;
        Ok(Self {
            objects,
            id,
            location: location.to_owned(),
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
        let directory = self.directory_of(&lease_prefix(lease_key, lease));
        let deleting = spawn_blocking(move || match std::fs::remove_dir_all(directory) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e.to_string()),
            Ok(()) | Err(_) => Ok(()),
        });
        deleting.await.map_err(|e| e.to_string())?
    }

    fn directory_of(&self, prefix: &ObjectPath) -> PathBuf {
        self.location.join(prefix.as_ref())
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
        self.location.display().fmt(f)
    }
}

fn open_directory(directory: &Path) -> Result<Arc<dyn ObjectStore>, String> {
    let mut builder = DirBuilder::new();
    let made = builder.recursive(true).mode(0o700).create(directory);
    made.map_err(|e| e.to_string())?;
    let opened = LocalFileSystem::new_with_prefix(directory).map_err(|e| e.to_string())?;
    // A snapshot must outlive the host once its client has committed its mark.
    let opened = opened.with_fsync(true).with_automatic_cleanup(true);
    Ok(Arc::new(opened))
}

/// Returns the store's id. Generates one if the store has none.
async fn read_id(objects: &dyn ObjectStore) -> Result<StoreId, String> {
    let path = ObjectPath::from(ID_OBJECT);
    let id = StoreId(rand::random_range(1..=u64::MAX));
    let text = PutPayload::from(format!("{id}\n"));
    match objects.put_opts(&path, text, PutMode::Create.into()).await {
        Ok(_) => return Ok(id),
        // Another worker's, or that of an earlier start.
        Err(object_store::Error::AlreadyExists { .. }) => {}
        Err(e) => return Err(e.to_string()),
    }
    let found = objects.get(&path).await.map_err(|e| e.to_string())?;
    let text = found.bytes().await.map_err(|e| e.to_string())?;
    let text = std::str::from_utf8(&text).unwrap_or_default().trim();
    match u64::from_str_radix(text, 16) {
        Ok(id) if id > 0 && text.len() == 16 => Ok(StoreId(id)),
        _ => Err(format!(
            "its file {ID_OBJECT} has no id in it; if the directory is not a snapshot store, choose another one, or else delete the file"
        )),
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

/// What the name of a stored snapshot says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StoredName {
    pub(super) id: SnapshotId,
    /// The mark that the client had committed when the snapshot was taken; 0 if none.
    pub(super) committed: u64,
}

impl StoredName {
    pub(super) fn of(snapshot: &KeptSnapshot) -> Self {
        Self {
            id: snapshot.id(),
            committed: snapshot.info.committed,
        }
    }

    fn parse(name: &str) -> Option<Self> {
        let mut fields = name.split('-').map(|field| match field.len() {
            16 => u64::from_str_radix(field, 16).ok(),
            _ => None,
        });
        let mut field = || fields.next().flatten();
        let (session_id, epoch, mark, committed) = (field()?, field()?, field()?, field()?);
        let id = SnapshotId {
            session_id,
            mark,
            epoch,
        };
        fields.next().is_none().then_some(Self { id, committed })
    }
}

impl fmt::Display for StoredName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SnapshotId {
            session_id,
            mark,
            epoch,
        } = self.id;
        let committed = self.committed;
        write!(
            f,
            "{session_id:016x}-{epoch:016x}-{mark:016x}-{committed:016x}"
        )
    }
}

impl StoredPart {
    /// Returns the names of all snapshots, in ascending order, each with its size in bytes.
    pub(super) async fn list(&self) -> Result<Vec<(StoredName, u64)>, String> {
        let listed = self.store.objects.list(Some(&self.prefix));
        let listed: Result<Vec<_>, _> = listed.collect().await;
        let named = |object: object_store::ObjectMeta| {
            let name = StoredName::parse(object.location.filename()?)?;
            Some((name, object.size))
        };
        let listed = listed.map_err(|e| e.to_string())?.into_iter();
        let mut names: Vec<_> = listed.filter_map(named).collect();
        names.sort_by_key(|(name, _)| order(name.id));
        Ok(names)
    }

    /// Stores a snapshot. It is on disk when this returns.
    pub(super) async fn put(&self, snapshot: &KeptSnapshot) -> Result<(), String> {
        let path = self.path(&StoredName::of(snapshot));
        let bytes = map(&snapshot.file).map_err(|e| e.to_string())?;
        let put = self.store.objects.put(&path, PutPayload::from(bytes));
        put.await.map(drop).map_err(|e| e.to_string())
    }

    pub(super) async fn delete(&self, name: &StoredName) -> Result<(), String> {
        match self.store.objects.delete(&self.path(name)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(e) => Err(e.to_string()),
        }
    }

    /// Deletes what is left of snapshots that were not written whole, as their worker was killed.
    pub(super) async fn delete_incomplete(&self) -> Result<(), String> {
        let directory = self.store.directory_of(&self.prefix);
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
        let mut names = self.list().await?;
        let stored: Vec<_> = names.iter().map(|(name, _)| *name).collect();
        names.retain(|(name, _)| is_needed(name, &stored));
        let size_bytes = names.iter().map(|(_, size_bytes)| size_bytes).sum::<u64>();
        if size_bytes > max_bytes {
            return Err(format!(
                "the snapshots have {size_bytes} bytes, and --snapshot-memory lets the lease have {max_bytes}"
            ));
        }
        let mut loaded = Vec::new();
        for (name, size_bytes) in names {
            let file = self.load_one(&name, size_bytes).await?;
            let info = SnapshotInfo {
                session_id: name.id.session_id,
                mark: name.id.mark,
                committed: name.committed,
                size_bytes,
            };
            loaded.push(KeptSnapshot::new(name.id.epoch, info, file));
        }
        Ok(loaded)
    }

    /// Copies a snapshot to sealed memory.
    async fn load_one(&self, name: &StoredName, size_bytes: u64) -> Result<File, String> {
        let path = self.path(name);
        let found = self.store.objects.get(&path).await;
        let mut memory = unnamed_memory("tensord-snapshot").map_err(|e| e.to_string())?;
        let (memory, copied_bytes) = match found.map_err(|e| e.to_string())?.payload {
            GetResultPayload::File(mut file, _) => {
                let copying = spawn_blocking(move || {
                    let copied_bytes = io::copy(&mut file, &mut memory)?;
                    Ok::<_, io::Error>((memory, copied_bytes))
                });
                let copied = copying.await.map_err(|e| e.to_string())?;
                copied.map_err(|e| e.to_string())?
            }
            GetResultPayload::Stream(mut parts) => {
                let mut copied_bytes = 0;
                while let Some(part) = parts.next().await {
                    let part = part.map_err(|e| e.to_string())?;
                    memory.write_all(&part).map_err(|e| e.to_string())?;
                    copied_bytes += part.len() as u64;
                }
                (memory, copied_bytes)
            }
        };
        if copied_bytes != size_bytes {
            return Err(format!(
                "{path} has {copied_bytes} bytes, and was listed with {size_bytes}"
            ));
        }
        fcntl_add_seals(&memory, SEALS).map_err(|e| e.to_string())?;
        Ok(memory)
    }

    fn path(&self, name: &StoredName) -> ObjectPath {
        self.prefix.clone().join(name.to_string())
    }
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
