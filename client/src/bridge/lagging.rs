//! Flushes the ops of ranks that lag behind in an all-reduce.
//!
//! A collective proceeds once the ops of all its ranks are on the wire. But Burn's
//! remote client buffers ops, and a rank whose thread has ended would never send
//! its last ones. So while a rank has not reached an all-reduce that another rank of
//! its group has reached, the ops of the lagging rank are flushed again and again.

use std::{sync::Arc, time::Duration};

use burn::tensor::Device;
use tensord_session::Cohort;
use tokio::{runtime::Handle, time::sleep};

/// Delay until the ops of a rank that is behind are flushed. Threads that run at
/// about the same speed reach the all-reduce by themselves within that time.
const MIN_FLUSH_DELAY: Duration = Duration::from_millis(1);

/// Longest pause between two flushes of a rank that stays behind.
const MAX_FLUSH_DELAY: Duration = Duration::from_millis(100);

/// Flushes the ops of ranks that lag behind; `devices` are indexed by lease rank. Runs until
/// the future is dropped.
pub(super) async fn flush_lagging_ranks(
    cohort: Arc<Cohort>,
    devices: Vec<Device>,
    runtime: Handle,
) {
    let mut pause = MIN_FLUSH_DELAY;
    loop {
        if cohort.lagging_ranks().is_empty() {
            pause = MIN_FLUSH_DELAY;
            cohort.imbalance().await;
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
