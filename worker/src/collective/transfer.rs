//! Moves values from one session of a cohort to another.
//!
//! One session *offers* a value under a capability that the client drew at random, another
//! session *takes* it, and each value is taken once. Whichever request arrives first is
//! kept here until the other arrives. Within one worker the value is handed over in memory.
//! Between two workers, the worker that takes the value fetches it, so a value is sent only
//! after its receiver has reserved memory for it.
//!
//! This is a pure state machine: it returns the actions to execute as [`TransferAction`]s.

use std::{collections::HashMap, sync::Arc};

use burn_backend::{DType, Shape};
use bytes::Bytes;
use tensord_proto::{
    ids::WorkerId,
    v1::{Fault, FaultKind},
};

use super::{
    algorithm::{Failure, PeerViolation},
    members::LeaseMembers,
};
use crate::memory::SessionMemory;

/// Identifies a transfer: random bytes that both of its sessions know. Each session also names
/// the lease rank of the other, which is checked.
pub(crate) type Capability = [u8; 16];

/// Maximum number of pending transfers of a cohort at one worker.
const MAX_PENDING_TRANSFERS: usize = 1 << 16;

/// Number of pending transfers beyond which an offer is dropped, and not replaced by a fault for
/// the session that takes the value.
const MAX_REFUSED_OFFERS: usize = 4 * MAX_PENDING_TRANSFERS;

/// A tensor's value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Value {
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    pub(crate) bytes: Bytes,
}

/// A value that a session offers.
#[derive(Debug)]
pub(crate) struct Offer {
    /// The lease ranks of the two sessions.
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) value: Result<Value, Arc<Fault>>,
    /// Keeps the value counted in the device's memory.
    pub(crate) _memory: Option<SessionMemory>,
}

/// The request of a session to take a value.
#[derive(Debug)]
pub(crate) struct Take {
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// The ticket of the outcome. `None` if the session has no room for the value, which is
    /// then dropped, so that the other session does not keep it, unless too many transfers are
    /// pending.
    pub(crate) ticket: Option<u64>,
    /// Bytes of the value, which the session has reserved if it has room.
    pub(crate) size: usize,
}

/// An action for the caller to execute.
#[derive(Debug, PartialEq)]
pub(crate) enum TransferAction {
    /// Delivers the outcome of a take to a session of this worker.
    Deliver {
        to: u32,
        ticket: u64,
        outcome: Result<Value, Failure>,
    },
    /// Requests the value from another worker.
    Fetch {
        worker: WorkerId,
        capability: Capability,
        from: u32,
        to: u32,
    },
    /// Sends a value to another worker that fetches it.
    Send {
        worker: WorkerId,
        capability: Capability,
        value: Result<Value, Arc<Fault>>,
    },
}

/// The pending transfers of one cohort at one worker.
#[derive(Debug, Default)]
pub(crate) struct Transfers {
    offers: HashMap<Capability, Offer>,
    takes: HashMap<Capability, PendingTake>,
    /// Requests of other workers for values that are not offered yet.
    fetches: HashMap<Capability, Fetch>,
    /// The sessions of this worker that have ended, by lease rank, and why.
    ended: HashMap<u32, Arc<Fault>>,
}

/// The request of another worker for a value.
#[derive(Debug)]
struct Fetch {
    worker: WorkerId,
    from: u32,
    to: u32,
}

#[derive(Debug)]
struct PendingTake {
    take: Take,
    partial: Option<PartialValue>,
}

/// A value of which some parts have been received.
#[derive(Debug)]
struct PartialValue {
    shape: Shape,
    dtype: DType,
    /// Empty if the value is dropped.
    bytes: Vec<u8>,
    received_bytes: usize,
}

impl Transfers {
    /// Records that a new session of this worker is at `lease_rank`.
    pub(crate) fn enter(&mut self, lease_rank: u32) {
        self.ended.remove(&lease_rank);
    }

    /// Records that a session of this worker offers a value. Returns an action if the request
    /// for the value has already arrived. If too many transfers are pending, offers a fault
    /// instead, and beyond [`MAX_REFUSED_OFFERS`] nothing.
    pub(crate) fn offer(
        &mut self,
        capability: Capability,
        mut offer: Offer,
    ) -> Option<TransferAction> {
        if let Some(fetch) = self.fetches.remove(&capability) {
            return Some(send(fetch, capability, offer));
        }
        let expected =
            |taking: &PendingTake| (taking.take.from, taking.take.to) == (offer.from, offer.to);
        if self.takes.get(&capability).is_some_and(expected) {
            let take = self.takes.remove(&capability)?.take;
            return deliver(take, offer.value.map_err(Failure::Inherited));
        }
        // The session that would take the value has ended.
        if self.ended.contains_key(&offer.to) {
            return None;
        }
        if self.is_full() {
            if self.pending() >= MAX_REFUSED_OFFERS {
                return None;
            }
            (offer.value, offer._memory) = (Err(Arc::new(too_many_pending())), None);
        }
        self.offers.insert(capability, offer);
        None
    }

    /// Records that a session of this worker takes a value. Returns the action for an offer
    /// that has already arrived, the request to another worker, or the failure of the take.
    /// `None`: the take waits for an offer on this worker.
    pub(crate) fn take(
        &mut self,
        capability: Capability,
        take: Take,
        lease_members: &LeaseMembers,
    ) -> Option<TransferAction> {
        let worker = lease_members.worker(take.from);
        let failed = |take: Take, kind, why: String| deliver(take, Err(Failure::New(kind, why)));
        let Some(worker) = worker.filter(|_| take.from != take.to) else {
            let why = format!("the lease has no other device at place {}", take.from);
            return failed(take, FaultKind::Mismatch, why);
        };
        if self.takes.contains_key(&capability) {
            let why = "the transfer's capability is already in use".into();
            return failed(take, FaultKind::Mismatch, why);
        }
        let (from, to) = (take.from, take.to);
        let is_local = worker == lease_members.me();
        if is_local {
            let fits = |offer: &Offer| (offer.from, offer.to) == (from, to);
            if self.offers.get(&capability).is_some_and(fits) {
                let offer = self.offers.remove(&capability)?;
                return deliver(take, offer.value.map_err(Failure::Inherited));
            }
            if let Some(why) = self.ended.get(&from) {
                return deliver(take, Err(Failure::Inherited(why.clone())));
            }
        }
        if self.is_full() {
            return failed(take, FaultKind::OutOfMemory, too_many_pending().reason);
        }
        let action = (!is_local).then_some(TransferAction::Fetch {
            worker,
            capability,
            from,
            to,
        });
        let partial = None;
        self.takes.insert(capability, PendingTake { take, partial });
        action
    }

    /// Handles the request of another worker to fetch a value for one of its sessions from
    /// a session of this worker.
    pub(crate) fn fetch(
        &mut self,
        worker: WorkerId,
        capability: Capability,
        from: u32,
        to: u32,
        lease_members: &LeaseMembers,
    ) -> Result<Option<TransferAction>, PeerViolation> {
        if lease_members.worker(from) != Some(lease_members.me())
            || lease_members.worker(to) != Some(worker)
        {
            return Err(PeerViolation::new(format!(
                "worker {worker} requested a value from place {from} for place {to}, but these places are on other workers"
            )));
        }
        let fetch = Fetch { worker, from, to };
        if let Some(offer) = self.offers.remove(&capability) {
            return Ok(Some(send(fetch, capability, offer)));
        }
        let why = match self.ended.get(&from) {
            Some(why) => why.clone(),
            // The program has this many transfers pending, so the other worker broke no
            // rule.
            None if self.is_full() => Arc::new(too_many_pending()),
            None => {
                self.fetches.insert(capability, fetch);
                return Ok(None);
            }
        };
        Ok(Some(TransferAction::Send {
            worker,
            capability,
            value: Err(why),
        }))
    }

    /// Handles the next part of a value that this worker fetches from another.
    pub(crate) fn fetched(
        &mut self,
        worker: WorkerId,
        capability: Capability,
        part: FetchedPart,
        lease_members: &LeaseMembers,
    ) -> Result<Option<TransferAction>, PeerViolation> {
        let expected = |t: &&mut PendingTake| lease_members.worker(t.take.from) == Some(worker);
        // It is no error if no session waits for the value any more.
        let Some(taking) = self.takes.get_mut(&capability).filter(expected) else {
            return Ok(None);
        };
        let Take { size, ticket, .. } = taking.take;
        let (kind, part) = match part {
            FetchedPart::Fault(fault) => {
                return Ok(self.end(&capability, Err(Failure::Inherited(fault))));
            }
            FetchedPart::Bytes(kind, bytes) => (kind, bytes),
        };
        let partial = match (kind, &mut taking.partial) {
            (Some((shape, dtype)), partial) => partial.insert(PartialValue {
                shape,
                dtype,
                bytes: Vec::with_capacity(ticket.map_or(0, |_| size)),
                received_bytes: 0,
            }),
            (None, Some(partial)) => partial,
            (None, None) => {
                return Err(PeerViolation::new(
                    "the first part of a value has no type".into(),
                ));
            }
        };
        if ticket.is_some() {
            partial.bytes.extend_from_slice(&part);
        }
        partial.received_bytes = partial.received_bytes.saturating_add(part.len());
        if partial.received_bytes > size {
            return Err(PeerViolation::new(format!(
                "a value exceeds its {size} bytes"
            )));
        }
        if partial.received_bytes < size {
            return Ok(None);
        }
        let PartialValue {
            shape,
            dtype,
            bytes,
            ..
        } = taking.partial.take().expect("all bytes have arrived");
        let bytes = bytes.into();
        let value = Value {
            shape,
            dtype,
            bytes,
        };
        Ok(self.end(&capability, Ok(value)))
    }

    /// Removes the session at `lease_rank` of this worker, which has ended: the takes and
    /// fetches that wait for it, and later ones, fail with `why`.
    pub(crate) fn leave(&mut self, lease_rank: u32, why: &Arc<Fault>) -> Vec<TransferAction> {
        self.ended.insert(lease_rank, why.clone());
        self.offers
            .retain(|_, offer| offer.from != lease_rank && offer.to != lease_rank);
        self.takes.retain(|_, taking| taking.take.to != lease_rank);
        let from = |taking: &PendingTake| taking.take.from == lease_rank;
        let mut actions = self.fail(from, || Failure::Inherited(why.clone()));
        let fetches = self.fetches.extract_if(|_, fetch| fetch.from == lease_rank);
        actions.extend(fetches.map(|(capability, fetch)| TransferAction::Send {
            worker: fetch.worker,
            capability,
            value: Err(why.clone()),
        }));
        actions
    }

    /// Fails the takes from sessions of `worker`, which is unreachable or broke a rule, and
    /// drops the requests that it sent.
    pub(crate) fn fail_transfers_from(
        &mut self,
        worker: WorkerId,
        why: &str,
        lease_members: &LeaseMembers,
    ) -> Vec<TransferAction> {
        self.fetches.retain(|_, fetch| fetch.worker != worker);
        let from = |taking: &PendingTake| lease_members.worker(taking.take.from) == Some(worker);
        self.fail(from, || Failure::New(FaultKind::Peer, why.to_owned()))
    }

    fn fail(
        &mut self,
        which: impl Fn(&PendingTake) -> bool,
        why: impl Fn() -> Failure,
    ) -> Vec<TransferAction> {
        let failed = self.takes.extract_if(|_, taking| which(taking));
        let failed = failed.filter_map(|(_, taking)| deliver(taking.take, Err(why())));
        failed.collect()
    }

    fn end(
        &mut self,
        capability: &Capability,
        outcome: Result<Value, Failure>,
    ) -> Option<TransferAction> {
        deliver(self.takes.remove(capability)?.take, outcome)
    }

    fn pending(&self) -> usize {
        self.offers.len() + self.takes.len() + self.fetches.len()
    }

    fn is_full(&self) -> bool {
        self.pending() >= MAX_PENDING_TRANSFERS
    }
}

/// A message of another worker about a value.
#[derive(Debug)]
pub(crate) enum FetchedPart {
    /// There is no value, because of this fault.
    Fault(Arc<Fault>),
    /// The next bytes of the value. The first part also has its type.
    Bytes(Option<(Shape, DType)>, Bytes),
}

/// Returns the action that delivers the outcome of a take, unless its session wants none.
fn deliver(take: Take, outcome: Result<Value, Failure>) -> Option<TransferAction> {
    Some(TransferAction::Deliver {
        to: take.to,
        ticket: take.ticket?,
        outcome,
    })
}

fn too_many_pending() -> Fault {
    Fault {
        kind: FaultKind::OutOfMemory.into(),
        op_name: "Offer".into(),
        reason: format!("{MAX_PENDING_TRANSFERS} transfers are pending, which is the limit"),
        ..Fault::default()
    }
}

fn send(fetch: Fetch, capability: Capability, offer: Offer) -> TransferAction {
    let value = match (fetch.from, fetch.to) == (offer.from, offer.to) {
        true => offer.value,
        false => Err(Arc::new(Fault {
            kind: FaultKind::Mismatch.into(),
            op_name: "Take".into(),
            reason: "the tensor is offered to another device".into(),
            ..Fault::default()
        })),
    };
    TransferAction::Send {
        worker: fetch.worker,
        capability,
        value,
    }
}

#[cfg(test)]
mod tests;
