//! What leases have used of a device, in virtual time.
//!
//! A lease's virtual time grows by the time of each of its turns, from the grant to the return as
//! the worker measures them, divided by the lease's weight. The lease with the smallest virtual time
//! has the next turn. This is start-time fair queueing (Goyal, Vin and Cheng, "Start-time Fair
//! Queueing", SIGCOMM 1996), with these differences:
//!
//! - How long a turn takes is known only at its end, so it is charged then. The start of
//!   the next turn is the end of the last one, as it is there.
//! - A lease that begins to wait after it had no work gets a virtual time relative to the smallest of
//!   the leases that have work, instead of that of the turn which is running; at most [`CREDIT`]
//!   less, so that a program is not set back by its gaps.
//! - After a gap of [`CREDIT`] or less, the leases that have gone on are counted with [`CREDIT`]
//!   less, too. The virtual time of one with a small weight grows fast while it fills a gap, and the
//!   lease that has more of the device must not lose its place by that.
//!
//! What a lease used while nobody else waited is no debt: the leases that come later begin at its
//! virtual time. What it used because it returned a turn late is one.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use tensord_proto::{ids::LeaseId, share::WHOLE_PERMILLE};

/// Time of the device that a lease may be owed when it comes back: some time slices, and little for a
/// user who waits.
pub(super) const CREDIT: Duration = Duration::from_millis(50);

/// The virtual time and the weight of a lease.
#[derive(Debug, Clone, Copy)]
pub(super) struct Account {
    /// In thousandths of the device.
    pub(super) weight: u32,
    /// Nanoseconds of a lease with the whole device.
    pub(super) virtual_ns: u128,
    /// The virtual time without the credit that the lease was given last. Others begin at this: the credit of a
    /// lease with a small weight is a long virtual time, and must not be given to those with a large weight.
    uncredited_ns: u128,
    /// The number of the lease's request, while it waits.
    waiting: Option<u64>,
    /// When the lease had work last.
    active_at: Instant,
}

/// The accounts of the leases of a device.
#[derive(Debug, Default)]
pub(super) struct Accounts {
    leases: BTreeMap<LeaseId, Account>,
    /// Number of requests so far: of leases with the same virtual time, the first one is next.
    requests: u64,
    /// The largest virtual time that a lease has reached. If no other lease has work, a lease begins near it.
    at_rest_ns: u128,
}

impl Accounts {
    pub(super) fn get(&self, lease: LeaseId) -> Option<&Account> {
        self.leases.get(&lease)
    }

    pub(super) fn is_waiting(&self, lease: LeaseId) -> bool {
        let account = self.leases.get(&lease);
        account.is_some_and(|account| account.waiting.is_some())
    }

    /// Returns the lease that waits and has the smallest virtual time.
    pub(super) fn first_waiting(&self) -> Option<&Account> {
        self.next().map(|(_, account)| account)
    }

    fn next(&self) -> Option<(&LeaseId, &Account)> {
        let waiting = self.leases.iter();
        let waiting = waiting.filter(|(_, account)| account.waiting.is_some());
        waiting.min_by_key(|(_, account)| (account.virtual_ns, account.waiting))
    }

    /// Removes the lease that is next from those that wait.
    pub(super) fn take_next(&mut self) -> Option<LeaseId> {
        let lease = *self.next()?.0;
        if let Some(account) = self.leases.get_mut(&lease) {
            account.waiting = None;
        }
        Some(lease)
    }

    /// Records that a lease waits. `holder` has the turn, and since when.
    pub(super) fn add_waiting(
        &mut self,
        now: Instant,
        lease: LeaseId,
        weight: u32,
        holder: Option<(LeaseId, Instant)>,
    ) {
        // A weight of 0 would be one of a message that was not checked.
        let weight = weight.max(1);
        let own = self.leases.get(&lease);
        let virtual_ns = own.map_or(0, |own| own.virtual_ns);
        let is_back_soon =
            own.is_some_and(|own| now.saturating_duration_since(own.active_at) <= CREDIT);
        let competitors = self.leases.iter().filter_map(|(&of, account)| {
            let held = match holder {
                Some((holder, since)) if holder == of => now.saturating_duration_since(since),
                _ if account.waiting.is_some() => Duration::ZERO,
                _ => return None,
            };
            let reached = account.virtual_ns + virtual_ns_of(held, account.weight);
            let reached = reached.max(account.uncredited_ns);
            Some(match is_back_soon {
                true => reached.saturating_sub(virtual_ns_of(CREDIT, account.weight)),
                false => reached,
            })
        });
        let smallest = competitors.min().unwrap_or(self.at_rest_ns);
        let least = smallest.saturating_sub(virtual_ns_of(CREDIT, weight));
        self.requests += 1;
        let account = Account {
            weight,
            virtual_ns: virtual_ns.max(least),
            uncredited_ns: virtual_ns.max(smallest),
            waiting: Some(self.requests),
            active_at: now,
        };
        self.leases.insert(lease, account);
    }

    /// Withdraws the request of a lease for the turn, if it has one.
    pub(super) fn remove_waiting(&mut self, now: Instant, lease: LeaseId) {
        if let Some(account) = self.leases.get_mut(&lease)
            && account.waiting.take().is_some()
        {
            account.active_at = now;
        }
    }

    /// Charges a lease for the turn that it has had.
    pub(super) fn charge(&mut self, now: Instant, lease: LeaseId, since: Instant) {
        if let Some(account) = self.leases.get_mut(&lease) {
            let held = now.saturating_duration_since(since);
            account.virtual_ns += virtual_ns_of(held, account.weight);
            account.active_at = now;
            let reached = account.virtual_ns.max(account.uncredited_ns);
            self.at_rest_ns = self.at_rest_ns.max(reached);
        }
    }

    pub(super) fn forget(&mut self, lease: LeaseId) {
        self.leases.remove(&lease);
    }
}

/// Returns by how much the virtual time of a lease grows in a time.
pub(super) fn virtual_ns_of(time: Duration, weight: u32) -> u128 {
    time.as_nanos() * u128::from(WHOLE_PERMILLE) / u128::from(weight)
}

/// Returns the time in which the virtual time of a lease grows by this much: rounded up, so that it
/// has grown by no less then.
pub(super) fn time_of(virtual_ns: u128, weight: u32) -> Duration {
    let nanos = (virtual_ns * u128::from(weight)).div_ceil(u128::from(WHOLE_PERMILLE));
    Duration::from_nanos(nanos.try_into().unwrap_or(u64::MAX))
}
