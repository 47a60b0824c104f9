//! The state that the sessions of one lease share: which ranks lag behind in a collective,
//! so that the others wait for them ([`ahead`]), when they place marks ([`cuts`]), and why the
//! lease has ended.

mod ahead;
mod cuts;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, watch};

pub(crate) use self::cuts::Cuts;

/// The reason for the end of a lease that the program dropped.
pub const LEASE_DROPPED: &str = "the lease was dropped";

/// Sessions that were opened together.
#[derive(Debug, Default)]
pub struct Cohort {
    /// Chosen at random.
    pub id: u64,
    imbalance: Notify,
    cuts: Mutex<Cuts>,
    /// Wake the drivers of the sessions.
    wakes: Mutex<Vec<Arc<Notify>>>,
    /// Why the lease of the sessions can no longer be used, once it cannot.
    end: watch::Sender<Option<String>>,
}

/// A session's place in its cohort.
#[derive(Debug, Clone, Default)]
pub struct CohortMember {
    /// The cohort.
    pub cohort: Arc<Cohort>,
    /// The number of the session's device in the lease.
    pub lease_rank: u32,
}

impl CohortMember {
    /// Returns whether the cohort has other sessions.
    pub(crate) fn has_others(&self) -> bool {
        self.cuts().ranks() > 1
    }

    /// Locks the cuts of the cohort. The caller may have locked its own session, and must lock
    /// nothing else meanwhile.
    pub(crate) fn cuts(&self) -> MutexGuard<'_, Cuts> {
        self.cohort.cuts()
    }
}

impl Cohort {
    /// Creates the cohort of `size` sessions.
    pub fn new(id: u64, size: usize) -> Arc<Self> {
        Arc::new(Self {
            id,
            cuts: Mutex::new(Cuts::new(size)),
            ..Self::default()
        })
    }

    /// Adds what wakes the driver of a session.
    pub fn add_wake(&self, wake: Arc<Notify>) {
        self.wakes().push(wake);
    }

    /// Wakes the drivers of all sessions.
    pub(crate) fn wake_all(&self) {
        self.wakes().iter().for_each(|wake| wake.notify_one());
    }

    fn wakes(&self) -> MutexGuard<'_, Vec<Arc<Notify>>> {
        self.wakes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the ops of ranks flushed that lag behind in an all-reduce.
    pub(crate) fn flush_lagging(&self) {
        self.imbalance.notify_one();
    }

    /// Records why the lease can no longer be used. The first reason stays.
    pub fn end(&self, reason: &str) {
        self.end.send_if_modified(|end| {
            let is_first = end.is_none();
            end.get_or_insert_with(|| reason.to_owned());
            is_first
        });
    }

    /// Returns why the lease can no longer be used, or `None` while it can.
    pub fn end_reason(&self) -> Option<String> {
        self.end.borrow().clone()
    }

    /// Waits until the lease can no longer be used, and returns why.
    pub fn ended(&self) -> impl Future<Output = String> + Send + use<> {
        let mut end = self.end.subscribe();
        async move {
            let ended = end.wait_for(Option::is_some).await;
            let reason = ended.ok().and_then(|reason| reason.clone());
            reason.unwrap_or_else(|| LEASE_DROPPED.to_owned())
        }
    }

    fn cuts(&self) -> MutexGuard<'_, Cuts> {
        self.cuts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a rank may lag behind in an all-reduce.
    pub async fn imbalance(&self) {
        self.imbalance.notified().await;
    }

    /// Returns the lease ranks of the sessions for which others wait.
    pub fn lagging_ranks(&self) -> Vec<u32> {
        self.cuts().lagging_ranks()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn the_first_reason_for_the_end_of_a_lease_stays() {
        let cohort = Cohort::new(1, 1);
        let early = cohort.ended();
        assert!(timeout(Duration::ZERO, cohort.ended()).await.is_err());
        cohort.end("worker a is lost");
        cohort.end("worker b is lost");
        let late = cohort.ended();
        drop(cohort);
        for ended in [early.await, late.await] {
            assert_eq!(ended, "worker a is lost");
        }
        let dropped = Cohort::new(2, 1).ended();
        assert_eq!(dropped.await, LEASE_DROPPED);
    }
}
