//! What something allocates: an allocator that counts.
//!
//! A sanitizer would notice a huge allocation too, but needs a nightly compiler.
//! The count is of the whole process; the fuzzer runs one input at a time, and
//! what its other threads allocate is little against the bounds here.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: the methods pass their arguments to the system's allocator unchanged
// and give back what it gives; beside that they only count, which neither
// allocates nor panics. `realloc` and `alloc_zeroed` are the trait's own, which
// call these two.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(live, Relaxed);
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above; `memory` is from `System`.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// Runs `work`, and says how many bytes more than before were allocated when it
/// was most.
pub fn peak_of<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let result = work();
    (result, PEAK.load(Relaxed).saturating_sub(before))
}
