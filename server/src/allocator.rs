//! The program's allocator, and how long it keeps freed memory.
//!
//! A worker allocates and frees a tensor with every op, and some tensors are large. The
//! system's allocator requests fresh pages from the kernel each time; mimalloc keeps freed
//! pages for a purge delay. Its default purge delay is 1 s, after which it returns all free
//! memory to the system, even in the middle of a training run whose next step needs it
//! again. On a virtual machine whose host reclaims freed pages, allocating them again took a
//! third of the time of an all-reduce.
//!
//! mimalloc checks for memory to return only when other memory is freed. A worker whose
//! session has ended frees nothing more, and would keep the session's memory. So a thread
//! triggers the check every second; in a busy process, frees trigger it anyway.

#[cfg(target_os = "linux")]
mod huge_pages;

use std::{io, thread, time::Duration};

use libmimalloc_sys::{mi_collect, mi_option_set, mi_option_t};

#[cfg(target_os = "linux")]
#[global_allocator]
static ALLOCATOR: huge_pages::Allocator = huge_pages::Allocator;

#[cfg(not(target_os = "linux"))]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Purge delay: how long freed memory is kept, in milliseconds.
const PURGE_DELAY_MS: std::ffi::c_long = 10_000;

/// `mi_option_purge_delay` in `mimalloc.h`, for which the crate has no name.
const PURGE_DELAY_OPTION: mi_option_t = 15;

/// Interval between two checks for memory to return. Short compared with [`PURGE_DELAY_MS`].
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Sets the purge delay to [`PURGE_DELAY_MS`], unless `MIMALLOC_PURGE_DELAY` sets it.
#[expect(unsafe_code, reason = "an option of a C library")]
pub(crate) fn set_purge_delay() {
    if std::env::var_os("MIMALLOC_PURGE_DELAY").is_none() {
        // SAFETY: `mi_option_set` stores any number and has no precondition. Options are
        // atomics that are read whenever memory is freed.
        unsafe { mi_option_set(PURGE_DELAY_OPTION, PURGE_DELAY_MS) }
    }
}

/// Starts a thread that returns memory to the system once its purge delay is over, for as
/// long as the process runs.
///
/// # Errors
///
/// If the thread cannot be started.
pub(crate) fn start_purge_thread() -> io::Result<()> {
    let looking = thread::Builder::new().name("tensord-memory".into());
    let looking = looking.spawn(|| {
        loop {
            thread::sleep(POLL_INTERVAL);
            purge_expired();
        }
    });
    looking.map(drop)
}

/// Returns memory whose purge delay is over, whichever thread freed it. Keeps memory whose
/// delay is not over, as a running session needs it again.
#[expect(unsafe_code, reason = "a call of a C library")]
fn purge_expired() {
    // SAFETY: `mi_collect` has no precondition; any thread may call it at any time.
    unsafe { mi_collect(false) }
}

#[cfg(test)]
mod tests {
    use libmimalloc_sys::mi_option_get;

    use super::*;

    #[test]
    #[expect(unsafe_code, reason = "an option of a C library")]
    fn purge_delay_option_number_is_right() {
        // SAFETY: `mi_option_get` reads an atomic and has no precondition.
        let delay = || unsafe { mi_option_get(PURGE_DELAY_OPTION) };
        assert_eq!(delay(), 1000, "mimalloc's default");
        set_purge_delay();
        assert_eq!(delay(), PURGE_DELAY_MS);
    }
}
