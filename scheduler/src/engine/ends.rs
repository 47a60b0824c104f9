//! The commands to workers to end leases.

use std::collections::BTreeMap;

use tensord_proto::ids::{LeaseId, WorkerId};

use super::Engine;
use crate::command::Command;
use crate::event::DeviceGrant;

/// Where the [`EndLease`](Command::EndLease) commands of the current event are, so that further ends of the same lease
/// at the same worker are merged into them. A worker that joins can report thousands of leases that have ended.
#[derive(Default)]
pub(super) struct SentEnds(BTreeMap<(WorkerId, LeaseId), SentEnd>);

/// Where a command is that ends a lease, and what it names.
struct SentEnd {
    /// The command's position among those of the event.
    command: usize,
    /// The positions of the grants in the command, by device index and lane.
    grants: BTreeMap<(u32, u32), usize>,
}

impl SentEnd {
    /// Returns the entry of a new command, before its grants are added.
    fn new(command: usize) -> Self {
        Self {
            command,
            grants: BTreeMap::new(),
        }
    }
}

impl SentEnds {
    /// Forgets the commands, as those of the event are complete.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

impl Engine {
    /// Queues a command for a worker to end a lease, and to keep the lease's snapshots if the lease is
    /// suspended and is to go on from these. All such commands for one lease and
    /// worker within one event are merged into one.
    pub(super) fn send_end(&mut self, worker: WorkerId, lease: LeaseId, ended: Vec<DeviceGrant>) {
        let next = self.commands.len();
        let sent = self.sent_ends.0.entry((worker, lease));
        let SentEnd { command, grants } = sent.or_insert_with(|| SentEnd::new(next));
        if *command == next {
            let known = self.leases.get(lease);
            let hold_snapshots = known.is_some_and(|known| known.holders().contains(&worker));
            self.commands.push(Command::EndLease {
                worker,
                lease,
                grants: Vec::new(),
                hold_snapshots,
            });
        }
        let Some(Command::EndLease { grants: named, .. }) = self.commands.get_mut(*command) else {
            return;
        };
        for grant in ended {
            let at = *grants
                .entry((grant.index, grant.lane))
                .or_insert(named.len());
            match named.get_mut(at) {
                Some(known) => known.grant = known.grant.max(grant.grant),
                None => named.push(grant),
            }
        }
    }
}
