//! The op that each device of a lease executes, in memory that outlives the lease's process.
//!
//! When a process dies, its worker reads here which op each device was executing. The memory
//! has no name (`memfd`); the worker makes it and keeps it open, and the process writes to it
//! through a mapping, which costs a few nanoseconds an op.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    os::{fd::OwnedFd, unix::fs::FileExt},
    sync::Mutex,
};

use memmap2::MmapOptions;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use tensord_proto::{codec::OpName, text::sanitize};

use crate::locks::lock;

/// Bytes for a device: the op's number, the length of its name, and the name.
const ENTRY_BYTES: usize = 64;

/// Where the name begins.
const NAME_AT: usize = size_of::<u64>() + 1;

/// The records of a lease's devices, as the worker has them.
#[derive(Debug)]
pub(crate) struct OpRecords {
    file: File,
    devices: usize,
}

impl OpRecords {
    /// Makes the records of this number of devices.
    ///
    /// # Errors
    ///
    /// When the system has no memory.
    pub(crate) fn new(devices: usize) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("tensord-ops", flags)?);
        file.set_len((devices * ENTRY_BYTES) as u64)?;
        // The mapping in the process relies on the size.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Self { file, devices })
    }

    /// Returns the file for the process.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Returns the ops that were being executed when the process died, as text, by the position of
    /// their device. The process may have written anything.
    pub(crate) fn read(&self) -> BTreeMap<usize, String> {
        let mut bytes = vec![0; self.devices * ENTRY_BYTES];
        if self.file.read_exact_at(&mut bytes, 0).is_err() {
            return BTreeMap::new();
        }
        let (entries, _) = bytes.as_chunks::<ENTRY_BYTES>();
        let current = |(device, entry)| Some((device, text(entry)?));
        entries.iter().enumerate().filter_map(current).collect()
    }
}

fn text(entry: &[u8; ENTRY_BYTES]) -> Option<String> {
    let (number, rest) = entry.split_first_chunk()?;
    let (&length, name) = rest.split_first()?;
    let name = name
        .get(..usize::from(length))
        .filter(|name| !name.is_empty())?;
    let name = String::from_utf8_lossy(name);
    let name = sanitize(&name, ENTRY_BYTES);
    Some(format!("op {} ({name})", u64::from_le_bytes(*number)))
}

/// The record of one device, in the process that runs it.
#[derive(Debug)]
pub(crate) struct OpRecord(Mutex<&'static mut [u8]>);

impl OpRecord {
    /// Maps the records of `devices` devices, for as long as this process runs.
    ///
    /// # Errors
    ///
    /// When `file` does not have the size of the records, or the system refuses the mapping.
    #[expect(unsafe_code, reason = "a mapping of a file")]
    pub(crate) fn map(file: OwnedFd, devices: usize) -> io::Result<Vec<Self>> {
        let file = File::from(file);
        if file.metadata()?.len() != (devices * ENTRY_BYTES) as u64 {
            return Err(io::Error::other("the records of ops have a wrong size"));
        }
        // SAFETY: The mapping must stay valid and must not be changed by others.
        // - The worker has sealed the file's size in `OpRecords::new`, so no page of the
        //   mapping goes away. It made the file and sent it to this process alone.
        // - The worker only reads, by system calls. This process maps the file here only, and
        //   each part of the mapping belongs to one `OpRecord`.
        let map = unsafe {
            MmapOptions::new()
                .len(devices * ENTRY_BYTES)
                .map_mut(&file)?
        };
        let entries = Box::leak(Box::new(map)).chunks_exact_mut(ENTRY_BYTES);
        Ok(entries.map(|entry| Self(Mutex::new(entry))).collect())
    }

    /// Records that the device begins an op.
    pub(crate) fn begin(&self, number: u64, name: OpName) {
        let mut entry = lock(&self.0);
        entry[..size_of::<u64>()].copy_from_slice(&number.to_le_bytes());
        let length = name.write_to(&mut entry[NAME_AT..]);
        // An entry is shorter than 256 bytes.
        entry[NAME_AT - 1] = length as u8;
    }

    /// Records that the device executes no op.
    pub(crate) fn end(&self) {
        lock(&self.0)[NAME_AT - 1] = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worker_reads_the_current_op_of_each_device() {
        let records = OpRecords::new(2).unwrap();
        let file = records.file().try_clone().unwrap();
        let devices = OpRecord::map(file.into(), 2).unwrap();
        assert!(records.read().is_empty());
        devices[1].begin(7, OpName::from("Matmul"));
        let second = (1, "op 7 (Matmul)".to_owned());
        assert_eq!(records.read(), BTreeMap::from([second.clone()]));
        let long = "a name that is longer than all of the room that an entry has for it";
        devices[0].begin(1 << 40, OpName::from(long));
        let cut = &long[..ENTRY_BYTES - NAME_AT];
        let first = (0, format!("op 1099511627776 ({cut})"));
        assert_eq!(records.read(), BTreeMap::from([first.clone(), second]));
        devices[1].end();
        assert_eq!(records.read(), BTreeMap::from([first]));
    }

    #[test]
    fn worker_reads_whatever_a_process_writes() {
        let records = OpRecords::new(1).unwrap();
        for byte in 0..=255 {
            records.file().write_at(&[byte; ENTRY_BYTES], 0).unwrap();
            records.read();
        }
        records.file().set_len(1).unwrap_err();
        let file = records.file().try_clone().unwrap();
        OpRecord::map(file.into(), 2).unwrap_err();
    }
}
