//! Links between the workers of a lease, over real connections.

use std::{
    sync::{Mutex, mpsc as std_mpsc},
    thread,
};

use burn_backend::{DType, Shape};
use bytes::Bytes;
use tensord_proto::{
    codec::encode_type,
    ids::LeaseId,
    v1::{Arrivals, FaultKind},
};
use tensord_transport::Listener;
use tokio::{runtime::Handle, sync::mpsc, task::AbortHandle};

use super::super::{
    AllReduceCall, Arrival, CollectiveSettings, Failure, LeaseMembers, Member, Members, Outcome,
    ReceivedValue,
};
use super::*;

/// A session that only collects its outcomes.
struct OutcomeCollector(mpsc::UnboundedSender<(u64, Outcome)>);

impl Member for OutcomeCollector {
    fn deliver(self: Arc<Self>, ticket: u64, outcome: Outcome) {
        let _ = self.0.send((ticket, outcome));
    }
}

struct Worker {
    cohort: Arc<Cohort>,
    _collector: Arc<dyn Member>,
    outcomes: mpsc::UnboundedReceiver<(u64, Outcome)>,
}

/// Creates the cohort at the worker with this id.
fn cohort(shares: &[LeaseShare], identity: Arc<Identity>, id: u64) -> Arc<Cohort> {
    let settings = CollectiveSettings {
        deadline: Duration::from_secs(20),
        bucket_bytes: None,
        runtime: Handle::current(),
        identity: Some(identity),
    };
    let lease_members = LeaseMembers::new(shares.to_vec(), WorkerId(id));
    Cohort::new(1, LeaseId(1), lease_members, Bytes::new(), settings)
}

/// Creates the worker with this id, with the session at `lease_rank`.
fn worker(shares: &[LeaseShare], identity: Arc<Identity>, id: u64, lease_rank: u32) -> Worker {
    let cohort = cohort(shares, identity, id);
    let (outcome_sender, outcomes) = mpsc::unbounded_channel();
    let collector: Arc<dyn Member> = Arc::new(OutcomeCollector(outcome_sender));
    assert!(cohort.enter(lease_rank, Arc::downgrade(&collector)));
    Worker {
        cohort,
        _collector: collector,
        outcomes,
    }
}

/// Starts an all-reduce of the ranks 0 and 1.
fn call(cohort: &Arc<Cohort>, lease_rank: u32, ticket: u64, size: usize) {
    let value = (ticket as f32 + lease_rank as f32).to_le_bytes();
    let call = AllReduceCall {
        members: Members::new(vec![0, 1], cohort.lease_members()).unwrap(),
        ticket,
        arrival: Arrival {
            shape: Shape::new([size]),
            dtype: DType::F32,
            mean: false,
            fault: None,
            ring_bytes: None,
        },
        bytes: value.repeat(size).into(),
    };
    cohort.call(lease_rank, vec![call]);
}

impl Worker {
    fn call(&self, lease_rank: u32, ticket: u64, size: usize) {
        call(&self.cohort, lease_rank, ticket, size);
    }

    async fn next(&mut self) -> (u64, Bytes) {
        match self.ended().await {
            (ticket, Ok(ReceivedValue::Reduced(bytes))) => (ticket, bytes),
            other => panic!("{other:?}"),
        }
    }

    async fn ended(&mut self) -> (u64, Outcome) {
        let outcomes = timeout(Duration::from_secs(30), self.outcomes.recv()).await;
        outcomes.unwrap().unwrap()
    }

    /// Waits for the next call and returns why it failed.
    async fn failed(&mut self) -> String {
        match self.ended().await {
            (_, Err(Failure::New(FaultKind::Peer, reason))) => reason,
            other => panic!("{other:?}"),
        }
    }
}

/// Returns a lease of two workers, with their identities. The second worker listens.
async fn lease() -> ([LeaseShare; 2], [Arc<Identity>; 2], Listener) {
    let identities = [(); 2].map(|()| Arc::new(Identity::self_signed().unwrap()));
    let any = "127.0.0.1:0".parse().unwrap();
    let listener = Listener::bind(any, &identities[1]).await.unwrap();
    let share = |worker_id, address: String, identity: &Identity| LeaseShare {
        worker_id,
        worker: format!("w{worker_id}"),
        address,
        certificate_sha256: identity.fingerprint().0.to_vec().into(),
        ..LeaseShare::default()
    };
    let address = listener.address().to_string();
    let shares = [
        share(1, "127.0.0.1:1".into(), &identities[0]),
        share(2, address, &identities[1]),
    ];
    (shares, identities, listener)
}

/// Accepts every connection. `last` aborts the latest.
async fn accepting(
    mut listener: Listener,
    cohort: Arc<Cohort>,
    last: Arc<Mutex<Option<AbortHandle>>>,
) {
    loop {
        let mut link = listener.accept().await;
        let first = link.receiver.recv().await.unwrap().unwrap();
        link.receiver.admit().unwrap();
        let Some(Body::Join(join)) = duplex::decode(first).unwrap().body else {
            panic!("the first frame joins");
        };
        let accepted = accept(&cohort, &join, link.certificate.as_ref()).unwrap();
        let serving = serve(accepted, link);
        *last.lock().unwrap() = Some(tokio::spawn(serving).abort_handle());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_link_is_redialled_without_data_loss() {
    let (shares, [one, two], listener) = lease().await;
    let (mut first, mut second) = (worker(&shares, one, 1, 0), worker(&shares, two, 2, 1));
    let last: Arc<Mutex<Option<AbortHandle>>> = Arc::default();
    let accepting = accepting(listener, second.cohort.clone(), last.clone());
    let accepting = tokio::spawn(accepting);
    let (calls, size) = (40, 300_000);
    for ticket in 0..calls {
        first.call(0, ticket, size);
        second.call(1, ticket, size);
        if ticket % 8 == 7 {
            // The connection is cut in the middle of the latest call.
            assert_eq!(first.next().await.0, ticket / 8);
            let connected = async {
                loop {
                    if let Some(last) = last.lock().unwrap().take() {
                        break last;
                    }
                    sleep(Duration::from_millis(1)).await;
                }
            };
            let last = timeout(Duration::from_secs(20), connected).await;
            last.expect("it is dialled again").abort();
        }
    }
    let sum = |ticket: u64| (2.0 * ticket as f32 + 1.0).to_le_bytes().repeat(size);
    for ticket in calls / 8..calls {
        assert_eq!(first.next().await.0, ticket);
    }
    for ticket in 0..calls {
        let (of, bytes) = second.next().await;
        assert!(of == ticket && bytes == sum(ticket), "call {ticket}");
    }
    accepting.abort();
}

fn join(from: u64) -> Join {
    Join {
        hello: Some(version::hello()),
        from_worker_id: from,
        to_worker_id: 2,
        credit_bytes: 1 << 20,
        ..Join::default()
    }
}

/// The token of the lease proves nothing, as all its workers and programs have it.
#[tokio::test]
async fn worker_is_identified_by_its_certificate_only() {
    let (shares, [one, two], _listener) = lease().await;
    let second = worker(&shares, two.clone(), 2, 1);
    let refused = |peer_certificate: Option<&PeerCertificate>| {
        let refused = accept(&second.cohort, &join(1), peer_certificate).map(|_| ());
        refused.unwrap_err().message
    };
    let other = Identity::self_signed().unwrap();
    let error = refused(None);
    assert!(error.ends_with("it presented no certificate"), "{error}");
    let process = |of: &Identity, lease| {
        let issued = of.issue_for_lease(LeaseId(lease)).unwrap();
        PeerCertificate::shown_by(&Identity::from_der(issued).unwrap())
    };
    let lease = second.cohort.lease.0;
    for shown in [
        PeerCertificate::shown_by(&other),
        // A third worker of the lease would show such a certificate.
        PeerCertificate::shown_by(&two),
        process(&two, lease),
        // Another lease's process on the first worker.
        process(&one, lease + 1),
    ] {
        let error = refused(Some(&shown));
        let expected = format!("{}, which is not the worker's", shown.fingerprint);
        assert!(error.contains("is not worker w1 of the lease"), "{error}");
        assert!(error.ends_with(&expected), "{error}");
    }
    for shown in [PeerCertificate::shown_by(&one), process(&one, lease)] {
        assert!(accept(&second.cohort, &join(1), Some(&shown)).is_ok());
    }
    let stranger = accept(
        &second.cohort,
        &join(7),
        Some(&PeerCertificate::shown_by(&one)),
    );
    let error = stranger.map(|_| ()).unwrap_err();
    assert!(error.message.contains("not part of the lease"), "{error}");
}

/// A session that blocks whoever delivers an outcome, until the test lets it go on.
struct SlowSession {
    is_reached: std_mpsc::Sender<()>,
    goes_on: Mutex<std_mpsc::Receiver<()>>,
}

impl Member for SlowSession {
    fn deliver(self: Arc<Self>, _: u64, _: Outcome) {
        self.is_reached.send(()).unwrap();
        let goes_on = self.goes_on.lock().unwrap();
        goes_on.recv_timeout(Duration::from_secs(30)).unwrap();
    }
}

#[tokio::test]
async fn later_connection_waits_until_a_received_frame_is_handled() {
    let (shares, [_, two], _listener) = lease().await;
    let cohort = cohort(&shares, two, 2);
    let (is_reached, reached) = std_mpsc::channel();
    let (go_on, goes_on) = std_mpsc::channel();
    let session: Arc<dyn Member> = Arc::new(SlowSession {
        is_reached,
        goes_on: Mutex::new(goes_on),
    });
    assert!(cohort.enter(1, Arc::downgrade(&session)));
    call(&cohort, 1, 1, 4);

    let accept = || accept_from(&cohort, &join(1), |_| Ok(())).unwrap();
    let accepted = accept();
    let mut other = duplex::Duplex::new(1 << 20, 1 << 20, 1 << 20);
    // The all-reduce fails at once, as its two tensors have different shapes.
    other.push(Body::Arrivals(Arrivals {
        group: vec![0, 1],
        arrivals: vec![arrival(0, 5)],
    }));
    let frame: Bytes = other.next_to_send().unwrap().concat().into();
    let end = PeerEnd {
        cohort: &accepted.cohort,
        peer: &accepted.peer,
    };
    thread::scope(|scope| {
        let handling = scope.spawn(|| end.on_frame(accepted.connection, frame, &mut ()).is_ok());
        reached.recv_timeout(Duration::from_secs(30)).unwrap();
        let accepting = scope.spawn(|| accept().joined.received);
        thread::sleep(Duration::from_millis(200));
        assert!(!accepting.is_finished(), "two frames at a time");
        go_on.send(()).unwrap();
        assert!(handling.join().unwrap());
        assert_eq!(accepting.join().unwrap(), 1);
    });
}

fn arrival(rank: u32, size: usize) -> tensord_proto::v1::Arrival {
    tensord_proto::v1::Arrival {
        rank,
        r#type: Some(encode_type(&Shape::new([size]), DType::F32)),
        ..Default::default()
    }
}

/// The first frame after the greeting is an arrival of a rank that does not exist. Ignoring
/// this frame would keep the first worker waiting.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn protocol_violation_ends_the_link_and_the_group() {
    let (shares, [one, _], mut listener) = lease().await;
    let mut first = worker(&shares, one, 1, 0);
    first.call(0, 1, 4);
    let mut link = timeout(Duration::from_secs(20), listener.accept())
        .await
        .unwrap();
    link.receiver.recv().await.unwrap().unwrap();
    link.receiver.admit().unwrap();
    let joined = Joined {
        hello: Some(version::hello()),
        protocol: version::PROTOCOL_MAX,
        received: 0,
        credit_bytes: 1 << 20,
    };
    let joined = duplex::encode(Body::Joined(joined));
    link.sender.send(&[joined]).await.unwrap();
    let arrivals = Arrivals {
        group: vec![0, 1],
        arrivals: vec![arrival(9, 4)],
    };
    let mut other = duplex::Duplex::new(1 << 20, 1 << 20, 1 << 20);
    other.push(Body::Arrivals(arrivals));
    let frame = other.next_to_send().unwrap();
    link.sender.send(&frame).await.unwrap();
    let reason = first.failed().await;
    assert!(reason.contains("worker w2 at 127.0.0.1:"), "{reason}");
    assert!(
        reason.contains("broke the protocol between workers"),
        "{reason}"
    );
    assert!(reason.contains("announced rank 9 of 2"), "{reason}");
    // Later calls fail at once with the same message, and the link is not dialled again.
    first.call(0, 2, 4);
    assert_eq!(first.failed().await, reason);
    let again = timeout(2 * MAX_RETRY_DELAY, listener.accept()).await;
    assert!(
        again.is_err(),
        "it dialled a worker that broke the protocol"
    );
}
