//! Decides which connections are served, which wait, and which are closed: a pure state
//! machine.
//!
//! A peer is a *stranger* until it has proved that it may call. Strangers have places of
//! their own, so they cannot take the places of admitted peers. A TLS handshake takes
//! processor time and a connection takes memory, so few strangers are served at once, per
//! address and in total; the rest wait, and cost one socket each.
//!
//! While strangers wait, each stranger that is served has only a short time slice, and
//! the newest waiting one is served next. Under attack an honest peer has just come,
//! while connections that have waited for long are mostly the attacker's; served in order
//! of arrival, an honest peer would have to outlast all of them. Between addresses, the
//! one with the fewest strangers served goes first. When there is no place left to wait,
//! the address with the most waiting strangers loses its oldest.
//!
//! A quarter of an address's places is kept for peers that have just come. Without this
//! reserve, every free place would go to a peer that has waited, and a peer whose
//! connection is closed connects again: connections would arrive as fast as places become
//! free, and in such a queue even the newest may wait for seconds. With the reserve,
//! peers that connect again cannot fill all places, and a new peer is served at once.
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
    /// Maximum number of strangers, served or waiting.
    pub(crate) unadmitted: usize,
    /// Maximum number of strangers served at once.
    pub(crate) served: usize,
    /// Maximum number of strangers served at once from one address.
    pub(crate) served_per_address: usize,
    /// Maximum number of admitted peers.
    pub(crate) admitted: usize,
    /// How many of the `admitted` places are kept for peers with a reserved place.
    pub(crate) reserved: usize,
    /// How long a waiting stranger counts as new.
    pub(crate) new_peer_age: Duration,
    /// How long a stranger is served while others wait.
    pub(crate) time_slice: Duration,
    /// How long a stranger is served at most.
    pub(crate) admission_timeout: Duration,
}

/// Id of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ConnectionId(u64);

/// What counts as one address: an IPv4 address, or an IPv6 /64 network, as one host may
/// have all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SourceNetwork(u128);

impl From<IpAddr> for SourceNetwork {
    fn from(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self(address.to_ipv6_mapped().to_bits()),
            IpAddr::V6(address) => Self(address.to_bits() >> 64 << 64),
        }
    }
}

/// What the owner of the connections must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GateAction {
    /// Begin the connection's handshake.
    Serve(ConnectionId),
    /// Close the connection.
    Close(ConnectionId),
}

/// All places for admitted peers are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{limit} connections of admitted peers are open, which is the limit")]
pub struct AdmissionLimitError {
    /// The number of places for such peers.
    pub limit: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeerStage {
    Waiting { since: Instant },
    Served { since: Instant },
    Admitted { reserved: bool },
}

/// The strangers of one address.
#[derive(Debug, Default)]
struct AddressQueue {
    served: usize,
    waiting: BTreeSet<ConnectionId>,
}

/// The state machine; see the module's documentation.
#[derive(Debug)]
pub(crate) struct PeerAdmission {
    limits: Limits,
    next_id: u64,
    peers: HashMap<ConnectionId, (SourceNetwork, PeerStage)>,
    address_queues: HashMap<SourceNetwork, AddressQueue>,
    /// Strangers that are served, the oldest first.
    served: VecDeque<ConnectionId>,
    /// Addresses with waiting strangers, ordered by the number served, fewest first, then
    /// by the newest waiting stranger, newest first.
    by_fewest_served: BTreeSet<(usize, Reverse<ConnectionId>, SourceNetwork)>,
    /// The same addresses, ordered by the number waiting.
    by_most_waiting: BTreeSet<(usize, SourceNetwork)>,
    waiting: usize,
    admitted: usize,
    /// Number of admitted peers without a reserved place.
    unreserved: usize,
    last_tick: Option<Instant>,
}

impl PeerAdmission {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            next_id: 0,
            peers: HashMap::new(),
            address_queues: HashMap::new(),
            served: VecDeque::new(),
            by_fewest_served: BTreeSet::new(),
            by_most_waiting: BTreeSet::new(),
            waiting: 0,
            admitted: 0,
            unreserved: 0,
            last_tick: None,
        }
    }

    /// Adds an accepted connection. Returns its id, and actions for this and other
    /// connections. The connection is served once a [`GateAction::Serve`] of this or a
    /// later call names it.
    pub(crate) fn accepted(
        &mut self,
        source: SourceNetwork,
        now: Instant,
    ) -> (ConnectionId, Vec<GateAction>) {
        let id = ConnectionId(self.next_id);
        self.next_id += 1;
        let mut actions = Vec::new();
        if self.served.len() + self.waiting >= self.limits.unadmitted {
            let Some(victim) = self.eviction_candidate() else {
                // All places are taken by strangers that are served, so it cannot wait.
                return (id, vec![GateAction::Close(id)]);
            };
            self.remove(victim);
            actions.push(GateAction::Close(victim));
        }
        self.peers
            .insert(id, (source, PeerStage::Waiting { since: now }));
        self.waiting += 1;
        self.update_queue(source, |queue| {
            queue.waiting.insert(id);
        });
        self.serve_waiting(now, &mut actions);
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
        id: ConnectionId,
        reserved: bool,
        now: Instant,
    ) -> Result<Vec<GateAction>, AdmissionLimitError> {
        let mut actions = Vec::new();
        let Some(&(source, PeerStage::Served { .. })) = self.peers.get(&id) else {
            return Ok(actions);
        };
        let shared = self.limits.admitted - self.limits.reserved;
        if self.admitted >= self.limits.admitted {
            let limit = self.limits.admitted;
            return Err(AdmissionLimitError { limit });
        }
        if !reserved && self.unreserved >= shared {
            return Err(AdmissionLimitError { limit: shared });
        }
        self.remove(id);
        self.peers
            .insert(id, (source, PeerStage::Admitted { reserved }));
        self.admitted += 1;
        self.unreserved += usize::from(!reserved);
        self.serve_waiting(now, &mut actions);
        Ok(actions)
    }

    /// Removes a connection that either side has closed.
    pub(crate) fn closed(&mut self, id: ConnectionId, now: Instant) -> Vec<GateAction> {
        let mut actions = Vec::new();
        self.remove(id);
        self.serve_waiting(now, &mut actions);
        actions
    }

    /// Closes strangers that have been served for too long at `now`, and serves waiting
    /// ones. Must be called regularly while there are strangers.
    pub(crate) fn tick(&mut self, now: Instant) -> Vec<GateAction> {
        let mut actions = Vec::new();
        while let Some(id) = self.timed_out(now) {
            self.remove(id);
            actions.push(GateAction::Close(id));
        }
        self.serve_waiting(now, &mut actions);
        for _ in 0..self.preemption_budget(now) {
            let Some(id) = self.preemption_candidate(now) else {
                break;
            };
            self.remove(id);
            actions.push(GateAction::Close(id));
            self.serve_waiting(now, &mut actions);
        }
        actions
    }

    /// Returns how many strangers may be closed now because their time slice is over: a
    /// share in proportion to the time since the last tick, so that places become free
    /// evenly and a new peer finds one at the next tick. Otherwise strangers that came
    /// together would be closed together, again and again.
    fn preemption_budget(&mut self, now: Instant) -> usize {
        let before = self.last_tick.replace(now).unwrap_or(now);
        let (passed, time_slice) = (
            now.saturating_duration_since(before),
            self.limits.time_slice,
        );
        if passed >= time_slice {
            return self.served.len();
        }
        let share = passed.as_secs_f64() / time_slice.as_secs_f64();
        // At most 512 strangers are served, so the conversions lose nothing.
        ((self.served.len() as f64 * share).ceil() as usize).max(1)
    }

    /// Returns the numbers of strangers that are served and that wait.
    pub(crate) fn unadmitted(&self) -> (usize, usize) {
        (self.served.len(), self.waiting)
    }

    /// Serves waiting strangers while places are free.
    fn serve_waiting(&mut self, now: Instant, actions: &mut Vec<GateAction>) {
        while self.served.len() < self.limits.served
            && let Some((id, source)) = self.next_served(now)
        {
            self.waiting -= 1;
            self.peers
                .insert(id, (source, PeerStage::Served { since: now }));
            self.served.push_back(id);
            self.update_queue(source, |queue| {
                queue.waiting.remove(&id);
                queue.served += 1;
            });
            actions.push(GateAction::Serve(id));
        }
    }

    /// Returns the stranger that gets the next place, if its address has one for it.
    fn next_served(&self, now: Instant) -> Option<(ConnectionId, SourceNetwork)> {
        // The search is short: each address that is passed over has most of an address's
        // places, and there are only `served` places in total.
        let mut by_fewest_served = self.by_fewest_served.iter();
        let fits =
            |&&(served, Reverse(newest), _): &&(usize, Reverse<ConnectionId>, SourceNetwork)| {
                served < self.place_limit(newest, now)
            };
        let &(_, Reverse(id), source) = by_fewest_served.find(fits)?;
        Some((id, source))
    }

    /// Returns how many places of its address a waiting stranger may use: three quarters,
    /// once it has waited for `new_peer_age`.
    fn place_limit(&self, waiting: ConnectionId, now: Instant) -> usize {
        let limit = self.limits.served_per_address;
        match self.peers.get(&waiting) {
            Some((_, PeerStage::Waiting { since }))
                if now.saturating_duration_since(*since) >= self.limits.new_peer_age =>
            {
                limit - limit / 4
            }
            _ => limit,
        }
    }

    fn served_since(&self, id: ConnectionId) -> Option<(SourceNetwork, Instant)> {
        match self.peers.get(&id)? {
            (source, PeerStage::Served { since }) => Some((*source, *since)),
            (_, PeerStage::Waiting { .. } | PeerStage::Admitted { .. }) => None,
        }
    }

    /// Returns the oldest served stranger if it has been served for `admission_timeout`.
    fn timed_out(&self, now: Instant) -> Option<ConnectionId> {
        let id = *self.served.front()?;
        let (_, since) = self.served_since(id)?;
        (now.saturating_duration_since(since) >= self.limits.admission_timeout).then_some(id)
    }

    /// Returns a stranger whose time slice is over and for whose place another one waits.
    fn preemption_candidate(&self, now: Instant) -> Option<ConnectionId> {
        let &(fewest, Reverse(newest), _) = self.by_fewest_served.first()?;
        let place_of_own = fewest < self.place_limit(newest, now);
        let crowded = place_of_own && self.served.len() >= self.limits.served;
        let due = |&id: &ConnectionId| {
            let (source, since) = self.served_since(id)?;
            if now.saturating_duration_since(since) < self.limits.time_slice {
                return None;
            }
            let queue = self.address_queues.get(&source)?;
            // Close it if its address has a waiting stranger and no other place for it,
            // or if all places are taken and its address has at least as many as the
            // address to be served next.
            let newest = queue.waiting.last();
            let own = newest.is_some_and(|newest| queue.served >= self.place_limit(*newest, now));
            (own || crowded && queue.served >= fewest).then_some((queue.served, Reverse(id)))
        };
        let heaviest = self.served.iter().filter_map(due).max();
        heaviest.map(|(_, Reverse(id))| id)
    }

    /// Returns the longest-waiting stranger of the address with the most waiting
    /// strangers.
    fn eviction_candidate(&self) -> Option<ConnectionId> {
        let (_, source) = self.by_most_waiting.last()?;
        self.address_queues.get(source)?.waiting.first().copied()
    }

    fn remove(&mut self, id: ConnectionId) {
        let Some((source, stage)) = self.peers.remove(&id) else {
            return;
        };
        match stage {
            PeerStage::Waiting { .. } => {
                self.waiting -= 1;
                self.update_queue(source, |queue| {
                    queue.waiting.remove(&id);
                });
            }
            PeerStage::Served { .. } => {
                self.served.retain(|&served| served != id);
                self.update_queue(source, |queue| queue.served -= 1);
            }
            PeerStage::Admitted { reserved } => {
                self.admitted -= 1;
                self.unreserved -= usize::from(!reserved);
            }
        }
    }

    /// Applies `change` to the queue of an address, and updates both orderings of
    /// addresses.
    fn update_queue(&mut self, source: SourceNetwork, change: impl FnOnce(&mut AddressQueue)) {
        let queue = self.address_queues.entry(source).or_default();
        if let Some(&newest) = queue.waiting.last() {
            self.by_fewest_served
                .remove(&(queue.served, Reverse(newest), source));
            self.by_most_waiting.remove(&(queue.waiting.len(), source));
        }
        change(queue);
        if let Some(&newest) = queue.waiting.last() {
            self.by_fewest_served
                .insert((queue.served, Reverse(newest), source));
            self.by_most_waiting.insert((queue.waiting.len(), source));
        } else if queue.served == 0 {
            self.address_queues.remove(&source);
        }
    }
}

#[cfg(test)]
mod tests;
