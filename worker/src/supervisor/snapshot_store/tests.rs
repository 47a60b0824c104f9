use std::{collections::BTreeSet, io::Read, os::unix::fs::PermissionsExt, path::Path};

use tempfile::TempDir;

use super::{objects::ID_OBJECT, *};
use crate::supervisor::sealed_memory::{contents, sealed_memory};

const KEY: &[u8] = b"the key of a pool";

const LEASE: LeaseId = LeaseId(7);

fn snapshot(session_id: u64, epoch: u64, mark: u64, committed: u64, bytes: &[u8]) -> KeptSnapshot {
    let info = SnapshotInfo {
        session_id,
        mark,
        committed,
        size_bytes: bytes.len() as u64,
        base_id: 0,
    };
    KeptSnapshot::new(epoch, info, sealed_memory(bytes), None)
}

async fn open() -> (TempDir, SnapshotStore) {
    let directory = tempfile::tempdir().unwrap();
    let store = open_directory(&directory.path().join("new/store")).await;
    (directory, store.unwrap())
}

async fn open_directory(directory: &Path) -> Result<SnapshotStore, OpenStoreError> {
    SnapshotStore::open(&directory.to_owned().into()).await
}

/// Returns the files below a directory.
fn files(directory: &Path) -> usize {
    let entries = std::fs::read_dir(directory).unwrap();
    let count = |entry: io::Result<std::fs::DirEntry>| {
        let path = entry.unwrap().path();
        if path.is_dir() { files(&path) } else { 1 }
    };
    entries.map(count).sum()
}

#[tokio::test]
async fn store_keeps_its_id() {
    let (directory, store) = open().await;
    let path = directory.path().join("new/store");
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    let again = open_directory(&path).await.unwrap();
    assert_eq!(again.id(), store.id());
    let (_other_directory, other) = open().await;
    assert_ne!(other.id(), store.id());
    std::fs::write(path.join(ID_OBJECT), "notes about stores").unwrap();
    let error = open_directory(&path).await.unwrap_err().to_string();
    assert!(
        error.contains("new/store") && error.contains("has no id in it"),
        "{error}"
    );
}

#[tokio::test]
async fn store_must_be_a_directory() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = open_directory(&file).await.unwrap_err();
    assert_eq!(error.location, file.into());
}

#[tokio::test]
async fn needed_snapshots_are_loaded() {
    let (_directory, store) = open().await;
    let part = store.part(KEY, LEASE, 1);
    let stored = [
        snapshot(1, 0, 1, 0, b"one"),
        snapshot(1, 0, 2, 1, b"two"),
        // The session went on from mark 1 in another process.
        snapshot(1, 4, 2, 1, b"two again"),
        snapshot(1, 4, 3, 2, b"three"),
        snapshot(2, 4, 1, 0, b""),
    ];
    for snapshot in &stored {
        part.put(snapshot).await.unwrap();
    }
    store.part(KEY, LEASE, 0).put(&stored[0]).await.unwrap();
    let listed = part.list().await.unwrap().snapshots;
    let sizes: BTreeSet<_> = listed.iter().map(|(_, size)| *size).collect();
    assert_eq!((listed.len(), sizes), (5, [0, 3, 5, 9].into()));
    let loaded = part.load(17).await.unwrap();
    let found = loaded.iter().map(|it| (it.id(), contents(&it.file)));
    let expected = [&stored[4], &stored[2], &stored[3]];
    let expected = expected.map(|it| (it.id(), contents(&it.file)));
    assert_eq!(found.collect::<Vec<_>>(), expected);
    let error = part.load(13).await.unwrap_err();
    assert!(error.contains("14 bytes"), "{error}");
    part.delete(&StoredName::of(&stored[4])).await.unwrap();
    part.delete(&StoredName::of(&stored[4])).await.unwrap();
    assert_eq!(part.load(14).await.unwrap().len(), 2);
}

#[tokio::test]
async fn snapshots_are_loaded_with_the_base_that_they_share() {
    let (_directory, store) = open().await;
    let part = store.part(KEY, LEASE, 0);
    let base = KeptBase {
        id: 9,
        size_bytes: 4,
        file: Arc::new(sealed_memory(b"base")),
    };
    let with_base = |mark, committed, bytes: &[u8]| {
        let mut snapshot = snapshot(1, 0, mark, committed, bytes);
        snapshot.info.base_id = base.id;
        snapshot.base = Some(base.clone());
        snapshot
    };
    let [one, two] = [with_base(1, 0, b"one"), with_base(2, 1, b"two")];
    let name = StoredName::of(&one).base().unwrap();
    part.put(&one).await.unwrap();
    let error = part.load(100).await.unwrap_err();
    assert!(error.contains("is missing"), "{error}");
    part.put_base(&name, &base.file).await.unwrap();
    part.put(&two).await.unwrap();
    assert!(part.load(9).await.is_err(), "they have 10 bytes");
    let loaded = part.load(10).await.unwrap();
    let loaded_bases: Vec<_> = loaded.iter().map(|it| it.base.as_ref().unwrap()).collect();
    let files = loaded_bases.iter().map(|it| Arc::as_ptr(&it.file));
    assert_eq!(files.collect::<BTreeSet<_>>().len(), 1, "it is loaded once");
    assert_eq!((loaded_bases[0].id, loaded_bases[0].size_bytes), (9, 4));
    part.delete(&name).await.unwrap();
    assert!(part.list().await.unwrap().bases.is_empty());
}

#[tokio::test]
async fn what_belongs_to_an_ended_lease_is_deleted() {
    let (directory, store) = open().await;
    for (key, lease, part) in [(KEY, 7, 0), (KEY, 7, 1), (KEY, 8, 0), (b"other", 7, 0)] {
        let part = store.part(key, LeaseId(lease), part);
        part.put(&snapshot(1, 0, 1, 0, b"one")).await.unwrap();
    }
    assert_eq!(store.leases(KEY).await.unwrap(), [LEASE, LeaseId(8)]);
    store.delete_lease(KEY, LEASE).await.unwrap();
    assert_eq!(store.leases(KEY).await.unwrap(), [LeaseId(8)]);
    assert_eq!(store.leases(b"other").await.unwrap(), [LEASE]);
    store.delete_lease(KEY, LeaseId(8)).await.unwrap();
    store.delete_lease(KEY, LeaseId(8)).await.unwrap();
    assert_eq!(store.leases(KEY).await.unwrap(), []);
    // The id, and what the other pool has.
    assert_eq!(files(directory.path()), 2);
}

#[tokio::test]
async fn other_files_in_the_directory_are_ignored() {
    let (directory, store) = open().await;
    let part = store.part(KEY, LEASE, 0);
    let one = snapshot(u64::MAX, 1, 2, 0, b"one");
    part.put(&one).await.unwrap();
    let path = directory.path().join("new/store");
    let path = path.join(part.path(&StoredName::of(&one)).as_ref());
    let mut text = String::new();
    let mut file = File::open(&path).unwrap();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "one");
    for name in ["notes", "1-2-3-4-5", "ffffffffffffffff-1-2-0-0", "base-1"] {
        std::fs::write(path.with_file_name(name), "").unwrap();
    }
    assert_eq!(part.load(3).await.unwrap().len(), 1);
}
