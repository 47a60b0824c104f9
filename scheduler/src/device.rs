//! Device descriptions: what a worker offers, what a client requests, and what the pool
//! has, each with the text for error messages.

use std::collections::BTreeMap;
use std::fmt;
use std::iter;
use std::ops::Deref;
use std::time::Duration;

use tensord_proto::share::{DeviceShare, Percent, WHOLE_PERMILLE};

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
    /// Whether several leases can share it.
    pub takes_shares: bool,
}

/// What the bits of a device's results depend on, as a worker reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceFingerprint {
    /// Equal for devices that compute in the same way.
    pub hash: [u8; 16],
    /// Whether a program gives the same bits each time on such devices.
    pub is_exact: bool,
}

/// Whether a lease goes on from snapshots if a process of it dies or a worker is lost, and on which
/// devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Durability {
    /// It ends.
    #[default]
    Off,
    /// [`Exact`](Self::Exact) on exact devices, and [`Continue`](Self::Continue) on others.
    Auto,
    /// On devices that give the same bits. The lease is granted exact devices only.
    Exact,
    /// On devices of the same kind, which may give other bits.
    Continue,
}

impl Durability {
    /// Returns whether the lease goes on.
    pub fn is_durable(self) -> bool {
        self != Self::Off
    }
}

/// What devices must be like for the sessions of a lease to go on there.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Requirement {
    /// The fingerprint of the lease's devices.
    pub fingerprint: [u8; 16],
    /// If this is a kind, any devices of the kind will do; otherwise the fingerprint must be the same.
    pub kind: Option<String>,
    /// The memory of the lease's smallest device, in bytes.
    pub smallest_bytes: u64,
    /// The memory of its largest device, in bytes.
    pub largest_bytes: u64,
    /// The part of its device that the lease needs; `None` for whole devices.
    pub share: Option<Share>,
}

impl Requirement {
    /// Returns what is needed to take the place of `devices`, or of a `share` of a device. `None` if the
    /// fingerprint of one is not known, if the lease must give the same bits and one of them does not do so each
    /// time, or if no device is like all of them.
    pub(crate) fn of<'a>(
        devices: impl Iterator<Item = &'a DeviceSpec> + Clone,
        durability: Durability,
        share: Option<Share>,
    ) -> Option<Self> {
        let first = devices.clone().next()?;
        let fingerprint = first.fingerprint?;
        let may_differ = match durability {
            Durability::Off => return None,
            Durability::Exact if !fingerprint.is_exact => return None,
            Durability::Auto | Durability::Exact => !fingerprint.is_exact,
            Durability::Continue => true,
        };
        let mut requirement = Self {
            fingerprint: fingerprint.hash,
            kind: may_differ.then(|| first.kind.clone()),
            smallest_bytes: first.memory_bytes,
            largest_bytes: first.memory_bytes,
            share,
        };
        for device in devices {
            if !requirement.is_like(device) {
                return None;
            }
            requirement.smallest_bytes = requirement.smallest_bytes.min(device.memory_bytes);
            requirement.largest_bytes = requirement.largest_bytes.max(device.memory_bytes);
        }
        if let Some(share) = share {
            requirement.smallest_bytes = share.memory_bytes;
            requirement.largest_bytes = share.memory_bytes;
        }
        Some(requirement)
    }

    /// Returns whether a device can take the place of any of the lease's devices.
    pub(crate) fn accepts(&self, device: &DeviceSpec) -> bool {
        self.is_like(device) && device.memory_bytes >= self.largest_bytes
    }

    /// Returns whether the lease can go on where it was, on this device of a worker that is back.
    pub(crate) fn accepts_back(&self, device: &DeviceSpec) -> bool {
        self.is_like(device) && device.memory_bytes >= self.smallest_bytes
    }

    /// Returns whether a device computes like the lease's.
    fn is_like(&self, device: &DeviceSpec) -> bool {
        if self.share.is_some() && !device.takes_shares {
            return false;
        }
        match (&self.kind, device.fingerprint) {
            (Some(kind), Some(_)) => *kind == device.kind,
            (None, Some(fingerprint)) => {
                fingerprint.is_exact && fingerprint.hash == self.fingerprint
            }
            (_, None) => false,
        }
    }

    /// Returns whether a device has the fingerprint of the lease's devices.
    pub(crate) fn is_equal(&self, device: &DeviceSpec) -> bool {
        device.fingerprint.map(|it| it.hash) == Some(self.fingerprint)
    }
}

/// The devices that a client requests, all or none.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Demand {
    /// The number of devices, at least one.
    pub devices: u32,
    /// The kind of every device; `None` accepts any kind, and a mix of kinds.
    pub kind: Option<String>,
    /// The least memory of each device, in bytes; of a share, the memory that it has, or 0 for the same part of
    /// the device's memory as of its time.
    pub memory_bytes: u64,
    /// The part of the time of one device, in thousandths, from 1 to 999; `None` for whole devices.
    pub share_permille: Option<u32>,
    /// Whether the lease is to go on from snapshots if a process of it dies, or at another worker if
    /// a worker is lost.
    pub durability: Durability,
    /// How long the lease may wait for devices after a worker or a process of it was lost; `None` for
    /// the pool's default.
    pub recover_within: Option<Duration>,
    /// For how long the lease has devices at most; `None` for any time.
    pub max_duration: Option<Duration>,
    /// Whether the lease comes after all others, and gives its devices to any request that is not one for a
    /// spot lease, and to any other lease that waits for devices.
    pub is_spot: bool,
    /// Whether the lease may end when a request is entitled to its devices that are beyond the guarantee of its
    /// tenant, and it cannot be suspended.
    pub may_end: bool,
}

impl Demand {
    /// Returns whether `device` meets the demand.
    pub(crate) fn accepts(&self, device: &DeviceSpec) -> bool {
        let is_exact = || device.fingerprint.is_some_and(|it| it.is_exact);
        self.kind.as_ref().is_none_or(|kind| *kind == device.kind)
            && self.memory_bytes <= device.memory_bytes
            && (self.share_permille.is_none() || device.takes_shares)
            && (self.durability != Durability::Exact || is_exact())
    }

    /// Returns the part that the lease would have of a device; `None` for all of it.
    pub(crate) fn share_of(&self, device: &DeviceSpec) -> Option<Share> {
        let permille = self.share_permille?;
        let proportional =
            u128::from(device.memory_bytes) * u128::from(permille) / u128::from(WHOLE_PERMILLE);
        Some(Share {
            permille,
            memory_bytes: match self.memory_bytes {
                0 => u64::try_from(proportional).unwrap_or(u64::MAX),
                bytes => bytes,
            },
        })
    }

    /// Returns the thousandths of the time of each device that the lease would have.
    pub(crate) fn permille(&self) -> u64 {
        self.share_permille.unwrap_or(WHOLE_PERMILLE).into()
    }

    /// Returns what each device that the lease would have counts as, in thousandths.
    pub(crate) fn counted_permille(&self, device: &DeviceSpec) -> u64 {
        let share = self.share_of(device);
        share.map_or(WHOLE_PERMILLE.into(), |it| it.counted_permille(device))
    }

    /// Returns the memory that the lease would have of a device, in bytes.
    pub(crate) fn memory_of(&self, device: &DeviceSpec) -> u64 {
        let share = self.share_of(device);
        share.map_or(device.memory_bytes, |share| share.memory_bytes)
    }

    /// Returns for how long the lease has devices at most, rounded up to a power of 2 in milliseconds, so that
    /// there are few different shapes.
    pub(crate) fn rounded_duration(&self) -> Option<Duration> {
        let millis = u64::try_from(self.max_duration?.as_millis()).ok()?;
        Some(Duration::from_millis(millis.checked_next_power_of_two()?))
    }

    /// Returns whether a lease that has such devices can give them to others: it can be suspended, once there are
    /// snapshots, or may end. One on devices of several kinds could not go on.
    pub(crate) fn gives_way_on(&self, device: &DeviceSpec) -> bool {
        let is_of_one_kind = self.devices == 1 || self.kind.is_some();
        let can_go_on = || Requirement::of(iter::once(device), self.durability, None).is_some();
        self.is_spot || self.may_end || is_of_one_kind && can_go_on()
    }
}

/// What decides about the devices that a request can get: requests of the same shape fit in the same pools.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Shape(Demand);

impl Shape {
    pub(crate) fn of(demand: &Demand) -> Self {
        let durability = match demand.durability {
            Durability::Auto | Durability::Continue => Durability::Auto,
            other @ (Durability::Off | Durability::Exact) => other,
        };
        Self(Demand {
            durability,
            recover_within: None,
            max_duration: demand.rounded_duration(),
            ..demand.clone()
        })
    }
}

/// A demand of the shape.
impl Deref for Shape {
    type Target = Demand;

    fn deref(&self) -> &Demand {
        &self.0
    }
}

impl fmt::Display for Demand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(permille) = self.share_permille {
            write!(f, "{} of ", Percent(permille))?;
        }
        let plural = if self.devices == 1 { "" } else { "s" };
        let exact = match self.durability {
            Durability::Exact => "exact ",
            Durability::Off | Durability::Auto | Durability::Continue => "",
        };
        write!(f, "{} {exact}device{plural} of ", self.devices)?;
        match &self.kind {
            Some(kind) => write!(f, "kind {kind}")?,
            None => write!(f, "any kind")?,
        }
        if self.memory_bytes > 0 {
            let each = if self.share_permille.is_some() {
                ""
            } else {
                " each"
            };
            write!(f, " with {}{each}", Memory(self.memory_bytes))?;
        }
        f.write_str(if self.is_spot { " (spot)" } else { "" })
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

    /// Creates the inventory of so many workers, which offer devices like these, each with their number.
    pub(crate) fn new<'a>(
        workers: usize,
        offered: impl Iterator<Item = (&'a DeviceSpec, usize)>,
    ) -> Self {
        let mut devices = BTreeMap::new();
        for (device, count) in offered {
            let sort = (device.kind.clone(), device.memory_bytes);
            *devices.entry(sort).or_default() += count;
        }
        Self { workers, devices }
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

/// A part of a device's time, and of its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share {
    /// The part of the time, in thousandths.
    pub permille: u32,
    /// The part of the memory, in bytes.
    pub memory_bytes: u64,
}

impl From<DeviceShare> for Share {
    fn from(share: DeviceShare) -> Self {
        Self {
            permille: share.permille,
            memory_bytes: share.memory_bytes,
        }
    }
}

impl Share {
    /// Returns what the share counts as of a device: the part of the time or of the memory, whichever is larger, in
    /// thousandths.
    pub(crate) fn counted_permille(self, device: &DeviceSpec) -> u64 {
        let whole = u128::from(device.memory_bytes.max(1));
        let memory = (u128::from(self.memory_bytes) * u128::from(WHOLE_PERMILLE)).div_ceil(whole);
        u64::from(self.permille).max(u64::try_from(memory).unwrap_or(u64::MAX))
    }

    /// Returns the share with a lane.
    pub(crate) fn in_lane(self, lane: u32) -> DeviceShare {
        DeviceShare {
            permille: self.permille,
            memory_bytes: self.memory_bytes,
            lane,
        }
    }
}

/// A number of bytes, displayed in MiB or GiB.
pub(crate) struct Memory(pub(crate) u64);

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
