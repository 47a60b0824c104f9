//! Sealed memory for tests, as the processes of leases send it with snapshots.

use std::{
    fs::File,
    io::Write,
    os::unix::fs::{FileExt, MetadataExt},
};

use rustix::fs::fcntl_add_seals;

use crate::memory_file::{MemoryFile, SEALS, unnamed_memory};

/// Returns sealed memory with these contents.
pub(super) fn sealed_memory(bytes: &[u8]) -> MemoryFile {
    let mut file = unnamed_memory("test").unwrap();
    file.write_all(bytes).unwrap();
    fcntl_add_seals(&file, SEALS).unwrap();
    file.into()
}

/// Returns the contents of such memory.
pub(super) fn contents(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().size() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}
