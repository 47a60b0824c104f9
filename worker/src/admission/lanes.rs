//! The grants of one device, by lanes.
//!
//! Lane 0 is the whole device, and each share has a lane of its own. A grant of the whole device
//! ends the earlier grants of all lanes; a grant of a share ends those of its lane and of the whole
//! device. So leases can have the device at the same time only if each has a share.

use std::collections::BTreeMap;

use tensord_proto::{
    grant::GrantNumber,
    ids::LeaseId,
    share::{self, DeviceShare, MAX_LANES},
};

/// The lane of grants of the whole device.
pub(crate) const WHOLE_LANE: u32 = 0;

/// The lanes of a device that leases may have here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lanes {
    /// The whole device, or shares.
    All,
    /// This lane only: the process of a lease serves no other lease.
    Only(u32),
}

impl Lanes {
    fn has(self, lane: u32) -> bool {
        match self {
            Self::All => lane <= MAX_LANES,
            Self::Only(only) => lane == only,
        }
    }
}

/// The state of the latest grant of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GrantState {
    /// The grant has ended.
    Ended,
    /// This lease may use the device, with this share of it.
    InUse(LeaseId, Option<DeviceShare>),
}

impl GrantState {
    fn lease(self) -> Option<LeaseId> {
        match self {
            Self::InUse(lease, _) => Some(lease),
            Self::Ended => None,
        }
    }
}

/// The latest grant that a lane may have, and its state.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaneState {
    /// The latest grant that ended those of the lane before it. It may be one of another lane.
    pub(super) latest: GrantNumber,
    pub(super) grant_state: GrantState,
    /// The latest grant of this lane that was seen, or [`GrantNumber::ZERO`].
    own: GrantNumber,
}

impl LaneState {
    /// Returns the state of a lane of which no grant was seen, and whose grants up to `latest` have
    /// ended.
    fn unseen(latest: GrantNumber) -> Self {
        Self {
            latest,
            grant_state: GrantState::Ended,
            own: GrantNumber::ZERO,
        }
    }

    /// Invalidates all grants before `grant`. Returns the lease that had one.
    fn end_before(&mut self, grant: GrantNumber) -> Option<LeaseId> {
        if grant <= self.latest {
            return None;
        }
        self.latest = grant;
        std::mem::replace(&mut self.grant_state, GrantState::Ended).lease()
    }

    /// Returns the number up to which all grants of the lane have ended.
    ///
    /// It is the number of a grant of this lane, also if a later grant of another lane has ended that
    /// one: a scheduler that restarts would take the later grant, which may be in use, for ended, too.
    pub(super) fn ended_up_to(&self) -> GrantNumber {
        match self.grant_state {
            GrantState::Ended => self.own,
            GrantState::InUse(..) => self.own.previous(),
        }
    }
}

/// The grants of one device.
#[derive(Clone, Debug)]
pub(super) struct DeviceLanes {
    here: Lanes,
    /// The lanes of which a grant was seen.
    lanes: BTreeMap<u32, LaneState>,
    /// The latest grant of the whole device that was seen. It has ended the earlier ones of lanes
    /// of which no grant was seen, too.
    latest_whole: GrantNumber,
}

impl DeviceLanes {
    pub(super) fn new(here: Lanes) -> Self {
        Self {
            here,
            lanes: BTreeMap::new(),
            latest_whole: GrantNumber::ZERO,
        }
    }

    /// Returns the state of a lane, or `None` if leases cannot have it here.
    pub(super) fn lane(&self, lane: u32) -> Option<LaneState> {
        let unseen = LaneState::unseen(self.latest_whole);
        let state = self.lanes.get(&lane).copied().unwrap_or(unseen);
        self.here.has(lane).then_some(state)
    }

    /// Records a grant, which gives the lease the device unless a later one is known. Returns the
    /// leases that have lost the device by it.
    pub(super) fn granted(
        &mut self,
        lease: LeaseId,
        grant: GrantNumber,
        share: Option<DeviceShare>,
    ) -> Vec<LeaseId> {
        let lane = share::lane(share);
        let Some(known) = self.lane(lane) else {
            return Vec::new();
        };
        self.see(lane);
        self.see(WHOLE_LANE);
        // A grant of the whole device ends earlier shares also if it is outdated itself, as a later
        // share of another lane is known.
        let ends = |of: u32| lane == WHOLE_LANE || of == lane || of == WHOLE_LANE;
        let ended = self.lanes.iter_mut().filter(|(of, _)| ends(**of));
        let ended = ended.filter_map(|(_, state)| state.end_before(grant));
        let ended: Vec<_> = ended.collect();
        if lane == WHOLE_LANE {
            self.latest_whole = self.latest_whole.max(grant);
        }
        let state = self.see(lane);
        state.own = state.own.max(grant);
        if grant > known.latest {
            state.grant_state = GrantState::InUse(lease, share);
        }
        ended
    }

    /// Records that all grants of a lane up to this one have ended.
    pub(super) fn end(&mut self, lane: u32, grant: GrantNumber) {
        if !self.here.has(lane) {
            return;
        }
        let state = self.see(lane);
        state.own = state.own.max(grant);
        if grant >= state.latest {
            state.latest = grant;
            state.grant_state = GrantState::Ended;
        }
    }

    fn see(&mut self, lane: u32) -> &mut LaneState {
        let unseen = LaneState::unseen(self.latest_whole);
        self.lanes.entry(lane).or_insert(unseen)
    }

    /// Returns the leases that may use the device, with their shares and the numbers of their
    /// grants.
    pub(super) fn in_use(
        &self,
    ) -> impl Iterator<Item = (LeaseId, Option<DeviceShare>, GrantNumber)> {
        self.lanes
            .values()
            .filter_map(|state| match state.grant_state {
                GrantState::InUse(lease, share) => Some((lease, share, state.latest)),
                GrantState::Ended => None,
            })
    }

    /// Returns each lane of which a grant was seen, with the number up to which all its grants have
    /// ended.
    pub(super) fn ended(&self) -> impl Iterator<Item = (u32, GrantNumber)> {
        let lanes = self.lanes.iter();
        let ended = lanes.map(|(&lane, state)| (lane, state.ended_up_to()));
        ended.filter(|(_, grant)| *grant != GrantNumber::ZERO)
    }
}
