//! Counts what leases use of the worker's devices, grant by grant, from the reports of their
//! processes.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use tensord_proto::{ids::LeaseId, v1::LeaseGranted};

use super::Supervisor;
use crate::{locks::lock, process_message::Report, usage::ledger::ProcessCounters};

impl Supervisor {
    /// Records which devices a lease has got. The table has refused those that the lease may not have.
    pub(super) fn count_granted(&self, granted: &LeaseGranted) {
        let (now, lease) = (Instant::now(), LeaseId(granted.lease_id));
        let devices: BTreeSet<_> = lock(&self.table).devices(lease).collect();
        let mut ledger = lock(&self.usage);
        for grant in &granted.grants {
            if devices.contains(&grant.device_index) {
                ledger.granted(now, lease, grant);
            }
        }
    }

    /// Has the ledger know what a lease has used by the latest report of its process.
    pub(super) fn count(&self, lease: LeaseId, report: &Report) {
        let now = Instant::now();
        let table = lock(&self.table);
        let shares = report.used.keys();
        let shares = shares.map(|device| (*device, table.share(lease, *device)));
        let shares: BTreeMap<_, _> = shares.collect();
        drop(table);
        let mut ledger = lock(&self.usage);
        for (&device, &used) in &report.used {
            let usage = report.usage.get(&device);
            let counters = ProcessCounters {
                used,
                device_busy_us: usage.map_or(0, |usage| usage.busy_us),
            };
            let mut devices = self.devices.iter();
            let offered = devices.find(|offered| offered.index == device);
            let memory_bytes = match shares.get(&device).copied().flatten() {
                Some(share) => share.memory_bytes,
                None => offered.map_or(0, |offered| offered.memory_bytes),
            };
            ledger.reported(now, lease, device, memory_bytes, counters);
        }
    }
}
