//! The leases and requests that wait for devices, in the order in which they get them, and why.

use std::collections::BTreeSet;

use tensord_proto::ids::LeaseId;

use super::Engine;
use crate::lease::{Lease, Standing};
use crate::queue::QueuedRequest;
use crate::reason::EndReason;
use crate::waiting::{NeededDevices, Waiter, Waiting};

impl Engine {
    /// Returns the ids of the leases and requests that wait for devices. Each gets devices before those
    /// that follow it, unless there are too few for it, and enough for a later one.
    pub fn waiting_ids(&self) -> Vec<LeaseId> {
        let leases = self.leases_without_devices().into_iter();
        let waits = |id: &LeaseId| {
            let lease = self.leases.get(*id);
            lease.is_some_and(|it| !matches!(it.standing, Standing::Suspended { .. }))
        };
        let requests = self.queue.iter().map(|queued| queued.lease);
        leases.filter(waits).chain(requests).collect()
    }

    /// Returns what a lease or request waits for; `None` if there is none with this id that waits.
    pub fn waiting(&self, id: LeaseId) -> Option<Waiting> {
        let request = || self.queue.iter().find(|queued| queued.lease == id);
        self.waiting_lease(id)
            .or_else(|| Some(self.waiting_request(request()?)))
    }

    /// Returns the leases that have no devices, in the order in which they get some: those first that a
    /// death has interrupted, as they had devices until then; and then by the time at which the lease ends,
    /// or would end if it had been lost when it was resumed.
    pub(super) fn leases_without_devices(&self) -> Vec<LeaseId> {
        let ordered = self.leases.iter().filter_map(|(id, lease)| {
            let (is_interrupted, since) = match &lease.standing {
                Standing::Running => return None,
                Standing::Lost(_) => (false, lease.rejoin_by),
                Standing::Resuming { since, cause } => {
                    let timeout = lease.recovery_timeout(&self.options);
                    (cause.is_some(), lease.rejoin_by.or(Some(*since + timeout)))
                }
                Standing::Suspended { .. } => (false, None),
            };
            Some((!is_interrupted, since, id))
        });
        let ordered: BTreeSet<_> = ordered.collect();
        ordered.into_iter().map(|(.., id)| id).collect()
    }

    /// Returns what a lease waits for; `None` if it is suspended, or has devices.
    fn waiting_lease(&self, id: LeaseId) -> Option<Waiting> {
        let lease = self.leases.get(id)?;
        let (cause, resumed_at) = match &lease.standing {
            Standing::Running | Standing::Suspended { .. } => return None,
            Standing::Lost(reason) => (Some(what_happened(reason)), None),
            Standing::Resuming { since, cause } => (cause.clone(), Some(*since)),
        };
        let receivers = match lease.is_suspended() {
            true => lease.keepers.values().map(|keeper| keeper.worker).collect(),
            // Another worker is not involved: a lost lease goes on at its keeper, or at its own worker.
            false => Vec::new(),
        };
        let name = |worker| Some(self.pool.get(worker)?.name().to_owned());
        Some(Waiting {
            lease: id,
            client: lease.owner,
            waiter: Waiter::Lease {
                cause,
                resumed_at,
                ends_at: lease.rejoin_by,
                receivers: receivers.into_iter().filter_map(name).collect(),
            },
            needs: self.needs_of(id, lease),
        })
    }

    fn needs_of(&self, id: LeaseId, lease: &Lease) -> Vec<NeededDevices> {
        let parts = lease.parts.iter();
        let mut needs: Vec<_> = parts
            .map(|it| (it.requirement.clone(), it.devices))
            .collect();
        if needs.is_empty() {
            let requirement = lease.requirement_elsewhere().into_iter();
            needs.extend(requirement.map(|it| (it, lease.lease_devices.len())));
        }
        let needed = needs.into_iter().map(|(requirement, count)| {
            let suitable = self.pool.suitable(id, |device| requirement.accepts(device));
            NeededDevices {
                count,
                at_one_worker: true,
                suitable,
            }
        });
        needed.collect()
    }

    fn waiting_request(&self, queued: &QueuedRequest) -> Waiting {
        let demand = &queued.demand;
        let suitable = self
            .pool
            .suitable(queued.lease, |device| demand.accepts(device));
        Waiting {
            lease: queued.lease,
            client: Some(queued.client),
            waiter: Waiter::Request {
                demand: demand.clone(),
                since: queued.since,
            },
            needs: vec![NeededDevices {
                count: demand.devices as usize,
                at_one_worker: false,
                suitable,
            }],
        }
    }
}

/// Returns what happened to the worker of a lost lease: the reason for its end, which it is if no devices
/// become free, names other places as well.
pub(super) fn what_happened(reason: &EndReason) -> EndReason {
    match reason {
        EndReason::NotReplaced { gone, .. } => (**gone).clone(),
        other => other.clone(),
    }
}
