//! The supervisor as the [`LeaseHost`] of its worker.

use std::{collections::BTreeMap, pin::Pin, time::Instant};

use tensord_proto::{
    MAX_LEASES_WITH_SNAPSHOTS,
    ids::{LeaseId, PartId, StoreId, WorkerId},
    text::{MESSAGE_CHARS, sanitize},
    v1::{
        DeviceGrant, DeviceUsage, Error, GrantUsage, HeldDevice, IdleLease, InterruptedLease,
        KeepSnapshots, KeptLease, LeaseGranted, MissingPeer, OutOfService, SendSnapshots,
        SnapshotMemory,
    },
};
use tensord_transport::tls::Fingerprint;
use tracing::warn;

use super::{
    SnapshotStore, Supervisor,
    keeper::NewSource,
    keeper_link::{Assignment, Keeper},
};
use crate::{
    lease_host::LeaseHost,
    locks::lock,
    process_message::{Empty, Task},
};

impl LeaseHost for Supervisor {
    fn set_lease_key(&self, key: Vec<u8>) {
        lock(&self.scheduler).lease_key = Some(key.clone());
        lock(&self.stored_leases).joined();
        self.lease_tokens.set_key(key.clone());
        self.broadcast(&Task::LeaseKey(key));
    }

    fn takes_shares(&self) -> bool {
        true
    }

    fn set_time(&self, time_ms: u64) {
        lock(&self.scheduler).time_ms = Some((time_ms, Instant::now()));
        lock(&self.table).set_time(time_ms, Instant::now());
        self.broadcast(&Task::Time(time_ms));
    }

    fn mark_unreachable(&self) {
        lock(&self.scheduler).time_ms = None;
        lock(&self.table).mark_unreachable();
        self.broadcast(&Task::Unreachable(Empty {}));
    }

    fn granted(&self, granted: &LeaseGranted) {
        if let Err(e) = self.admit(granted) {
            let lease = LeaseId(granted.lease_id);
            warn!(%lease, "refused a lease that the scheduler has announced: {e}");
        }
    }

    fn end_lease(&self, lease: LeaseId, grants: &[DeviceGrant]) {
        self.update(|table, now| table.end_lease(now, lease, grants));
    }

    fn send_snapshots(&self, command: &SendSnapshots) {
        let Some(certificate) = fingerprint(command.lease_id, &command.certificate_sha256) else {
            return;
        };
        let keeper = Keeper {
            assignment: Assignment {
                keeper: WorkerId(command.keeper_id),
                number: command.assignment,
            },
            name: sanitize(&command.keeper, MESSAGE_CHARS).to_string(),
            address: command.address.clone(),
            certificate,
        };
        let part = PartId {
            lease: LeaseId(command.lease_id),
            index: command.part,
        };
        match lock(&self.leases).get(&part.lease) {
            Some(lease) => drop(lease.keeper.send_if_modified(|known| {
                let is_new = known.as_ref() != Some(&keeper);
                *known = Some(keeper);
                is_new
            })),
            None => self.begin_handover(part, keeper),
        }
    }

    fn keep_snapshots(&self, command: &KeepSnapshots) {
        let hash = &command.source_certificate_sha256;
        let Some(certificate) = fingerprint(command.lease_id, hash) else {
            return;
        };
        let part = PartId {
            lease: LeaseId(command.lease_id),
            index: command.part,
        };
        let name = sanitize(&command.source, MESSAGE_CHARS).to_string();
        let mut kept = lock(&self.kept_for_others);
        let source = NewSource {
            name,
            certificate,
            assignment: command.assignment,
            is_handover: command.handover,
        };
        kept.allow(Instant::now(), part, &command.tenant, source);
    }

    fn set_tenant_snapshots(&self, permille: u32) {
        lock(&self.kept_for_others).set_tenant_permille(permille);
    }

    fn snapshot_memory(&self) -> Vec<SnapshotMemory> {
        let mut by_lease = BTreeMap::<LeaseId, u64>::new();
        let mut add = |lease, bytes| *by_lease.entry(lease).or_default() += bytes;
        let own = lock(&self.snapshots);
        own.sizes().for_each(|(lease, bytes)| add(lease, bytes));
        drop(own);
        let kept = lock(&self.kept_for_others);
        kept.sizes()
            .for_each(|(part, bytes)| add(part.lease, bytes));
        drop(kept);
        let used = by_lease.into_iter().filter(|(_, bytes)| *bytes > 0);
        let used = used.take(MAX_LEASES_WITH_SNAPSHOTS);
        used.map(|(lease, bytes)| SnapshotMemory {
            lease_id: lease.0,
            bytes,
        })
        .collect()
    }

    fn drop_snapshots(&self, lease: LeaseId) {
        if let Some(running) = lock(&self.leases).get_mut(&lease) {
            running.is_suspended = false;
        }
        lock(&self.kept_for_others).forget(lease);
        lock(&self.handovers).end(lease);
        lock(&self.restarts).remove(&lease);
    }

    fn drop_part(&self, part: PartId) {
        lock(&self.kept_for_others).forget_part(part);
        lock(&self.handovers).end_part(part);
    }

    fn hold_snapshots(&self, lease: LeaseId) {
        match lock(&self.leases).get_mut(&lease) {
            // Its snapshots are held once its process has ended.
            Some(running) => running.is_suspended = true,
            None => {
                lock(&self.kept_for_others).hold(lease);
                lock(&self.handovers).end(lease);
            }
        }
    }

    fn hold_part(&self, part: PartId) {
        lock(&self.kept_for_others).hold_part(part);
        lock(&self.handovers).end_part(part);
    }

    fn suspended_leases(&self) -> Vec<LeaseId> {
        let leases = lock(&self.leases);
        let ending = leases.iter().filter(|(_, running)| running.is_suspended);
        let ending = ending.map(|(lease, _)| *lease);
        let held = lock(&self.kept_for_others).held();
        // The other leases have ended while the scheduler could not be reached.
        let mut restarts = lock(&self.restarts);
        restarts.retain(|lease, _| leases.contains_key(lease) || held.contains(lease));
        ending.chain(held).collect()
    }

    fn is_handing_over(&self) -> bool {
        lock(&self.handovers).has_pending()
    }

    fn has_waiting_leases(&self) -> bool {
        let is_ending = lock(&self.leases).values().any(|lease| lease.is_suspended);
        is_ending || lock(&self.kept_for_others).has_waiting()
    }

    fn kept_leases(&self) -> Vec<KeptLease> {
        let running = lock(&self.leases);
        let leases = running.values().map(|running| {
            let live_sessions = lock(&running.report).live_sessions as usize;
            let keeper = lock(&running.progress).place_of_all(live_sessions);
            (running.part, live_sessions, keeper)
        });
        let mut leases: Vec<_> = leases.collect();
        leases.sort_unstable_by_key(|(part, ..)| *part);
        let at_keepers = leases.iter().filter_map(|(part, _, keeper)| {
            let Assignment { keeper, number } = (*keeper)?;
            Some(KeptLease {
                lease_id: part.lease.0,
                keeper_id: keeper.0,
                assignment: number,
                part: part.index,
                ..KeptLease::default()
            })
        });
        let refused = running.values().filter_map(|running| {
            let Assignment { keeper, number } = lock(&running.progress).refusing_place()?;
            Some(KeptLease {
                lease_id: running.part.lease.0,
                keeper_id: keeper.0,
                assignment: number,
                part: running.part.index,
                failed: true,
                ..KeptLease::default()
            })
        });
        let refused: Vec<_> = refused.collect();
        let here = self.leases_kept_here(&leases).into_iter();
        let handovers = lock(&self.handovers);
        let at_keepers = at_keepers.chain(handovers.ended());
        at_keepers.chain(refused).chain(here).collect()
    }

    fn leases_in_store(&self) -> Vec<LeaseId> {
        if let Some(at_stop) = lock(&self.stored_leases).at_stop() {
            return at_stop;
        }
        let leases = lock(&self.leases);
        let stored = leases.iter().filter(|(lease, running)| {
            let live_sessions = match lock(&self.interrupted).contains_key(*lease) {
                // They have ended with their process, and go on from their snapshots.
                true => lock(&self.snapshots).size_of(**lease).0,
                false => lock(&running.report).live_sessions as usize,
            };
            let progress = lock(&running.store_progress);
            progress.place_of_all(live_sessions).is_some()
        });
        stored.map(|(lease, _)| *lease).collect()
    }

    fn store_id(&self) -> Option<StoreId> {
        self.settings.store.as_ref().map(SnapshotStore::id)
    }

    fn take_stored_leases(&self) -> Vec<LeaseId> {
        self.take_found()
    }

    fn drop_stored(&self, leases: Vec<LeaseId>) {
        self.drop_stored_leases(leases);
    }

    fn interrupted_leases(&self) -> Vec<InterruptedLease> {
        let interrupted = lock(&self.interrupted);
        let interrupted = interrupted.iter().map(|(lease, reason)| InterruptedLease {
            lease_id: lease.0,
            reason: reason.clone(),
        });
        interrupted.collect()
    }

    fn idle_leases(&self) -> Vec<IdleLease> {
        let now = Instant::now();
        let leases = lock(&self.leases);
        let idle = leases.iter().filter_map(|(lease, running)| {
            let idle_for = running.activity.idle_for(now)?;
            Some(IdleLease {
                lease_id: lease.0,
                idle_ms: u64::try_from(idle_for.as_millis()).unwrap_or(u64::MAX),
            })
        });
        idle.collect()
    }

    fn missing_peers(&self) -> Vec<MissingPeer> {
        let leases = lock(&self.leases);
        let missing = leases.iter().flat_map(|(lease, running)| {
            let workers = lock(&running.report).missing_peers.clone();
            let lease_id = lease.0;
            let missing = move |worker_id| MissingPeer {
                lease_id,
                worker_id,
            };
            workers.into_iter().map(missing)
        });
        missing.collect()
    }

    fn end_all(&self, error: &Error) {
        let in_store = self.leases_in_store();
        lock(&self.stored_leases).stopping(in_store);
        self.update(|table, now| table.end_all(now, &error.message));
    }

    fn stop(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(self.spares.close())
    }

    fn live_session_count(&self) -> usize {
        let leases = lock(&self.leases);
        let live = leases.values();
        live.map(|lease| lock(&lease.report).live_sessions as usize)
            .fold(0, usize::saturating_add)
    }

    fn query_memory(&self) {
        self.broadcast(&Task::QueryMemory(Empty {}));
    }

    fn usage(&self) -> (Vec<DeviceUsage>, Vec<GrantUsage>) {
        let mut usage = vec![DeviceUsage::default(); self.devices.len()];
        for lease in lock(&self.leases).values() {
            for (&device, reported) in &lock(&lease.report).usage {
                if let Some(usage) = usage.get_mut(device as usize) {
                    add_usage(usage, reported);
                }
            }
        }
        let ledger = lock(&self.usage);
        for (device, usage) in (0..).zip(&mut usage) {
            usage.busy_us = ledger.device_busy_us(device);
        }
        (usage, ledger.usage(Instant::now()))
    }

    fn usage_recorded(&self, grants: &[DeviceGrant]) {
        lock(&self.usage).recorded(grants);
    }

    fn out_of_service(&self) -> Vec<OutOfService> {
        let own = |(device_index, reason): (u32, &str)| OutOfService {
            device_index,
            reason: reason.to_owned(),
        };
        let mut out: Vec<_> = lock(&self.table).out_of_service().map(own).collect();
        let leases = lock(&self.leases);
        let reported = leases.iter().flat_map(|(lease, running)| {
            let reported = lock(&running.report).out_of_service.clone();
            reported.into_iter().map(|out| (*lease, out))
        });
        let reported: Vec<_> = reported.collect();
        drop(leases);
        let table = lock(&self.table);
        // A lease with a share must not keep others from the device. If its op is stuck, its process
        // does not return its turn, and is killed once another lease wants it.
        let has_whole = |(lease, out): &(LeaseId, OutOfService)| {
            table.share(*lease, out.device_index).is_none()
        };
        out.extend(reported.into_iter().filter(has_whole).map(|(_, out)| out));
        drop(table);
        out.sort_by_key(|out| out.device_index);
        out.dedup_by_key(|out| out.device_index);
        out
    }

    fn held_devices(&self) -> Vec<HeldDevice> {
        lock(&self.table).held_devices()
    }

    fn ended_grants(&self) -> Vec<DeviceGrant> {
        lock(&self.table).ended_grants()
    }

    fn unreleased_devices(&self, lease: LeaseId) -> Vec<u32> {
        lock(&self.table).unreleased_devices(lease)
    }

    fn wait_for_reports(&self) -> Pin<Box<dyn Future<Output = Vec<LeaseId>> + Send + '_>> {
        Box::pin(async {
            self.reports.notified().await;
            std::mem::take(&mut *lock(&self.released))
        })
    }
}

/// Adds what one of the leases of a device uses of it.
fn add_usage(sum: &mut DeviceUsage, of_lease: &DeviceUsage) {
    let reserved = [sum.reserved_bytes, of_lease.reserved_bytes];
    *sum = DeviceUsage {
        sessions: sum.sessions.saturating_add(of_lease.sessions),
        live_bytes: sum.live_bytes.saturating_add(of_lease.live_bytes),
        ops_executed: sum.ops_executed.saturating_add(of_lease.ops_executed),
        // None if no backend counts them.
        reserved_bytes: reserved.into_iter().flatten().reduce(u64::saturating_add),
        // The ledger has it.
        busy_us: 0,
    };
}

impl Supervisor {
    /// Returns the leases each of whose sessions has a snapshot here, and whether there is room to hold
    /// the snapshots of all these leases together. `leases` has the number of live sessions of each
    /// lease.
    fn leases_kept_here(&self, leases: &[(PartId, usize, Option<Assignment>)]) -> Vec<KeptLease> {
        let snapshots = lock(&self.snapshots);
        let sized = leases.iter().filter_map(|(part, live_sessions, _)| {
            let (sessions, bytes) = snapshots.size_of(part.lease);
            let has_all = *live_sessions > 0 && sessions >= *live_sessions;
            has_all.then_some((*part, bytes))
        });
        let sized: Vec<_> = sized.collect();
        drop(snapshots);
        let kept_for_others = lock(&self.kept_for_others);
        let is_full = kept_for_others.is_full();
        let mut free_bytes = kept_for_others.free_bytes();
        drop(kept_for_others);
        let kept = sized.into_iter().map(|(part, bytes)| {
            let left = free_bytes.checked_sub(bytes).filter(|_| !is_full);
            free_bytes = left.unwrap_or(free_bytes);
            KeptLease {
                lease_id: part.lease.0,
                keeper_id: self.settings.worker_id.0,
                without_room: left.is_none(),
                part: part.index,
                ..KeptLease::default()
            }
        });
        kept.collect()
    }
}

/// Returns the fingerprint of a certificate that a command of the scheduler names. Logs one of another length.
fn fingerprint(lease_id: u64, sha256: &[u8]) -> Option<Fingerprint> {
    let Ok(hash) = sha256.try_into() else {
        let (lease, bytes) = (LeaseId(lease_id), sha256.len());
        warn!(%lease, "ignored a command on snapshots: the hash of its certificate has {bytes} bytes instead of 32");
        return None;
    };
    Some(Fingerprint(hash))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_of_a_device_is_that_of_all_its_leases() {
        let of_lease = |sessions, reserved_bytes| DeviceUsage {
            sessions,
            live_bytes: 100,
            ops_executed: 7,
            reserved_bytes,
            busy_us: 9,
        };
        let mut sum = DeviceUsage::default();
        add_usage(&mut sum, &of_lease(1, None));
        assert_eq!(sum.reserved_bytes, None, "no backend counts them");
        add_usage(&mut sum, &of_lease(2, Some(300)));
        add_usage(&mut sum, &of_lease(1, Some(50)));
        let expected = DeviceUsage {
            sessions: 4,
            live_bytes: 300,
            ops_executed: 21,
            reserved_bytes: Some(350),
            // That is counted where it cannot be lost with a process.
            busy_us: 0,
        };
        assert_eq!(sum, expected);
    }
}
