//! The snapshots of sessions that the worker keeps while their processes run.
//!
//! A snapshot is sealed memory, whose contents the worker does not read. A session has at most
//! two: the one that its client has committed, and a later one of which the client may not know
//! yet. Some of the contents may be in a *base*, which both share. Each lease has a bound of its own, so
//! that no lease can use up the memory of another.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::RangeInclusive,
    sync::Arc,
};

use tensord_proto::{ids::SessionId, v1::SnapshotId};

use crate::{memory_file::MemoryFile, process_message::SnapshotInfo};

/// Maximum number of sessions that have snapshots, for each device of their lease. An honest client
/// has one session on each device. Each snapshot is an open file of the worker.
const MAX_SESSIONS_PER_DEVICE: usize = 16;

/// Least bytes that a snapshot is charged for: it takes a descriptor of the worker, too.
const MIN_COST_BYTES: u64 = 64 << 10;

/// A snapshot of a session.
#[derive(Debug, Clone)]
pub(crate) struct KeptSnapshot {
    /// The epoch of the process that sent it.
    epoch: u64,
    pub(crate) info: SnapshotInfo,
    pub(crate) file: Arc<MemoryFile>,
    /// The base that `info` names.
    pub(crate) base: Option<KeptBase>,
}

/// Contents that snapshots of a session share.
#[derive(Debug, Clone)]
pub(crate) struct KeptBase {
    pub(crate) id: u64,
    pub(crate) size_bytes: u64,
    pub(crate) file: Arc<MemoryFile>,
}

impl KeptBase {
    fn is_same_as(&self, other: &Self) -> bool {
        (self.id, self.size_bytes) == (other.id, other.size_bytes)
    }
}

impl KeptSnapshot {
    /// Creates a snapshot in sealed memory that the lease's process of this epoch had taken.
    pub(super) fn new(
        epoch: u64,
        info: SnapshotInfo,
        file: MemoryFile,
        base: Option<KeptBase>,
    ) -> Self {
        let file = Arc::new(file);
        Self {
            epoch,
            info,
            file,
            base,
        }
    }

    /// Returns what identifies the snapshot among those of its lease.
    pub(crate) fn id(&self) -> SnapshotId {
        SnapshotId {
            session_id: self.info.session_id,
            mark: self.info.mark,
            epoch: self.epoch,
            base_id: self.info.base_id,
        }
    }

    /// Returns whether a keeper that has the snapshots `kept` of the lease has the base of this one, too, with a
    /// snapshot that outlasts the arrival of this one.
    pub(super) fn has_base_among(&self, kept: &[SnapshotId]) -> bool {
        let (id, committed) = (self.id(), self.info.committed);
        let mut of_session = kept.iter().filter(|it| it.session_id == id.session_id);
        of_session.any(|it| keeps_base(*it, id, committed))
    }
}

/// Returns whether the snapshot `kept` has the base of `other`, a snapshot of the same session, and outlasts its
/// arrival: a place then drops the snapshots from before `committed`, the mark that the client had committed when
/// `other` was taken.
pub(super) fn keeps_base(kept: SnapshotId, other: SnapshotId, committed: u64) -> bool {
    kept.base_id == other.base_id && kept.mark >= committed
}

/// Returns the sort key of a session's snapshots: that of a later one is greater.
pub(super) fn order(id: SnapshotId) -> (u64, u64) {
    (id.epoch, id.mark)
}

/// The memory of a snapshot, and of its base if that is new.
#[derive(Debug)]
pub(crate) struct SnapshotFiles {
    pub(crate) file: MemoryFile,
    pub(crate) base: Option<MemoryFile>,
}

impl From<MemoryFile> for SnapshotFiles {
    fn from(file: MemoryFile) -> Self {
        Self { file, base: None }
    }
}

/// The bounds of a lease's snapshots.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SnapshotBounds {
    /// Maximum bytes of all of them.
    pub(crate) max_bytes: u64,
    /// Number of the lease's devices on this worker.
    pub(crate) devices: usize,
}

/// The snapshots of all leases. `K` identifies what runs in one process: a lease, or a part of it.
#[derive(Debug)]
pub(crate) struct Snapshots<K> {
    leases: BTreeMap<K, LeaseSnapshots>,
}

impl<K> Default for Snapshots<K> {
    fn default() -> Self {
        let leases = BTreeMap::new();
        Self { leases }
    }
}

/// The snapshots of a lease.
#[derive(Debug, Default)]
struct LeaseSnapshots {
    used_bytes: u64,
    sessions: BTreeMap<SessionId, Vec<KeptSnapshot>>,
}

/// Why a snapshot is not kept.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// There is no room for the snapshot, or it is of no use. The sender may go on.
    NotKept(String),
    /// The rule that the sender broke.
    Violation(&'static str),
}

impl<K: Ord + Copy> Snapshots<K> {
    /// Adds a snapshot that the lease's process of this epoch has sent, with its base if that is new, if
    /// the lease's snapshots then keep to `bounds`. Drops those of the session that are not needed any
    /// more.
    ///
    /// A session that was restored at an earlier mark comes to later marks again: the snapshots of
    /// earlier processes there are replaced, and do not replace those of later ones.
    pub(crate) fn add(
        &mut self,
        lease: K,
        bounds: SnapshotBounds,
        epoch: u64,
        info: SnapshotInfo,
        files: impl Into<SnapshotFiles>,
    ) -> Result<(), Refused> {
        let SnapshotFiles { file, base } = files.into();
        let new_base = check_files(info, &file, base).map_err(Refused::Violation)?;
        let base_bytes = new_base.as_ref().map_or(0, |(_, size_bytes)| *size_bytes);
        let most_bytes = info.size_bytes.max(base_bytes);
        if most_bytes > bounds.max_bytes {
            let max_bytes = bounds.max_bytes;
            return Err(Refused::NotKept(format!(
                "the snapshot or its base has {most_bytes} bytes; snapshots of the lease may have at most {max_bytes} bytes in all"
            )));
        }
        let session = SessionId(info.session_id);
        let LeaseSnapshots {
            used_bytes: lease_used_bytes,
            sessions,
        } = self.leases.entry(lease).or_default();
        let SnapshotBounds { max_bytes, devices } = bounds;
        let max_sessions = MAX_SESSIONS_PER_DEVICE.saturating_mul(devices);
        if !sessions.contains_key(&session) && sessions.len() >= max_sessions {
            let reason = format!("{max_sessions} sessions of the lease have snapshots");
            return Err(Refused::NotKept(reason));
        }
        let kept = sessions.entry(session).or_default();
        if kept.last().is_some_and(|latest| latest.epoch > epoch) {
            return Err(Refused::NotKept(
                "there is a snapshot of a later process of the lease".into(),
            ));
        }
        if kept
            .last()
            .is_some_and(|latest| latest.epoch == epoch && latest.info.mark >= info.mark)
        {
            return Err(Refused::Violation(
                "its mark is not after that of the snapshot before",
            ));
        }
        let base = base_of(info, kept, new_base);
        if let Err(Refused::Violation(rule)) = base {
            return Err(Refused::Violation(rule));
        }
        // All but the one from which the client can go on.
        *lease_used_bytes -= sum(kept);
        kept.retain(|snapshot| snapshot.info.mark == info.committed);
        let added = base.and_then(|base| {
            let file = Arc::new(file);
            let snapshot = KeptSnapshot {
                epoch,
                info,
                file,
                base,
            };
            push_within(kept, snapshot, *lease_used_bytes, max_bytes)
        });
        *lease_used_bytes += sum(kept);
        if kept.is_empty() {
            sessions.remove(&session);
        }
        added
    }

    /// Adds the snapshots of a lease that has moved to this worker, whatever their size.
    pub(crate) fn adopt(&mut self, lease: K, kept: Vec<KeptSnapshot>) {
        let adopted = self.leases.entry(lease).or_default();
        for mut snapshot in kept {
            let session = SessionId(snapshot.info.session_id);
            let others = adopted.sessions.entry(session).or_default();
            adopted.used_bytes -= sum(others);
            let known = others.iter().filter_map(|other| other.base.as_ref());
            if let Some(base) = &mut snapshot.base {
                let same = |known: &&KeptBase| known.is_same_as(base);
                // It may have been loaded twice.
                if let Some(known) = known.clone().find(same) {
                    base.clone_from(known);
                }
            }
            others.push(snapshot);
            adopted.used_bytes += sum(others);
        }
    }

    /// Returns the bytes of all snapshots.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.leases.values().map(|lease| lease.used_bytes).sum()
    }

    /// Returns the bytes of each lease's snapshots.
    pub(crate) fn sizes(&self) -> impl Iterator<Item = (K, u64)> {
        let leases = self.leases.iter();
        leases.map(|(lease, snapshots)| (*lease, snapshots.used_bytes))
    }

    /// Returns the latest snapshot of a session.
    pub(crate) fn latest(&self, lease: K, session: SessionId) -> Option<KeptSnapshot> {
        let kept = self.leases.get(&lease)?.sessions.get(&session)?;
        kept.last().cloned()
    }

    /// Returns the number of a lease's sessions that have snapshots, and the bytes of all of these.
    pub(crate) fn size_of(&self, lease: K) -> (usize, u64) {
        let snapshots = self.leases.get(&lease);
        snapshots.map_or((0, 0), |it| (it.sessions.len(), it.used_bytes))
    }

    /// Returns whether a lease has snapshots.
    pub(crate) fn has(&self, lease: K) -> bool {
        let snapshots = self.leases.get(&lease);
        snapshots.is_some_and(|snapshots| snapshots.used_bytes > 0)
    }

    /// Returns the snapshots of a lease.
    pub(crate) fn of(&self, lease: K) -> Vec<KeptSnapshot> {
        let snapshots = self.leases.get(&lease).into_iter();
        let kept = snapshots.flat_map(|snapshots| snapshots.sessions.values().flatten());
        kept.cloned().collect()
    }

    /// Drops the snapshots of a session.
    pub(crate) fn forget_session(&mut self, lease: K, session: SessionId) {
        if let Some(snapshots) = self.leases.get_mut(&lease) {
            let kept = snapshots.sessions.remove(&session);
            snapshots.used_bytes -= sum(&kept.unwrap_or_default());
        }
    }

    /// Drops the snapshots of a session at marks before `mark`.
    pub(crate) fn forget_before(&mut self, lease: K, session: SessionId, mark: u64) {
        let Some(snapshots) = self.leases.get_mut(&lease) else {
            return;
        };
        if let Some(kept) = snapshots.sessions.get_mut(&session) {
            snapshots.used_bytes -= sum(kept);
            kept.retain(|snapshot| snapshot.info.mark >= mark);
            snapshots.used_bytes += sum(kept);
        }
    }

    /// Returns what has snapshots in this range.
    pub(crate) fn keys(&self, range: RangeInclusive<K>) -> impl Iterator<Item = K> {
        self.leases.range(range).map(|(lease, _)| *lease)
    }

    /// Drops the snapshots of a lease.
    pub(crate) fn forget_lease(&mut self, lease: K) {
        self.leases.remove(&lease);
    }
}

/// Checks a snapshot without regard to others. Returns its base, if that is new, with its size.
///
/// # Errors
///
/// The rule that the sender broke.
fn check_files(
    info: SnapshotInfo,
    file: &MemoryFile,
    base: Option<MemoryFile>,
) -> Result<Option<(MemoryFile, u64)>, &'static str> {
    if file.sealed_bytes()? != info.size_bytes {
        return Err("its size is not the announced one");
    }
    if info.mark <= info.committed {
        return Err("its mark is not after the committed one");
    }
    if info.base_id == 0 && base.is_some() {
        return Err("it has a base without an id");
    }
    base.map(|base| {
        let size_bytes = base.sealed_bytes()?;
        Ok((base, size_bytes))
    })
    .transpose()
}

/// Returns the base of a snapshot: one that a snapshot of its session has, or the new one.
///
/// # Errors
///
/// If the base is not kept, or the sender broke a rule.
fn base_of(
    info: SnapshotInfo,
    kept: &[KeptSnapshot],
    new_base: Option<(MemoryFile, u64)>,
) -> Result<Option<KeptBase>, Refused> {
    let id = info.base_id;
    let mut known = kept.iter().filter_map(|kept| kept.base.as_ref());
    let known = known.find(|base| base.id == id).cloned();
    match (known, new_base) {
        (None, None) if id == 0 => Ok(None),
        // A base is charged once per id, so a second copy must have the same size.
        (Some(known), Some((_, size_bytes))) if known.size_bytes != size_bytes => Err(
            Refused::Violation("its base has another size than the kept base of this id"),
        ),
        (Some(known), _) => Ok(Some(known)),
        (None, Some((file, size_bytes))) => Ok(Some(KeptBase {
            id,
            size_bytes,
            file: Arc::new(file),
        })),
        (None, None) => Err(Refused::NotKept(format!("its base {id:x} is not kept"))),
    }
}

/// Adds a snapshot to those of its session, if there is room. The lease's other sessions use
/// `other_bytes` of `max_bytes`.
fn push_within(
    kept: &mut Vec<KeptSnapshot>,
    snapshot: KeptSnapshot,
    other_bytes: u64,
    max_bytes: u64,
) -> Result<(), Refused> {
    let used_bytes = other_bytes + sum(kept);
    kept.push(snapshot);
    let needed_bytes = other_bytes.saturating_add(sum(kept));
    if needed_bytes <= max_bytes {
        return Ok(());
    }
    kept.pop();
    let cost_bytes = needed_bytes - used_bytes;
    Err(Refused::NotKept(format!(
        "the snapshot has {cost_bytes} bytes, and {used_bytes} of {max_bytes} bytes for snapshots of the lease are in use"
    )))
}

/// Returns the bytes for which snapshots of a session are charged. A base that they share is charged once.
fn sum(kept: &[KeptSnapshot]) -> u64 {
    let cost = |size_bytes: u64| size_bytes.max(MIN_COST_BYTES);
    let snapshots = kept.iter().map(|snapshot| cost(snapshot.info.size_bytes));
    let bases = kept.iter().filter_map(|snapshot| snapshot.base.as_ref());
    let bases: BTreeSet<_> = bases.map(|base| (base.id, base.size_bytes)).collect();
    let bases = bases.into_iter().map(|(_, size_bytes)| cost(size_bytes));
    snapshots.sum::<u64>() + bases.sum::<u64>()
}
