//! The allocator of the program, and how long it keeps what is freed.
//!
//! A worker allocates and frees a tensor with every op, some of them large. The
//! system's allocator asks the kernel for fresh pages each time; mimalloc keeps them for
//! a while. Its own while is a second, and then all that is free at the moment goes
//! back, in the midst of a training whose next step wants it again: on a virtual machine
//! that takes freed pages away, a third of the time of an all-reduce went into them.
//!
//! It looks for what is to go back only when other memory is freed. A worker whose session
//! has ended frees nothing more, and would keep what the session had. So a thread has it
//! look now and then, which in a busy process does what would be done anyway.

use std::{io, thread, time::Duration};

use libmimalloc_sys::{mi_collect, mi_option_set, mi_option_t};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// How long freed memory is kept, in milliseconds.
const KEPT_MS: std::ffi::c_long = 10_000;

/// `mi_option_purge_delay` in `mimalloc.h`, for which the crate has no name.
const PURGE_DELAY: mi_option_t = 15;

/// Between two looks for memory to give back. Short against [`KEPT_MS`].
const LOOK: Duration = Duration::from_secs(1);

/// Has the allocator keep memory, unless `MIMALLOC_PURGE_DELAY` says for how long.
#[expect(unsafe_code, reason = "an option of a C library")]
pub(crate) fn keep_memory() {
    if std::env::var_os("MIMALLOC_PURGE_DELAY").is_none() {
        // SAFETY: it takes any number and stores it, which has no precondition; options
        // are atomics, read whenever memory is freed.
        unsafe { mi_option_set(PURGE_DELAY, KEPT_MS) }
    }
}

/// Has memory given back that was free for long enough, for as long as the process runs.
///
/// # Errors
///
/// When the system gives no thread.
pub(crate) fn give_back() -> io::Result<()> {
    let looking = thread::Builder::new().name("tensord-memory".into());
    let looking = looking.spawn(|| {
        loop {
            thread::sleep(LOOK);
            look();
        }
    });
    looking.map(drop)
}

/// Gives back what has been free for long enough, on whatever thread it was freed. Not what
/// was freed just now, as a session that runs wants it again.
#[expect(unsafe_code, reason = "a call of a C library")]
fn look() {
    // SAFETY: it has no precondition, and may be called on any thread at any time.
    unsafe { mi_collect(false) }
}

#[cfg(test)]
mod tests {
    use libmimalloc_sys::mi_option_get;

    use super::*;

    #[test]
    #[expect(unsafe_code, reason = "an option of a C library")]
    fn the_option_is_the_one_it_is_taken_for() {
        // SAFETY: as above.
        let delay = || unsafe { mi_option_get(PURGE_DELAY) };
        assert_eq!(delay(), 1000, "mimalloc's default");
        keep_memory();
        assert_eq!(delay(), KEPT_MS);
    }
}
