//! Memory accounting: the bytes of a device that sessions hold.
//!
//! The owner of memory decides what to count: `session/dataflow/account.rs` does so for
//! tensors. This module keeps the sums, refuses what does not fit before the device
//! allocates it, and attributes memory to sessions.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// One device's memory, shared by its sessions.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    capacity_bytes: u64,
    live_bytes: AtomicU64,
}

/// The bytes of a device that one session holds; returned on drop.
#[derive(Debug)]
pub(crate) struct SessionMemory {
    device: Arc<DeviceMemory>,
    live_bytes: u64,
}

/// The error when the free memory is too small.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OutOfMemory {
    pub(crate) requested_bytes: u64,
    pub(crate) free_bytes: u64,
}

impl DeviceMemory {
    pub(crate) fn new(capacity_bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            capacity_bytes,
            live_bytes: AtomicU64::new(0),
        })
    }

    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    pub(crate) fn live_bytes(&self) -> u64 {
        self.live_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn open(self: &Arc<Self>) -> SessionMemory {
        SessionMemory {
            device: self.clone(),
            live_bytes: 0,
        }
    }
}

impl SessionMemory {
    /// Returns an empty account of the same device.
    pub(crate) fn new_account(&self) -> Self {
        self.device.open()
    }

    /// Adds `bytes` to the account, if the device has room.
    pub(crate) fn take(&mut self, bytes: u64) -> Result<(), OutOfMemory> {
        let capacity = self.device.capacity_bytes;
        let fits = |live: u64| live.checked_add(bytes).filter(|&sum| sum <= capacity);
        let order = Ordering::Relaxed;
        match self.device.live_bytes.fetch_update(order, order, fits) {
            Ok(_) => {
                self.live_bytes += bytes;
                Ok(())
            }
            Err(live) => Err(OutOfMemory {
                requested_bytes: bytes,
                free_bytes: capacity.saturating_sub(live),
            }),
        }
    }

    /// Adds `bytes` even if the device has no room: for memory that is held already, or
    /// that has a small bound of its own.
    pub(crate) fn take_over_capacity(&mut self, bytes: u64) {
        self.device.live_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.live_bytes += bytes;
    }

    /// Moves `bytes` of this account to a new account.
    pub(crate) fn split(&mut self, bytes: u64) -> Self {
        debug_assert!(bytes <= self.live_bytes, "split off more than was taken");
        self.live_bytes -= bytes;
        Self {
            device: self.device.clone(),
            live_bytes: bytes,
        }
    }

    /// Returns the bytes of this account.
    pub(crate) fn bytes(&self) -> u64 {
        self.live_bytes
    }

    /// Moves all bytes of `other` to this account of the same device. Returns their number.
    pub(crate) fn merge(&mut self, mut other: Self) -> u64 {
        debug_assert!(
            Arc::ptr_eq(&self.device, &other.device),
            "both accounts must be of the same device"
        );
        let bytes = std::mem::take(&mut other.live_bytes);
        self.live_bytes += bytes;
        bytes
    }

    /// Returns `bytes` to the device.
    pub(crate) fn return_bytes(&mut self, bytes: u64) {
        debug_assert!(bytes <= self.live_bytes, "gave back more than was taken");
        self.live_bytes -= bytes;
        self.device.live_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for SessionMemory {
    fn drop(&mut self) {
        self.return_bytes(self.live_bytes);
    }
}

/// Formats bytes for people: `512 B`, `1.5 GiB`.
pub(crate) fn format_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_share_device_memory_and_return_it() {
        let device = DeviceMemory::new(100);
        let (mut a, mut b) = (device.open(), device.open());
        a.take(60).unwrap();
        assert_eq!(
            b.take(50),
            Err(OutOfMemory {
                requested_bytes: 50,
                free_bytes: 40
            })
        );
        b.take(40).unwrap();
        a.return_bytes(10);
        assert_eq!(device.live_bytes(), 90);
        drop(a);
        assert_eq!(device.live_bytes(), 40);
        assert!(b.take(u64::MAX).is_err());
    }

    #[test]
    fn split_account_outlives_its_parent() {
        let device = DeviceMemory::new(100);
        let mut account = device.open();
        account.take(60).unwrap();
        let part = account.split(20);
        assert_eq!((account.bytes(), part.bytes()), (40, 20));
        assert_eq!(device.live_bytes(), 60, "to split moves nothing");
        drop(account);
        assert_eq!(device.live_bytes(), 20);
        drop(part);
        assert_eq!(device.live_bytes(), 0);
    }

    #[test]
    fn take_over_capacity_counts_held_memory() {
        let device = DeviceMemory::new(100);
        let mut account = device.open();
        account.take_over_capacity(150);
        let full = OutOfMemory {
            requested_bytes: 1,
            free_bytes: 0,
        };
        assert_eq!(account.take(1), Err(full));
        account.return_bytes(150);
        assert_eq!(device.live_bytes(), 0);
    }

    #[test]
    fn bytes_are_formatted_with_units() {
        let shown = [0, 1023, 1024, 1536 << 20, 5 << 40].map(format_bytes);
        assert_eq!(shown, ["0 B", "1023 B", "1.0 KiB", "1.5 GiB", "5.0 TiB"]);
    }
}
