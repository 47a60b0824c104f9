//! What the sessions of one lease have to know of each other: which of them the
//! collectives of the others wait for.
//!
//! A collective proceeds once the ops of all its ranks are on the wire. But Burn's
//! remote client buffers ops, and a rank whose thread has ended would never send
//! its last ones. So while one rank of a group has reached an all-reduce that
//! another has not, the other rank's ops are flushed until it has.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use burn::tensor::Device;
use tokio::{runtime::Handle, sync::Notify, time::sleep};

/// Delay until the ops of a rank that is behind are flushed. Threads that run at
/// about the same speed reach the all-reduce by themselves within that time.
const MIN_FLUSH_DELAY: Duration = Duration::from_millis(1);

/// Longest pause between two flushes of a rank that stays behind.
const MAX_FLUSH_DELAY: Duration = Duration::from_millis(100);

/// Sessions that were opened together.
#[derive(Debug, Default)]
pub(crate) struct Cohort {
    /// Chosen at random.
    pub(crate) id: u64,
    /// By a group's places: how many all-reduces each member is ahead of the
    /// slowest. Groups whose members are level have no entry.
    ahead: Mutex<HashMap<Vec<u32>, Vec<u64>>>,
    imbalance: Notify,
}

/// A session's place in its cohort.
#[derive(Debug, Clone, Default)]
pub(crate) struct CohortMember {
    pub(crate) cohort: Arc<Cohort>,
    /// The number of the session's device in the lease.
    pub(crate) lease_rank: u32,
}

impl Cohort {
    pub(crate) fn new(id: u64) -> Arc<Self> {
        Arc::new(Self {
            id,
            ..Self::default()
        })
    }

    /// Records that the session at `lease_rank` has reached an all-reduce of `group`,
    /// whose places are in ascending order.
    pub(crate) fn record_all_reduce(&self, group: &[u32], lease_rank: u32) {
        let Ok(rank) = group.binary_search(&lease_rank) else {
            return;
        };
        let mut ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        let counts = ahead
            .entry(group.to_vec())
            .or_insert_with(|| vec![0; group.len()]);
        counts[rank] += 1;
        if counts.iter().all(|count| *count > 0) {
            counts.iter_mut().for_each(|count| *count -= 1);
        }
        if counts.iter().all(|count| *count == 0) {
            ahead.remove(group);
        } else {
            self.imbalance.notify_one();
        }
    }

    /// The places of the sessions that others wait for.
    fn lagging_ranks(&self) -> Vec<u32> {
        let ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        let members = ahead
            .iter()
            .flat_map(|(group, counts)| group.iter().zip(counts));
        let mut behind: Vec<u32> = members.filter(|(_, c)| **c == 0).map(|(p, _)| *p).collect();
        behind.sort_unstable();
        behind.dedup();
        behind
    }
}

/// Flushes the ops of members that are behind. Runs until the future is dropped.
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

    #[test]
    fn lagging_ranks_are_those_with_fewer_all_reduces() {
        let cohort = Cohort::default();
        let both = [1, 4];
        assert!(cohort.lagging_ranks().is_empty());
        cohort.record_all_reduce(&both, 4);
        cohort.record_all_reduce(&both, 4);
        assert_eq!(cohort.lagging_ranks(), [1]);
        cohort.record_all_reduce(&[0, 4], 0);
        assert_eq!(cohort.lagging_ranks(), [1, 4]);
        cohort.record_all_reduce(&both, 1);
        cohort.record_all_reduce(&[0, 4], 4);
        assert_eq!(cohort.lagging_ranks(), [1]);
        cohort.record_all_reduce(&both, 1);
        assert!(cohort.lagging_ranks().is_empty());
        assert!(cohort.ahead.lock().unwrap().is_empty());
    }
}
