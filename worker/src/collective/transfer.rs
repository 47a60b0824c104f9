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

/// Names a transfer. A session or worker that has the capability may take part.
pub(crate) type Capability = [u8; 16];

/// Most pending transfers of a cohort at one worker.
const MAX_PENDING_TRANSFERS: usize = 1 << 16;

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
    pub(crate) ticket: u64,
    /// Bytes that the session has reserved for the value.
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
    bytes: Vec<u8>,
}

impl Transfers {
    /// Records that a session of this worker offers a value. Returns an action if the
    /// request for the value has already arrived.
    pub(crate) fn offer(&mut self, capability: Capability, offer: Offer) -> Option<TransferAction> {
        if let Some(fetch) = self.fetches.remove(&capability) {
            return Some(send(fetch, capability, offer));
        }
        let expected =
            |taking: &PendingTake| (taking.take.from, taking.take.to) == (offer.from, offer.to);
        if self.takes.get(&capability).is_some_and(expected) {
            let take = self.takes.remove(&capability)?.take;
            return Some(deliver(take, offer.value.map_err(Failure::Inherited)));
        }
        if self.is_full() {
            return None;
        }
        self.offers.insert(capability, offer);
        None
    }

    /// Records that a session of this worker takes a value. Returns the action for an offer
    /// that has already arrived, the request to another worker, or the failure of the take.
    pub(crate) fn take(
        &mut self,
        capability: Capability,
        take: Take,
        lease_members: &LeaseMembers,
    ) -> Option<TransferAction> {
        let worker = lease_members.worker(take.from);
        let failed =
            |take: Take, kind, why: String| Some(deliver(take, Err(Failure::New(kind, why))));
        let Some(worker) = worker.filter(|_| take.from != take.to) else {
            let why = format!("the lease has no other device at place {}", take.from);
            return failed(take, FaultKind::Mismatch, why);
        };
        if self.takes.contains_key(&capability) {
            let why = "the transfer's capability is already in use".into();
            return failed(take, FaultKind::Mismatch, why);
        }
        if self.is_full() {
            let why = format!("{MAX_PENDING_TRANSFERS} transfers are pending, which is the limit");
            return failed(take, FaultKind::OutOfMemory, why);
        }
        let (from, to) = (take.from, take.to);
        let action = if worker == lease_members.me() {
            let fits = |offer: &Offer| (offer.from, offer.to) == (from, to);
            if self.offers.get(&capability).is_some_and(fits) {
                let offer = self.offers.remove(&capability)?;
                return Some(deliver(take, offer.value.map_err(Failure::Inherited)));
            }
            None
        } else {
            Some(TransferAction::Fetch {
                worker,
                capability,
                from,
                to,
            })
        };
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
        match self.offers.remove(&capability) {
            Some(offer) => Ok(Some(send(fetch, capability, offer))),
            // The program has this many transfers pending, so the other worker broke no
            // rule.
            None if self.is_full() => Ok(Some(TransferAction::Send {
                worker: fetch.worker,
                capability,
                value: Err(Arc::new(Fault {
                    kind: FaultKind::OutOfMemory.into(),
                    op_name: "Offer".into(),
                    reason: format!(
                        "{MAX_PENDING_TRANSFERS} transfers are pending, which is the limit"
                    ),
                    ..Fault::default()
                })),
            })),
            None => {
                self.fetches.insert(capability, fetch);
                Ok(None)
            }
        }
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
        let size = taking.take.size;
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
                bytes: Vec::with_capacity(size),
            }),
            (None, Some(partial)) => partial,
            (None, None) => {
                return Err(PeerViolation::new(
                    "the first part of a value has no type".into(),
                ));
            }
        };
        partial.bytes.extend_from_slice(&part);
        if partial.bytes.len() > size {
            return Err(PeerViolation::new(format!(
                "a value exceeds its {size} bytes"
            )));
        }
        if partial.bytes.len() < size {
            return Ok(None);
        }
        let PartialValue {
            shape,
            dtype,
            bytes,
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
    /// fetches that wait for it fail with `why`.
    pub(crate) fn leave(&mut self, lease_rank: u32, why: &Arc<Fault>) -> Vec<TransferAction> {
        self.offers.retain(|_, offer| offer.from != lease_rank);
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

    /// Fails the takes from sessions of `worker`, which is unreachable.
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
        failed.map(|(_, t)| deliver(t.take, Err(why()))).collect()
    }

    fn end(
        &mut self,
        capability: &Capability,
        outcome: Result<Value, Failure>,
    ) -> Option<TransferAction> {
        let taking = self.takes.remove(capability)?;
        Some(deliver(taking.take, outcome))
    }

    fn is_full(&self) -> bool {
        self.offers.len() + self.takes.len() + self.fetches.len() >= MAX_PENDING_TRANSFERS
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

fn deliver(take: Take, outcome: Result<Value, Failure>) -> TransferAction {
    TransferAction::Deliver {
        to: take.to,
        ticket: take.ticket,
        outcome,
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
mod tests {
    use tensord_proto::v1::LeaseShare;

    use super::*;

    const KEY: Capability = [1; 16];
    const OTHER: WorkerId = WorkerId(2);

    /// Lease ranks 0 and 1 are on this worker, 2 is on another.
    fn lease_members() -> LeaseMembers {
        let share = |worker_id| LeaseShare {
            worker_id,
            ..LeaseShare::default()
        };
        LeaseMembers::new([1, 1, 2].map(share).to_vec(), WorkerId(1))
    }

    fn value() -> Value {
        Value {
            shape: Shape::new([4]),
            dtype: DType::U8,
            bytes: Bytes::from_static(b"abcd"),
        }
    }

    fn offer(from: u32, to: u32) -> Offer {
        Offer {
            from,
            to,
            value: Ok(value()),
            _memory: None,
        }
    }

    fn take(from: u32, to: u32) -> Take {
        Take {
            from,
            to,
            ticket: 9,
            size: 4,
        }
    }

    fn delivered(to: u32) -> TransferAction {
        TransferAction::Deliver {
            to,
            ticket: 9,
            outcome: Ok(value()),
        }
    }

    #[test]
    fn local_transfer_delivers_the_value_once() {
        let mut transfers = Transfers::default();
        assert_eq!(transfers.offer(KEY, offer(0, 1)), None);
        assert_eq!(
            transfers.take(KEY, take(0, 1), &lease_members()),
            Some(delivered(1))
        );
        // The same with the take first.
        assert_eq!(transfers.take(KEY, take(0, 1), &lease_members()), None);
        assert_eq!(transfers.offer(KEY, offer(0, 1)), Some(delivered(1)));
        assert_eq!(transfers.take(KEY, take(0, 1), &lease_members()), None);
    }

    #[test]
    fn remote_value_is_fetched_in_parts() {
        let (mut transfers, lease_members) = (Transfers::default(), lease_members());
        let action = transfers.take(KEY, take(2, 1), &lease_members);
        let fetch = TransferAction::Fetch {
            worker: OTHER,
            capability: KEY,
            from: 2,
            to: 1,
        };
        assert_eq!(action, Some(fetch));
        let kind = Some((Shape::new([4]), DType::U8));
        let parts = [(kind, &b"ab"[..]), (None, b"cd")];
        let actions = parts.map(|(kind, bytes)| {
            let part = FetchedPart::Bytes(kind, Bytes::from_static(bytes));
            transfers.fetched(OTHER, KEY, part, &lease_members).unwrap()
        });
        assert_eq!(actions, [None, Some(delivered(1))]);
    }

    #[test]
    fn worker_can_fetch_only_what_is_offered_to_it() {
        let (mut transfers, lease_members) = (Transfers::default(), lease_members());
        let sent = |value| TransferAction::Send {
            worker: OTHER,
            capability: KEY,
            value,
        };
        assert_eq!(transfers.fetch(OTHER, KEY, 0, 2, &lease_members), Ok(None));
        assert_eq!(transfers.offer(KEY, offer(0, 2)), Some(sent(Ok(value()))));
        transfers.offer(KEY, offer(0, 1));
        let Ok(Some(TransferAction::Send {
            value: Err(fault), ..
        })) = transfers.fetch(OTHER, KEY, 0, 2, &lease_members)
        else {
            panic!("it is offered to a session of this worker");
        };
        assert!(fault.reason.contains("offered to another device"));
        let broke = transfers
            .fetch(OTHER, KEY, 2, 0, &lease_members)
            .unwrap_err();
        assert!(
            broke
                .to_string()
                .contains("requested a value from place 2 for place 0")
        );
    }

    #[test]
    fn pending_takes_fail_with_the_reason_when_the_source_is_lost() {
        let (mut transfers, lease_members) = (Transfers::default(), lease_members());
        transfers.take(KEY, take(0, 1), &lease_members);
        transfers
            .fetch(OTHER, [2; 16], 0, 2, &lease_members)
            .unwrap();
        let why = Arc::new(Fault {
            reason: "over".into(),
            ..Fault::default()
        });
        let actions = transfers.leave(0, &why);
        assert_eq!(actions.len(), 2, "{actions:?}");
        transfers.take(KEY, take(2, 1), &lease_members);
        let actions = transfers.fail_transfers_from(OTHER, "gone", &lease_members);
        let TransferAction::Deliver { outcome, .. } = &actions[0] else {
            panic!("{actions:?}");
        };
        let failure = Failure::New(FaultKind::Peer, "gone".into());
        assert_eq!(outcome, &Err(failure));
        assert!(transfers.takes.is_empty());
    }

    #[test]
    fn invalid_takes_and_parts_are_refused() {
        let (mut transfers, lease_members) = (Transfers::default(), lease_members());
        let failure = |action: Option<TransferAction>| match action {
            Some(TransferAction::Deliver {
                outcome: Err(Failure::New(kind, why)),
                ..
            }) => (kind, why),
            action => panic!("{action:?}"),
        };
        let (kind, why) = failure(transfers.take(KEY, take(7, 1), &lease_members));
        assert_eq!(kind, FaultKind::Mismatch);
        assert!(why.contains("place 7"), "{why}");
        transfers.take(KEY, take(2, 1), &lease_members);
        let (_, why) = failure(transfers.take(KEY, take(2, 1), &lease_members));
        assert!(why.contains("in use"), "{why}");
        let mut part = |kind, bytes: &'static [u8]| {
            let part = FetchedPart::Bytes(kind, Bytes::from_static(bytes));
            transfers
                .fetched(OTHER, KEY, part, &lease_members)
                .unwrap_err()
                .to_string()
        };
        assert!(part(None, b"a").contains("has no type"));
        let kind = Some((Shape::new([5]), DType::U8));
        assert!(part(kind, b"abcde").contains("exceeds its 4 bytes"));
    }
}
