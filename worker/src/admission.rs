//! Which lease may use each device: the highest grant of the device that was ever seen.
//!
//! A pure state machine: claims of tokens and messages of the scheduler come in, decisions
//! go out, and time is an argument. It remembers one number for each device and no list of
//! leases, so a token does not become good again however many leases follow it.
//!
//! A token's end is judged by the scheduler's clock, and not while the scheduler is out of
//! reach: it could not have renewed the token. It is of interest to new sessions alone.
//!
//! After a restart a worker knows nothing of this, and has another id, which no earlier
//! token names.

mod clock;

use std::time::Instant;

use tensord_proto::{grant::GrantNumber, ids::LeaseId};

use self::clock::SchedulerClock;

/// What a token, whose signature holds, claims of one of this worker's devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) lease: LeaseId,
    pub(crate) device: u32,
    pub(crate) grant: GrantNumber,
}

/// Why a token opens nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    /// The scheduler ended it.
    #[error("lease {lease} has ended; ask the pool for a new one")]
    Ended { lease: LeaseId },
    /// The device went on to another lease.
    #[error(
        "lease {lease} has device {device} no more: its grant is {grant}, and the latest is {latest}; ask the pool for a new lease"
    )]
    Superseded {
        lease: LeaseId,
        device: u32,
        grant: GrantNumber,
        latest: GrantNumber,
    },
    /// The device does not exist, or the token names no grant.
    #[error("the token names no grant of device {device} here")]
    NoGrant { device: u32 },
    /// The token is past its end.
    #[error(
        "the token of lease {lease} opens no new session since {seconds} s ago; use the one that the scheduler sent later"
    )]
    Expired { lease: LeaseId, seconds: u64 },
}

/// What the latest grant of a device is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Standing {
    /// Nothing any more.
    Ended,
    /// The scheduler announced it; its lease has not come yet.
    Given,
    /// This lease uses it.
    Used(LeaseId),
}

#[derive(Clone, Copy, Debug)]
struct Device {
    latest: GrantNumber,
    standing: Standing,
}

/// See the module's documentation.
pub(crate) struct Admission {
    devices: Vec<Device>,
    clock: SchedulerClock,
}

/// Sessions.
impl Admission {
    /// For so many devices, none of which was granted yet.
    pub(crate) fn new(devices: usize) -> Self {
        let device = Device {
            latest: GrantNumber::ZERO,
            standing: Standing::Ended,
        };
        Self {
            devices: vec![device; devices],
            clock: SchedulerClock::default(),
        }
    }

    /// Whether a new session may be opened by a token that ends at `expires_at_ms`. What is
    /// returned is an earlier lease of the device, whose sessions on it are to be ended.
    pub(crate) fn open(
        &mut self,
        claim: Claim,
        expires_at_ms: u64,
        now: Instant,
    ) -> Result<Option<LeaseId>, Refusal> {
        let Claim {
            lease,
            device,
            grant,
        } = claim;
        if let Some(time_ms) = self.clock.time_ms(now)
            && time_ms >= expires_at_ms
        {
            let seconds = (time_ms - expires_at_ms) / 1000;
            return Err(Refusal::Expired { lease, seconds });
        }
        let known = self.devices.get_mut(device as usize);
        let known = known.ok_or(Refusal::NoGrant { device })?;
        if grant > known.latest {
            let earlier = known.standing;
            known.latest = grant;
            known.standing = Standing::Used(lease);
            return Ok(earlier.lease());
        }
        if grant == known.latest && known.standing == Standing::Given {
            known.standing = Standing::Used(lease);
        }
        self.check(claim).map(|()| None)
    }

    /// Whether `claim` is by the current grant of the device: so for what a session that
    /// was opened needs, such as another connection.
    pub(crate) fn check(&self, claim: Claim) -> Result<(), Refusal> {
        let Claim {
            lease,
            device,
            grant,
        } = claim;
        let known = self.devices.get(device as usize);
        let known = known.filter(|_| grant != GrantNumber::ZERO);
        let known = known.ok_or(Refusal::NoGrant { device })?;
        match known.standing {
            Standing::Used(user) if user == lease && grant == known.latest => Ok(()),
            Standing::Ended if grant == known.latest => Err(Refusal::Ended { lease }),
            _ => Err(Refusal::Superseded {
                lease,
                device,
                grant,
                latest: known.latest,
            }),
        }
    }
}

impl Standing {
    fn lease(self) -> Option<LeaseId> {
        match self {
            Self::Used(lease) => Some(lease),
            Self::Ended | Self::Given => None,
        }
    }
}

/// The scheduler.
impl Admission {
    /// A device was granted. What is returned is as for [`open`](Self::open).
    pub(crate) fn granted(&mut self, device: u32, grant: GrantNumber) -> Option<LeaseId> {
        let known = self.devices.get_mut(device as usize)?;
        if grant <= known.latest {
            return None;
        }
        let earlier = known.standing;
        known.latest = grant;
        known.standing = Standing::Given;
        earlier.lease()
    }

    /// No grant of a device up to this one is good any more.
    pub(crate) fn end(&mut self, device: u32, grant: GrantNumber) {
        if let Some(known) = self.devices.get_mut(device as usize)
            && grant >= known.latest
        {
            known.latest = grant;
            known.standing = Standing::Ended;
        }
    }

    /// The lease that uses each device, as far as is known here.
    pub(crate) fn held(&self) -> impl Iterator<Item = Claim> {
        (0..).zip(&self.devices).filter_map(|(device, known)| {
            Some(Claim {
                lease: known.standing.lease()?,
                device,
                grant: known.latest,
            })
        })
    }

    /// Each device that was ever granted, and the number up to which all grants have ended.
    pub(crate) fn ended(&self) -> impl Iterator<Item = (u32, GrantNumber)> {
        let ended = |known: &Device| match known.standing {
            Standing::Ended => known.latest,
            Standing::Given | Standing::Used(_) => known.latest.previous(),
        };
        let devices = (0..).zip(&self.devices);
        devices
            .map(move |(device, known)| (device, ended(known)))
            .filter(|(_, grant)| *grant != GrantNumber::ZERO)
    }

    /// It was `time_ms` at the scheduler at `now`.
    pub(crate) fn set_time(&mut self, time_ms: u64, now: Instant) {
        self.clock.set(time_ms, now);
    }

    /// The scheduler is out of reach.
    pub(crate) fn cut_off(&mut self) {
        self.clock.cut_off();
    }
}

#[cfg(test)]
mod tests;
