//! Decides which connections are served, which wait, and which are closed: a pure state
//! machine.
//!
//! A peer is a *stranger* until it has proved that it may call. Strangers have places of
//! their own, so they cannot take the places of admitted peers. A TLS handshake takes
//! processor time and a connection takes memory, so few strangers are served at once, per
//! address and in total; the rest wait, and cost one socket each.
//!
//! While strangers wait, each stranger that is served has only a short turn, and the
//! newest waiting one is served next. Under attack an honest peer has just come, while
//! connections that have waited for long are mostly the attacker's; served in order of
//! arrival, an honest peer would have to outlast all of them. Between addresses, the one
//! with the fewest strangers served goes first. When there is no place left to wait, the
//! address with the most waiting strangers loses its oldest.
//!
//! A quarter of an address's places is kept for peers that have just come. Without it
//! every free place would go to a peer that has waited, which connects again when it is
//! closed: connections would arrive as fast as places become free, and in such a queue
//! even the newest may wait for seconds. With it, peers that connect again cannot fill
//! all places, and a new peer is served at once.
//!
//! Time comes with each event. [`gate`](crate::gate) carries out the decisions.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap, VecDeque},
    net::IpAddr,
    time::{Duration, Instant},
};

/// Limits on numbers of connections and on their times.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Number of strangers, served or waiting.
    pub(crate) strangers: usize,
    /// Number of strangers served at once.
    pub(crate) served: usize,
    /// Number of strangers served at once from one address.
    pub(crate) served_per_address: usize,
    /// Number of admitted peers.
    pub(crate) admitted: usize,
    /// How many of the `admitted` places are kept for peers with a reserved place.
    pub(crate) reserved: usize,
    /// How long a waiting stranger counts as one that has just come.
    pub(crate) fresh: Duration,
    /// How long a stranger is served while others wait.
    pub(crate) turn: Duration,
    /// How long a stranger is served at most.
    pub(crate) patience: Duration,
}

/// Id of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Id(u64);

/// What counts as one address: an IPv4 address, or an IPv6 /64 network, as one host may
/// have all of it.
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

/// What the owner of the connections must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Begin the connection's handshake.
    Serve(Id),
    /// Close the connection.
    Close(Id),
}

/// All places for admitted peers are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{limit} connections of admitted peers are open, which is the most there may be")]
pub struct Full {
    /// The number of these places.
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

/// The state machine; see the module's documentation.
#[derive(Debug)]
pub(crate) struct Admission {
    limits: Limits,
    next: u64,
    peers: HashMap<Id, (Source, Stage)>,
    crowds: HashMap<Source, Crowd>,
    /// Strangers that are served, the oldest first.
    served: VecDeque<Id>,
    /// Addresses with waiting strangers, ordered by the number served, fewest first, then
    /// by the newest waiting stranger, newest first.
    eager: BTreeSet<(usize, Reverse<Id>, Source)>,
    /// The same addresses, ordered by the number waiting.
    heavy: BTreeSet<(usize, Source)>,
    waiting: usize,
    admitted: usize,
    /// Number of admitted peers without a reserved place.
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

    /// Adds an accepted connection. It is served when an action names it.
    pub(crate) fn accepted(&mut self, source: Source, now: Instant) -> (Id, Vec<Action>) {
        let id = Id(self.next);
        self.next += 1;
        let mut actions = Vec::new();
        if self.served.len() + self.waiting >= self.limits.strangers {
            let Some(victim) = self.most_patient() else {
                // All places are taken by strangers that are served, so it cannot wait.
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

    /// Admits a stranger that is being served. Has no effect on any other connection,
    /// such as one that was admitted before or is closed.
    ///
    /// # Errors
    ///
    /// When no place is free for the peer, which then stays a stranger.
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

    /// Removes a connection that either side has closed.
    pub(crate) fn closed(&mut self, id: Id, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        self.remove(id);
        self.fill(now, &mut actions);
        actions
    }

    /// Ends the turns that are over at `now`. Must be called regularly while there are
    /// strangers.
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

    /// Returns how many turns may end now: the share of the served strangers that keeps
    /// turns ending evenly, so that a new peer finds a place at the next tick. Otherwise
    /// strangers that came together would leave together, again and again.
    fn turns_over(&mut self, now: Instant) -> usize {
        let before = self.ticked.replace(now).unwrap_or(now);
        let (passed, turn) = (now.saturating_duration_since(before), self.limits.turn);
        if passed >= turn {
            return self.served.len();
        }
        let share = passed.as_secs_f64() / turn.as_secs_f64();
        // At most 512 strangers are served, so the conversions lose nothing.
        ((self.served.len() as f64 * share).ceil() as usize).max(1)
    }

    /// Returns the numbers of strangers that are served and that wait.
    pub(crate) fn strangers(&self) -> (usize, usize) {
        (self.served.len(), self.waiting)
    }

    /// Serves waiting strangers while places are free.
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

    /// Returns the stranger that gets the next place, if its address has one for it.
    fn next_served(&self, now: Instant) -> Option<(Id, Source)> {
        // The search is short: each address that is passed over has most of an address's
        // places, and there are only `served` places in total.
        let mut eager = self.eager.iter();
        let fits = |&&(served, Reverse(newest), _): &&(usize, Reverse<Id>, Source)| {
            served < self.places(newest, now)
        };
        let &(_, Reverse(id), source) = eager.find(fits)?;
        Some((id, source))
    }

    /// Returns how many places of its address a waiting stranger may use: three quarters,
    /// once it has waited for `fresh`.
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

    /// Returns the oldest served stranger if it has been served for `patience`.
    fn overdue(&self, now: Instant) -> Option<Id> {
        let id = *self.served.front()?;
        let (_, since) = self.since(id)?;
        (now.saturating_duration_since(since) >= self.limits.patience).then_some(id)
    }

    /// Returns a stranger whose turn is over and whose place another one waits for.
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
            // Either its own address waits for the place, or all places are taken and its
            // address has no fewer than the address that is next.
            let newest = crowd.waiting.last();
            let own = newest.is_some_and(|newest| crowd.served >= self.places(*newest, now));
            (own || crowded && crowd.served >= fewest).then_some((crowd.served, Reverse(id)))
        };
        let heaviest = self.served.iter().filter_map(due).max();
        heaviest.map(|(_, Reverse(id))| id)
    }

    /// Returns the longest-waiting stranger of the address with the most waiting
    /// strangers.
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

    /// Updates what is known of an address, and both orderings of addresses.
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
