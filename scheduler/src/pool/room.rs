//! What is left of a device that leases share.

use tensord_proto::share::{MAX_LANES, WHOLE_PERMILLE};

use crate::device::{DeviceSpec, Share};

/// A part of a device that leases could get; below zero if leases are to make room for what is held back. Ordered
/// by the part of its time first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Room {
    permille: i64,
    memory_bytes: i128,
    /// The number of leases that could have a share.
    lanes: i64,
}

impl Room {
    /// Returns all of a device.
    pub(crate) fn of(device: &DeviceSpec) -> Self {
        Self {
            permille: WHOLE_PERMILLE.into(),
            memory_bytes: device.memory_bytes.into(),
            lanes: MAX_LANES.into(),
        }
    }

    /// Returns the least room that has this share: of all rooms with as much time, the first in order.
    pub(super) fn least_for(share: Share) -> Self {
        Self {
            permille: share.permille.into(),
            memory_bytes: i128::MIN,
            lanes: i64::MIN,
        }
    }

    pub(crate) fn has_room(&self, share: Share) -> bool {
        let Share {
            permille,
            memory_bytes,
        } = share;
        self.lanes > 0
            && self.permille >= permille.into()
            && self.memory_bytes >= memory_bytes.into()
    }

    /// Returns whether no lease could have a share of it.
    pub(super) fn is_empty(&self) -> bool {
        self.lanes <= 0 || self.permille <= 0
    }

    /// Returns what both of two rooms have.
    pub(crate) fn least(self, other: Self) -> Self {
        Self {
            permille: self.permille.min(other.permille),
            memory_bytes: self.memory_bytes.min(other.memory_bytes),
            lanes: self.lanes.min(other.lanes),
        }
    }

    /// Takes a share from it.
    pub(crate) fn subtract(&mut self, share: Share) {
        self.permille -= i64::from(share.permille);
        self.memory_bytes -= i128::from(share.memory_bytes);
        self.lanes -= 1;
    }

    /// Gives a share back to it.
    pub(crate) fn add(&mut self, share: Share) {
        self.permille += i64::from(share.permille);
        self.memory_bytes += i128::from(share.memory_bytes);
        self.lanes += 1;
    }
}
