//! Tests of the bound on the memory that the snapshots of a lease take.

use burn_ir::OperationIr;
use tensord_proto::v1::{Close, frame::Body};
use tensord_testkit::{raw, resource_usage::Bound};

use super::{LEASE_BYTES, RawLease, assert_works, kept_mark, large, open, start};

/// Bytes of a snapshot of one large tensor, which the worker has received and not kept or refused
/// yet.
const IN_TRANSIT_BYTES: u64 = 17 << 20;

#[test]
fn flood_of_marks_takes_no_more_than_the_memory_for_snapshots() {
    const MARKS: u64 = 2_000;

    let cluster = start(1);
    let worker = &cluster.workers[0];
    let mut lease = raw::block(async {
        let mut lease = RawLease::start(cluster.client_url()).await;
        assert_works(&mut lease.session).await;
        lease
    });
    let before = worker.resource_usage();
    raw::block(async {
        let first = lease.large();
        kept_mark(&mut lease.session, 1, 0).await;
        lease.session.ops(&[OperationIr::Drop(raw::last(&first))]);
        for mark in 2..=MARKS {
            // Each snapshot has a tensor that no other one has.
            let tensor = lease.large();
            lease.session.mark(mark, 1);
            lease.session.ops(&[OperationIr::Drop(raw::last(&tensor))]);
        }
        let mut replies = Vec::new();
        while replies.len() < MARKS as usize - 1 {
            let marked = lease.session.marked().await.unwrap();
            replies.push(marked.mark);
            let kept: u64 = worker.snapshots_bytes().iter().sum();
            assert!(kept <= LEASE_BYTES + IN_TRANSIT_BYTES, "{kept} bytes");
        }
        replies.sort_unstable();
        assert!(replies.into_iter().eq(2..=MARKS), "each has one reply");
        assert_works(&mut lease.session).await;
        lease.attached.release(lease.target.lease_id).await.unwrap();
    });
    cluster.wait("the end of the snapshots", || {
        worker.snapshots_bytes().is_empty()
    });
    worker.wait_until_settled(&before, Bound::default());
}

#[test]
fn session_goes_on_without_a_snapshot_that_does_not_fit() {
    let cluster = start(1);
    raw::block(async {
        let mut lease = RawLease::start(cluster.client_url()).await;
        for _ in 0..3 {
            lease.large();
        }
        lease.session.mark(1, 0);
        let marked = lease.session.marked().await.unwrap();
        assert!(marked.error.contains("limit"), "{}", marked.error);
        assert_works(&mut lease.session).await;
    });
    assert_eq!(cluster.workers[0].snapshots_bytes(), [0; 0]);
}

#[test]
fn lease_cannot_take_the_memory_for_snapshots_of_another() {
    let cluster = start(2);
    raw::block(async {
        let lease = RawLease::start(cluster.client_url()).await;
        let mut sessions = Vec::new();
        let mut refused = Vec::new();
        for _ in 0..5 {
            let (opening, mut session) = open(&lease.target).await;
            large(&mut session);
            session.mark(1, 0);
            let marked = session.marked().await.unwrap();
            refused.extend(Some(marked.error).filter(|error| !error.is_empty()));
            sessions.push((opening, session));
        }
        assert_eq!(refused.len(), 3, "two fit: {refused:?}");
        assert!(
            refused
                .iter()
                .all(|error| error.contains("snapshots of the lease")),
            "{refused:?}"
        );
        let mut other = RawLease::start(cluster.client_url()).await;
        other.large();
        kept_mark(&mut other.session, 1, 0).await;
        let kept = cluster.workers[0].snapshots_bytes();
        assert_eq!(kept.len(), 3, "{kept:?}");
        // The end of a session makes room for another one.
        let (opening, mut ended) = sessions.remove(0);
        // A connection ends if a session sends nothing while others work.
        ended.resume(&lease.target, opening).await.unwrap();
        ended.push(Body::Close(Close {}));
        ended.end().await;
        cluster.wait("the end of a snapshot", || {
            cluster.workers[0].snapshots_bytes().len() == 2
        });
        let (opening, mut last) = sessions.remove(3);
        last.resume(&lease.target, opening).await.unwrap();
        kept_mark(&mut last, 2, 0).await;
    });
}
