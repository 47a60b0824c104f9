//! What the program has given up: requests, leases, and at last the pool.

use std::sync::{Mutex, MutexGuard, PoisonError, mpsc::SyncSender};

use tensord_proto::ids::{LeaseId, RequestId};
use tokio::sync::Notify;

/// Collects what was given up until the control task takes it.
///
/// To add something never waits and never fails, so that values can be dropped anywhere. The
/// lists are bounded by the requests and leases that the program has had since the task last
/// looked, as each is given up once.
#[derive(Default)]
pub(super) struct Withdrawals {
    withdrawn: Mutex<Withdrawn>,
    added: Notify,
}

/// What was given up since the control task last looked.
#[derive(Default)]
pub(super) struct Withdrawn {
    pub(super) cancelled: Vec<RequestId>,
    pub(super) released: Vec<LeaseId>,
    /// Set when the client is to leave the pool; notified once it has left.
    pub(super) left: Option<SyncSender<()>>,
}

impl Withdrawals {
    fn lock(&self) -> MutexGuard<'_, Withdrawn> {
        self.withdrawn
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds something by `add`, and wakes the control task.
    pub(super) fn add(&self, add: impl FnOnce(&mut Withdrawn)) {
        add(&mut self.lock());
        self.added.notify_one();
    }

    /// Waits until something was added since the last wait.
    pub(super) async fn added(&self) {
        self.added.notified().await;
    }

    pub(super) fn take(&self) -> Withdrawn {
        std::mem::take(&mut self.lock())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn nothing_that_is_given_up_waits_or_is_lost_while_the_task_is_busy() {
        let withdrawals = Withdrawals::default();
        for id in 0..1000 {
            withdrawals.add(|withdrawn| withdrawn.cancelled.push(RequestId(id)));
            withdrawals.add(|withdrawn| withdrawn.released.push(LeaseId(id)));
        }
        withdrawals.added().await;
        let withdrawn = withdrawals.take();
        assert!(withdrawn.cancelled.into_iter().eq((0..1000).map(RequestId)));
        assert!(withdrawn.released.into_iter().eq((0..1000).map(LeaseId)));
        assert!(withdrawals.take().released.is_empty());
    }
}
