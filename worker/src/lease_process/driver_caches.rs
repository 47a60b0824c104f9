//! Where drivers keep what they have compiled: beside the kernels of the lease's tenant.
//!
//! By default they use directories of the user, to which the process may not write. Without a cache,
//! Mesa's driver for the CPU compiles each kernel again in each process.
//!
//! CubeCL's database of kernels needs a directory for temporary files, too, or it keeps nothing. The usual
//! one may be out of reach, as when the worker's state is in it.

use std::{env, fs, path::Path, process};

/// The variable by which each driver takes its directory, and the directory's name.
const CACHES: [(&str, &str); 3] = [
    ("MESA_SHADER_CACHE_DIR", "mesa"),
    ("CUDA_CACHE_PATH", "cuda"),
    ("__GL_SHADER_DISK_CACHE_PATH", "nvidia"),
];

/// The variable that names the directory for temporary files.
const TEMPORARY: (&str, &str) = ("TMPDIR", "tmp");

/// Has drivers use directories in `kernels`, unless the worker's environment names others.
/// Drivers read the variables when they are loaded. Temporary files are there, too, if this process
/// cannot make any in the usual directory.
///
/// This process must have one thread, and be confined.
#[expect(unsafe_code, reason = "the environment")]
pub(super) fn place(kernels: &Path) {
    let unset = CACHES.into_iter();
    let unset = unset.filter(|(variable, _)| env::var_os(variable).is_none());
    let temporary = (!can_make_temporary()).then_some(TEMPORARY);
    for (variable, name) in unset.chain(temporary) {
        let directory = kernels.join(name);
        if fs::create_dir_all(&directory).is_err() {
            continue;
        }
        // SAFETY: No other thread reads or changes the environment meanwhile. The caller has one
        // thread: a spare waits on a runtime that runs on its only thread, and starts others
        // after this (`lease_process::run`).
        unsafe { env::set_var(variable, directory) };
    }
}

/// Returns whether this process can make temporary files.
fn can_make_temporary() -> bool {
    let directory = env::temp_dir().join(format!("tensord-lease-{}", process::id()));
    let made = fs::create_dir(&directory).is_ok();
    if made {
        // An error leaves an empty directory.
        let _ = fs::remove_dir(directory);
    }
    made
}
