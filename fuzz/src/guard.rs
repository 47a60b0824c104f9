//! An allocator that ends the process at the first access beyond an allocation.
//!
//! While a thread is within [`with_guards`], its allocations are in slots of whole pages.
//! An allocation ends at the end of its slot, and the page after the slot cannot be
//! accessed: the system ends a process that reads or writes there (`SIGSEGV`). If alignment
//! leaves room after the allocation, that room has a pattern, and so have some bytes before
//! the allocation. `dealloc` compares the patterns, which finds writes. Slots are reused in
//! turn, the longest free first, and have another pattern while they are free; every eighth
//! slot cannot be accessed at all while it is free, which finds a use after free.
//!
//! It takes the place of a sanitizer, which stable compilers do not have.

#![allow(unsafe_code)]

use std::{
    alloc::Layout,
    cell::Cell,
    sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
};

const PAGE: usize = 4096;

/// For each class of slots: pages of a slot, and number of slots.
const CLASSES: [(usize, usize); 6] = [
    (1, 8192),
    (4, 2048),
    (16, 1024),
    (64, 256),
    (512, 64),
    (4096, 8),
];

const SLOTS: usize = {
    let (mut sum, mut i) = (0, 0);
    while i < CLASSES.len() {
        sum += CLASSES[i].1;
        i += 1;
    }
    sum
};

/// Maximum number of bytes before an allocation that have the pattern.
const BEFORE: usize = 32;

/// The patterns around allocations and in freed memory.
const AROUND: u8 = 0xc5;
const FREED: u8 = 0xdd;

/// Maximum number of bytes of freed memory that are filled with the pattern.
const FILLED: usize = 256;

/// Slots whose number is a multiple of this cannot be accessed while they are free.
const CLOSED_EVERY: usize = 8;

/// Address of the slots; 0 before [`install`].
static BASE: AtomicUsize = AtomicUsize::new(0);

/// The numbers of free slots: a ring buffer for each class, one after the other.
static RINGS: [AtomicU32; SLOTS] = [const { AtomicU32::new(0) }; SLOTS];

/// The state of each class's ring buffer.
static FREE: [Ring; CLASSES.len()] = [const {
    Ring {
        busy: AtomicBool::new(false),
        head: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
    }
}; CLASSES.len()];

/// A ring buffer of free slots, guarded by a spin lock.
struct Ring {
    busy: AtomicBool,
    /// Index of the slot that has been free the longest.
    head: AtomicUsize,
    len: AtomicUsize,
}

thread_local! {
    /// Number of calls of [`with_guards`] that the thread is within.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// A slot: whole pages for one allocation.
#[derive(Clone, Copy)]
struct Slot {
    class: usize,
    number: usize,
    /// Addresses of its beginning and its end.
    start: usize,
    end: usize,
}

/// Runs `work` with guards around this thread's allocations, if [`install`] was called.
pub fn with_guards<T>(work: impl FnOnce() -> T) -> T {
    struct Off;
    impl Drop for Off {
        fn drop(&mut self) {
            DEPTH.set(DEPTH.get() - 1);
        }
    }
    DEPTH.set(DEPTH.get() + 1);
    let _off = Off;
    work()
}

/// Returns whether this thread is within [`with_guards`].
pub fn is_active() -> bool {
    DEPTH.get() > 0
}

/// Sets the slots up, once in a process.
///
/// # Errors
///
/// When the system refuses the address space, or has pages of another size.
#[cfg(unix)]
pub fn install() -> Result<(), String> {
    if BASE.load(Ordering::Acquire) != 0 {
        return Ok(());
    }
    // SAFETY: the call returns a number and has no other effect.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    if page != PAGE as libc::c_long {
        return Err(format!(
            "guard pages need pages of {PAGE} bytes, but this system has {page}"
        ));
    }
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at an address of the system's choice touches no other memory.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            total_bytes(),
            libc::PROT_NONE,
            flags,
            -1,
            0,
        )
    };
    if base == libc::MAP_FAILED {
        return Err(format!(
            "cannot reserve address space for guard pages: {}",
            std::io::Error::last_os_error()
        ));
    }
    let base = base as usize;
    for (class, (_, slots)) in CLASSES.into_iter().enumerate() {
        for number in 0..slots {
            let slot = slot_at(base, class, number);
            if !protect(slot, !is_closed(slot)) {
                return Err(format!(
                    "cannot set up guard pages: {}",
                    std::io::Error::last_os_error()
                ));
            }
            release_slot(slot);
        }
    }
    BASE.store(base, Ordering::Release);
    Ok(())
}

/// Guard pages do not exist on this system.
///
/// # Errors
///
/// Always.
#[cfg(not(unix))]
pub fn install() -> Result<(), String> {
    Err("guard pages need a Unix system".into())
}

/// Reads the byte after an allocation of `size` bytes, so that a test can check that the
/// guards end the process here.
pub fn read_beyond(size: usize) -> u8 {
    let bytes = with_guards(|| vec![1u8; size]);
    // SAFETY: none, on purpose: the byte is outside the allocation. With guards it is in a
    // page that cannot be read, and the process ends; without, the read has no effect. The
    // only caller is a hidden option of `execute` for tests.
    unsafe { bytes.as_ptr().add(size).read_volatile() }
}

/// Returns memory with a guard after it. Returns `None` if the thread is not within
/// [`with_guards`], or if no slot is free.
pub(crate) fn alloc(layout: Layout) -> Option<*mut u8> {
    let base = BASE.load(Ordering::Acquire);
    if base == 0 || !is_active() || layout.size() == 0 || layout.align() > PAGE {
        return None;
    }
    let first = CLASSES
        .iter()
        .position(|(pages, _)| pages * PAGE >= layout.size())?;
    let slot = acquire_slot(base, first)?;
    if is_closed(slot) && !protect(slot, true) {
        release_slot(slot);
        return None;
    }
    let start = start_address(slot, layout);
    fill(slot.start.max(start.saturating_sub(BEFORE)), start, AROUND);
    fill(start + layout.size(), slot.end, AROUND);
    Some(start as *mut u8)
}

/// Frees memory. Returns `false` if [`alloc`] did not allocate it.
///
/// # Safety
///
/// If [`alloc`] did allocate it, then with `layout`, and nobody uses it any more.
pub(crate) unsafe fn dealloc(memory: *mut u8, layout: Layout) -> bool {
    let base = BASE.load(Ordering::Acquire);
    let start = memory as usize;
    let Some(slot) = find(base, start) else {
        return false;
    };
    let before = slot.start.max(start.saturating_sub(BEFORE));
    let is_intact = start == start_address(slot, layout)
        && is_filled_with(before, start, AROUND)
        && is_filled_with(start + layout.size(), slot.end, AROUND);
    if !is_intact {
        abort_with(
            b"fuzz: memory around an allocation was overwritten (found when it was freed)\n",
        );
    }
    fill(start, start + layout.size().min(FILLED), FREED);
    if is_closed(slot) {
        protect(slot, false);
    }
    release_slot(slot);
    true
}

/// Returns the address at which an allocation begins so that it ends at its slot's end.
fn start_address(slot: Slot, layout: Layout) -> usize {
    (slot.end - layout.size()) & !(layout.align() - 1)
}

fn is_closed(slot: Slot) -> bool {
    slot.number.is_multiple_of(CLOSED_EVERY)
}

const fn class_bytes(class: usize) -> usize {
    (CLASSES[class].0 + 1) * PAGE * CLASSES[class].1
}

/// Returns the size of the mapping: one page, and all slots with a page after each.
fn total_bytes() -> usize {
    (0..CLASSES.len()).map(class_bytes).sum::<usize>() + PAGE
}

fn slot_at(base: usize, class: usize, number: usize) -> Slot {
    let (pages, _) = CLASSES[class];
    let before: usize = (0..class).map(class_bytes).sum();
    let start = base + PAGE + before + number * (pages + 1) * PAGE;
    let end = start + pages * PAGE;
    Slot {
        class,
        number,
        start,
        end,
    }
}

/// Returns the slot that contains `address`, if one does.
fn find(base: usize, address: usize) -> Option<Slot> {
    if base == 0 {
        return None;
    }
    let mut offset = address.checked_sub(base + PAGE)?;
    for (class, (pages, _)) in CLASSES.into_iter().enumerate() {
        if offset < class_bytes(class) {
            return Some(slot_at(base, class, offset / ((pages + 1) * PAGE)));
        }
        offset -= class_bytes(class);
    }
    None
}

/// Takes the slot that has been free the longest, of class `first` or the next one.
fn acquire_slot(base: usize, first: usize) -> Option<Slot> {
    let mut classes = first..CLASSES.len().min(first + 2);
    classes.find_map(|class| {
        let (_, slots) = CLASSES[class];
        let number = locked(class, |ring| {
            let len = ring.len.load(Ordering::Relaxed);
            if len == 0 {
                return None;
            }
            let head = ring.head.load(Ordering::Relaxed);
            ring.head.store((head + 1) % slots, Ordering::Relaxed);
            ring.len.store(len - 1, Ordering::Relaxed);
            Some(RINGS[ring_start(class) + head].load(Ordering::Relaxed))
        });
        number.map(|number| slot_at(base, class, number as usize))
    })
}

fn release_slot(slot: Slot) {
    let (_, slots) = CLASSES[slot.class];
    locked(slot.class, |ring| {
        let len = ring.len.load(Ordering::Relaxed);
        let at = (ring.head.load(Ordering::Relaxed) + len) % slots;
        RINGS[ring_start(slot.class) + at].store(slot.number as u32, Ordering::Relaxed);
        ring.len.store(len + 1, Ordering::Relaxed);
    });
}

fn ring_start(class: usize) -> usize {
    CLASSES[..class].iter().map(|(_, slots)| slots).sum()
}

/// Runs a few instructions with the ring buffer of a class locked.
fn locked<T>(class: usize, work: impl FnOnce(&Ring) -> T) -> T {
    let ring = &FREE[class];
    while ring.busy.swap(true, Ordering::Acquire) {
        std::hint::spin_loop();
    }
    let result = work(ring);
    ring.busy.store(false, Ordering::Release);
    result
}

/// Fills memory of a slot that this thread owns.
fn fill(start: usize, end: usize, with: u8) {
    // SAFETY: `start..end` is within a slot that this thread has just taken from the ring
    // or is about to put back: no other thread uses it, and it may be accessed.
    unsafe { (start as *mut u8).write_bytes(with, end - start) };
}

/// Returns whether memory around an allocation still has the pattern.
fn is_filled_with(start: usize, end: usize, pattern: u8) -> bool {
    // SAFETY: `start..end` is within a slot whose allocation is being freed, so it may be
    // accessed, and outside the allocation, so `fill` initialised it.
    let around = unsafe { std::slice::from_raw_parts(start as *const u8, end - start) };
    around.iter().all(|&byte| byte == pattern)
}

/// Allows or forbids access to a slot's pages. Returns whether the system did so.
#[cfg(unix)]
fn protect(slot: Slot, open: bool) -> bool {
    let access = match open {
        true => libc::PROT_READ | libc::PROT_WRITE,
        false => libc::PROT_NONE,
    };
    let bytes = slot.end - slot.start;
    // SAFETY: these pages belong to the mapping of `install`, which is never unmapped, and
    // have no live allocation.
    unsafe { libc::mprotect(slot.start as *mut libc::c_void, bytes, access) == 0 }
}

#[cfg(not(unix))]
fn protect(_: Slot, _: bool) -> bool {
    false
}

/// Writes an error without allocating, and ends the process.
fn abort_with(what: &[u8]) -> ! {
    // SAFETY: the pointer and the length are those of `what`.
    #[cfg(unix)]
    unsafe {
        libc::write(2, what.as_ptr().cast(), what.len());
    }
    let _ = what;
    std::process::abort()
}
