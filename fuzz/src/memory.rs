//! An allocator that counts bytes, to measure how much memory code allocates.
//!
//! A sanitizer would notice a huge allocation too, but needs a nightly compiler. Each
//! thread has a count of its own, so that parallel tests do not count each other's memory.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

use crate::guard;

thread_local! {
    /// Bytes that this thread allocated, less those that it freed. The number is negative
    /// if the thread frees memory that others allocated.
    static LIVE: Cell<isize> = const { Cell::new(0) };
    /// Maximum of `LIVE` since the last measurement began.
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: the methods pass their arguments to the system's allocator or to `guard`
// unchanged and return its result. Beside that they only count, in thread-local cells that
// need no initialisation and no destructor; that neither allocates nor panics. Memory of
// `guard` has its own range of addresses, by which `guard::dealloc` recognises it.
// `realloc` and `alloc_zeroed` are the trait's default methods, which call these two.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // An allocation is never larger than `isize::MAX`.
        let live = LIVE.get().wrapping_add(layout.size() as isize);
        LIVE.set(live);
        PEAK.set(PEAK.get().max(live));
        if let Some(memory) = guard::alloc(layout) {
            return memory;
        }
        // SAFETY: the caller upholds the same contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.set(LIVE.get().wrapping_sub(layout.size() as isize));
        // SAFETY: the caller guarantees that `memory` was allocated here with this layout.
        if unsafe { guard::dealloc(memory, layout) } {
            return;
        }
        // SAFETY: as above; `memory` is not from `guard`, so it is from `System`.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// Runs `work`, and returns its result with the maximum number of bytes that this thread
/// had allocated during `work` beyond those that it had before.
pub fn peak_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVE.get();
    PEAK.set(before);
    let result = work();
    (result, PEAK.get().wrapping_sub(before).unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_counts_only_this_thread() {
        let work = || {
            let other = std::thread::spawn(|| drop(vec![1u8; 1 << 26]));
            other.join().expect("it does not panic");
            drop(vec![1u8; 1 << 20]);
            drop(vec![1u8; 1 << 21]);
        };
        let ((), peak) = peak_of(work);
        assert!((1 << 21..1 << 22).contains(&peak), "{peak}");
    }
}
