//! Files that only their owner can read, and that are either complete or absent.
//!
//! This module does not depend on their content. Unix permissions protect them.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::Path,
    process,
    sync::atomic::{AtomicU64, Ordering},
};

use tracing::warn;

use super::StateError;

/// Maximum number of bytes read from a file. A certificate chain has a few kilobytes; the
/// files of workers and of tokens, when they are full, have about a megabyte each.
const MAX_FILE_BYTES: u64 = 8 << 20;

/// Returns a function that wraps an error with the failed operation and its file.
fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StateError {
    move |source| StateError::Io {
        what,
        path: path.into(),
        source,
    }
}

/// Creates the directory at `path` if it is missing, and checks that it belongs to this
/// process's user and that no other user can write to it.
pub(super) fn private_directory(path: &Path) -> Result<(), StateError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(failed("create the state directory", path))?;
    let metadata =
        fs::metadata(path).map_err(failed("read the metadata of the state directory", path))?;
    let mode = metadata.permissions().mode() & 0o777;
    if mode & 0o022 != 0 {
        return Err(StateError::Exposed {
            path: path.into(),
            mode,
        });
    }
    match (metadata.uid(), own_user(path)?) {
        (owner, user) if owner == user => Ok(()),
        (owner, user) => Err(StateError::Foreign {
            path: path.into(),
            owner,
            user,
        }),
    }
}

/// Returns the id of the user that this process creates files as. Reads it from a file
/// that it creates in `directory` and removes: the standard library has no call for it.
fn own_user(directory: &Path) -> Result<u32, StateError> {
    static PROBES: AtomicU64 = AtomicU64::new(0);
    let number = PROBES.fetch_add(1, Ordering::Relaxed);
    let path = directory.join(format!("owner-{}-{number}.new", process::id()));
    // A file that a crash left behind may have the same process id in its name.
    let _ = fs::remove_file(&path);
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .map_err(failed("create a file in the state directory,", &path))?;
    let metadata = file.metadata();
    fs::remove_file(&path).map_err(failed("remove", &path))?;
    Ok(metadata
        .map_err(failed("read the metadata of", &path))?
        .uid())
}

/// Returns the content of the file at `path`, or `None` if there is none. Makes a
/// file private that other users can access, and logs a warning.
pub(super) fn read_private(path: &Path) -> Result<Option<Vec<u8>>, StateError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(failed("open", path)(e)),
    };
    let metadata = file
        .metadata()
        .map_err(failed("read the metadata of", path))?;
    let mode = metadata.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        file.set_permissions(Permissions::from_mode(0o600))
            .map_err(failed("remove other users' access to", path))?;
        warn!(
            "{} was accessible to other users (mode {mode:03o}) and is private now; if another user may have read it, delete it to have a new one created",
            path.display()
        );
    }
    let mut content = Vec::new();
    file.take(MAX_FILE_BYTES)
        .read_to_end(&mut content)
        .map_err(failed("read", path))?;
    Ok(Some(content))
}

/// Writes `content` to a new file at `path`, complete and on disk before this
/// returns. If the file exists by then, keeps it. Returns the content of the file.
pub(super) fn create_private(path: &Path, content: &[u8]) -> Result<Vec<u8>, StateError> {
    let lock_path = path.with_file_name("state.lock");
    let lock = open_lock_file(&lock_path)?;
    lock.lock().map_err(failed("lock", &lock_path))?;
    let result = match read_private(path)? {
        Some(existing) => existing,
        None => {
            write_whole(path, content)?;
            content.to_vec()
        }
    };
    drop(lock);
    Ok(result)
}

/// Replaces the content of the file at `path` with `content`, complete and on disk before
/// this returns. Creates the file if it is missing.
pub(super) fn replace_private(path: &Path, content: &[u8]) -> Result<(), StateError> {
    let lock_path = path.with_file_name("state.lock");
    let lock = open_lock_file(&lock_path)?;
    lock.lock().map_err(failed("lock", &lock_path))?;
    let written = write_whole(path, content);
    drop(lock);
    written
}

fn write_whole(path: &Path, content: &[u8]) -> Result<(), StateError> {
    // The caller holds the lock, so an existing temporary file is left over from a crash.
    let temporary = path.with_extension("new");
    let mut file = private_options()
        .truncate(true)
        .open(&temporary)
        .map_err(failed("create", &temporary))?;
    file.write_all(content)
        .and_then(|()| file.sync_all())
        .map_err(failed("write", &temporary))?;
    fs::rename(&temporary, path).map_err(failed("rename a new file to", path))?;
    // The rename is on disk once the directory is synced.
    let directory = path.parent().unwrap_or(Path::new("."));
    File::open(directory)
        .and_then(|directory| directory.sync_all())
        .map_err(failed("write", directory))
}

/// Opens the file at `path` to read and write, and creates it if it is missing.
pub(super) fn open_private(path: &Path) -> Result<File, StateError> {
    private_options()
        .read(true)
        .truncate(false)
        .open(path)
        .map_err(failed("open", path))
}

/// Opens a file to lock, and creates it if it is missing.
pub(super) fn open_lock_file(path: &Path) -> Result<File, StateError> {
    private_options()
        .truncate(false)
        .open(path)
        .map_err(failed("create", path))
}

fn private_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).create(true).mode(0o600);
    options
}
