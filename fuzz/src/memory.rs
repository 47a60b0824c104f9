//! What something allocates: an allocator that counts.
//!
//! A sanitizer would notice a huge allocation too, but needs a nightly compiler.
//! Each thread has a count of its own, so that tests that run beside each other do
//! not count each other's memory.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

use crate::guard;

thread_local! {
    /// Bytes this thread allocated, less those it freed: below 0 where it frees what
    /// others allocated.
    static LIVE: Cell<isize> = const { Cell::new(0) };
    /// The most there were since the last measurement began.
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: the methods pass their arguments to the system's allocator or to `guard`
// unchanged and give back what it gives; beside that they only count, in cells of the
// thread that need no setting up and no taking down: that neither allocates nor panics.
// What `guard` gave is in its own part of the address space, by which it knows it again.
// `realloc` and `alloc_zeroed` are the trait's own, which call these two.
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
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.set(LIVE.get().wrapping_sub(layout.size() as isize));
        // SAFETY: `memory` is from one of the two, with this layout, as the caller promises.
        if unsafe { guard::dealloc(memory, layout) } {
            return;
        }
        // SAFETY: as above; `memory` is not from `guard`, so it is from `System`.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// Runs `work`, and says how many bytes more than before this thread had allocated
/// when it was most.
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
