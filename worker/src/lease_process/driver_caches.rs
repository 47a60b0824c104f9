//! Where drivers keep what they have compiled: beside the kernels of the lease's tenant.
//!
//! By default they use directories of the user, to which the process may not write. Without a cache,
//! Mesa's driver for the CPU compiles each kernel again in each process.

use std::{env, fs, path::Path};

/// The variable by which each driver takes its directory, and the directory's name.
const CACHES: [(&str, &str); 3] = [
    ("MESA_SHADER_CACHE_DIR", "mesa"),
    ("CUDA_CACHE_PATH", "cuda"),
    ("__GL_SHADER_DISK_CACHE_PATH", "nvidia"),
];

/// Has drivers use directories in `kernels`, unless the worker's environment names others.
/// Drivers read the variables when they are loaded.
///
/// This process must have one thread.
#[expect(unsafe_code, reason = "the environment")]
pub(super) fn place(kernels: &Path) {
    for (variable, name) in CACHES {
        let directory = kernels.join(name);
        if env::var_os(variable).is_some() || fs::create_dir_all(&directory).is_err() {
            continue;
        }
        // SAFETY: No other thread reads or changes the environment meanwhile. The caller has one
        // thread: a spare waits on a runtime that runs on its only thread, and starts others
        // after this (`lease_process::run`).
        unsafe { env::set_var(variable, directory) };
    }
}
