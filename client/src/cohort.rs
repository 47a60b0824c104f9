//! The state that the sessions of one lease share: which ranks lag behind in a collective,
//! so that the others wait for them ([`ahead`]), when they place marks ([`cuts`]), and why the
//! lease has ended.
//!
//! A collective proceeds once the ops of all its ranks are on the wire. But Burn's
//! remote client buffers ops, and a rank whose thread has ended would never send
//! its last ones. So while a rank has not reached an all-reduce that another rank of
//! its group has reached, the ops of the lagging rank are flushed again and again.

mod ahead;
mod cuts;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use burn::tensor::Device;
use tokio::{
    runtime::Handle,
    sync::{Notify, watch},
    time::sleep,
};

pub(crate) use self::cuts::Cuts;

/// Delay until the ops of a rank that is behind are flushed. Threads that run at
/// about the same speed reach the all-reduce by themselves within that time.
const MIN_FLUSH_DELAY: Duration = Duration::from_millis(1);

/// Longest pause between two flushes of a rank that stays behind.
const MAX_FLUSH_DELAY: Duration = Duration::from_millis(100);

/// The reason for the end of a lease that the program dropped.
pub(crate) const LEASE_DROPPED: &str = "the lease was dropped";

/// Sessions that were opened together.
#[derive(Debug, Default)]
pub(crate) struct Cohort {
    /// Chosen at random.
    pub(crate) id: u64,
    imbalance: Notify,
    cuts: Mutex<Cuts>,
    /// Wake the drivers of the sessions.
    wakes: Mutex<Vec<Arc<Notify>>>,
    /// Why the lease of the sessions can no longer be used, once it cannot.
    end: watch::Sender<Option<String>>,
}

/// A session's place in its cohort.
#[derive(Debug, Clone, Default)]
pub(crate) struct CohortMember {
    pub(crate) cohort: Arc<Cohort>,
    /// The number of the session's device in the lease.
    pub(crate) lease_rank: u32,
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
    pub(crate) fn new(id: u64, size: usize) -> Arc<Self> {
        Arc::new(Self {
            id,
            cuts: Mutex::new(Cuts::new(size)),
            ..Self::default()
        })
    }

    /// Adds what wakes the driver of a session.
    pub(crate) fn add_wake(&self, wake: Arc<Notify>) {
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
    pub(crate) fn end(&self, reason: &str) {
        self.end.send_if_modified(|end| {
            let is_first = end.is_none();
            end.get_or_insert_with(|| reason.to_owned());
            is_first
        });
    }

    /// Returns why the lease can no longer be used, or `None` while it can.
    pub(crate) fn end_reason(&self) -> Option<String> {
        self.end.borrow().clone()
    }

    /// Waits until the lease can no longer be used, and returns why.
    pub(crate) fn ended(&self) -> impl Future<Output = String> + Send + use<> {
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

    /// Returns the lease ranks of the sessions for which others wait.
    fn lagging_ranks(&self) -> Vec<u32> {
        self.cuts().lagging_ranks()
    }
}

/// Flushes the ops of ranks that lag behind; `devices` are indexed by lease rank. Runs until
/// the future is dropped.
pub(crate) async fn flush_lagging_ranks(
    cohort: Arc<Cohort>,
    devices: Vec<Device>,
    runtime: Handle,
) {
    let mut pause = MIN_FLUSH_DELAY;
    loop {
        if cohort.lagging_ranks().is_empty() {
            pause = MIN_FLUSH_DELAY;
            cohort.imbalance.notified().await;
        }
        sleep(pause).await;
        pause = (pause * 2).min(MAX_FLUSH_DELAY);
        let behind = cohort.lagging_ranks();
        let behind = behind
            .iter()
            .filter_map(|lease_rank| devices.get(*lease_rank as usize));
        let behind: Vec<Device> = behind.cloned().collect();
        // A flush waits for the thread that buffers the ops. It fails only if the
        // session is dead; reads report that.
        let flush = move || behind.iter().for_each(|device| drop(device.flush()));
        let _ = runtime.spawn_blocking(flush).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocking::block_on;

    #[test]
    fn the_first_reason_for_the_end_of_a_lease_stays() {
        let cohort = Cohort::new(1, 1);
        let early = cohort.ended();
        let waits = Some(Duration::ZERO);
        assert_eq!(block_on(cohort.ended(), waits), None);
        cohort.end("worker a is lost");
        cohort.end("worker b is lost");
        let late = cohort.ended();
        drop(cohort);
        for ended in [block_on(early, None), block_on(late, None)] {
            assert_eq!(ended.as_deref(), Some("worker a is lost"));
        }
        let dropped = Cohort::new(2, 1).ended();
        assert_eq!(block_on(dropped, None).as_deref(), Some(LEASE_DROPPED));
    }
}
