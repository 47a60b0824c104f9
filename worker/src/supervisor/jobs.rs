//! The work that [`Supervisor::run`](super::Supervisor::run) has others do, as it takes time.

use std::fmt;

use tensord_proto::ids::{LeaseId, PartId};
use tokio::sync::mpsc::error::TrySendError;
use tracing::{debug, error};

use super::{Supervisor, keeper_link::Keeper, lease_queues::LeaseQueues};

/// Maximum number of jobs that `run` has not taken yet. More than can be due at a time: a lease in each lane of 64
/// devices, a test of each, a handover of each of 512 suspended leases, and a few for the snapshot store.
pub(super) const JOB_QUEUE: usize = 2048;

/// Work that takes time.
pub(super) enum Job {
    RunLease(LeaseId, Box<LeaseQueues>),
    Probe(u32),
    /// Find out of which leases the snapshot store has snapshots.
    ListStored,
    /// Delete what the snapshot store has of these leases.
    DropStored(Vec<LeaseId>),
    /// Hand the snapshots of a suspended lease over to another worker.
    HandOver(PartId, Box<Keeper>),
}

impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RunLease(lease, _) => write!(f, "run lease {lease}"),
            Self::Probe(device) => write!(f, "test device {device}"),
            Self::ListStored => f.write_str("list the leases in the snapshot store"),
            Self::DropStored(leases) => {
                let leases = leases.len();
                write!(
                    f,
                    "delete the stored snapshots of leases that are over: {leases}"
                )
            }
            Self::HandOver(part, _) => write!(f, "hand over the snapshots of lease {}", part.lease),
        }
    }
}

impl Supervisor {
    /// Queues a job.
    pub(super) fn queue(&self, job: Job) {
        match self.jobs.try_send(job) {
            Ok(()) => {}
            Err(TrySendError::Closed(job)) => debug!("the worker shuts down, and does not {job}"),
            Err(TrySendError::Full(job)) => {
                error!("cannot {job}: {JOB_QUEUE} other jobs of the worker's processes are queued");
            }
        }
    }
}
