//! Executes what [`Turns`] decides, when something happens and when time has passed.

use std::{sync::Arc, time::Instant};

use tokio::time::sleep_until;
use tracing::warn;

use super::{
    Supervisor,
    lease_queues::KillReason,
    turns::{TurnAction, Turns},
};
use crate::{locks::lock, process_message::Task};

impl Supervisor {
    /// Decides again whenever that is due, forever.
    pub(super) async fn run_turn_clock(self: Arc<Self>) {
        let mut due = self.turn_due.subscribe();
        loop {
            let at = *due.borrow_and_update();
            let is_due = async {
                match at {
                    Some(at) => sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                // The sender is a field of the supervisor.
                _ = due.changed() => {}
                () = is_due => self.update_turns(|turns, now| turns.tick(now)),
            }
        }
    }

    /// Changes the turns of devices, and executes what the change decides.
    pub(super) fn update_turns(&self, change: impl FnOnce(&mut Turns, Instant) -> Vec<TurnAction>) {
        // The lock is held until the messages are queued, so that they stay in order.
        let mut turns = lock(&self.turns);
        for action in change(&mut turns, Instant::now()) {
            let lease = action.lease();
            let leases = lock(&self.leases);
            // A lease that is gone has no process that could use a turn.
            let Some(running) = leases.get(&lease) else {
                continue;
            };
            match action {
                TurnAction::Grant(_, device) => running.send(Task::GrantTurn(device)),
                TurnAction::Want(_, device) => running.send(Task::WantTurn(device)),
                TurnAction::Revoke(_, device) => running.send(Task::RevokeTurn(device)),
                TurnAction::Kill(_, device) => {
                    warn!(%lease, device, "the process of the lease keeps its device from others and is killed");
                    running
                        .kill
                        .send_replace(Some(KillReason::KeepsDevice(device)));
                }
            }
        }
        let due = turns.next_deadline();
        self.turn_due.send_if_modified(|known| {
            let has_changed = *known != due;
            *known = due;
            has_changed
        });
    }
}
