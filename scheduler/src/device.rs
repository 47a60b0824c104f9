//! Device descriptions: what a worker offers, what a client requests, and what the pool
//! has, each with the text for error messages.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// One accelerator (or CPU) that a worker offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceSpec {
    /// The kind: "flex", "cuda", "vulkan", …
    pub kind: String,
    /// The display name.
    pub name: String,
    /// The memory in bytes.
    pub memory_bytes: u64,
    /// What the bits of the device's results depend on, if the worker has reported it.
    pub fingerprint: Option<DeviceFingerprint>,
}

/// What the bits of a device's results depend on, as a worker reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceFingerprint {
    /// Equal for devices that compute in the same way.
    pub hash: [u8; 16],
    /// Whether a program gives the same bits each time on such devices.
    pub is_exact: bool,
}

/// What devices must be like for the sessions of a lease to go on there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requirement {
    /// The fingerprint of exact devices: the sessions would give other bits on others.
    pub fingerprint: [u8; 16],
    /// The memory of the lease's smallest device, in bytes.
    pub smallest_bytes: u64,
    /// The memory of its largest device, in bytes.
    pub largest_bytes: u64,
}

impl Requirement {
    /// Returns what is needed to take the place of `devices`, or `None` if one of them does not give
    /// the same bits each time, or they have different fingerprints.
    pub(crate) fn of<'a>(mut devices: impl Iterator<Item = &'a DeviceSpec>) -> Option<Self> {
        let first = devices.next()?;
        let mut requirement = Self {
            fingerprint: exact_fingerprint(first)?,
            smallest_bytes: first.memory_bytes,
            largest_bytes: first.memory_bytes,
        };
        for device in devices {
            if exact_fingerprint(device) != Some(requirement.fingerprint) {
                return None;
            }
            requirement.smallest_bytes = requirement.smallest_bytes.min(device.memory_bytes);
            requirement.largest_bytes = requirement.largest_bytes.max(device.memory_bytes);
        }
        Some(requirement)
    }

    /// Returns whether a device can take the place of any of the lease's devices.
    pub(crate) fn accepts(&self, device: &DeviceSpec) -> bool {
        exact_fingerprint(device) == Some(self.fingerprint)
            && device.memory_bytes >= self.largest_bytes
    }

    /// Returns whether the lease can go on where it was, on this device of a worker that is back.
    pub(crate) fn accepts_back(&self, device: &DeviceSpec) -> bool {
        exact_fingerprint(device) == Some(self.fingerprint)
            && device.memory_bytes >= self.smallest_bytes
    }
}

/// Returns the fingerprint of a device that gives the same bits each time.
fn exact_fingerprint(device: &DeviceSpec) -> Option<[u8; 16]> {
    let exact = device.fingerprint.filter(|it| it.is_exact);
    exact.map(|it| it.hash)
}

/// The devices that a client requests, all or none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Demand {
    /// The number of devices, at least one.
    pub devices: u32,
    /// The kind of every device; `None` accepts any kind, and a mix of kinds.
    pub kind: Option<String>,
    /// The least memory of each device, in bytes.
    pub memory_bytes: u64,
    /// Whether the lease is to go on from snapshots if a process of it dies, or at another worker if
    /// a worker is lost. Leases with devices that are not exact do not.
    pub is_durable: bool,
    /// How long the lease may wait for devices after a worker or a process of it was lost; `None` for
    /// the pool's default.
    pub recover_within: Option<Duration>,
}

impl Demand {
    /// Returns whether `device` meets the demand.
    pub(crate) fn accepts(&self, device: &DeviceSpec) -> bool {
        self.kind.as_ref().is_none_or(|kind| *kind == device.kind)
            && self.memory_bytes <= device.memory_bytes
    }
}

impl fmt::Display for Demand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.devices == 1 { "" } else { "s" };
        write!(f, "{} device{plural} of ", self.devices)?;
        match &self.kind {
            Some(kind) => write!(f, "kind {kind}")?,
            None => write!(f, "any kind")?,
        }
        if self.memory_bytes > 0 {
            write!(f, " with {} each", Memory(self.memory_bytes))?;
        }
        Ok(())
    }
}

/// The devices that the pool could lease if nothing were leased.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    workers: usize,
    /// The number of devices of each kind and memory.
    devices: BTreeMap<(String, u64), usize>,
}

impl Inventory {
    /// The largest number of kind-and-memory pairs listed in an error.
    const MAX_LISTED: usize = 8;

    /// Adds a worker, and those of its devices that can still be leased.
    pub(crate) fn add<'a>(&mut self, devices: impl Iterator<Item = &'a DeviceSpec>) {
        self.workers += 1;
        for device in devices {
            let sort = (device.kind.clone(), device.memory_bytes);
            *self.devices.entry(sort).or_default() += 1;
        }
    }
}

impl fmt::Display for Inventory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.workers == 0 {
            return write!(f, "no worker has joined the pool");
        }
        if self.devices.is_empty() {
            return write!(f, "the pool's workers are leaving or have no devices");
        }
        write!(f, "the pool has ")?;
        for (i, ((kind, memory), count)) in self.devices.iter().enumerate() {
            if i == Self::MAX_LISTED {
                let more: usize = self.devices.values().skip(i).sum();
                return write!(f, " and {more} more");
            }
            let comma = if i > 0 { ", " } else { "" };
            write!(f, "{comma}{count} {kind} ({})", Memory(*memory))?;
        }
        Ok(())
    }
}

/// A number of bytes, displayed in MiB or GiB.
struct Memory(u64);

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MIB: f64 = 1024.0 * 1024.0;
        let mib = self.0 as f64 / MIB;
        if mib < 1024.0 {
            write!(f, "{mib:.1} MiB")
        } else {
            write!(f, "{:.1} GiB", mib / 1024.0)
        }
    }
}
