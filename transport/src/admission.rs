//! Which connections are served, which wait, and which are closed: a pure state machine.
//!
//! A peer is a stranger until it has shown that it may call. Strangers have places of
//! their own, so that they take none of those who were admitted. Few of them are served
//! at once, from one address and in all, as a TLS handshake takes processor time and a
//! connection takes memory; the rest wait, and cost a socket each.
//!
//! While strangers wait, those that are served have a short turn, and the newest of those
//! that wait is served first: under attack an honest peer has just come, and the ones
//! that have waited for long are not in a hurry. In the order of arrival, it would have
//! to outlast everybody who came to stay. Between addresses, the one that has the fewest
//! served goes first, and when there is no place left to wait, the one that has the most
//! waiting loses its oldest.
//!
//! A quarter of an address's places is for peers that have just come. Without it every
//! place that falls free goes to one that has waited, which connects again when it is
//! closed: connections would arrive as fast as places fall free, and in such a queue the
//! newest may still wait for seconds. With it, what connects again is less than there is
//! room for, and a new peer finds a place at once.
//!
//! Time comes with each event. [`gate`](crate::gate) carries out what is decided.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap, VecDeque},
    net::IpAddr,
    time::{Duration, Instant},
};

/// How many of what there may be, and for how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Strangers, served or not.
    pub(crate) strangers: usize,
    /// Strangers that are served at once.
    pub(crate) served: usize,
    /// Of these, from one address.
    pub(crate) served_per_address: usize,
    /// Peers that were admitted.
    pub(crate) admitted: usize,
    /// Of these, places that are kept for peers with a reserved place.
    pub(crate) reserved: usize,
    /// How long a stranger that waits counts as one that has just come.
    pub(crate) fresh: Duration,
    /// How long a stranger is served while others wait.
    pub(crate) turn: Duration,
    /// How long a stranger is served at most.
    pub(crate) patience: Duration,
}

/// A connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Id(u64);

/// What counts as one address: an IPv4 address, or an IPv6 network of 64 bits, which a
/// single host may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Source(u128);

impl From<IpAddr> for Source {
    fn from(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self(address.to_ipv6_mapped().to_bits()),
            IpAddr::V6(address) => Self(address.to_bits() >> 64 << 64),
        }
    }
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Begin with the connection's handshake.
    Serve(Id),
    /// Close the connection.
    Close(Id),
}

/// Every place for peers that were admitted is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{limit} connections of admitted peers are open, which is the most there may be")]
pub struct Full {
    /// How many there are.
    pub limit: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Waiting { since: Instant },
    Served { since: Instant },
    Admitted { reserved: bool },
}

/// The strangers of one address.
#[derive(Debug, Default)]
struct Crowd {
    served: usize,
    waiting: BTreeSet<Id>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Admission {
    limits: Limits,
    next: u64,
    peers: HashMap<Id, (Source, Stage)>,
    crowds: HashMap<Source, Crowd>,
    /// Strangers that are served, the oldest first.
    served: VecDeque<Id>,
    /// Addresses from which somebody waits: those with the fewest served first, and of
    /// these the one from which the newest came.
    eager: BTreeSet<(usize, Reverse<Id>, Source)>,
    /// The same addresses, by how many wait.
    heavy: BTreeSet<(usize, Source)>,
    waiting: usize,
    admitted: usize,
    /// Of these, those without a reserved place.
    unreserved: usize,
    ticked: Option<Instant>,
}

impl Admission {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            next: 0,
            peers: HashMap::new(),
            crowds: HashMap::new(),
            served: VecDeque::new(),
            eager: BTreeSet::new(),
            heavy: BTreeSet::new(),
            waiting: 0,
            admitted: 0,
            unreserved: 0,
            ticked: None,
        }
    }

    /// A connection was accepted. It is served when an action says so.
    pub(crate) fn accepted(&mut self, source: Source, now: Instant) -> (Id, Vec<Action>) {
        let id = Id(self.next);
        self.next += 1;
        let mut actions = Vec::new();
        if self.served.len() + self.waiting >= self.limits.strangers {
            let Some(victim) = self.most_patient() else {
                // All are served, so this one has nowhere to wait.
                return (id, vec![Action::Close(id)]);
            };
            self.remove(victim);
            actions.push(Action::Close(victim));
        }
        self.peers
            .insert(id, (source, Stage::Waiting { since: now }));
        self.waiting += 1;
        self.change(source, |crowd| {
            crowd.waiting.insert(id);
        });
        self.fill(now, &mut actions);
        (id, actions)
    }

    /// A peer has shown that it may call. The second time, and of a connection that is
    /// closed, this changes nothing.
    ///
    /// # Errors
    ///
    /// When there is no place for it; it stays a stranger.
    pub(crate) fn admit(
        &mut self,
        id: Id,
        reserved: bool,
        now: Instant,
    ) -> Result<Vec<Action>, Full> {
        let mut actions = Vec::new();
        let Some(&(source, Stage::Served { .. })) = self.peers.get(&id) else {
            return Ok(actions);
        };
        let shared = self.limits.admitted - self.limits.reserved;
        if self.admitted >= self.limits.admitted {
            let limit = self.limits.admitted;
            return Err(Full { limit });
        }
        if !reserved && self.unreserved >= shared {
            return Err(Full { limit: shared });
        }
        self.remove(id);
        self.peers
            .insert(id, (source, Stage::Admitted { reserved }));
        self.admitted += 1;
        self.unreserved += usize::from(!reserved);
        self.fill(now, &mut actions);
        Ok(actions)
    }

    /// A connection is closed, by whichever side.
    pub(crate) fn closed(&mut self, id: Id, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        self.remove(id);
        self.fill(now, &mut actions);
        actions
    }

    /// Time has passed. To be called now and then while there are strangers.
    pub(crate) fn tick(&mut self, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        while let Some(id) = self.overdue(now) {
            self.remove(id);
            actions.push(Action::Close(id));
        }
        self.fill(now, &mut actions);
        for _ in 0..self.turns_over(now) {
            let Some(id) = self.gives_way(now) else {
                break;
            };
            self.remove(id);
            actions.push(Action::Close(id));
            self.fill(now, &mut actions);
        }
        actions
    }

    /// How many turns may end now: as many as keep those that are served changing evenly,
    /// so that whoever comes finds a place at the next tick. Those that came together would
    /// go together otherwise, again and again.
    fn turns_over(&mut self, now: Instant) -> usize {
        let before = self.ticked.replace(now).unwrap_or(now);
        let (passed, turn) = (now.saturating_duration_since(before), self.limits.turn);
        if passed >= turn {
            return self.served.len();
        }
        let share = passed.as_secs_f64() / turn.as_secs_f64();
        // Some 512 at most, so nothing is lost or cut off.
        ((self.served.len() as f64 * share).ceil() as usize).max(1)
    }

    /// Strangers that are served, and that wait.
    pub(crate) fn strangers(&self) -> (usize, usize) {
        (self.served.len(), self.waiting)
    }

    /// Serves who waits, as long as there are places.
    fn fill(&mut self, now: Instant, actions: &mut Vec<Action>) {
        while self.served.len() < self.limits.served
            && let Some((id, source)) = self.next_served(now)
        {
            self.waiting -= 1;
            self.peers
                .insert(id, (source, Stage::Served { since: now }));
            self.served.push_back(id);
            self.change(source, |crowd| {
                crowd.waiting.remove(&id);
                crowd.served += 1;
            });
            actions.push(Action::Serve(id));
        }
    }

    /// The stranger that gets the next place, if its address has one for it.
    fn next_served(&self, now: Instant) -> Option<(Id, Source)> {
        // Few addresses are looked at: those that are passed over have most of the places
        // of an address each, and there are no more than `served` places.
        let mut eager = self.eager.iter();
        let fits = |&&(served, Reverse(newest), _): &&(usize, Reverse<Id>, Source)| {
            served < self.places(newest, now)
        };
        let &(_, Reverse(id), source) = eager.find(fits)?;
        Some((id, source))
    }

    /// How many places of its address a stranger that waits may count on.
    fn places(&self, waiting: Id, now: Instant) -> usize {
        let limit = self.limits.served_per_address;
        match self.peers.get(&waiting) {
            Some((_, Stage::Waiting { since }))
                if now.saturating_duration_since(*since) >= self.limits.fresh =>
            {
                limit - limit / 4
            }
            _ => limit,
        }
    }

    fn since(&self, id: Id) -> Option<(Source, Instant)> {
        match self.peers.get(&id)? {
            (source, Stage::Served { since }) => Some((*source, *since)),
            (_, Stage::Waiting { .. } | Stage::Admitted { .. }) => None,
        }
    }

    /// A stranger that was served for longer than anybody is.
    fn overdue(&self, now: Instant) -> Option<Id> {
        let id = *self.served.front()?;
        let (_, since) = self.since(id)?;
        (now.saturating_duration_since(since) >= self.limits.patience).then_some(id)
    }

    /// A stranger whose turn is over while others wait for its place.
    fn gives_way(&self, now: Instant) -> Option<Id> {
        let &(fewest, Reverse(newest), _) = self.eager.first()?;
        let place_of_own = fewest < self.places(newest, now);
        let crowded = place_of_own && self.served.len() >= self.limits.served;
        let due = |&id: &Id| {
            let (source, since) = self.since(id)?;
            if now.saturating_duration_since(since) < self.limits.turn {
                return None;
            }
            let crowd = self.crowds.get(&source)?;
            // Its own address waits for it; or all do, and it has more than its share.
            let newest = crowd.waiting.last();
            let own = newest.is_some_and(|newest| crowd.served >= self.places(*newest, now));
            (own || crowded && crowd.served >= fewest).then_some((crowd.served, Reverse(id)))
        };
        let heaviest = self.served.iter().filter_map(due).max();
        heaviest.map(|(_, Reverse(id))| id)
    }

    /// The stranger that has waited longest, of those from the address with the most.
    fn most_patient(&self) -> Option<Id> {
        let (_, source) = self.heavy.last()?;
        self.crowds.get(source)?.waiting.first().copied()
    }

    fn remove(&mut self, id: Id) {
        let Some((source, stage)) = self.peers.remove(&id) else {
            return;
        };
        match stage {
            Stage::Waiting { .. } => {
                self.waiting -= 1;
                self.change(source, |crowd| {
                    crowd.waiting.remove(&id);
                });
            }
            Stage::Served { .. } => {
                self.served.retain(|&served| served != id);
                self.change(source, |crowd| crowd.served -= 1);
            }
            Stage::Admitted { reserved } => {
                self.admitted -= 1;
                self.unreserved -= usize::from(!reserved);
            }
        }
    }

    /// Changes what is known of an address, and keeps the orders of addresses right.
    fn change(&mut self, source: Source, change: impl FnOnce(&mut Crowd)) {
        let crowd = self.crowds.entry(source).or_default();
        if let Some(&newest) = crowd.waiting.last() {
            self.eager.remove(&(crowd.served, Reverse(newest), source));
            self.heavy.remove(&(crowd.waiting.len(), source));
        }
        change(crowd);
        if let Some(&newest) = crowd.waiting.last() {
            self.eager.insert((crowd.served, Reverse(newest), source));
            self.heavy.insert((crowd.waiting.len(), source));
        } else if crowd.served == 0 {
            self.crowds.remove(&source);
        }
    }
}

#[cfg(test)]
mod tests;
