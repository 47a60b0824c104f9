//! Decides which leases may use each device: in each of its [lanes](lanes) the one with the
//! highest grant ever seen.
//!
//! A pure state machine: its inputs are claims of tokens, messages of the scheduler, and
//! the time; its outputs are decisions. It stores one number for each lane and no list of
//! leases, so a superseded token stays invalid however many leases follow. Whether the lanes of a
//! device have no more than the device together is the scheduler's decision, which has signed the
//! tokens.
//!
//! The expiry of a token is checked against the scheduler's clock, and only for new sessions.
//! While the scheduler is unreachable, tokens do not expire, as the scheduler could not have
//! renewed them.
//!
//! A restarted worker has lost this state, but it also has another id, which no earlier
//! token names.

mod clock;
mod lanes;

use std::{collections::BTreeMap, time::Instant};

use tensord_proto::{
    grant::{GrantNumber, number},
    ids::LeaseId,
    share::{self, DeviceShare, ShareError},
    v1::{self, DeviceGrant, HeldDevice},
};

pub(crate) use self::lanes::{Lanes, WHOLE_LANE};
use self::{
    clock::SchedulerClock,
    lanes::{DeviceLanes, GrantState},
};

/// A lease's claim to one of this worker's devices, from a token with a valid signature or
/// from a message of the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) lease: LeaseId,
    pub(crate) device: u32,
    pub(crate) grant: GrantNumber,
    /// The lease's share of the device; `None` if it has the whole device.
    pub(crate) share: Option<DeviceShare>,
}

impl Claim {
    /// Returns a lease's claim by a grant.
    ///
    /// # Errors
    ///
    /// If the grant has no valid share.
    pub(crate) fn new(lease: LeaseId, granted: &DeviceGrant) -> Result<Self, ShareError> {
        Ok(Self {
            lease,
            device: granted.device_index,
            grant: number(granted.grant),
            share: granted.share.map(DeviceShare::try_from).transpose()?,
        })
    }

    pub(crate) fn lane(&self) -> u32 {
        share::lane(self.share)
    }

    /// Returns the grant as a message.
    pub(crate) fn to_grant(self) -> DeviceGrant {
        DeviceGrant {
            device_index: self.device,
            grant: Some(self.grant.into()),
            share: self.share.map(Into::into),
        }
    }
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
    /// The device is not divided in this way here.
    #[error("the token is for {} of device {device}, which leases cannot have here", part(*lane))]
    NoLane { device: u32, lane: u32 },
    /// The token has expired.
    #[error(
        "the token of lease {lease} expired {seconds} s ago and opens no new session; use the renewed token from the scheduler"
    )]
    Expired { lease: LeaseId, seconds: u64 },
}

/// Returns the lane of a grant. Does not check the grant's share.
pub(crate) fn lane_of(granted: &DeviceGrant) -> u32 {
    granted.share.map_or(WHOLE_LANE, |share| share.lane)
}

/// Returns what a lane is, for people.
fn part(lane: u32) -> String {
    match lane {
        WHOLE_LANE => "the whole".into(),
        lane => format!("a share (lane {lane})"),
    }
}

/// The admission state of all devices; see the module's documentation.
pub(crate) struct Admission {
    devices: BTreeMap<u32, DeviceLanes>,
    clock: SchedulerClock,
}

/// Decisions about sessions.
impl Admission {
    /// Creates the state for the devices with these indices, none of which was granted yet. Leases
    /// can have these lanes of a device.
    pub(crate) fn new(devices: impl IntoIterator<Item = (u32, Lanes)>) -> Self {
        let devices = devices.into_iter();
        Self {
            devices: devices
                .map(|(index, lanes)| (index, DeviceLanes::new(lanes)))
                .collect(),
            clock: SchedulerClock::default(),
        }
    }

    /// Admits a new session with a token that expires at `expires_at_ms`, and records the
    /// grant. Returns the leases that have lost the device by it; the caller must end their
    /// sessions on the device.
    pub(crate) fn open(
        &mut self,
        claim: Claim,
        expires_at_ms: u64,
        now: Instant,
    ) -> Result<Vec<LeaseId>, AdmissionError> {
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
        let lane = known.and_then(|lanes| lanes.lane(claim.lane()));
        match lane.is_some_and(|lane| claim.grant > lane.latest) {
            true => Ok(()),
            false => self.check(claim),
        }
    }

    /// Checks that `claim` is for the current grant of its lane. Does not check the token's
    /// expiry, so that existing sessions can get another connection.
    pub(crate) fn check(&self, claim: Claim) -> Result<(), AdmissionError> {
        let Claim {
            lease,
            device,
            grant,
            share: _,
        } = claim;
        let known = self.devices.get(&device);
        let known = known.filter(|_| grant != GrantNumber::ZERO);
        let known = known.ok_or(AdmissionError::NoGrant { device })?;
        let lane = claim.lane();
        let known = known.lane(lane);
        let known = known.ok_or(AdmissionError::NoLane { device, lane })?;
        match known.grant_state {
            GrantState::InUse(user, _) if user == lease && grant == known.latest => Ok(()),
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

/// Messages from the scheduler, and reports to it.
impl Admission {
    /// Records that a device was granted. The return value is as for [`open`](Self::open).
    pub(crate) fn granted(&mut self, claim: Claim) -> Vec<LeaseId> {
        match self.devices.get_mut(&claim.device) {
            Some(known) => known.granted(claim.lease, claim.grant, claim.share),
            None => Vec::new(),
        }
    }

    /// Records that all grants of a device's lane up to this one have ended. Of the share of
    /// `ended`, only the lane is used.
    pub(crate) fn end(&mut self, ended: &DeviceGrant) {
        if let Some(known) = self.devices.get_mut(&ended.device_index) {
            known.end(lane_of(ended), number(ended.grant));
        }
    }

    /// Returns the leases that may use devices, as far as this worker knows.
    pub(crate) fn active_claims(&self) -> impl Iterator<Item = Claim> {
        self.devices.iter().flat_map(|(&device, known)| {
            known.in_use().map(move |(lease, share, grant)| Claim {
                lease,
                device,
                grant,
                share,
            })
        })
    }

    /// Returns each lane of a device that was ever granted, with the number up to which all its
    /// grants have ended: device, lane and number.
    pub(crate) fn ended(&self) -> impl Iterator<Item = (u32, u32, GrantNumber)> {
        self.devices.iter().flat_map(|(&device, known)| {
            let ended = known.ended();
            ended.map(move |(lane, grant)| (device, lane, grant))
        })
    }

    /// Returns the devices that leases hold: those in use, and those in `left`, which a
    /// lease still occupies with a share, or as a whole. An entry is marked as ended if its lease
    /// may no longer use the device.
    pub(crate) fn held_devices(
        &self,
        left: BTreeMap<(LeaseId, u32), Option<DeviceShare>>,
    ) -> Vec<HeldDevice> {
        let held: BTreeMap<_, _> = self
            .active_claims()
            .map(|claim| ((claim.lease, claim.device), claim))
            .collect();
        let over = left
            .into_iter()
            .filter(|(left, _)| !held.contains_key(left));
        let over = over.map(|((lease, device), share)| {
            let known = self.devices.get(&device);
            let lane = known.and_then(|known| known.lane(share::lane(share)));
            let claim = Claim {
                lease,
                device,
                grant: lane.map(|lane| lane.ended_up_to()).unwrap_or_default(),
                share,
            };
            (claim, true)
        });
        let in_use = held.values().map(|claim| (*claim, false));
        let device = |(claim, ended): (Claim, bool)| HeldDevice {
            lease_id: claim.lease.0,
            device_index: claim.device,
            grant: Some(claim.grant.into()),
            ended,
            share: claim.share.map(Into::into),
        };
        in_use.chain(over).map(device).collect()
    }

    /// Returns [`ended`](Self::ended) as a message.
    pub(crate) fn ended_grants(&self) -> Vec<DeviceGrant> {
        let lane = |(device_index, lane, grant): (u32, u32, GrantNumber)| DeviceGrant {
            device_index,
            grant: Some(grant.into()),
            share: (lane != WHOLE_LANE).then(|| v1::DeviceShare {
                lane,
                ..v1::DeviceShare::default()
            }),
        };
        self.ended().map(lane).collect()
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
