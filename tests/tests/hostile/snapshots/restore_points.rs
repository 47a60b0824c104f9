//! Tests of programs that resume with wrong restore points.

use tensord_proto::v1::{Open, RestorePoint};
use tensord_testkit::raw;

use super::{RawLease, assert_works, kept_mark, kill_processes, open, start};

#[test]
fn wrong_restore_points_restore_nothing() {
    let cluster = start(2);
    raw::block(async {
        let mut lease = RawLease::start(cluster.client_url()).await;
        let mut other = RawLease::start(cluster.client_url()).await;
        let tensor = lease.session.upload(&[3.0]);
        let point = kept_mark(&mut lease.session, 1, 0).await;
        let other_point = kept_mark(&mut other.session, 1, 0).await;
        kill_processes(&cluster);

        let none = "the worker has no snapshot of it";
        lease.assert_not_restored(&[], none).await;
        let mark = |mark| RestorePoint { mark, ..point };
        lease.assert_not_restored(&[mark(0), mark(2)], none).await;
        // More points than a client has.
        let many: Vec<_> = (2..2000).map(mark).chain([point]).collect();
        lease.assert_not_restored(&many, none).await;
        let beyond = [u64::MAX, u64::MAX / 2].map(|at| {
            [
                RestorePoint {
                    frames: at,
                    ..point
                },
                RestorePoint { bytes: at, ..point },
                RestorePoint {
                    bulk_frames: at,
                    ..point
                },
                RestorePoint {
                    bulk_bytes: at,
                    ..point
                },
            ]
        });
        for point in beyond.into_iter().flatten() {
            lease.assert_not_restored(&[point], none).await;
        }
        // The session of another lease.
        let foreign = Open {
            session_id: other.open.session_id,
            ..lease.restoring(&[other_point])
        };
        lease.assert_refused(foreign, none).await;
        let bulk = Open {
            bulk: true,
            ..lease.restoring(&[point])
        };
        lease.assert_refused(bulk, "track for ops").await;
        // The worker does not know a session that was not restored, whatever epoch the client sends.
        for epoch in [1, u64::MAX] {
            let claimed = Open {
                epoch,
                ..lease.restoring(&[point])
            };
            lease.assert_refused(claimed, "no longer exists").await;
        }

        // None of that has done any harm.
        for (lease, point) in [(&mut lease, point), (&mut other, other_point)] {
            let open = lease.restoring(&[RestorePoint { mark: 7, ..point }, point]);
            lease.session.restore(&lease.target, open).await.unwrap();
            assert_works(&mut lease.session).await;
        }
        let value = lease.session.fetch(&tensor).await.unwrap().unwrap();
        assert_eq!(raw::floats(&value), [3.0]);
    });
}

#[test]
fn false_positions_harm_only_their_session() {
    let cluster = start(1);
    raw::block(async {
        let mut lease = RawLease::start(cluster.client_url()).await;
        let tensor = lease.session.upload(&[3.0]);
        let mut liars = Vec::new();
        for _ in 0..4 {
            let (open, mut session) = open(&lease.target).await;
            let first = session.upload(&[1.0]);
            session.fetch(&first).await.unwrap().unwrap();
            let point = kept_mark(&mut session, 1, 0).await;
            session.upload(&[2.0]);
            session.sync().await.unwrap();
            liars.push((open, session, point));
        }
        let point = kept_mark(&mut lease.session, 1, 0).await;
        kill_processes(&cluster);
        let falsified: [fn(RestorePoint) -> RestorePoint; 4] = [
            // The worker gets all frames again, also those from before the mark.
            |point| RestorePoint {
                frames: 0,
                bytes: 0,
                ..point
            },
            |point| RestorePoint {
                frames: point.frames - 1,
                ..point
            },
            |point| RestorePoint {
                frames: point.frames + 1,
                ..point
            },
            // Credit that the client has never used.
            |point| RestorePoint {
                bytes: 1 << 62,
                bulk_bytes: 1 << 62,
                ..point
            },
        ];
        for ((open, mut session, point), falsify) in liars.into_iter().zip(falsified) {
            let open = Open {
                restore: vec![falsify(point)],
                ..open
            };
            session.restore(&lease.target, open).await.unwrap();
            // Whatever becomes of the session, the worker replies or ends it.
            let _ = session.sync().await;
        }
        let process = cluster.workers[0].process_of_lease();
        let open = lease.restoring(&[point]);
        lease.session.restore(&lease.target, open).await.unwrap();
        let value = lease.session.fetch(&tensor).await.unwrap().unwrap();
        assert_eq!(raw::floats(&value), [3.0]);
        assert_eq!(cluster.workers[0].process_of_lease(), process);
    });
}
