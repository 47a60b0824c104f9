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
const FIRST_FLUSH: Duration = Duration::from_millis(1);

/// Longest pause between two flushes of a rank that stays behind.
const LAST_FLUSH: Duration = Duration::from_millis(100);

/// Sessions that were opened together.
#[derive(Debug, Default)]
pub(crate) struct Cohort {
    /// Chosen at random.
    pub(crate) id: u64,
    /// By a group's places: how many all-reduces each member is ahead of the
    /// slowest. Groups whose members are level have no entry.
    ahead: Mutex<HashMap<Vec<u32>, Vec<u64>>>,
    uneven: Notify,
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
    pub(crate) fn reached(&self, group: &[u32], lease_rank: u32) {
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
            self.uneven.notify_one();
        }
    }

    /// The places of the sessions that others wait for.
    fn behind(&self) -> Vec<u32> {
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
pub(crate) async fn flush_those_behind(cohort: Arc<Cohort>, devices: Vec<Device>, runtime: Handle) {
    let mut pause = FIRST_FLUSH;
    loop {
        if cohort.behind().is_empty() {
            pause = FIRST_FLUSH;
            cohort.uneven.notified().await;
        }
        sleep(pause).await;
        pause = (pause * 2).min(LAST_FLUSH);
        let behind = cohort.behind();
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
    fn those_whom_others_wait_for_are_behind() {
        let cohort = Cohort::default();
        let both = [1, 4];
        assert!(cohort.behind().is_empty());
        cohort.reached(&both, 4);
        cohort.reached(&both, 4);
        assert_eq!(cohort.behind(), [1]);
        cohort.reached(&[0, 4], 0);
        assert_eq!(cohort.behind(), [1, 4]);
        cohort.reached(&both, 1);
        cohort.reached(&[0, 4], 4);
        assert_eq!(cohort.behind(), [1]);
        cohort.reached(&both, 1);
        assert!(cohort.behind().is_empty());
        assert!(cohort.ahead.lock().unwrap().is_empty());
    }
}
