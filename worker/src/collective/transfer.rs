//! Values on their way from one session of a cohort to another.
//!
//! One session *offers* a value under a capability that the client drew, another
//! *takes* it, and each value is taken once. Whichever comes first waits here. On
//! one worker the value only changes hands; between two, the worker of the one who
//! takes fetches it, so nothing is sent that nobody has made room for.
//!
//! Pure: what is to be done comes back as [`Act`]s.

use std::{collections::HashMap, sync::Arc};

use burn_backend::{DType, Shape};
use bytes::Bytes;
use tensord_proto::{
    ids::WorkerId,
    v1::{Fault, FaultKind},
};

use super::{
    algorithm::{Broke, Failure},
    members::Roster,
};
use crate::memory::SessionMemory;

/// Names a transfer; whoever has it may take part.
pub(crate) type Capability = [u8; 16];

/// Transfers of a cohort that one worker may know of at once.
const MAX_WAITING: usize = 1 << 16;

/// A tensor's value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Value {
    pub(crate) shape: Shape,
    pub(crate) dtype: DType,
    pub(crate) bytes: Bytes,
}

/// What a session offers.
#[derive(Debug)]
pub(crate) struct Offer {
    /// The places of the two sessions.
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) value: Result<Value, Arc<Fault>>,
    /// Holds the value's place in the device's memory.
    pub(crate) _memory: Option<SessionMemory>,
}

/// A session that takes.
#[derive(Debug)]
pub(crate) struct Take {
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) ticket: u64,
    /// Bytes that it has made room for.
    pub(crate) size: usize,
}

/// What is to be done.
#[derive(Debug, PartialEq)]
pub(crate) enum Act {
    /// A session of this worker gets what it takes.
    Deliver {
        to: u32,
        ticket: u64,
        outcome: Result<Value, Failure>,
    },
    /// Another worker is asked for it.
    Fetch {
        worker: WorkerId,
        capability: Capability,
        from: u32,
        to: u32,
    },
    /// Another worker gets what it fetches.
    Send {
        worker: WorkerId,
        capability: Capability,
        value: Result<Value, Arc<Fault>>,
    },
}

/// The transfers of one cohort that one worker knows of.
#[derive(Debug, Default)]
pub(crate) struct Transfers {
    offers: HashMap<Capability, Offer>,
    takes: HashMap<Capability, Taking>,
    /// Other workers that fetch what is not offered yet.
    fetches: HashMap<Capability, Fetch>,
}

/// What another worker fetches.
#[derive(Debug)]
struct Fetch {
    worker: WorkerId,
    from: u32,
    to: u32,
}

#[derive(Debug)]
struct Taking {
    take: Take,
    arriving: Option<Arriving>,
}

/// A value of which a part has come.
#[derive(Debug)]
struct Arriving {
    shape: Shape,
    dtype: DType,
    bytes: Vec<u8>,
}

impl Transfers {
    /// A session of this worker offers a value.
    pub(crate) fn offer(&mut self, capability: Capability, offer: Offer) -> Option<Act> {
        if let Some(fetch) = self.fetches.remove(&capability) {
            return Some(send(fetch, capability, offer));
        }
        let expected =
            |taking: &Taking| (taking.take.from, taking.take.to) == (offer.from, offer.to);
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

    /// A session of this worker takes a value.
    pub(crate) fn take(
        &mut self,
        capability: Capability,
        take: Take,
        roster: &Roster,
    ) -> Option<Act> {
        let worker = roster.worker(take.from);
        let failed =
            |take: Take, kind, why: String| Some(deliver(take, Err(Failure::New(kind, why))));
        let Some(worker) = worker.filter(|_| take.from != take.to) else {
            let why = format!("it takes a tensor from place {} of the lease", take.from);
            return failed(take, FaultKind::Mismatch, why);
        };
        if self.takes.contains_key(&capability) {
            let why = "its capability is in use".into();
            return failed(take, FaultKind::Mismatch, why);
        }
        if self.is_full() {
            let why = format!("{MAX_WAITING} transfers wait already, the limit");
            return failed(take, FaultKind::OutOfMemory, why);
        }
        let (from, to) = (take.from, take.to);
        let act = if worker == roster.me() {
            let fits = |offer: &Offer| (offer.from, offer.to) == (from, to);
            if self.offers.get(&capability).is_some_and(fits) {
                let offer = self.offers.remove(&capability)?;
                return Some(deliver(take, offer.value.map_err(Failure::Inherited)));
            }
            None
        } else {
            Some(Act::Fetch {
                worker,
                capability,
                from,
                to,
            })
        };
        let arriving = None;
        self.takes.insert(capability, Taking { take, arriving });
        act
    }

    /// Another worker fetches what a session of this one offers to its own.
    pub(crate) fn fetch(
        &mut self,
        worker: WorkerId,
        capability: Capability,
        from: u32,
        to: u32,
        roster: &Roster,
    ) -> Result<Option<Act>, Broke> {
        if roster.worker(from) != Some(roster.me()) || roster.worker(to) != Some(worker) {
            return Err(Broke::new(format!(
                "worker {worker} fetches from place {from} for place {to}"
            )));
        }
        let fetch = Fetch { worker, from, to };
        match self.offers.remove(&capability) {
            Some(offer) => Ok(Some(send(fetch, capability, offer))),
            None if self.is_full() => Err(Broke::new("too many transfers wait".into())),
            None => {
                self.fetches.insert(capability, fetch);
                Ok(None)
            }
        }
    }

    /// Another worker sends what was fetched, or the next part of it.
    pub(crate) fn fetched(
        &mut self,
        worker: WorkerId,
        capability: Capability,
        part: Part,
        roster: &Roster,
    ) -> Result<Option<Act>, Broke> {
        let expected = |t: &&mut Taking| roster.worker(t.take.from) == Some(worker);
        // One that nobody waits for any more is no error.
        let Some(taking) = self.takes.get_mut(&capability).filter(expected) else {
            return Ok(None);
        };
        let size = taking.take.size;
        let (kind, part) = match part {
            Part::Fault(fault) => {
                return Ok(self.end(&capability, Err(Failure::Inherited(fault))));
            }
            Part::Bytes(kind, bytes) => (kind, bytes),
        };
        let arriving = match (kind, &mut taking.arriving) {
            (Some((shape, dtype)), arriving) => arriving.insert(Arriving {
                shape,
                dtype,
                bytes: Vec::with_capacity(size),
            }),
            (None, Some(arriving)) => arriving,
            (None, None) => return Err(Broke::new("a value begins without a type".into())),
        };
        arriving.bytes.extend_from_slice(&part);
        if arriving.bytes.len() > size {
            return Err(Broke::new(format!("a value goes over its {size} bytes")));
        }
        if arriving.bytes.len() < size {
            return Ok(None);
        }
        let Arriving {
            shape,
            dtype,
            bytes,
        } = taking.arriving.take().expect("it has come");
        let bytes = bytes.into();
        let value = Value {
            shape,
            dtype,
            bytes,
        };
        Ok(self.end(&capability, Ok(value)))
    }

    /// The session at `place` of this worker is over: who waits for it hears `why`.
    pub(crate) fn leave(&mut self, place: u32, why: &Arc<Fault>) -> Vec<Act> {
        self.offers.retain(|_, offer| offer.from != place);
        self.takes.retain(|_, taking| taking.take.to != place);
        let from = |taking: &Taking| taking.take.from == place;
        let mut acts = self.fail(from, || Failure::Inherited(why.clone()));
        let fetches = self.fetches.extract_if(|_, fetch| fetch.from == place);
        acts.extend(fetches.map(|(capability, fetch)| Act::Send {
            worker: fetch.worker,
            capability,
            value: Err(why.clone()),
        }));
        acts
    }

    /// Ends what is taken from sessions of `worker`, which is out of reach.
    pub(crate) fn lose(&mut self, worker: WorkerId, why: &str, roster: &Roster) -> Vec<Act> {
        self.fetches.retain(|_, fetch| fetch.worker != worker);
        let from = |taking: &Taking| roster.worker(taking.take.from) == Some(worker);
        self.fail(from, || Failure::New(FaultKind::Peer, why.to_owned()))
    }

    fn fail(&mut self, which: impl Fn(&Taking) -> bool, why: impl Fn() -> Failure) -> Vec<Act> {
        let failed = self.takes.extract_if(|_, taking| which(taking));
        failed.map(|(_, t)| deliver(t.take, Err(why()))).collect()
    }

    fn end(&mut self, capability: &Capability, outcome: Result<Value, Failure>) -> Option<Act> {
        let taking = self.takes.remove(capability)?;
        Some(deliver(taking.take, outcome))
    }

    fn is_full(&self) -> bool {
        self.offers.len() + self.takes.len() + self.fetches.len() >= MAX_WAITING
    }
}

/// What another worker sends of a value.
#[derive(Debug)]
pub(crate) enum Part {
    /// There is none, because of this.
    Fault(Arc<Fault>),
    /// Its next bytes; the first of them with its type.
    Bytes(Option<(Shape, DType)>, Bytes),
}

fn deliver(take: Take, outcome: Result<Value, Failure>) -> Act {
    Act::Deliver {
        to: take.to,
        ticket: take.ticket,
        outcome,
    }
}

fn send(fetch: Fetch, capability: Capability, offer: Offer) -> Act {
    let value = match (fetch.from, fetch.to) == (offer.from, offer.to) {
        true => offer.value,
        false => Err(Arc::new(Fault {
            kind: FaultKind::Mismatch.into(),
            op_name: "Take".into(),
            reason: "the tensor is offered to another device".into(),
            ..Fault::default()
        })),
    };
    Act::Send {
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

    /// Places 0 and 1 on this worker, 2 on another.
    fn roster() -> Roster {
        let share = |worker_id| LeaseShare {
            worker_id,
            ..LeaseShare::default()
        };
        Roster::new([1, 1, 2].map(share).to_vec(), WorkerId(1))
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

    fn delivered(to: u32) -> Act {
        Act::Deliver {
            to,
            ticket: 9,
            outcome: Ok(value()),
        }
    }

    #[test]
    fn on_one_worker_a_value_changes_hands_once() {
        let mut transfers = Transfers::default();
        assert_eq!(transfers.offer(KEY, offer(0, 1)), None);
        assert_eq!(
            transfers.take(KEY, take(0, 1), &roster()),
            Some(delivered(1))
        );
        // Again, the other way round.
        assert_eq!(transfers.take(KEY, take(0, 1), &roster()), None);
        assert_eq!(transfers.offer(KEY, offer(0, 1)), Some(delivered(1)));
        assert_eq!(transfers.take(KEY, take(0, 1), &roster()), None);
    }

    #[test]
    fn another_worker_is_asked_and_answers_in_parts() {
        let (mut transfers, roster) = (Transfers::default(), roster());
        let act = transfers.take(KEY, take(2, 1), &roster);
        let fetch = Act::Fetch {
            worker: OTHER,
            capability: KEY,
            from: 2,
            to: 1,
        };
        assert_eq!(act, Some(fetch));
        let kind = Some((Shape::new([4]), DType::U8));
        let parts = [(kind, &b"ab"[..]), (None, b"cd")];
        let acts = parts.map(|(kind, bytes)| {
            let part = Part::Bytes(kind, Bytes::from_static(bytes));
            transfers.fetched(OTHER, KEY, part, &roster).unwrap()
        });
        assert_eq!(acts, [None, Some(delivered(1))]);
    }

    #[test]
    fn another_worker_gets_what_is_offered_to_it_and_nothing_else() {
        let (mut transfers, roster) = (Transfers::default(), roster());
        let sent = |value| Act::Send {
            worker: OTHER,
            capability: KEY,
            value,
        };
        assert_eq!(transfers.fetch(OTHER, KEY, 0, 2, &roster), Ok(None));
        assert_eq!(transfers.offer(KEY, offer(0, 2)), Some(sent(Ok(value()))));
        transfers.offer(KEY, offer(0, 1));
        let Ok(Some(Act::Send {
            value: Err(fault), ..
        })) = transfers.fetch(OTHER, KEY, 0, 2, &roster)
        else {
            panic!("it is offered to a session of this worker");
        };
        assert!(fault.reason.contains("offered to another device"));
        let broke = transfers.fetch(OTHER, KEY, 2, 0, &roster).unwrap_err();
        assert!(
            broke
                .to_string()
                .contains("fetches from place 2 for place 0")
        );
    }

    #[test]
    fn who_waits_for_a_session_that_ends_or_a_worker_that_is_lost_hears_why() {
        let (mut transfers, roster) = (Transfers::default(), roster());
        transfers.take(KEY, take(0, 1), &roster);
        transfers.fetch(OTHER, [2; 16], 0, 2, &roster).unwrap();
        let why = Arc::new(Fault {
            reason: "over".into(),
            ..Fault::default()
        });
        let acts = transfers.leave(0, &why);
        assert_eq!(acts.len(), 2, "{acts:?}");
        transfers.take(KEY, take(2, 1), &roster);
        let acts = transfers.lose(OTHER, "gone", &roster);
        let Act::Deliver { outcome, .. } = &acts[0] else {
            panic!("{acts:?}");
        };
        let failure = Failure::New(FaultKind::Peer, "gone".into());
        assert_eq!(outcome, &Err(failure));
        assert!(transfers.takes.is_empty());
    }

    #[test]
    fn bad_takes_and_parts_are_refused() {
        let (mut transfers, roster) = (Transfers::default(), roster());
        let failure = |act: Option<Act>| match act {
            Some(Act::Deliver {
                outcome: Err(Failure::New(kind, why)),
                ..
            }) => (kind, why),
            act => panic!("{act:?}"),
        };
        let (kind, why) = failure(transfers.take(KEY, take(7, 1), &roster));
        assert_eq!(kind, FaultKind::Mismatch);
        assert!(why.contains("place 7"), "{why}");
        transfers.take(KEY, take(2, 1), &roster);
        let (_, why) = failure(transfers.take(KEY, take(2, 1), &roster));
        assert!(why.contains("in use"), "{why}");
        let mut part = |kind, bytes: &'static [u8]| {
            let part = Part::Bytes(kind, Bytes::from_static(bytes));
            transfers
                .fetched(OTHER, KEY, part, &roster)
                .unwrap_err()
                .to_string()
        };
        assert!(part(None, b"a").contains("without a type"));
        let kind = Some((Shape::new([5]), DType::U8));
        assert!(part(kind, b"abcde").contains("over its 4 bytes"));
    }
}
