//! Parts of a device, for leases that have it at the same time.

use std::fmt;

use crate::v1;

/// All of a device's time, in thousandths.
pub const WHOLE_PERMILLE: u32 = 1000;

/// Most leases that have shares of a device at a time: each has a process, and a lane of the device.
pub const MAX_LANES: u32 = 16;

/// A part of a device's time, and of its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceShare {
    /// The part of the time while all leases of the device have work, in thousandths: 1 to 999.
    pub permille: u32,
    /// The part of the memory, in bytes.
    pub memory_bytes: u64,
    /// The lane, from 1 to [`MAX_LANES`]: at most one lease has a lane of a device at a time.
    pub lane: u32,
}

/// Why a message has no valid share of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShareError {
    /// The part of the time is none, or all.
    #[error("a share has {0} thousandths of a device's time; 1 to 999 are possible")]
    Permille(u32),
    /// There is no such lane.
    #[error("a share has lane {0} of a device; there are lanes 1 to {MAX_LANES}")]
    Lane(u32),
}

impl TryFrom<v1::DeviceShare> for DeviceShare {
    type Error = ShareError;

    fn try_from(share: v1::DeviceShare) -> Result<Self, ShareError> {
        let v1::DeviceShare {
            permille,
            memory_bytes,
            lane,
        } = share;
        if !(1..WHOLE_PERMILLE).contains(&permille) {
            return Err(ShareError::Permille(permille));
        }
        if !(1..=MAX_LANES).contains(&lane) {
            return Err(ShareError::Lane(lane));
        }
        Ok(Self {
            permille,
            memory_bytes,
            lane,
        })
    }
}

impl From<DeviceShare> for v1::DeviceShare {
    fn from(share: DeviceShare) -> Self {
        Self {
            permille: share.permille,
            memory_bytes: share.memory_bytes,
            lane: share.lane,
        }
    }
}

/// Returns the lane of a lease's share; 0 for a whole device.
pub fn lane(share: Option<DeviceShare>) -> u32 {
    share.map_or(0, |share| share.lane)
}

/// A number of thousandths, displayed in percent for people, such as `25 %` or `12.5 %`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Percent(pub u32);

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 % 10 {
            0 => write!(f, "{} %", self.0 / 10),
            tenth => write!(f, "{}.{tenth} %", self.0 / 10),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percent_has_a_decimal_where_it_needs_one() {
        let cases = [
            (0, "0 %"),
            (1, "0.1 %"),
            (125, "12.5 %"),
            (250, "25 %"),
            (WHOLE_PERMILLE, "100 %"),
        ];
        for (permille, expected) in cases {
            assert_eq!(Percent(permille).to_string(), expected);
        }
    }

    #[test]
    fn a_share_is_less_than_a_device_and_has_a_lane() {
        let share = |permille, lane| v1::DeviceShare {
            permille,
            memory_bytes: 7,
            lane,
        };
        for message in [share(1, 1), share(999, MAX_LANES)] {
            let known = DeviceShare::try_from(message).unwrap();
            assert_eq!(v1::DeviceShare::from(known), message);
            assert_eq!(lane(Some(known)), message.lane);
        }
        assert_eq!(lane(None), 0);
        let refused = [
            (share(0, 1), ShareError::Permille(0)),
            (share(1000, 1), ShareError::Permille(1000)),
            (share(500, 0), ShareError::Lane(0)),
            (share(500, 17), ShareError::Lane(17)),
        ];
        for (message, error) in refused {
            assert_eq!(DeviceShare::try_from(message), Err(error));
        }
    }
}
