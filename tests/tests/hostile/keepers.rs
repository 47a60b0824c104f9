//! Workers that send other workers snapshots that nobody took.

use tensord_client::LeaseRequest;
use tensord_proto::{
    v1::{
        DeviceFingerprint, ErrorCode, Granted, LeaseRequest as RawLeaseRequest, OfferSnapshots,
        Open, RestorePoint, SnapshotBegin, SnapshotId, SnapshotPart, SnapshotStored, frame::Body,
        pool_message, worker_command,
    },
    version,
};
use tensord_testkit::{
    cluster::Cluster,
    raw::{
        self, ANSWER_DEADLINE, ClientStream, RawSession, RawWorker, SessionError, Target,
        WorkerStream,
    },
};
use tensord_transport::{Dialer, Link, TransportChoice, channel::duplex, tls::Trust};
use tokio::{
    task::JoinSet,
    time::{Instant, timeout},
};

/// A connection to the worker that keeps snapshots.
struct KeeperConnection(Link);

impl KeeperConnection {
    /// Dials the keeper and offers the snapshots of a lease under an assignment. Returns what the keeper
    /// replies.
    async fn open(
        dialer: Dialer,
        keeper: &(String, Trust),
        (lease_id, assignment): (u64, u64),
    ) -> (Self, Body) {
        let (address, trust) = keeper;
        let link = dialer.dial(address, trust, ANSWER_DEADLINE).await;
        let mut connection = Self(link.expect("the keeper is there"));
        let hello = Some(version::hello());
        let part = 0;
        let offer = OfferSnapshots {
            hello,
            lease_id,
            part,
            assignment,
        };
        assert!(connection.send(Body::OfferSnapshots(offer)).await);
        let reply = connection.next().await.expect("the keeper answers");
        (connection, reply)
    }

    /// Sends a frame. Returns `false` if the keeper has closed the connection.
    async fn send(&mut self, body: Body) -> bool {
        self.0.sender.send(&[duplex::encode(body)]).await.is_ok()
    }

    /// Returns the next frame, or `None` if the keeper has closed the connection.
    async fn next(&mut self) -> Option<Body> {
        let next = timeout(ANSWER_DEADLINE, self.0.receiver.recv()).await;
        let next = next.expect("the keeper answers or closes");
        duplex::decode(next.ok()??).expect("a frame of ours").body
    }

    /// Sends frames, and expects that the keeper closes the connection.
    async fn expect_closed(mut self, frames: impl IntoIterator<Item = Body>) {
        for frame in frames {
            self.send(frame).await;
        }
        while let Some(body) = self.next().await {
            assert!(matches!(body, Body::SnapshotStored(_)), "{body:?}");
        }
    }

    async fn stored(&mut self) -> SnapshotStored {
        match self.next().await {
            Some(Body::SnapshotStored(stored)) => stored,
            other => panic!("not a reply to a snapshot: {other:?}"),
        }
    }
}

fn id(session_id: u64, mark: u64) -> SnapshotId {
    let epoch = 0;
    SnapshotId {
        session_id,
        mark,
        epoch,
        base_id: 0,
    }
}

fn begin(id: SnapshotId, size_bytes: u64) -> Body {
    Body::SnapshotBegin(SnapshotBegin {
        id: Some(id),
        committed: 0,
        size_bytes,
        base_bytes: 0,
    })
}

/// Begins a snapshot with the base `base_id`, of which `base_bytes` follow.
fn begin_with_base(id: SnapshotId, base_id: u64, base_bytes: u64) -> Body {
    Body::SnapshotBegin(SnapshotBegin {
        id: Some(SnapshotId { base_id, ..id }),
        committed: 0,
        size_bytes: 8,
        base_bytes,
    })
}

fn part(bytes: usize) -> Body {
    let data = vec![7; bytes].into();
    Body::SnapshotPart(SnapshotPart { data })
}

/// A worker that runs a lease, whose snapshots the only honest worker is to keep.
struct Rogue {
    worker: RawWorker,
    /// The client that has the lease.
    attached: ClientStream,
    granted: Granted,
    keeper: (String, Trust),
    /// The number by which the scheduler has assigned the keeper.
    assignment: u64,
    /// Its stream to the scheduler, on which it sends heartbeats, until it is lost.
    registered: Option<(WorkerStream, JoinSet<()>)>,
}

impl Rogue {
    async fn start(cluster: &Cluster, fingerprint: DeviceFingerprint) -> Self {
        let mut worker = RawWorker::new("rogue", 1);
        worker.register.devices[0].fingerprint = Some(fingerprint);
        let mut registered = worker.join(cluster.worker_url()).await.unwrap();
        let heartbeats = registered.send_heartbeats();
        let mut attached = ClientStream::to(cluster.client_url()).await.unwrap();
        let durable = RawLeaseRequest {
            devices: 1,
            durability: tensord_proto::v1::Durability::Auto.into(),
            ..RawLeaseRequest::default()
        };
        // The smallest device that fits is that of the rogue.
        let granted = attached.request(durable).await.unwrap();
        let target = Target::all(&granted).remove(0);
        assert_eq!(target.worker_id, worker.register.worker_id);
        let status = cluster.pool().status().unwrap();
        let mut workers = status.workers.iter();
        let honest = workers.find(|worker| worker.name == "worker-0").unwrap();
        let assignment = loop {
            if let worker_command::Body::SendSnapshots(send) = registered.next_command().await {
                break send.assignment;
            }
        };
        let rogue = Self {
            worker,
            attached,
            granted,
            keeper: (honest.address.clone(), cluster.worker_trust(0)),
            assignment,
            registered: Some((registered, heartbeats)),
        };
        // The keeper learns of the lease a moment after the client.
        let until = Instant::now() + ANSWER_DEADLINE;
        while !matches!(rogue.connect().await.1, Body::SnapshotsOffered(_)) {
            assert!(Instant::now() < until, "the keeper does not know the lease");
        }
        rogue
    }

    fn dialer(&self) -> Dialer {
        Dialer::new(TransportChoice::Tcp).with_identity(self.worker.identity.clone())
    }

    /// Returns the lease, and the number of its keeper's assignment.
    fn lease(&self) -> (u64, u64) {
        (self.granted.lease_id, self.assignment)
    }

    /// Connects to the keeper. Returns its reply, too.
    async fn connect(&self) -> (KeeperConnection, Body) {
        KeeperConnection::open(self.dialer(), &self.keeper, self.lease()).await
    }

    /// Leaves the pool without a word, and waits until the lease has moved to the keeper.
    async fn moved(&mut self) -> Target {
        self.registered = None;
        let moved = loop {
            match self
                .attached
                .next()
                .await
                .unwrap()
                .expect("the stream is up")
            {
                pool_message::Body::Moved(moved) => break moved,
                pool_message::Body::Ended(ended) => panic!("{ended:?}"),
                _ => {}
            }
        };
        let moved = Granted {
            lease_id: moved.lease_id,
            token: moved.token,
            devices: moved.devices,
            ..self.granted.clone()
        };
        let moved = Target::all(&moved).remove(0);
        assert_ne!(moved.worker_id, self.worker.register.worker_id);
        moved
    }
}

/// Returns the fingerprint of the devices of the only worker.
fn fingerprint(cluster: &Cluster) -> DeviceFingerprint {
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let fingerprint = lease.descriptions()[0].fingerprint.expect("a fingerprint");
    DeviceFingerprint {
        hash: fingerprint.hash.to_vec().into(),
        is_exact: fingerprint.is_exact,
    }
}

fn expect_refused(reply: Body) {
    match reply {
        Body::Rejected(rejected) => {
            let error = rejected.error.unwrap();
            assert_eq!(error.code(), ErrorCode::Lease);
            assert!(error.message.contains("has not allowed"), "{error}");
        }
        other => panic!("not a refusal: {other:?}"),
    }
}

#[test]
fn only_the_worker_of_a_lease_may_send_its_snapshots() {
    let cluster = Cluster::start(&["flex*2"]);
    let fingerprint = fingerprint(&cluster);
    raw::block(async {
        let rogue = Rogue::start(&cluster, fingerprint).await;
        let (lease, assignment) = rogue.lease();
        let stranger = RawWorker::new("stranger", 1).identity;
        let tcp = || Dialer::new(TransportChoice::Tcp);
        let strangers = [
            (tcp().with_identity(stranger), (lease, assignment)),
            (tcp(), (lease, assignment)),
            (rogue.dialer(), (lease + 1, assignment)),
            (rogue.dialer(), (lease, assignment - 1)),
            (rogue.dialer(), (lease, 0)),
        ];
        for (dialer, lease) in strangers {
            let opened = KeeperConnection::open(dialer, &rogue.keeper, lease);
            expect_refused(opened.await.1);
        }
    });
}

#[test]
fn connection_of_a_worker_that_breaks_a_rule_is_closed() {
    let cluster = Cluster::start(&["flex*2"]);
    let fingerprint = fingerprint(&cluster);
    raw::block(async {
        let rogue = Rogue::start(&cluster, fingerprint).await;
        let broken = [
            vec![part(1)],
            vec![begin(id(1, 1), 8), begin(id(1, 2), 8)],
            vec![begin(id(1, 1), 8), part(9)],
            vec![begin(id(1, 1), 8), part(0)],
            // The same mark twice.
            vec![begin(id(2, 1), 8), part(8), begin(id(2, 1), 8), part(8)],
            // Mark 0 is none.
            vec![begin(id(3, 0), 8), part(8)],
            // A base without an id.
            vec![begin_with_base(id(4, 1), 0, 8), part(8), part(8)],
            // A part of both the base and the snapshot.
            vec![begin_with_base(id(5, 1), 7, 8), part(9)],
            // Two bases with the same id.
            vec![
                begin_with_base(id(6, 1), 7, 8),
                part(8),
                part(8),
                begin_with_base(id(6, 2), 7, 9),
                part(9),
                part(8),
            ],
            vec![Body::OfferSnapshots(OfferSnapshots::default())],
        ];
        for frames in broken {
            let (connection, reply) = rogue.connect().await;
            assert!(matches!(reply, Body::SnapshotsOffered(_)), "{reply:?}");
            connection.expect_closed(frames).await;
        }
        let (mut connection, _) = rogue.connect().await;
        connection.send(begin_with_base(id(8, 1), 9, 0)).await;
        connection.send(part(8)).await;
        let refused = connection.stored().await;
        assert_eq!(refused.error, "its base 9 is not kept");
        // Its parts are dropped.
        connection.send(begin(id(4, 1), u64::MAX)).await;
        let refused = connection.stored().await;
        assert!(refused.error.contains("in use"), "{}", refused.error);
        connection.send(part(100)).await;
        // The worker closes a connection before it drops what it has received on it.
        let kept = || cluster.workers[0].snapshots_bytes();
        cluster.wait("unfinished snapshots to be dropped", || kept().len() <= 3);
        assert_eq!(
            kept(),
            [8, 8, 8],
            "of session 2, and of session 6 with its base"
        );
    });
}

/// The lease moves to the keeper, and its session cannot be restored. The lease itself is as good
/// as new.
#[test]
fn false_snapshot_restores_nothing() {
    let cluster = Cluster::start(&["flex*2"]);
    let fingerprint = fingerprint(&cluster);
    raw::block(async {
        let mut rogue = Rogue::start(&cluster, fingerprint).await;
        let (mut connection, _) = rogue.connect().await;
        connection.send(begin(id(5, 1), 8)).await;
        connection.send(part(8)).await;
        assert_eq!(connection.stored().await.error, "");
        let moved = rogue.moved().await;
        let open = Open {
            session_id: 5,
            resume: true,
            restore: vec![RestorePoint {
                mark: 1,
                ..RestorePoint::default()
            }],
            ..moved.open()
        };
        let refused = loop {
            match RawSession::open_with(&moved, open.clone()).await {
                Ok(_) => panic!("a session was made of nothing"),
                // The worker has not started the lease.
                Err(SessionError::Lost(_)) => {}
                Err(error) => break error.to_string(),
            }
        };
        assert!(refused.contains("the snapshot"), "{refused}");
        assert!(!refused.contains("no snapshot"), "{refused}");
        let mut session = RawSession::open(&moved).await.unwrap();
        let tensor = session.upload(&[1.0, 2.0]);
        let read = session.fetch(&tensor).await.unwrap().unwrap();
        assert_eq!(raw::floats(&read), [1.0, 2.0]);
        // The rogue may send no more.
        expect_refused(rogue.connect().await.1);
    });
}
