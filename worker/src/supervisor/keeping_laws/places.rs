//! The places that keep snapshots, for the tests of their laws, each with a lease whose snapshots are copied there.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tempfile::TempDir;
use tensord_proto::{
    grant::GrantNumber,
    ids::{LeaseId, PartId, SessionId, StoreId, WorkerId},
    v1::{DeviceGrant, LeaseGranted},
};
use tensord_transport::{Identity, Listener};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::supervisor::{
    Described, Job, SnapshotStore, Supervisor, SupervisorSettings,
    copy_queue::CopyQueue,
    keeper::NewSource,
    keeper_link::{Assignment, Keeper, KeeperLink, KeeperQueues},
    process::Spawner,
    sealed_memory::{contents, sealed_memory},
    snapshot_copies::SnapshotCopies,
    snapshot_store::StoredPart,
    snapshots::{KeptSnapshot, Refused, SnapshotBounds, SnapshotFiles},
    store_link::StoreLink,
};
use crate::{
    devices::{DeviceSelection, FoundDevice},
    lease_host::LeaseHost,
    locks::lock,
    process_message::{ProcessSettings, SnapshotInfo},
};

const LEASE: LeaseId = LeaseId(7);

pub(in crate::supervisor) const PART: PartId = PartId {
    lease: LEASE,
    index: 0,
};

/// Another lease, which has a snapshot at the same place.
pub(super) const OTHER_LEASE: LeaseId = LeaseId(8);

/// The pool's key, from which a store derives the prefix of its objects.
const POOL_KEY: &[u8] = b"the key of a pool";

/// What the lease's own worker may keep of it.
pub(super) const BOUNDS: SnapshotBounds = SnapshotBounds {
    max_bytes: 2 << 20,
    devices: 1,
};

/// Bytes that a worker may keep for other workers.
const KEPT_FOR_OTHERS_BYTES: u64 = 1 << 20;

/// The deadline of each wait, which should take milliseconds.
const DEADLINE: Duration = Duration::from_secs(20);

/// A place that keeps snapshots.
pub(super) trait Place {
    /// Returns the snapshots with which a process of the lease would start if there were only this place.
    async fn load(&self, lease: LeaseId) -> Vec<KeptSnapshot>;

    /// Has the place keep a snapshot of [`OTHER_LEASE`].
    async fn keep_other_lease(&self, snapshot: KeptSnapshot);

    /// Drops what is kept of the lease, as the scheduler commands when the lease has ended.
    async fn end_lease(&self);

    /// Returns the most bytes of the lease that the place may have, if there is a bound.
    fn max_bytes(&self) -> Option<u64>;
}

/// The memory of the lease's own worker.
pub(super) struct OwnMemory(Arc<Supervisor>);

impl Place for OwnMemory {
    async fn load(&self, lease: LeaseId) -> Vec<KeptSnapshot> {
        lock(&self.0.snapshots).of(lease)
    }

    async fn keep_other_lease(&self, snapshot: KeptSnapshot) {
        lock(&self.0.snapshots).adopt(OTHER_LEASE, vec![snapshot]);
    }

    async fn end_lease(&self) {
        lock(&self.0.snapshots).forget_lease(LEASE);
    }

    fn max_bytes(&self) -> Option<u64> {
        Some(BOUNDS.max_bytes)
    }
}

/// The memory of another worker, which is the keeper of the lease.
pub(super) struct OtherWorker {
    supervisor: Arc<Supervisor>,
    keeper: watch::Sender<Option<Keeper>>,
    source: Arc<Supervisor>,
}

impl OtherWorker {
    /// Ends the connections, drops all snapshots, and allows the lease's worker to connect again.
    pub(super) fn begin_anew(&self) {
        self.supervisor.drop_snapshots(LEASE);
        self.keeper.send_modify(|keeper| {
            let keeper = keeper.as_mut().expect("there is a keeper");
            keeper.assignment.number += 1;
            let number = keeper.assignment.number;
            allow(&self.supervisor, &self.source, number);
        });
    }
}

impl Place for OtherWorker {
    async fn load(&self, lease: LeaseId) -> Vec<KeptSnapshot> {
        lock(&self.supervisor.kept_for_others).snapshots_of(PartId { lease, index: 0 })
    }

    async fn keep_other_lease(&self, snapshot: KeptSnapshot) {
        let part = PartId {
            lease: OTHER_LEASE,
            index: 0,
        };
        lock(&self.supervisor.kept_for_others).hold_own(part, "a", vec![snapshot]);
    }

    async fn end_lease(&self) {
        self.supervisor.drop_snapshots(LEASE);
    }

    fn max_bytes(&self) -> Option<u64> {
        Some(KEPT_FOR_OTHERS_BYTES)
    }
}

/// A snapshot store in a directory.
pub(super) struct Directory {
    store: SnapshotStore,
    _directory: TempDir,
}

impl Directory {
    fn part(&self, lease: LeaseId) -> StoredPart {
        self.store.part(POOL_KEY, lease, 0)
    }
}

impl Place for Directory {
    async fn load(&self, lease: LeaseId) -> Vec<KeptSnapshot> {
        self.part(lease).load(u64::MAX).await.unwrap()
    }

    async fn keep_other_lease(&self, snapshot: KeptSnapshot) {
        self.part(OTHER_LEASE).put(&snapshot).await.unwrap();
    }

    async fn end_lease(&self) {
        self.store.delete_lease(POOL_KEY, LEASE).await.unwrap();
    }

    fn max_bytes(&self) -> Option<u64> {
        None
    }
}

/// A lease of a worker, whose snapshots are copied to a place.
pub(super) struct Copied<P> {
    source: Arc<Supervisor>,
    copies: SnapshotCopies,
    pub(super) place: P,
    /// Kept open so that queued jobs are not refused; nobody runs them.
    _jobs: mpsc::Receiver<Job>,
    /// The tasks that copy the snapshots.
    tasks: JoinSet<()>,
}

/// A snapshot of a session.
#[derive(Clone, Copy)]
pub(super) struct Taken<'a> {
    pub(super) session: u64,
    pub(super) epoch: u64,
    pub(super) mark: u64,
    pub(super) committed: u64,
    pub(super) bytes: &'a [u8],
    pub(super) base: Option<Base<'a>>,
}

/// The base of a snapshot.
#[derive(Clone, Copy)]
pub(super) struct Base<'a> {
    pub(super) id: u64,
    pub(super) bytes: &'a [u8],
    /// Whether the process sends it with the snapshot.
    pub(super) is_new: bool,
}

/// What a place has: session, epoch, mark, contents, and those of the base.
type Contents = (u64, u64, u64, Vec<u8>, Option<Vec<u8>>);

pub(super) fn taken(mark: u64, committed: u64, bytes: &[u8]) -> Taken<'_> {
    Taken {
        session: 1,
        epoch: 0,
        mark,
        committed,
        bytes,
        base: None,
    }
}

/// Returns a worker whose jobs nobody runs.
pub(in crate::supervisor) fn worker(
    id: u64,
    store: Option<SnapshotStore>,
) -> (Arc<Supervisor>, mpsc::Receiver<Job>) {
    let found = FoundDevice {
        selection: DeviceSelection {
            kind: "flex".into(),
            index: 0,
        },
        name: "none".into(),
        memory_bytes: 1 << 30,
        driver: String::new(),
    };
    let described = Described {
        found: vec![found],
        missing: Vec::new(),
        spawner: Spawner::closed(),
    };
    let settings = SupervisorSettings {
        worker_id: WorkerId(id),
        worker_name: format!("w{id}"),
        identity: Arc::new(Identity::self_signed().unwrap()),
        process_settings: ProcessSettings::default(),
        hidden: Vec::new(),
        cache_bytes: 0,
        kept_for_others_bytes: KEPT_FOR_OTHERS_BYTES,
        store,
    };
    Supervisor::idle(described, settings)
}

/// Allows a worker to send a keeper the snapshots of the lease, by this assignment.
pub(in crate::supervisor) fn allow(keeper: &Supervisor, source: &Supervisor, assignment: u64) {
    let certificate = source.settings.identity.fingerprint();
    let source = NewSource {
        name: "w1".into(),
        certificate,
        assignment,
        is_handover: false,
    };
    let mut kept = lock(&keeper.kept_for_others);
    kept.allow(Instant::now(), PART, "a", source);
}

fn granted() -> LeaseGranted {
    let number = GrantNumber { term: 1, count: 1 };
    LeaseGranted {
        lease_id: LEASE.0,
        grants: vec![DeviceGrant {
            device_index: 0,
            grant: Some(number.into()),
            share: None,
        }],
        tenant: "a".into(),
        ..LeaseGranted::default()
    }
}

/// Returns the queues of a lease without a keeper.
fn no_keeper(source: &Arc<Supervisor>) -> KeeperQueues {
    let keeper = watch::channel(None).1;
    KeeperLink::new(source.clone(), PART, 1, keeper, Arc::default()).1
}

pub(super) async fn own_memory() -> Copied<OwnMemory> {
    let (source, jobs) = worker(1, None);
    let keeper = no_keeper(&source);
    Copied::new(source.clone(), keeper, None, OwnMemory(source), jobs)
}

pub(super) async fn other_worker() -> Copied<OtherWorker> {
    let (source, jobs) = worker(1, None);
    let (supervisor, _) = worker(2, None);
    let identity = &supervisor.settings.identity;
    let any = "127.0.0.1:0".parse().unwrap();
    let listener = Listener::bind_with_router(any, identity, supervisor.clone()).await;
    let listener = listener.unwrap();
    let keeper = Keeper {
        assignment: Assignment {
            keeper: WorkerId(2),
            number: 1,
        },
        name: "w2".into(),
        address: listener.address().to_string(),
        certificate: identity.fingerprint(),
    };
    allow(&supervisor, &source, keeper.assignment.number);
    let (keeper, assigned) = watch::channel(Some(keeper));
    let (link, queues) = KeeperLink::new(source.clone(), PART, 1, assigned, Arc::default());
    let place = OtherWorker {
        supervisor: supervisor.clone(),
        keeper,
        source: source.clone(),
    };
    let mut copied = Copied::new(source, queues, None, place, jobs);
    copied.tasks.spawn(supervisor.accept(listener));
    copied.tasks.spawn(link.run());
    copied
}

pub(super) async fn directory() -> Copied<Directory> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let store = SnapshotStore::open(&path.clone().into()).await.unwrap();
    let (source, jobs) = worker(1, Some(SnapshotStore::open(&path.into()).await.unwrap()));
    source.set_lease_key(POOL_KEY.into());
    source.set_time(1);
    source.granted(&granted());
    let part = source.stored_part(LEASE, &granted()).unwrap();
    let (link, queue) = StoreLink::new(source.clone(), LEASE, 1, part, Arc::default());
    let keeper = no_keeper(&source);
    let place = Directory {
        store,
        _directory: directory,
    };
    let mut copied = Copied::new(source, keeper, Some(queue), place, jobs);
    copied.tasks.spawn(link.run());
    copied
}

impl<P: Place> Copied<P> {
    fn new(
        source: Arc<Supervisor>,
        keeper: KeeperQueues,
        store: Option<CopyQueue<StoreId>>,
        place: P,
        jobs: mpsc::Receiver<Job>,
    ) -> Self {
        Self {
            source,
            copies: SnapshotCopies::new(keeper, store),
            place,
            _jobs: jobs,
            tasks: JoinSet::new(),
        }
    }

    /// Has the process of the lease take a snapshot, and waits until it counts as kept.
    pub(super) async fn take(&mut self, taken: Taken<'_>) -> Result<(), Refused> {
        let session = SessionId(taken.session);
        let new_base = taken.base.filter(|base| base.is_new);
        let files = SnapshotFiles {
            file: sealed_memory(taken.bytes),
            base: new_base.map(|base| sealed_memory(base.bytes)),
        };
        let added = {
            let mut snapshots = lock(&self.source.snapshots);
            snapshots.add(LEASE, BOUNDS, taken.epoch, taken.info(), files)
        };
        added?;
        if self.copies.send(session, taken.mark) {
            let kept = timeout(DEADLINE, self.copies.kept()).await;
            let kept = kept.expect("the snapshot counts as kept");
            assert_eq!((kept.session_id, kept.mark), (taken.session, taken.mark));
        }
        Ok(())
    }

    pub(super) fn end_session(&mut self, session: u64) {
        let session = SessionId(session);
        lock(&self.source.snapshots).forget_session(LEASE, session);
        self.copies.end_session(session);
    }

    /// Asserts that the place soon has these snapshots of the lease, and no others.
    #[track_caller]
    pub(super) fn expect(&self, expected: &[Taken<'_>]) -> impl Future<Output = ()> {
        let caller = std::panic::Location::caller();
        let expected: Vec<_> = expected.iter().map(contents_of).collect();
        async move {
            let until = Instant::now() + DEADLINE;
            loop {
                let found = self.contents().await;
                if found == expected {
                    return;
                }
                let is_over = Instant::now() > until;
                assert!(!is_over, "{caller}: found {found:?}, expected {expected:?}");
                sleep(Duration::from_millis(5)).await;
            }
        }
    }

    async fn contents(&self) -> Vec<Contents> {
        let loaded = self.place.load(LEASE).await;
        let found = loaded.iter().map(|kept| {
            let id = kept.id();
            let base = kept.base.as_ref().map(|base| contents(&base.file));
            (id.session_id, id.epoch, id.mark, contents(&kept.file), base)
        });
        let mut found: Vec<_> = found.collect();
        found.sort();
        found
    }
}

impl Taken<'_> {
    pub(super) fn info(&self) -> SnapshotInfo {
        SnapshotInfo {
            session_id: self.session,
            mark: self.mark,
            committed: self.committed,
            size_bytes: self.bytes.len() as u64,
            base_id: self.base.map_or(0, |base| base.id),
        }
    }
}

fn contents_of(taken: &Taken<'_>) -> Contents {
    let Taken {
        session,
        epoch,
        mark,
        bytes,
        base,
        ..
    } = *taken;
    let base = base.map(|base| base.bytes.into());
    (session, epoch, mark, bytes.into(), base)
}
