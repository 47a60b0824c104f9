//! What a state directory holds beside its secrets.

use std::{num::NonZeroU32, path::PathBuf};

use crate::{
    audit,
    config::{StatePath, values::MemoryOrZero},
};

/// Default size and number of the audit log's files: some 300,000 entries in all.
const AUDIT_FILE_BYTES: u64 = 16 << 20;
const AUDIT_FILES: u32 = 4;

/// Returns the settings of the audit log in the state directory.
pub(super) fn audit_log(
    state: &StatePath,
    size: Option<MemoryOrZero>,
    files: Option<NonZeroU32>,
) -> audit::Settings {
    audit::Settings {
        directory: state.path.clone(),
        file_bytes: size.map_or(AUDIT_FILE_BYTES, |size| size.size_bytes),
        files: files.map_or(AUDIT_FILES, NonZeroU32::get),
    }
}

/// Returns the directory for compiled kernels in the state directory.
pub(super) fn kernel_cache(state: &StatePath) -> PathBuf {
    state.path.join("kernels")
}
