//! What is left of a device that leases share.

use tensord_proto::share::{MAX_LANES, WHOLE_PERMILLE};

use crate::device::{DeviceSpec, Share};

/// A part of a device that leases could get. Ordered by the part of its time first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Room {
    permille: u32,
    memory_bytes: u64,
    /// The number of leases that could have a share.
    lanes: u32,
}

impl Room {
    /// Returns all of a device.
    pub(crate) fn of(device: &DeviceSpec) -> Self {
        Self {
            permille: WHOLE_PERMILLE,
            memory_bytes: device.memory_bytes,
            lanes: MAX_LANES,
        }
    }

    /// Returns the least room that has this share: of all rooms with as much time, the first in order.
    pub(super) fn least_for(share: Share) -> Self {
        Self {
            permille: share.permille,
            memory_bytes: 0,
            lanes: 0,
        }
    }

    pub(crate) fn has_room(&self, share: Share) -> bool {
        let Share {
            permille,
            memory_bytes,
        } = share;
        self.lanes > 0 && self.permille >= permille && self.memory_bytes >= memory_bytes
    }

    /// Returns whether no lease could have a share of it.
    pub(super) fn is_empty(&self) -> bool {
        self.lanes == 0 || self.permille == 0
    }

    /// Takes a share from it.
    pub(crate) fn subtract(&mut self, share: Share) {
        self.permille = self.permille.saturating_sub(share.permille);
        self.memory_bytes = self.memory_bytes.saturating_sub(share.memory_bytes);
        self.lanes = self.lanes.saturating_sub(1);
    }

    /// Gives a share back to it.
    pub(crate) fn add(&mut self, share: Share) {
        self.permille += share.permille;
        self.memory_bytes = self.memory_bytes.saturating_add(share.memory_bytes);
        self.lanes += 1;
    }
}
