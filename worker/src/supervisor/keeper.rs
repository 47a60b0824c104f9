//! The snapshots that this worker keeps for leases that other workers run, and those of suspended
//! leases.
//!
//! The scheduler allows other workers of a lease to send the snapshots of the sessions that they run,
//! and names the workers' certificates. If one of them is lost, the scheduler grants devices of this
//! worker to the lease, and the lease's process starts with these snapshots.
//!
//! All these snapshots share one bound in bytes. In a pool of several tenants, those of one tenant may use a part of it
//! that the scheduler sets; what other workers send of its running leases beyond that is refused. The snapshots of
//! suspended leases are not refused because of that: otherwise a tenant could keep devices by large snapshots, as its
//! leases could not be suspended.

pub(super) mod connection;
mod tenants;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::RangeInclusive,
    time::{Duration, Instant},
};

use tensord_proto::{
    MAX_SUSPENDED_LEASES,
    ids::{LeaseId, PartId, SessionId},
};
use tensord_transport::tls::Fingerprint;

use self::tenants::{Reserved, Tenants};
use super::snapshots::{KeptSnapshot, Refused, SnapshotBounds, SnapshotFiles, Snapshots};
use crate::process_message::SnapshotInfo;

/// How long the snapshots of a lease are kept after the connection from its worker has ended: longer
/// than the scheduler lets a lost lease wait at most.
const ORPHAN_TIMEOUT: Duration = Duration::from_secs(25 * 3600);

/// After this time without a connection, the snapshots of a lease give way to those of leases that
/// run, if there is no room for both.
const ORPHAN_PRIORITY_TIMEOUT: Duration = Duration::from_secs(1800);

/// Maximum number of leases of other workers, counted once for each of their parts.
const MAX_SOURCES: usize = 1 << 16;

/// The snapshots that this worker keeps for leases that it does not run: those that other workers run, and suspended
/// ones.
#[derive(Debug)]
pub(super) struct KeptForOthers {
    /// Bounds of all snapshots, with those that are being received. The number of devices is at least
    /// that of this worker: a part of a lease that could go on here has no more devices.
    bounds: SnapshotBounds,
    tenants: Tenants,
    snapshots: Snapshots<PartId>,
    /// The workers that may send snapshots of a part of a lease, by their certificates.
    sources: BTreeMap<(PartId, [u8; 32]), Source>,
    /// The number of the source that has sent the last snapshot of a session.
    senders: BTreeMap<(PartId, SessionId), u64>,
    /// The suspended leases whose snapshots are held.
    held: BTreeSet<LeaseId>,
    /// Number of sources so far.
    allowed: u64,
}

/// A worker that is to send snapshots of a part of a lease.
#[derive(Debug)]
pub(super) struct NewSource {
    pub(super) name: String,
    pub(super) certificate: Fingerprint,
    /// The scheduler's number of the assignment.
    pub(super) assignment: u64,
    /// Whether the lease does not run, so that the bound for one tenant does not hold for its snapshots.
    pub(super) is_handover: bool,
}

/// A worker that may send snapshots of a part of a lease.
#[derive(Debug)]
struct Source {
    /// Different for each source, so that a connection of an earlier one counts for no other.
    number: u64,
    /// The scheduler's number of the assignment.
    assignment: u64,
    name: String,
    /// See [`NewSource`].
    is_handover: bool,
    /// Whether it may send more. It may not once the lease is suspended.
    may_send: bool,
    /// Number of its connections for the part.
    connections: usize,
    /// When it was allowed, or its last connection ended.
    last_seen: Instant,
}

impl KeptForOthers {
    pub(super) fn new(bounds: SnapshotBounds) -> Self {
        Self {
            bounds,
            tenants: Tenants::default(),
            snapshots: Snapshots::default(),
            sources: BTreeMap::new(),
            senders: BTreeMap::new(),
            held: BTreeSet::new(),
            allowed: 0,
        }
    }

    /// Sets how much of the memory one tenant may use, in thousandths; 0 means all of it. Snapshots that are here stay.
    pub(super) fn set_tenant_permille(&mut self, permille: u32) {
        self.tenants.set_most(permille);
    }

    /// Allows a worker to send the snapshots of a part of a tenant's lease, as the scheduler
    /// has assigned it to this worker by a number. Its connections under an earlier number end. If the
    /// sessions ran at another worker before, the snapshots of that one have a lower epoch, and do not
    /// replace later ones.
    pub(super) fn allow(&mut self, now: Instant, part: PartId, tenant: &str, source: NewSource) {
        let NewSource {
            name,
            certificate,
            assignment,
            is_handover,
        } = source;
        let key = (part, certificate.0);
        let known = self.sources.get(&key);
        let is_known = known.is_some_and(|it| it.may_send && it.assignment == assignment);
        let is_full = known.is_none() && self.sources.len() >= MAX_SOURCES;
        if !is_full {
            self.tenants.set(part, tenant);
        }
        if is_known || is_full {
            return;
        }
        let before = known.map(|known| known.number);
        self.allowed += 1;
        // What the worker has sent under an earlier number is its own.
        let all = (part, SessionId(0))..=(part, SessionId(u64::MAX));
        let senders = self.senders.range_mut(all).map(|(_, sender)| sender);
        for sender in senders.filter(|sender| Some(**sender) == before) {
            *sender = self.allowed;
        }
        let source = Source {
            number: self.allowed,
            assignment,
            name,
            is_handover,
            may_send: true,
            connections: 0,
            last_seen: now,
        };
        self.sources.insert(key, source);
    }

    /// Drops all that is kept of a lease. Its workers may send no more.
    pub(super) fn forget(&mut self, lease: LeaseId) {
        let allowed = self.sources.range(sources_of(PartId::range_of(lease)));
        let mut parts: BTreeSet<_> = allowed.map(|((part, _), _)| *part).collect();
        parts.extend(self.parts_of(lease));
        parts.into_iter().for_each(|part| self.forget_part(part));
        self.held.remove(&lease);
    }

    /// Drops all that is kept of a part of a lease. Its worker may send no more.
    pub(super) fn forget_part(&mut self, part: PartId) {
        let sources = sources_of(part..=part);
        self.sources.extract_if(sources, |_, _| true).for_each(drop);
        let all = (part, SessionId(0))..=(part, SessionId(u64::MAX));
        self.senders.extract_if(all, |_, _| true).for_each(drop);
        self.snapshots.forget_lease(part);
        self.tenants.forget(part);
        if self.parts_of(part.lease).is_empty() {
            self.held.remove(&part.lease);
        }
    }

    /// Returns the parts of a lease that have snapshots.
    fn parts_of(&self, lease: LeaseId) -> Vec<PartId> {
        self.snapshots.keys(PartId::range_of(lease)).collect()
    }

    /// Holds the snapshots of a suspended lease until they are dropped or taken, if there are any. No
    /// worker may send more.
    pub(super) fn hold(&mut self, lease: LeaseId) {
        let is_new = !self.held.contains(&lease);
        let mut parts = self.parts_of(lease).into_iter();
        let has_any = parts.any(|part| self.snapshots.has(part));
        if is_new && self.is_full() || !has_any {
            return self.forget(lease);
        }
        let all = sources_of(PartId::range_of(lease));
        for (_, source) in self.sources.range_mut(all) {
            source.may_send = false;
        }
        self.held.insert(lease);
    }

    /// Holds the snapshots of a part of a suspended lease, if there are any. No worker may send more.
    pub(super) fn hold_part(&mut self, part: PartId) {
        let is_new = !self.held.contains(&part.lease);
        if is_new && self.is_full() || !self.snapshots.has(part) {
            return self.forget_part(part);
        }
        for (_, source) in self.sources.range_mut(sources_of(part..=part)) {
            source.may_send = false;
        }
        self.held.insert(part.lease);
    }

    /// Returns whether there are snapshots of a part of a suspended lease.
    pub(super) fn holds(&self, part: PartId) -> bool {
        self.held.contains(&part.lease) && self.snapshots.has(part)
    }

    /// Holds the snapshots of the part of a tenant's suspended lease that has run here, and those of other parts
    /// of the lease that are kept here.
    pub(super) fn hold_own(&mut self, part: PartId, tenant: &str, own: Vec<KeptSnapshot>) {
        self.forget_part(part);
        self.tenants.set(part, tenant);
        self.snapshots.adopt(part, own);
        self.hold(part.lease);
    }

    /// Returns whether there is no place for another suspended lease.
    pub(super) fn is_full(&self) -> bool {
        self.held.len() >= MAX_SUSPENDED_LEASES
    }

    /// Returns the snapshots of a part of a lease.
    pub(super) fn snapshots_of(&self, part: PartId) -> Vec<KeptSnapshot> {
        self.snapshots.of(part)
    }

    /// Returns each part that has snapshots, of any lease, with their bytes.
    pub(super) fn sizes(&self) -> impl Iterator<Item = (PartId, u64)> {
        self.snapshots.sizes()
    }

    /// Returns the suspended leases whose snapshots are held.
    pub(super) fn held(&self) -> Vec<LeaseId> {
        self.held.iter().copied().collect()
    }

    /// Returns whether there are snapshots of a suspended lease, or of a part of a lease whose worker has no
    /// connection.
    pub(super) fn has_waiting(&self) -> bool {
        let orphans = self.orphans(Instant::now(), Duration::ZERO);
        let mut orphans = orphans.iter();
        !self.held.is_empty() || orphans.any(|(_, part)| self.snapshots.has(*part))
    }

    /// Returns the bytes for which there is room.
    pub(super) fn free_bytes(&self) -> u64 {
        self.bounds.max_bytes.saturating_sub(self.used_bytes())
    }

    /// Returns the bytes in use, with those of snapshots that are being received.
    fn used_bytes(&self) -> u64 {
        self.snapshots.used_bytes() + self.tenants.reserved_bytes()
    }

    /// Returns the bytes that a tenant uses, with those of snapshots that are being received.
    fn used_by(&self, tenant: &str) -> u64 {
        let parts = self.tenants.parts_of(tenant);
        let sizes = parts.map(|part| self.snapshots.size_of(part).1);
        sizes.sum::<u64>() + self.tenants.reserved_by(tenant)
    }

    /// Removes and returns the snapshots of a part of a lease that starts here. Its old worker may send
    /// no more.
    pub(super) fn take(&mut self, part: PartId) -> Vec<KeptSnapshot> {
        let kept = self.snapshots_of(part);
        self.forget_part(part);
        self.held.remove(&part.lease);
        kept
    }

    /// Drops the snapshots of parts of leases none of whose workers has had a connection for long. The
    /// workers may still send others.
    pub(super) fn expire(&mut self, now: Instant) {
        for (_, part) in self.orphans(now, ORPHAN_TIMEOUT) {
            self.snapshots.forget_lease(part);
        }
    }

    /// Returns the parts of leases none of whose workers has had a connection for `age`, each with the
    /// time since when, the longest first. Those of suspended leases are not among them.
    fn orphans(&self, now: Instant, age: Duration) -> BTreeSet<(Instant, PartId)> {
        let mut last_seen = BTreeMap::<PartId, Option<Instant>>::new();
        for ((part, _), source) in &self.sources {
            let here = Some(source.last_seen).filter(|_| source.connections == 0);
            let all = last_seen.entry(*part).or_insert(here);
            *all = all.zip(here).map(|(all, here)| all.max(here));
        }
        let orphans = last_seen.into_iter();
        let orphans = orphans.filter_map(|(part, since)| Some((since?, part)));
        let is_old = |since: Instant| now.saturating_duration_since(since) >= age;
        orphans
            .filter(|(since, part)| is_old(*since) && !self.held.contains(&part.lease))
            .collect()
    }

    /// Drops snapshots of leases without a connection, those of `tenant` first, until there is room for `size_bytes` more
    /// of it, which may use `most_bytes`. Drops none if that would not be enough.
    fn make_room(&mut self, now: Instant, tenant: &str, size_bytes: u64, most_bytes: u64) {
        let mut used_bytes = self.used_bytes().saturating_add(size_bytes);
        let mut tenant_bytes = self.used_by(tenant).saturating_add(size_bytes);
        let max_bytes = self.bounds.max_bytes;
        if used_bytes <= max_bytes && tenant_bytes <= most_bytes {
            return;
        }
        let orphans = self.orphans(now, ORPHAN_PRIORITY_TIMEOUT).into_iter();
        let is_own = |part: &PartId| *self.tenants.of(*part) == *tenant;
        let (own, others): (Vec<_>, Vec<_>) = orphans.map(|(_, part)| part).partition(is_own);
        let mut dropped = Vec::new();
        let parts = own.into_iter().map(|part| (part, true));
        for (part, is_own) in parts.chain(others.into_iter().map(|part| (part, false))) {
            if used_bytes <= max_bytes && tenant_bytes <= most_bytes {
                break;
            }
            let bytes = self.snapshots.size_of(part).1;
            used_bytes -= bytes;
            tenant_bytes -= if is_own { bytes } else { 0 };
            dropped.push(part);
        }
        if used_bytes <= max_bytes && tenant_bytes <= most_bytes {
            let parts = dropped.into_iter();
            parts.for_each(|part| self.snapshots.forget_lease(part));
        }
    }

    /// Returns the worker with this certificate, if it may send snapshots of a part of a lease under this
    /// assignment.
    fn source(
        &mut self,
        part: PartId,
        certificate: Option<Fingerprint>,
        assignment: u64,
    ) -> Option<&mut Source> {
        let source = self.sources.get_mut(&(part, certificate?.0))?;
        (source.may_send && source.assignment == assignment).then_some(source)
    }

    /// Returns the worker with this number, if it may still send snapshots of a part of a lease.
    fn numbered_source(&mut self, part: PartId, number: u64) -> Option<&mut Source> {
        let sources = self.sources.range_mut(sources_of(part..=part));
        let mut sources = sources.map(|(_, source)| source);
        sources.find(|source| source.number == number && source.may_send)
    }

    /// Returns whether another source than the one with this number has sent the last snapshot of a
    /// session.
    fn is_of_other(&self, part: PartId, session: SessionId, number: u64) -> bool {
        let sender = self.senders.get(&(part, session));
        sender.is_some_and(|sender| *sender != number)
    }

    /// Adds a snapshot that the source with this number has sent.
    fn add(
        &mut self,
        part: PartId,
        number: u64,
        epoch: u64,
        info: SnapshotInfo,
        files: impl Into<SnapshotFiles>,
    ) -> Result<(), Refused> {
        self.snapshots.add(part, self.bounds, epoch, info, files)?;
        let session = SessionId(info.session_id);
        self.senders.insert((part, session), number);
        Ok(())
    }

    /// Drops the snapshots of a session that has ended, as the source with this number reports. It may
    /// have gone on elsewhere, and another source may have sent snapshots of it.
    fn end_session(&mut self, part: PartId, session: SessionId, number: u64) {
        if !self.is_of_other(part, session, number) {
            self.snapshots.forget_session(part, session);
            self.senders.remove(&(part, session));
        }
    }

    /// Takes memory for a snapshot that the source with this number is to send, and drops those of its
    /// session that are not needed any more, as its client has committed a later mark.
    fn reserve(
        &mut self,
        now: Instant,
        part: PartId,
        number: u64,
        session: SessionId,
        committed: u64,
        size_bytes: u64,
    ) -> Result<Reserved, String> {
        if !self.is_of_other(part, session, number) {
            self.snapshots.forget_before(part, session, committed);
        }
        let tenant = self.tenants.of(part);
        let max_bytes = self.bounds.max_bytes;
        let source = self.numbered_source(part, number);
        let most_bytes = match source.is_some_and(|source| source.is_handover) {
            true => max_bytes,
            false => self.tenants.most_of(max_bytes),
        };
        self.make_room(now, &tenant, size_bytes, most_bytes);
        if self.free_bytes() < size_bytes {
            let used_bytes = self.used_bytes();
            return Err(format!(
                "the snapshot has {size_bytes} bytes, and {used_bytes} of {max_bytes} bytes for snapshots of other workers' and suspended leases are in use"
            ));
        }
        let used_bytes = self.used_by(&tenant);
        if most_bytes.saturating_sub(used_bytes) < size_bytes {
            return Err(format!(
                "the snapshot has {size_bytes} bytes, and its tenant's leases use {used_bytes} of the {most_bytes} bytes that one tenant may use of the memory for other workers' snapshots"
            ));
        }
        Ok(self.tenants.reserve(tenant, size_bytes))
    }

    fn release(&mut self, reserved: Reserved) {
        self.tenants.release(reserved);
    }
}

/// Returns the keys of all sources of these parts.
fn sources_of(parts: RangeInclusive<PartId>) -> RangeInclusive<(PartId, [u8; 32])> {
    let (first, last) = parts.into_inner();
    (first, [0; 32])..=(last, [u8::MAX; 32])
}
