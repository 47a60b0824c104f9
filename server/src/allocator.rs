//! The allocator of the program, and how long it keeps what is freed.
//!
//! A worker allocates and frees a tensor with every op, some of them large. The
//! system's allocator asks the kernel for fresh pages each time; mimalloc keeps them for
//! a while. Its own while is a second, and then all that is free at the moment goes
//! back, in the midst of a training whose next step wants it again: on a virtual machine
//! that takes freed pages away, a third of the time of an all-reduce went into them.

use libmimalloc_sys::{mi_option_set, mi_option_t};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// How long freed memory is kept, in milliseconds.
const KEPT_MS: std::ffi::c_long = 10_000;

/// `mi_option_purge_delay` in `mimalloc.h`, for which the crate has no name.
const PURGE_DELAY: mi_option_t = 15;

/// Has the allocator keep memory, unless `MIMALLOC_PURGE_DELAY` says for how long.
#[expect(unsafe_code, reason = "an option of a C library")]
pub(crate) fn keep_memory() {
    if std::env::var_os("MIMALLOC_PURGE_DELAY").is_none() {
        // SAFETY: it takes any number and stores it, which has no precondition; options
        // are atomics, read whenever memory is freed.
        unsafe { mi_option_set(PURGE_DELAY, KEPT_MS) }
    }
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
