//! Marks that clients place before their leases move or are suspended.
//!
//! A lease goes on elsewhere from the last marks of its sessions, and executes the ops since then
//! again. So before a lease moves or is suspended although nothing was lost, the scheduler has its
//! client place marks, and waits for them up to [`PREPARATION_TIMEOUT`]. The program runs meanwhile.
//!
//! [`Preparations`] is pure state: time is an argument.

use std::{collections::BTreeSet, time::Duration};

use tensord_proto::{
    ids::{ClientId, LeaseId},
    v1::{client_message, worker_message},
};
use tensord_scheduler::Suspender;
use tokio::time::Instant;

use super::{Driver, Input};
use crate::scheduler::convert;

/// How long the marks of a client are waited for.
const PREPARATION_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum number of actions that wait. Others do not wait.
const MAX_WAITING: usize = 1024;

/// Actions that wait for marks.
pub(super) struct Preparations<T>(Vec<Preparation<T>>);

struct Preparation<T> {
    /// The leases whose clients have yet to place marks.
    leases: BTreeSet<LeaseId>,
    deadline: Instant,
    action: T,
}

impl<T> Default for Preparations<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Preparations<T> {
    /// Has `action` wait for marks in these `leases`.
    ///
    /// # Errors
    ///
    /// The action, if too many wait: it must be executed now.
    pub(super) fn begin(
        &mut self,
        now: Instant,
        leases: BTreeSet<LeaseId>,
        action: T,
    ) -> Result<(), T> {
        if self.0.len() >= MAX_WAITING {
            return Err(action);
        }
        let deadline = now + PREPARATION_TIMEOUT;
        self.0.push(Preparation {
            leases,
            deadline,
            action,
        });
        Ok(())
    }

    /// Records that the marks of a lease are placed. Returns the actions that need not wait any more.
    pub(super) fn placed(&mut self, lease: LeaseId) -> Vec<T> {
        for preparation in &mut self.0 {
            preparation.leases.remove(&lease);
        }
        self.take(|preparation| preparation.leases.is_empty())
    }

    /// Returns the actions that have waited for long enough.
    pub(super) fn take_due(&mut self, now: Instant) -> Vec<T> {
        self.take(|preparation| preparation.deadline <= now)
    }

    /// Returns when [`take_due`](Self::take_due) returns the next action.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.0.iter().map(|preparation| preparation.deadline).min()
    }

    /// Returns the actions for which `is_chosen` holds, which wait no more.
    pub(super) fn take_chosen(&mut self, is_chosen: impl Fn(&T) -> bool) -> Vec<T> {
        self.take(|preparation| is_chosen(&preparation.action))
    }

    fn take(&mut self, is_over: impl Fn(&Preparation<T>) -> bool) -> Vec<T> {
        let taken = self.0.extract_if(.., |preparation| is_over(preparation));
        taken.map(|preparation| preparation.action).collect()
    }
}

impl Driver {
    /// Returns the leases that `input` moves or suspends although nothing was lost, and whose clients
    /// can place marks before that.
    pub(super) fn leases_to_prepare(&self, input: &Input) -> BTreeSet<LeaseId> {
        let leases = match input {
            Input::MoveLease(lease, _) | Input::SuspendLease(lease, _) => BTreeSet::from([*lease]),
            Input::FromClient(client, _, message) => match &message.body {
                Some(client_message::Body::ChangeStanding(change))
                    if change.suspend || change.elsewhere =>
                {
                    let lease = LeaseId(change.lease_id);
                    let owner = self.engine.lease(lease).and_then(|lease| lease.owner);
                    Some(lease)
                        .filter(|_| owner == Some(*client))
                        .into_iter()
                        .collect()
                }
                _ => BTreeSet::new(),
            },
            Input::FromWorker(worker, _, message) => match &message.body {
                Some(worker_message::Body::Leaving(_)) => self.engine.leases_at(*worker),
                _ => BTreeSet::new(),
            },
            Input::DrainWorker {
                name,
                is_drained: true,
                ..
            } => {
                let worker = self.engine.worker_named(name);
                worker.map_or_else(BTreeSet::new, |it| self.engine.leases_at(it))
            }
            _ => BTreeSet::new(),
        };
        let can_prepare = |lease: &LeaseId| {
            let owner = self.engine.lease(*lease).and_then(|lease| lease.owner);
            let is_attached = owner.is_some_and(|owner| self.clients.contains_key(&owner));
            let by = Suspender::Administrator;
            let goes_on = self.engine.check_move(*lease).is_ok()
                || self.engine.check_suspend(*lease, by).is_ok();
            let known = self.engine.lease(*lease);
            let is_running = known.is_some_and(|lease| lease.suspension.is_none());
            is_attached && is_running && goes_on
        };
        leases.into_iter().filter(can_prepare).collect()
    }

    /// Handles the inputs that wait for marks and must be handled before `input`, as they are about the
    /// same worker.
    pub(super) fn handle_earlier(&mut self, input: &Input) {
        let is_earlier = |earlier: &Input| match (earlier, input) {
            (Input::DrainWorker { name: earlier, .. }, Input::DrainWorker { name, .. }) => {
                earlier == name
            }
            (Input::FromWorker(earlier, ..), Input::FromWorker(worker, _, message)) => {
                let is_left = matches!(message.body, Some(worker_message::Body::Left(_)));
                earlier == worker && is_left
            }
            _ => false,
        };
        for earlier in self.preparations.take_chosen(|earlier| is_earlier(earlier)) {
            self.handle(*earlier);
        }
    }

    /// Has the client of a lease place marks.
    pub(super) fn request_marks(&mut self, lease: LeaseId) {
        let owner = self.engine.lease(lease).and_then(|lease| lease.owner);
        if let Some(client) = owner
            && let Some(gone) = self.send(client, convert::place_mark(lease))
        {
            self.apply(gone);
        }
    }

    /// Executes what has waited for marks of a lease, which a client reports to be placed.
    pub(super) fn on_mark_placed(&mut self, client: ClientId, lease: LeaseId) {
        let owner = self.engine.lease(lease).and_then(|lease| lease.owner);
        if owner != Some(client) {
            return;
        }
        for input in self.preparations.placed(lease) {
            self.handle(*input);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leases(ids: &[u64]) -> BTreeSet<LeaseId> {
        ids.iter().copied().map(LeaseId).collect()
    }

    #[test]
    fn action_waits_for_the_marks_of_all_its_leases_or_for_its_deadline() {
        let now = Instant::now();
        let mut preparations = Preparations::default();
        assert_eq!(preparations.next_deadline(), None);
        preparations.begin(now, leases(&[1, 2]), "drain").unwrap();
        let later = now + Duration::from_secs(1);
        preparations.begin(later, leases(&[2]), "move").unwrap();
        let due = now + PREPARATION_TIMEOUT;
        assert_eq!(preparations.next_deadline(), Some(due));
        assert!(preparations.take_due(later).is_empty());
        assert_eq!(preparations.placed(LeaseId(2)), ["move"]);
        assert!(preparations.placed(LeaseId(3)).is_empty());
        assert_eq!(preparations.take_due(due), ["drain"]);
        assert!(preparations.placed(LeaseId(1)).is_empty());
    }

    #[test]
    fn number_of_waiting_actions_is_bounded() {
        let now = Instant::now();
        let mut preparations = Preparations::default();
        for _ in 0..MAX_WAITING {
            assert_eq!(preparations.begin(now, leases(&[1]), ()), Ok(()));
        }
        assert_eq!(preparations.begin(now, leases(&[1]), ()), Err(()));
    }
}
