//! Decides which lease may use each device: the one with the highest grant of the device
//! ever seen.
//!
//! A pure state machine: its inputs are claims of tokens, messages of the scheduler, and
//! the time; its outputs are decisions. It stores one number for each device and no list of
//! leases, so a superseded token stays invalid however many leases follow.
//!
//! The expiry of a token is checked against the scheduler's clock, and only for new sessions.
//! While the scheduler is unreachable, tokens do not expire, as the scheduler could not have
//! renewed them.
//!
//! A restarted worker has lost this state, but it also has another id, which no earlier
//! token names.

mod clock;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use tensord_proto::{
    grant::GrantNumber,
    ids::LeaseId,
    v1::{DeviceGrant, HeldDevice},
};

use self::clock::SchedulerClock;

/// A lease's claim to one of this worker's devices, from a token with a valid signature or
/// from a message of the scheduler.
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
    /// This lease may use the device.
    InUse(LeaseId),
}

#[derive(Clone, Copy, Debug)]
struct DeviceState {
    latest: GrantNumber,
    grant_state: GrantState,
}

/// The admission state of all devices; see the module's documentation.
pub(crate) struct Admission {
    devices: BTreeMap<u32, DeviceState>,
    clock: SchedulerClock,
}

/// Decisions about sessions.
impl Admission {
    /// Creates the state for the devices with these indices, none of which was granted yet.
    pub(crate) fn new(devices: impl IntoIterator<Item = u32>) -> Self {
        let device = DeviceState {
            latest: GrantNumber::ZERO,
            grant_state: GrantState::Ended,
        };
        Self {
            devices: devices.into_iter().map(|index| (index, device)).collect(),
            clock: SchedulerClock::default(),
        }
    }

    /// Admits a new session with a token that expires at `expires_at_ms`, and records the
    /// grant. Returns the lease that used the device until now, if there is one; the caller
    /// must end its sessions on the device.
    pub(crate) fn open(
        &mut self,
        claim: Claim,
        expires_at_ms: u64,
        now: Instant,
    ) -> Result<Option<LeaseId>, AdmissionError> {
        self.check_new(claim, expires_at_ms, now)?;
        // The scheduler's message about this grant may be late or lost, so the token stands in
        // for it.
        Ok(self.granted(claim))
    }

    /// Checks whether a new session may be opened with a token that expires at
    /// `expires_at_ms`.
    pub(crate) fn check_new(
        &self,
        claim: Claim,
        expires_at_ms: u64,
        now: Instant,
    ) -> Result<(), AdmissionError> {
        if let Some(time_ms) = self.clock.time_ms(now)
            && time_ms >= expires_at_ms
        {
            let seconds = (time_ms - expires_at_ms) / 1000;
            let lease = claim.lease;
            return Err(AdmissionError::Expired { lease, seconds });
        }
        let known = self.devices.get(&claim.device);
        match known.is_some_and(|known| claim.grant > known.latest) {
            true => Ok(()),
            false => self.check(claim),
        }
    }

    /// Checks that `claim` is for the current grant of the device. Does not check the token's
    /// expiry, so that existing sessions can get another connection.
    pub(crate) fn check(&self, claim: Claim) -> Result<(), AdmissionError> {
        let Claim {
            lease,
            device,
            grant,
        } = claim;
        let known = self.devices.get(&device);
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
            Self::Ended => None,
        }
    }
}

/// Messages from the scheduler, and reports to it.
impl Admission {
    /// Records that a device was granted. The return value is as for [`open`](Self::open).
    pub(crate) fn granted(&mut self, claim: Claim) -> Option<LeaseId> {
        let known = self.devices.get_mut(&claim.device)?;
        if claim.grant <= known.latest {
            return None;
        }
        known.latest = claim.grant;
        let earlier = std::mem::replace(&mut known.grant_state, GrantState::InUse(claim.lease));
        earlier.lease()
    }

    /// Records that all grants of a device up to this one have ended.
    pub(crate) fn end(&mut self, device: u32, grant: GrantNumber) {
        if let Some(known) = self.devices.get_mut(&device)
            && grant >= known.latest
        {
            known.latest = grant;
            known.grant_state = GrantState::Ended;
        }
    }

    /// Returns the lease that may use each device, as far as this worker knows.
    pub(crate) fn active_claims(&self) -> impl Iterator<Item = Claim> {
        self.devices.iter().filter_map(|(&device, known)| {
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
            GrantState::InUse(_) => known.latest.previous(),
        };
        let devices = self.devices.iter();
        devices
            .map(move |(&device, known)| (device, ended(known)))
            .filter(|(_, grant)| *grant != GrantNumber::ZERO)
    }

    /// Returns the devices that leases hold: those in use, and those in `left`, which a
    /// lease still occupies. An entry is marked as ended if its lease may no longer use the
    /// device.
    pub(crate) fn held_devices(&self, left: BTreeSet<(LeaseId, u32)>) -> Vec<HeldDevice> {
        let held: BTreeMap<_, _> = self
            .active_claims()
            .map(|claim| ((claim.lease, claim.device), claim.grant))
            .collect();
        let ended: BTreeMap<_, _> = self.ended().collect();
        let over = left.into_iter().filter(|left| !held.contains_key(left));
        let over = over.map(|(lease, device)| {
            let grant = ended.get(&device).copied().unwrap_or_default();
            ((lease, device), grant, true)
        });
        let in_use = held.iter().map(|(&of, &grant)| (of, grant, false));
        let device =
            |((lease, device_index), grant, ended): ((LeaseId, u32), GrantNumber, bool)| {
                HeldDevice {
                    lease_id: lease.0,
                    device_index,
                    grant: Some(grant.into()),
                    ended,
                    share: None,
                }
            };
        in_use.chain(over).map(device).collect()
    }

    /// Returns [`ended`](Self::ended) as a message.
    pub(crate) fn ended_grants(&self) -> Vec<DeviceGrant> {
        let device = |(device_index, grant): (u32, GrantNumber)| DeviceGrant {
            device_index,
            grant: Some(grant.into()),
            share: None,
        };
        self.ended().map(device).collect()
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
