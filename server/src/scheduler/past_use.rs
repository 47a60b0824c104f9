//! What tenants have had, on disk, so that it still counts after the scheduler has restarted.
//!
//! The averages of the engine are written now and then. A crash loses what has changed since, which is little
//! beside a half-life.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use tensord_scheduler::TenantName;
use tokio::{
    sync::oneshot,
    task,
    time::{MissedTickBehavior, interval},
};
use tracing::warn;

use super::{
    access::UnixMillis,
    driver::{Input, InputSender},
};
use crate::state::{Persisted, StateDir, StateError};

/// Name of the file in the state directory.
const FILE: &str = "past-use.json";

/// What the file has.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Record {
    /// When it was written; `None` if it never was.
    at: Option<UnixMillis>,
    /// The average share of each tenant then.
    shares: BTreeMap<String, f64>,
}

/// The file with what tenants have had.
#[derive(Clone, Debug)]
pub(crate) struct PastUseFile(Arc<Persisted<Record>>);

impl PastUseFile {
    /// Opens the file in a state directory. The first write creates it.
    ///
    /// # Errors
    ///
    /// If it cannot be read, or is damaged.
    pub(crate) fn open(state: &StateDir) -> Result<Self, StateError> {
        Ok(Self(Arc::new(state.persisted(FILE)?)))
    }

    /// Returns the average share of each tenant when the file was written, and how long ago that is.
    pub(super) fn shares(&self, now: UnixMillis) -> (Vec<(TenantName, f64)>, Duration) {
        let Record { at, shares } = &*self.0.read();
        let shares = shares.iter();
        let shares = shares.map(|(tenant, share)| (tenant.as_str().into(), *share));
        let age = at.map_or(0, |at| now.0.saturating_sub(at.0));
        (shares.collect(), Duration::from_millis(age))
    }

    /// Writes the averages of the engine every `period`, until the driver has ended.
    pub(super) async fn keep(self, driver: InputSender, period: Duration) {
        let mut ticks = interval(period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first tick is at once.
        ticks.tick().await;
        loop {
            ticks.tick().await;
            let (reply, replied) = oneshot::channel();
            let input = Input::PastShares(reply);
            if driver.send(input.into()).await.is_err() {
                return;
            }
            let Ok(shares) = replied.await else {
                return;
            };
            let file = self.clone();
            let write = task::spawn_blocking(move || file.write(shares, UnixMillis::now()));
            if let Ok(Err(error)) = write.await {
                warn!("what tenants have had is not recorded: {error}");
            }
        }
    }

    fn write(&self, shares: BTreeMap<TenantName, f64>, now: UnixMillis) -> Result<(), StateError> {
        let shares = shares.into_iter();
        let shares = shares.map(|(tenant, share)| (tenant.as_str().to_owned(), share));
        let shares: BTreeMap<_, _> = shares.collect();
        if shares.is_empty() && self.0.read().shares.is_empty() {
            return Ok(());
        }
        self.0.change(|record| {
            *record = Record {
                at: Some(now),
                shares,
            };
            Ok(())
        })
    }
}
