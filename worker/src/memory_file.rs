//! Files in memory (`memfd_create`), by which the worker and the processes of leases pass bytes to each other.

use std::{
    fs::File,
    io,
    ops::Deref,
    os::{fd::OwnedFd, unix::fs::MetadataExt},
};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_get_seals, memfd_create};
use tokio::runtime::Handle;

/// The seals of a file that is passed on: nothing can be written, and its size stays.
pub(crate) const SEALS: SealFlags = SealFlags::WRITE
    .union(SealFlags::GROW)
    .union(SealFlags::SHRINK);

/// Unit in which the kernel counts the memory of a file.
const BLOCK_BYTES: u64 = 512;

/// The last page of a file may be used in part.
const PAGE_BYTES: u64 = 64 << 10;

/// Makes a file in memory that can be sealed. `name` is for tools that show a process's files.
pub(crate) fn unnamed_memory(name: &str) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    Ok(File::from(memfd_create(name, flags)?))
}

/// A file in memory that is closed on a thread that may block, if there is a runtime: the thread that closes such a file
/// last waits until the kernel has freed its memory, which took 0.37 s for 1 GiB on a busy host of two cores.
#[derive(Debug)]
pub(crate) struct MemoryFile {
    /// Taken by `drop`.
    file: Option<File>,
}

impl MemoryFile {
    /// Checks that nobody can change this memory, and that it has no pages beyond its size, for which nobody would be
    /// charged. Returns its size.
    ///
    /// # Errors
    ///
    /// The rule that its sender broke.
    pub(crate) fn sealed_bytes(&self) -> Result<u64, &'static str> {
        // The call fails on a file that does not support seals.
        if !fcntl_get_seals(&**self).is_ok_and(|seals| seals.contains(SEALS)) {
            return Err("its memory is not sealed");
        }
        let metadata = self.metadata();
        let metadata = metadata.map_err(|_| "the size of its memory cannot be read")?;
        match metadata.blocks() * BLOCK_BYTES <= metadata.len() + PAGE_BYTES {
            true => Ok(metadata.len()),
            false => Err("its memory has pages beyond its size"),
        }
    }
}

impl From<File> for MemoryFile {
    fn from(file: File) -> Self {
        Self { file: Some(file) }
    }
}

impl From<OwnedFd> for MemoryFile {
    fn from(file: OwnedFd) -> Self {
        Self::from(File::from(file))
    }
}

impl Deref for MemoryFile {
    type Target = File;

    fn deref(&self) -> &File {
        self.file.as_ref().expect("only `drop` takes the file")
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        let file = self.file.take();
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn_blocking(move || drop(file));
        }
    }
}
