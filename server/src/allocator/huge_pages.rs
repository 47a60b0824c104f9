//! Huge pages for large blocks, on Linux.
//!
//! The kernel gives a process its memory in pages of 4 KiB, each when it is first written. So a process that has just
//! got its lease spends as long on the pages of a large upload as on the bytes. Most distributions give pages of 2 MiB
//! to programs that ask for them (`madvise` in `/sys/kernel/mm/transparent_hugepage/enabled`).

use std::alloc::{GlobalAlloc, Layout};

use mimalloc::MiMalloc;

/// Size of a huge page: that of x86-64, and of aarch64 with pages of 4 KiB. Others are aligned to this size, too, or
/// the kernel uses none.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Least size of a block for which huge pages are requested: it contains one, wherever it begins.
const MIN_BLOCK_BYTES: usize = 2 * HUGE_PAGE_BYTES;

/// [`MiMalloc`], with huge pages for large blocks.
pub(super) struct Allocator;

// SAFETY: Each function passes its arguments on to the one of `MiMalloc`, and returns its result. Advice to the kernel
// changes no contents.
#[expect(unsafe_code, reason = "the trait of allocators")]
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are those that `MiMalloc` needs.
        let block = unsafe { MiMalloc.alloc(layout) };
        request_huge_pages(block, layout.size());
        block
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in `alloc`.
        let block = unsafe { MiMalloc.alloc_zeroed(layout) };
        request_huge_pages(block, layout.size());
        block
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: as in `alloc`.
        let moved = unsafe { MiMalloc.realloc(block, layout, new_size) };
        request_huge_pages(moved, new_size);
        moved
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as in `alloc`.
        unsafe { MiMalloc.dealloc(block, layout) };
    }
}

/// Requests huge pages for a block, if it is large. `block` is null if there is no memory.
#[inline]
fn request_huge_pages(block: *mut u8, size: usize) {
    if size >= MIN_BLOCK_BYTES && !block.is_null() {
        advise(block, size);
    }
}

#[cold]
#[expect(unsafe_code, reason = "a system call")]
fn advise(block: *mut u8, size: usize) {
    let start = block.addr().next_multiple_of(HUGE_PAGE_BYTES);
    let end = (block.addr() + size) & !(HUGE_PAGE_BYTES - 1);
    // SAFETY: the range is within the block, and the advice changes nothing that a program can observe. An error means
    // that the kernel has no huge pages.
    unsafe {
        libc::madvise(
            block.with_addr(start).cast(),
            end - start,
            libc::MADV_HUGEPAGE,
        );
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Returns whether huge pages were requested for the memory at `address`.
    fn is_advised(address: usize) -> bool {
        let maps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_range_of_address = false;
        for line in maps.lines() {
            let range = line.split_whitespace().next().unwrap_or_default();
            if let Some((start, end)) = range.split_once('-')
                && let (Ok(start), Ok(end)) = (
                    usize::from_str_radix(start, 16),
                    usize::from_str_radix(end, 16),
                )
            {
                is_range_of_address = (start..end).contains(&address);
            }
            if is_range_of_address && let Some(flags) = line.strip_prefix("VmFlags:") {
                return flags.split_whitespace().any(|flag| flag == "hg");
            }
        }
        panic!("there is no memory at {address:#x}");
    }

    #[test]
    fn large_blocks_have_huge_pages() {
        if !fs::exists("/sys/kernel/mm/transparent_hugepage").unwrap() {
            return;
        }
        let mut grown = vec![1u8; 100];
        grown.resize(MIN_BLOCK_BYTES, 1);
        let sizes = [MIN_BLOCK_BYTES, MIN_BLOCK_BYTES + 1, 10 * MIN_BLOCK_BYTES];
        let blocks = sizes.map(|size| [vec![0u8; size], vec![1u8; size]]);
        for block in blocks.iter().flatten().chain([&grown]) {
            let (start, end) = (block.as_ptr().addr(), block.as_ptr().addr() + block.len());
            assert!(is_advised(start.next_multiple_of(HUGE_PAGE_BYTES)));
            assert!(is_advised((end & !(HUGE_PAGE_BYTES - 1)) - 1));
        }
    }
}
