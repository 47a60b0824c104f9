//! Marks, restore points and snapshots: a program that lies about them harms only its own
//! session, no lease takes more memory for snapshots than its own, and nothing is left of them.

mod memory_limit;
mod restore_points;
mod sending_time;

use burn_ir::TensorIr;
use tensord_proto::v1::{Close, ErrorCode, Open, RestorePoint, frame::Body};
use tensord_testkit::{
    cluster::Cluster,
    raw::{self, ClientStream, RawSession, SessionError, Target},
};

use crate::{
    ops::full,
    processes::{UncheckedPool, custom},
};

/// Elements of a large tensor, which has 16 MiB.
const LARGE: usize = 4 << 20;

/// Memory for the snapshots of a lease: enough for two large tensors, and not for three.
const LEASE_BYTES: u64 = 40 << 20;

/// Starts a pool whose worker has `devices` devices.
fn start(devices: u64) -> Cluster {
    let mut cluster = Cluster::start(&[]);
    let memory = format!("{}MiB", devices * (LEASE_BYTES >> 20));
    let more = ["--upload-cache", "0", "--snapshot-memory", &memory];
    cluster.add_worker_with(&format!("flex*{devices}"), &more);
    cluster.wait_for_workers(1);
    cluster
}

/// A lease of one device, through a raw client, with a session.
struct RawLease {
    attached: ClientStream,
    target: Target,
    open: Open,
    session: RawSession,
}

impl RawLease {
    async fn start(url: &str) -> Self {
        let mut attached = ClientStream::to(url).await.unwrap();
        let target = attached.lease(1).await.unwrap().remove(0);
        let (open, session) = open(&target).await;
        Self {
            attached,
            target,
            open,
            session,
        }
    }

    /// Queues a large tensor.
    fn large(&mut self) -> TensorIr {
        large(&mut self.session)
    }

    /// Returns the opening that goes on from `restore`.
    fn restoring(&self, restore: &[RestorePoint]) -> Open {
        Open {
            restore: restore.to_vec(),
            ..self.open.clone()
        }
    }

    /// Checks that the worker refuses to restore the session from `restore`.
    async fn assert_not_restored(&mut self, restore: &[RestorePoint], reason: &str) {
        let open = self.restoring(restore);
        self.assert_refused(open, reason).await;
    }

    /// Checks that the worker refuses `open`, which resumes after a process has died.
    async fn assert_refused(&mut self, open: Open, reason: &str) {
        let refused = self.session.restore(&self.target, open).await;
        let Err(SessionError::Rejected(error)) = refused else {
            panic!("{refused:?}");
        };
        assert_eq!(error.code(), ErrorCode::Session, "{error}");
        assert!(error.message.contains(reason), "{error}");
    }
}

/// Opens a session that keeps what it sends.
async fn open(target: &Target) -> (Open, RawSession) {
    let open = target.open();
    let session = RawSession::open_with(target, open.clone()).await;
    let mut session = session.unwrap();
    session.begin_journal();
    (open, session)
}

fn large(session: &mut RawSession) -> TensorIr {
    let id = session.new_id();
    session.ops(&[full(raw::out(id, &[LARGE]))]);
    raw::tensor(id, &[LARGE])
}

/// Queues a mark, and waits until its snapshot is kept.
async fn kept_mark(session: &mut RawSession, mark: u64, committed: u64) -> RestorePoint {
    let point = session.mark(mark, committed);
    let marked = session.marked().await.unwrap();
    assert_eq!((marked.mark, marked.error.as_str()), (mark, ""));
    point
}

async fn assert_works(session: &mut RawSession) {
    let tensor = session.upload(&[1.0, 2.0]);
    let value = session.fetch(&tensor).await.unwrap().unwrap();
    assert_eq!(raw::floats(&value), [1.0, 2.0]);
}

/// Kills the processes of all leases.
fn kill_processes(cluster: &Cluster) {
    let worker = &cluster.workers[0];
    let processes = worker.processes_of_leases();
    assert!(!processes.is_empty());
    for process in processes {
        worker.signal_child(process, "KILL");
    }
}

#[test]
fn mark_out_of_order_ends_only_its_session() {
    let cluster = start(1);
    let violations: [&[(u64, u64)]; 7] = [
        &[(0, 0)],
        &[(1, 1)],
        &[(1, u64::MAX)],
        &[(1, 0), (1, 0)],
        &[(2, 0), (1, 0)],
        &[(1, 0), (2, 3)],
        &[(u64::MAX, 0), (1, 0)],
    ];
    raw::block(async {
        let mut lease = RawLease::start(cluster.client_url()).await;
        for marks in violations {
            let (_, mut session) = open(&lease.target).await;
            for &(mark, committed) in marks {
                session.mark(mark, committed);
            }
            let ended = session.end().await;
            let error = ended.error().unwrap_or_else(|| panic!("{ended}"));
            assert_eq!(error.code(), ErrorCode::Protocol, "{marks:?}: {error}");
            assert!(error.message.contains("mark"), "{marks:?}: {error}");
        }
        assert_works(&mut lease.session).await;
    });
}

#[test]
fn session_is_restored_once() {
    let cluster = start(1);
    raw::block(async {
        let mut lease = RawLease::start(cluster.client_url()).await;
        let tensor = lease.session.upload(&[3.0]);
        let point = kept_mark(&mut lease.session, 1, 0).await;
        kill_processes(&cluster);
        let open = lease.restoring(&[point]);
        // As if the reply had been lost.
        for _ in 0..3 {
            let open = open.clone();
            lease.session.restore(&lease.target, open).await.unwrap();
        }
        let value = lease.session.fetch(&tensor).await.unwrap().unwrap();
        assert_eq!(raw::floats(&value), [3.0]);
        // A program that resumes at the process that it knows restores nothing.
        let resumed = Open {
            epoch: lease.session.opened.epoch,
            ..open
        };
        lease.session.resume(&lease.target, resumed).await.unwrap();
        let value = lease.session.fetch(&tensor).await.unwrap().unwrap();
        assert_eq!(raw::floats(&value), [3.0]);
    });
}

#[test]
fn snapshot_tells_nothing_and_is_restored_with_its_key_only() {
    const VALUE: f32 = 1234.5;
    let cluster = start(1);
    raw::block(async {
        let mut lease = RawLease::start(cluster.client_url()).await;
        let tensor = lease.session.upload(&[VALUE; 4096]);
        let point = kept_mark(&mut lease.session, 1, 0).await;
        let snapshots = cluster.workers[0].snapshots();
        assert_eq!(snapshots.len(), 1);
        assert!(snapshots[0].len() > 4096 * size_of::<f32>());
        let values = VALUE.to_le_bytes().repeat(2);
        let mut windows = snapshots[0].windows(values.len());
        assert!(!windows.any(|window| window == values));
        // Each has a salt of its own, so no two are encrypted with one key.
        kept_mark(&mut lease.session, 2, 1).await;
        let both = cluster.workers[0].snapshots();
        assert_eq!(both.len(), 2);
        assert_ne!(both[0][..32], both[1][..32]);

        kill_processes(&cluster);
        for key in [vec![], vec![8; 32], vec![7; 31]] {
            let other = Open {
                snapshot_key: key.into(),
                ..lease.restoring(&[point])
            };
            lease.assert_refused(other, "key").await;
        }
        let open = lease.restoring(&[point]);
        lease.session.restore(&lease.target, open).await.unwrap();
        let value = lease.session.fetch(&tensor).await.unwrap().unwrap();
        assert_eq!(raw::floats(&value), [VALUE; 4096]);
        let without_key = Open {
            snapshot_key: Vec::new().into(),
            ..lease.target.open()
        };
        let session = RawSession::open_with(&lease.target, without_key).await;
        assert!(!session.unwrap().opened.durable);
    });
}

#[test]
fn ended_session_and_ended_lease_are_not_restored() {
    let cluster = start(1);
    raw::block(async {
        let mut lease = RawLease::start(cluster.client_url()).await;
        let kept = kept_mark(&mut lease.session, 1, 0).await;
        let (open, mut session) = open(&lease.target).await;
        let point = kept_mark(&mut session, 1, 0).await;
        session.push(Body::Close(Close {}));
        session.end().await;
        cluster.wait("the end of a snapshot", || {
            cluster.workers[0].snapshots_bytes().len() == 1
        });
        kill_processes(&cluster);
        let ended = Open {
            session_id: open.session_id,
            ..lease.restoring(&[point])
        };
        lease.assert_refused(ended, "no snapshot").await;
        let open = lease.restoring(&[kept]);
        lease
            .session
            .restore(&lease.target, open.clone())
            .await
            .unwrap();

        lease.attached.release(lease.target.lease_id).await.unwrap();
        cluster.wait("the end of the lease", || {
            cluster.workers[0].snapshots_bytes().is_empty()
        });
        let mut next = RawLease::start(cluster.client_url()).await;
        let refused = lease.session.restore(&lease.target, open).await;
        let error = refused.unwrap_err();
        let error = error.error().unwrap_or_else(|| panic!("{error}"));
        assert_eq!(error.code(), ErrorCode::Lease, "{error}");
        // The next lease of the device cannot have the session, either.
        kept_mark(&mut next.session, 1, 0).await;
        kill_processes(&cluster);
        let foreign = Open {
            session_id: lease.open.session_id,
            ..next.restoring(&[kept])
        };
        next.assert_refused(foreign, "no snapshot").await;
    });
}

#[test]
fn marks_where_nothing_is_kept_have_a_reply() {
    let mut cluster = Cluster::start(&[]);
    cluster.add_worker_with("flex", &["--snapshot-memory", "0"]);
    cluster.wait_for_workers(1);
    raw::block(async {
        let mut attached = ClientStream::to(cluster.client_url()).await.unwrap();
        let target = attached.lease(1).await.unwrap().remove(0);
        let (_, mut session) = open(&target).await;
        assert!(!session.opened.durable);
        session.mark(1, 0);
        let marked = session.marked().await.unwrap();
        assert!(
            marked.error.contains("the worker keeps no snapshots"),
            "{}",
            marked.error
        );
        assert_works(&mut session).await;
    });
}

#[test]
fn op_that_ends_its_process_twice_ends_its_lease() {
    let snapshots = [("UNCHECKED_SNAPSHOTS", "1000000")];
    let UncheckedPool { cluster, worker } = UncheckedPool::start_with("flex", &snapshots);
    raw::block(async {
        let mut lease = RawLease::start(cluster.client_url()).await;
        lease.session.upload(&[1.0]);
        let point = kept_mark(&mut lease.session, 1, 0).await;
        let abort = custom(&mut lease.session, "abort");
        lease.session.ops(&[abort]);
        let lost = lease.session.end().await;
        assert!(matches!(lost, SessionError::Lost(_)), "{lost}");
        let open = lease.restoring(&[point]);
        lease.session.restore(&lease.target, open).await.unwrap();
        let lost = lease.session.end().await;
        assert!(matches!(lost, SessionError::Lost(_)), "{lost}");
        let error = raw::refusal(&lease.target).await;
        for expected in ["two processes have died in", "Custom", "SIGABRT"] {
            assert!(error.message.contains(expected), "{error}");
        }
    });
    assert_eq!(worker.snapshots_bytes(), [0; 0]);
}
