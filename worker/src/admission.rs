//! Decides which lease may use each device: the one with the highest grant of the device
//! ever seen.
//!
//! A pure state machine: its inputs are claims of tokens, messages of the scheduler, and
//! the time; its outputs are decisions. It stores one number for each device and no list of
//! leases, so a superseded token stays invalid however many leases follow.
//!
//! The expiry of a token is checked against the scheduler's clock, and only for new
//! sessions. While the scheduler is unreachable, it is not checked, as the scheduler could
//! not have renewed the token.
//!
//! A restarted worker has lost this state, but it also has another id, which no earlier
//! token names.

mod clock;

use std::time::Instant;

use tensord_proto::{grant::GrantNumber, ids::LeaseId};

use self::clock::SchedulerClock;

/// The claim of a token with a valid signature to one of this worker's devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) lease: LeaseId,
    pub(crate) device: u32,
    pub(crate) grant: GrantNumber,
}

/// Why a token is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AdmissionError {
    /// The scheduler ended the lease.
    #[error("lease {lease} has ended; request a new lease from the pool")]
    Ended { lease: LeaseId },
    /// The device was granted to another lease.
    #[error(
        "lease {lease} no longer has device {device}: its grant is {grant}, and the latest grant is {latest}; request a new lease from the pool"
    )]
    Superseded {
        lease: LeaseId,
        device: u32,
        grant: GrantNumber,
        latest: GrantNumber,
    },
    /// The device does not exist, or the token names no grant.
    #[error("the token contains no grant of device {device} of this worker")]
    NoGrant { device: u32 },
    /// The token has expired.
    #[error(
        "the token of lease {lease} expired {seconds} s ago and opens no new session; use the renewed token from the scheduler"
    )]
    Expired { lease: LeaseId, seconds: u64 },
}

/// The state of the latest grant of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GrantState {
    /// The grant has ended.
    Ended,
    /// The scheduler announced the grant, but its lease has not used it yet.
    Announced,
    /// This lease uses the device.
    InUse(LeaseId),
}

#[derive(Clone, Copy, Debug)]
struct DeviceState {
    latest: GrantNumber,
    grant_state: GrantState,
}

/// The admission state of all devices; see the module's documentation.
pub(crate) struct Admission {
    devices: Vec<DeviceState>,
    clock: SchedulerClock,
}

/// Decisions about sessions.
impl Admission {
    /// Creates the state for this number of devices, none of which was granted yet.
    pub(crate) fn new(devices: usize) -> Self {
        let device = DeviceState {
            latest: GrantNumber::ZERO,
            grant_state: GrantState::Ended,
        };
        Self {
            devices: vec![device; devices],
            clock: SchedulerClock::default(),
        }
    }

    /// Checks whether a new session may be opened with a token that expires at
    /// `expires_at_ms`. Returns an earlier lease of the device, if any, whose sessions on
    /// the device the caller must end.
    pub(crate) fn open(
        &mut self,
        claim: Claim,
        expires_at_ms: u64,
        now: Instant,
    ) -> Result<Option<LeaseId>, AdmissionError> {
        let Claim {
            lease,
            device,
            grant,
        } = claim;
        if let Some(time_ms) = self.clock.time_ms(now)
            && time_ms >= expires_at_ms
        {
            let seconds = (time_ms - expires_at_ms) / 1000;
            return Err(AdmissionError::Expired { lease, seconds });
        }
        let known = self.devices.get_mut(device as usize);
        let known = known.ok_or(AdmissionError::NoGrant { device })?;
        if grant > known.latest {
            let earlier = known.grant_state;
            known.latest = grant;
            known.grant_state = GrantState::InUse(lease);
            return Ok(earlier.lease());
        }
        if grant == known.latest && known.grant_state == GrantState::Announced {
            known.grant_state = GrantState::InUse(lease);
        }
        self.check(claim).map(|()| None)
    }

    /// Checks that `claim` is for the current grant of the device. Used for existing
    /// sessions, such as for another connection.
    pub(crate) fn check(&self, claim: Claim) -> Result<(), AdmissionError> {
        let Claim {
            lease,
            device,
            grant,
        } = claim;
        let known = self.devices.get(device as usize);
        let known = known.filter(|_| grant != GrantNumber::ZERO);
        let known = known.ok_or(AdmissionError::NoGrant { device })?;
        match known.grant_state {
            GrantState::InUse(user) if user == lease && grant == known.latest => Ok(()),
            GrantState::Ended if grant == known.latest => Err(AdmissionError::Ended { lease }),
            _ => Err(AdmissionError::Superseded {
                lease,
                device,
                grant,
                latest: known.latest,
            }),
        }
    }
}

impl GrantState {
    fn lease(self) -> Option<LeaseId> {
        match self {
            Self::InUse(lease) => Some(lease),
            Self::Ended | Self::Announced => None,
        }
    }
}

/// Messages of the scheduler.
impl Admission {
    /// Records that a device was granted. The return value is as for [`open`](Self::open).
    pub(crate) fn granted(&mut self, device: u32, grant: GrantNumber) -> Option<LeaseId> {
        let known = self.devices.get_mut(device as usize)?;
        if grant <= known.latest {
            return None;
        }
        let earlier = known.grant_state;
        known.latest = grant;
        known.grant_state = GrantState::Announced;
        earlier.lease()
    }

    /// Records that all grants of a device up to this one have ended.
    pub(crate) fn end(&mut self, device: u32, grant: GrantNumber) {
        if let Some(known) = self.devices.get_mut(device as usize)
            && grant >= known.latest
        {
            known.latest = grant;
            known.grant_state = GrantState::Ended;
        }
    }

    /// Returns the lease that uses each device, as far as this worker knows.
    pub(crate) fn active_claims(&self) -> impl Iterator<Item = Claim> {
        (0..).zip(&self.devices).filter_map(|(device, known)| {
            Some(Claim {
                lease: known.grant_state.lease()?,
                device,
                grant: known.latest,
            })
        })
    }

    /// Returns each device that was ever granted, with the number up to which all its
    /// grants have ended.
    pub(crate) fn ended(&self) -> impl Iterator<Item = (u32, GrantNumber)> {
        let ended = |known: &DeviceState| match known.grant_state {
            GrantState::Ended => known.latest,
            GrantState::Announced | GrantState::InUse(_) => known.latest.previous(),
        };
        let devices = (0..).zip(&self.devices);
        devices
            .map(move |(device, known)| (device, ended(known)))
            .filter(|(_, grant)| *grant != GrantNumber::ZERO)
    }

    /// Records that the scheduler's clock was at `time_ms` at `now`.
    pub(crate) fn set_time(&mut self, time_ms: u64, now: Instant) {
        self.clock.set(time_ms, now);
    }

    /// Records that the scheduler is unreachable.
    pub(crate) fn mark_unreachable(&mut self) {
        self.clock.mark_unreachable();
    }
}

#[cfg(test)]
mod tests;
