//! Why a request waits, for the program that made it: nothing here names another tenant, or shows what others
//! have.

use std::fmt;

/// Why a request waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WaitReason {
    /// Its tenant would have more than its limit with these devices.
    TenantLimit,
    /// Some devices that it could get are reserved for a request that comes before it, and its own lease could
    /// neither be suspended nor surely ends in time.
    Reserved,
    /// Too few devices are free, and it is within its tenant's guarantee.
    Guaranteed,
    /// Too few devices are free, and others get those for which it is next only if they can be suspended.
    HasReservation,
    /// Too few devices are free.
    TooFewFree,
}

impl fmt::Display for WaitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TenantLimit => "the tenant would have more than its limit with these devices",
            Self::Reserved => {
                "some devices are reserved for a request that comes before it and has waited for long; a durable lease on devices of one kind, or a short one that declares its max_duration, could have them meanwhile"
            }
            Self::Guaranteed => {
                "too few devices are free; it is within the guarantee of its tenant, so leases beyond guarantees make room for it where they can"
            }
            Self::HasReservation => {
                "too few devices are free; as it has waited for long, later requests get its devices only with leases that can be suspended for it"
            }
            Self::TooFewFree => "too few suitable devices are free",
        })
    }
}
