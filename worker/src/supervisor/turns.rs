//! Decides which lease's process may use a device, when several leases share it.
//!
//! A pure state machine. A process requests the device's turn when it has work, and keeps the
//! turn until another process wants it: as long as nobody else does, a turn costs no message.
//! Once another process has requested the turn, the worker tells the holder to return the turn when
//! the holder has no work. When the holder has had the turn for [`MIN_TURN`], and its [virtual
//! time](virtual_time) has passed that of a lease that waits, the worker revokes the turn: the holder
//! returns it after its current time slice. A turn that is free goes to the lease with the smallest virtual time. The process of a
//! holder that does not return the turn in time is killed.
//!
//! So if leases always have work, the times that they have had the device, divided by their weights,
//! differ by no more than `MIN_TURN` and the longest delay of a return, divided by the weight of the
//! lease that is ahead.

mod virtual_time;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use tensord_proto::ids::LeaseId;

use self::virtual_time::{Accounts, time_of};

/// How long a holder has the turn at least, unless it has no work. An executor returns a turn between
/// two time slices of this length, and each change costs two messages and, on a GPU, a wait for the
/// device and a switch of the driver's context.
pub(super) const MIN_TURN: Duration = crate::executor::QUANTUM;

/// By how much the worker may be late to see that a turn was not returned in time. If it is later, it
/// has been stopped or had no core, and once waits for as long again before it kills the process: the turn
/// may have been returned, in a message that the worker has yet to read.
const MAX_LATENESS: Duration = Duration::from_secs(1);

/// What the supervisor is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TurnAction {
    /// Grant the turn of the device to the lease.
    Grant(LeaseId, u32),
    /// Have the lease return the turn of the device when it has no work.
    Want(LeaseId, u32),
    /// Request the turn of the device back from the lease.
    Revoke(LeaseId, u32),
    /// Kill the lease's process, which did not return the turn of the device.
    Kill(LeaseId, u32),
}

impl TurnAction {
    pub(super) fn lease(self) -> LeaseId {
        let (Self::Grant(lease, _)
        | Self::Want(lease, _)
        | Self::Revoke(lease, _)
        | Self::Kill(lease, _)) = self;
        lease
    }
}

/// The turns of all devices.
#[derive(Debug)]
pub(super) struct Turns {
    /// How long a holder may take to return a turn.
    return_timeout: Duration,
    devices: BTreeMap<u32, DeviceTurns>,
}

#[derive(Debug, Default)]
struct DeviceTurns {
    holder: Option<Holder>,
    accounts: Accounts,
}

#[derive(Debug)]
struct Holder {
    lease: LeaseId,
    since: Instant,
    state: HolderState,
}

#[derive(Debug, PartialEq, Eq)]
enum HolderState {
    /// Nobody else wants the turn.
    Keeps,
    /// The holder is to return the turn when it has no work.
    Wanted,
    /// The turn was requested back.
    Revoked {
        kill_at: Instant,
        /// Whether that is later than at first, as the worker was late.
        is_postponed: bool,
    },
    /// The process was killed, and has not exited yet.
    Killed,
}

impl Turns {
    pub(super) fn new(return_timeout: Duration) -> Self {
        Self {
            return_timeout,
            devices: BTreeMap::new(),
        }
    }

    /// Records that the process of a lease with this weight has work for a device. A lease with a
    /// share has its thousandths as weight.
    pub(super) fn request(
        &mut self,
        now: Instant,
        lease: LeaseId,
        device: u32,
        weight: u32,
    ) -> Vec<TurnAction> {
        let turns = self.devices.entry(device).or_default();
        let holder = turns.holder.as_ref().map(|it| (it.lease, it.since));
        if holder.is_some_and(|(holder, _)| holder == lease) || turns.accounts.is_waiting(lease) {
            // A repeated request changes nothing.
            return Vec::new();
        }
        turns.accounts.add_waiting(now, lease, weight, holder);
        self.advance(now, device)
    }

    /// Records that a process has returned the turn of a device, or, if it has none, its request: it
    /// ends, and must not be granted a turn that it would not use.
    pub(super) fn returned(
        &mut self,
        now: Instant,
        lease: LeaseId,
        device: u32,
    ) -> Vec<TurnAction> {
        if let Some(turns) = self.devices.get_mut(&device) {
            turns.accounts.remove_waiting(now, lease);
            turns.end_turn(now, lease);
        }
        self.advance(now, device)
    }

    /// Records that the process of a lease has exited. What the lease has used still counts.
    pub(super) fn remove(&mut self, now: Instant, lease: LeaseId) -> Vec<TurnAction> {
        let devices: Vec<_> = self.devices.keys().copied().collect();
        let devices = devices.into_iter();
        let removed = devices.flat_map(|device| self.returned(now, lease, device));
        removed.collect()
    }

    /// Removes a lease that has no process any more, and gets none.
    pub(super) fn forget(&mut self, now: Instant, lease: LeaseId) -> Vec<TurnAction> {
        let actions = self.remove(now, lease);
        for turns in self.devices.values_mut() {
            turns.accounts.forget(lease);
        }
        actions
    }

    /// Requests turns back that are due, and kills the processes that have not returned one in time.
    pub(super) fn tick(&mut self, now: Instant) -> Vec<TurnAction> {
        let devices: Vec<_> = self.devices.keys().copied().collect();
        let due = devices.into_iter();
        due.flat_map(|device| self.advance(now, device)).collect()
    }

    /// Returns when [`tick`](Self::tick) has something to do, if nothing happens until then.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let deadlines = self.devices.values();
        deadlines.filter_map(DeviceTurns::deadline).min()
    }

    /// Grants a turn that is free, and demands one that other leases want.
    fn advance(&mut self, now: Instant, device: u32) -> Vec<TurnAction> {
        let mut actions = Vec::new();
        let Some(turns) = self.devices.get_mut(&device) else {
            return actions;
        };
        if turns.holder.is_none()
            && let Some(lease) = turns.accounts.take_next()
        {
            actions.push(TurnAction::Grant(lease, device));
            turns.holder = Some(Holder {
                lease,
                since: now,
                state: HolderState::Keeps,
            });
        }
        actions.extend(turns.demand(now, device, self.return_timeout));
        actions
    }
}

impl DeviceTurns {
    /// Ends the turn of a lease, if it has the turn, and charges for it.
    fn end_turn(&mut self, now: Instant, lease: LeaseId) {
        if let Some(holder) = self.holder.take_if(|holder| holder.lease == lease) {
            self.accounts.charge(now, lease, holder.since);
        }
    }

    /// Demands the turn from the holder, if other leases want it and that is due.
    fn demand(
        &mut self,
        now: Instant,
        device: u32,
        return_timeout: Duration,
    ) -> Option<TurnAction> {
        let is_wanted = self.accounts.first_waiting().is_some();
        let holder = self.holder.as_mut()?;
        let is_new = is_wanted && holder.state == HolderState::Keeps;
        if is_new {
            holder.state = HolderState::Wanted;
        }
        let is_due = self.deadline().is_some_and(|deadline| now >= deadline);
        let holder = self.holder.as_mut()?;
        match holder.state {
            HolderState::Wanted if is_due => {
                let kill_at = now + return_timeout;
                holder.state = HolderState::Revoked {
                    kill_at,
                    is_postponed: false,
                };
                Some(TurnAction::Revoke(holder.lease, device))
            }
            HolderState::Wanted if is_new => Some(TurnAction::Want(holder.lease, device)),
            HolderState::Revoked {
                kill_at,
                is_postponed: false,
            } if now >= kill_at + MAX_LATENESS => {
                holder.state = HolderState::Revoked {
                    kill_at: now + MAX_LATENESS,
                    is_postponed: true,
                };
                None
            }
            HolderState::Revoked { .. } if is_due => {
                holder.state = HolderState::Killed;
                Some(TurnAction::Kill(holder.lease, device))
            }
            _ => None,
        }
    }

    /// Returns when the holder is to return the turn, or is to be killed.
    fn deadline(&self) -> Option<Instant> {
        let holder = self.holder.as_ref()?;
        match holder.state {
            HolderState::Wanted => {
                let first = self.accounts.first_waiting()?;
                let own = self.accounts.get(holder.lease)?;
                let ahead_ns = first.virtual_ns.saturating_sub(own.virtual_ns);
                let turn = time_of(ahead_ns, own.weight).max(MIN_TURN);
                holder.since.checked_add(turn)
            }
            HolderState::Revoked { kill_at, .. } => Some(kill_at),
            HolderState::Keeps | HolderState::Killed => None,
        }
    }
}

#[cfg(test)]
mod tests;
