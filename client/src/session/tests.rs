//! Tests of when a session's driver sends, when it is woken, and when another thread sends in
//! its place. They run against the worker's end of the frames, mostly without a link.

use std::{future::Future, pin::pin, task, time::Duration};

use burn_backend::{DType, TensorData};
use burn_ir::{
    BaseOperationIr, CatOpIr, NumericOperationIr, OperationIr, ScalarIr, ScalarOpIr, TensorIr,
    TensorStatus,
};
use bytes::Bytes;
use tensord_proto::{
    codec::encode_type,
    ids::{LeaseId, WorkerId},
    v1::{Opened, TensorValue, Value, Values, tensor_value, value},
};

use tensord_session::{Delivery, MAX_RECORDED_ITEMS, send_policy::EAGER_OPS};
use tensord_transport::{
    Dialer, Identity, Link, Listener, TransportChoice,
    channel::{Look, Next, duplex::Duplex},
    tls::Trust,
};

use super::{driver::over_by, *};

/// Returns a session with unlimited credit, and the worker's end of it.
fn pair() -> (Arc<Session>, Duplex) {
    let session = Session::new(
        SessionId(7),
        CohortMember::default(),
        Durability::Auto,
        [7; 32],
    );
    session.lock().ops.attach(0, u64::MAX).unwrap();
    (session, Duplex::new(1 << 20, u64::MAX, 1 << 30))
}

fn tensor(id: TensorId, status: TensorStatus) -> TensorIr {
    TensorIr {
        status,
        ..TensorIr::uninit(id, [1].into(), DType::F32)
    }
}

fn any_tensor() -> TensorIr {
    tensor(TensorId::new(0), TensorStatus::ReadOnly)
}

fn record(session: &Session, count: usize) {
    for _ in 0..count {
        let lhs = tensor(session.new_tensor(), TensorStatus::ReadOnly);
        let out = tensor(session.new_tensor(), TensorStatus::NotInit);
        let rhs = ScalarIr::Float(1.0);
        session.record(OperationIr::NumericFloat(
            DType::F32,
            NumericOperationIr::AddScalar(ScalarOpIr { lhs, rhs, out }),
        ));
    }
}

/// Describes what the driver does next. Frames that it sends reach `worker`.
fn poll_driver(session: &Session, worker: &mut Duplex, patient: bool, rested: bool) -> String {
    match session.next_to_send(Track::Ops, Look { patient, rested }, Instant::now()) {
        Next::Frames(frames) => {
            for parts in &frames {
                worker.receive(parts.concat().into()).unwrap();
            }
            format!("{} frames", frames.len())
        }
        Next::Later(time) => format!("later, in {time:?}"),
        Next::PendingAck => "pending ack".into(),
        Next::Nothing => "nothing".into(),
        Next::Linger(_) => "linger".into(),
        Next::Done | Next::Replaced => unreachable!("a client's session does not end so"),
    }
}

/// Replies to a read as the worker.
fn answer(session: &Session, worker: &mut Duplex, request_id: u64) {
    let data = TensorData::from([1f32]);
    let tensor = TensorValue {
        r#type: Some(encode_type(data.shape(), data.dtype())),
        content: Some(tensor_value::Content::Bytes(Bytes::copy_from_slice(
            data.as_bytes(),
        ))),
    };
    let value = Value {
        request_id,
        result: Some(value::Result::Tensor(tensor)),
    };
    worker.push(Body::Values(Values {
        values: vec![value],
    }));
    let frame = worker.next_to_send().unwrap().concat().into();
    let mut deliveries = Vec::new();
    let connection = session.lock().ops.latest().unwrap();
    let received = session.receive(
        Track::Ops,
        connection,
        frame,
        Instant::now(),
        &mut deliveries,
    );
    assert!(received.is_ok());
    deliveries.into_iter().for_each(Delivery::deliver);
}

#[test]
fn small_batches_back_off_until_an_urgent_item() {
    let (session, mut worker) = pair();
    let mut next = |patient| poll_driver(&session, &mut worker, patient, false);
    record(&session, 3);
    assert_eq!(next(true), "later, in 1ms");
    record(&session, 3);
    assert_eq!(next(true), "later, in 1ms");
    assert_eq!(next(false), "1 frames");
    assert_eq!(next(true), "nothing");
    record(&session, 1);
    assert_eq!(next(true), "later, in 2ms");
    record(&session, EAGER_OPS - 1);
    assert_eq!(next(true), "1 frames");
    record(&session, 1);
    assert_eq!(next(true), "later, in 2ms");
    assert_eq!(next(false), "1 frames");
    record(&session, 1);
    assert_eq!(next(true), "later, in 4ms");
    let _sync = session.sync();
    assert_eq!(next(true), "2 frames");
    record(&session, 1);
    assert_eq!(next(true), "later, in 1ms");
}

#[test]
fn op_that_fits_no_frame_ends_the_session_with_the_reason() {
    let (session, _worker) = pair();
    // The ids do not follow each other, so that each takes some bytes.
    let id = |at: u64| TensorId::new(at.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let tensors = (1..=500_000).map(|at| tensor(id(at), TensorStatus::ReadOnly));
    let cat = CatOpIr {
        tensors: tensors.collect(),
        dim: 0,
        out: tensor(session.new_tensor(), TensorStatus::NotInit),
    };
    session.record(OperationIr::BaseFloat(BaseOperationIr::Cat(cat)));
    let answer = session.read(&any_tensor());
    let look = Look {
        patient: false,
        rested: false,
    };
    let next = session.next_to_send(Track::Ops, look, Instant::now());
    assert!(!matches!(next, Next::Frames(_)));
    let error = answer.blocking_recv().unwrap().unwrap_err().to_string();
    assert!(error.contains("make several ops of it"), "{error}");
}

#[test]
fn reply_wakes_driver_only_if_it_does_not_poll_for_acks() {
    let (session, mut worker) = pair();
    let mut answers = Vec::new();
    for (number, rested) in [(1, false), (2, true), (3, false)] {
        let read = tensor(session.new_tensor(), TensorStatus::ReadOnly);
        answers.push(session.read(&read));
        assert_eq!(poll_driver(&session, &mut worker, true, false), "1 frames");
        assert_eq!(poll_driver(&session, &mut worker, true, rested), "nothing");
        // The request woke a driver that waited.
        was_woken(&session);
        answer(&session, &mut worker, number);
        let woken = was_woken(&session);
        assert_eq!(woken, rested, "read {number}");
        // The ack rides on the next read's frame, or goes alone.
        assert_eq!(
            poll_driver(&session, &mut worker, true, rested),
            "pending ack"
        );
    }
    for mut answer in answers {
        assert!(answer.try_recv().unwrap().is_ok());
    }
    let mut state = session.lock();
    let connection = state.ops.latest().unwrap();
    let ping = state.ops.ping(connection, true).unwrap();
    drop(state);
    worker.receive(ping.concat().into()).unwrap();
    assert!(worker.outbox().is_empty());
    assert_eq!(poll_driver(&session, &mut worker, true, true), "nothing");
}

/// Returns both ends of a link that has carried a first frame.
async fn link(choice: TransportChoice) -> (Link, Link) {
    let identity = Identity::self_signed().unwrap();
    let trust = Trust::Pin(identity.fingerprint());
    let mut listener = Listener::bind(([127, 0, 0, 1], 0).into(), &identity)
        .await
        .unwrap();
    let address = listener.address().to_string();
    let dialer = Dialer::new(choice);
    let dialled = dialer.dial(&address, &trust, Duration::from_secs(10));
    let mut near = dialled.await.unwrap();
    near.sender
        .send(&[Bytes::from_static(b"hello")])
        .await
        .unwrap();
    let mut far = listener.accept().await;
    far.receiver.admit().unwrap();
    far.receiver.recv().await.unwrap().unwrap();
    (near, far)
}

/// Returns whether the driver was woken since the last call.
fn was_woken(session: &Session) -> bool {
    let mut context = task::Context::from_waker(task::Waker::noop());
    pin!(session.wake.notified()).poll(&mut context).is_ready()
}

/// Requests a tensor on a thread that has no runtime, as programs do.
async fn request_read(session: &Arc<Session>) {
    let session = session.clone();
    let request = move || {
        let requested = tensor(session.new_tensor(), TensorStatus::ReadOnly);
        drop(session.read(&requested));
    };
    tokio::task::spawn_blocking(request).await.unwrap();
}

/// Receives the next frame of a link as `worker`, and returns its body.
async fn take(far: &mut Link, worker: &mut Duplex) -> Body {
    let frame = tokio::time::timeout(Duration::from_secs(10), far.receiver.recv()).await;
    let frame = frame.unwrap().unwrap().unwrap();
    worker.receive(frame).unwrap().unwrap().0
}

#[tokio::test]
async fn requesting_thread_sends_while_the_driver_waits() {
    let (session, mut worker) = pair();
    let (near, mut far) = link(TransportChoice::Tcp).await;
    // The driver looks, finds nothing and waits.
    assert_eq!(poll_driver(&session, &mut worker, true, false), "nothing");
    let lent_sender = session.sender_slot.lend(Track::Ops, near.sender);
    for _ in 0..3 {
        request_read(&session).await;
        assert!(matches!(take(&mut far, &mut worker).await, Body::Reads(_)));
    }
    assert!(!was_woken(&session));
    // A few ops wake the driver, which then sends a request after them as well.
    record(&session, 2);
    assert!(was_woken(&session));
    request_read(&session).await;
    let sender = lent_sender.back();
    assert_eq!(poll_driver(&session, &mut worker, true, false), "2 frames");
    // A driver that gathers ops waits as well, and the requesting thread sends the ops, too.
    record(&session, 2);
    assert_eq!(
        poll_driver(&session, &mut worker, true, false),
        "later, in 1ms"
    );
    let lent_sender = session.sender_slot.lend(Track::Ops, sender);
    request_read(&session).await;
    assert!(matches!(take(&mut far, &mut worker).await, Body::Ops(_)));
    assert!(matches!(take(&mut far, &mut worker).await, Body::Reads(_)));
    assert!(!was_woken(&session));
    // After the driver has ended, nobody may use its link.
    drop(lent_sender);
    assert!(far.receiver.recv().await.is_err());
    request_read(&session).await;
    assert!(was_woken(&session));
}

#[tokio::test]
async fn bulk_driver_never_lends_a_sender() {
    let (session, mut worker) = pair();
    let (ops, mut far) = link(TransportChoice::Tcp).await;
    let (bulk, _far_bulk) = link(TransportChoice::Tcp).await;
    assert_eq!(poll_driver(&session, &mut worker, true, false), "nothing");
    let lent_sender = session.sender_slot.lend(Track::Ops, ops.sender);
    let kept = session.sender_slot.lend(Track::Bulk, bulk.sender);
    request_read(&session).await;
    assert!(matches!(take(&mut far, &mut worker).await, Body::Reads(_)));
    drop(kept.back());
    request_read(&session).await;
    assert!(matches!(take(&mut far, &mut worker).await, Body::Reads(_)));
    drop(lent_sender.back());
}

#[tokio::test]
async fn only_the_driver_sends_on_blocking_carriers() {
    let (session, mut worker) = pair();
    let (near, _far) = link(TransportChoice::Quic).await;
    assert_eq!(poll_driver(&session, &mut worker, true, false), "nothing");
    let lent_sender = session.sender_slot.lend(Track::Ops, near.sender);
    request_read(&session).await;
    assert!(was_woken(&session));
    drop(lent_sender.back());
    assert_eq!(poll_driver(&session, &mut worker, true, false), "1 frames");
}

#[tokio::test]
async fn driver_sends_what_the_socket_did_not_accept() {
    let (session, mut worker) = pair();
    let (near, mut far) = link(TransportChoice::Tcp).await;
    let mut sender = near.sender;
    // Nobody reads, so it is full in the end.
    let row = [Bytes::from(vec![0; 100_000]), Bytes::new(), Bytes::new()];
    let mut filled = 1;
    while sender.send_now(std::slice::from_ref(&row)).unwrap() {
        filled += 1;
    }
    assert_eq!(poll_driver(&session, &mut worker, true, false), "nothing");
    let lent_sender = session.sender_slot.lend(Track::Ops, sender);
    request_read(&session).await;
    assert!(was_woken(&session));
    let mut sender = lent_sender.back();
    let sending = async { sender.send_all(&[]).await.unwrap() };
    let taking = async {
        for _ in 0..filled {
            assert_eq!(far.receiver.recv().await.unwrap().unwrap().len(), 100_000);
        }
        take(&mut far, &mut worker).await
    };
    let ((), body) = tokio::join!(sending, taking);
    assert!(matches!(body, Body::Reads(_)));
}

#[test]
fn requests_fail_at_once_after_the_driver_is_dropped() {
    let (session, _worker) = pair();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let target = SessionTarget {
        device: crate::LeasedDevice::from(&tensord_proto::v1::LeasedDevice::default()),
        dialer: Dialer::default(),
        worker_id: WorkerId(1),
        worker: "worker-0".into(),
        // Nobody listens on a port that is not one.
        address: "127.0.0.1:0".into(),
        trust: Trust::System,
        access: SessionAccess {
            lease_token: Bytes::new(),
            device_index: 0,
            seed: 0,
        },
    };
    let (opened, _opens) = oneshot::channel();
    let mut requested = session.read(&tensor(session.new_tensor(), TensorStatus::ReadOnly));
    let watch =
        crate::control::lease_watch::LeaseWatch::new(LeaseId(1), Arc::default(), Arc::default());
    let destination = watch.add(&session, target);
    let driver = runtime.spawn(drive(session.clone(), destination, opened));
    drop(runtime);
    assert!(driver.is_finished());
    let error = requested.try_recv().unwrap().unwrap_err();
    assert!(
        error.to_string().contains("the client is shutting down"),
        "{error}"
    );
}

#[test]
fn next_use_of_an_idle_session_wakes_its_driver() {
    type Use = fn(&Session);
    let uses: [(&str, Use); 4] = [
        ("op", |session| record(session, 1)),
        ("read", |session| drop(session.read(&any_tensor()))),
        ("sync", |session| drop(session.sync())),
        ("upload", |session| {
            session.upload(session.new_tensor(), TensorData::from([1f32]));
        }),
    ];
    for (name, use_session) in uses {
        let (session, mut worker) = pair();
        record(&session, 1);
        // It waits for more ops, and then loses its connection.
        assert_eq!(
            poll_driver(&session, &mut worker, true, false),
            "later, in 1ms"
        );
        assert!(session.is_used(), "the worker has not received the op");
        assert_eq!(poll_driver(&session, &mut worker, false, false), "1 frames");
        assert!(session.is_used(), "it has not acknowledged the op");
        acknowledge(&session, &mut worker);
        assert!(!session.is_used());
        assert!(!was_woken(&session));
        use_session(&session);
        assert!(was_woken(&session), "{name}");
        assert!(session.is_used(), "{name}");
    }
}

/// The worker acknowledges all that it has received.
fn acknowledge(session: &Session, worker: &mut Duplex) {
    let ping = worker.ping();
    let mut state = session.lock();
    let connection = state.ops.latest().unwrap();
    let now = Instant::now();
    let received = state.receive(Track::Ops, connection, ping, now, &mut Vec::new());
    received.unwrap();
}

/// The worker may report the end of a lease before the pool has reported why.
#[tokio::test]
async fn reason_of_the_pool_is_awaited_when_a_lease_is_over() {
    let reason = "an administrator has ended the lease";
    let in_time = Instant::now() + Duration::from_secs(60);
    for track in [Track::Ops, Track::Bulk] {
        let (session, _worker) = pair();
        let reports = async {
            // Something else wakes the driver first.
            session.wake_of(track).notify_one();
            tokio::task::yield_now().await;
            session.fail(reason);
        };
        tokio::join!(over_by(&session, track, Some(in_time)), reports);
        session.fail("the worker ended the session");
        let ended = session.cohort_member.cohort.end_reason();
        assert_eq!(ended.as_deref(), Some(reason));
    }
    // A pool that reports nothing, or cannot be reached, is not awaited for long.
    for until in [Some(Instant::now() + Duration::from_millis(20)), None] {
        let (session, _worker) = pair();
        over_by(&session, Track::Ops, until).await;
        assert!(!session.is_over());
    }
}

/// A program cannot make its session hold more than a bounded number of items, by whatever
/// it records: at the bound each call waits, until the session has room or ends.
#[test]
fn every_way_into_a_full_session_waits() {
    type Call = fn(&Session);
    let calls: [(&str, Call); 9] = [
        ("op", |session| record(session, 1)),
        ("read", |session| drop(session.read(&any_tensor()))),
        ("sync", |session| drop(session.sync())),
        ("seed", |session| session.seed(1)),
        ("alias", |session| {
            session.alias(session.new_tensor(), TensorId::new(0));
        }),
        ("poison", |session| {
            session.poison(session.new_tensor(), &any_tensor(), "a reason".into());
        }),
        ("offer", |session| {
            session.offer(&any_tensor(), &[0; 16], 1, Instant::now())
        }),
        ("take", |session| {
            let now = Instant::now();
            session.take_offer(session.new_tensor(), &any_tensor(), &[0; 16], 1, now);
        }),
        ("upload", |session| {
            session.upload(session.new_tensor(), TensorData::from([1f32]));
        }),
    ];
    for (name, call) in calls {
        let (session, _) = pair();
        let (returned, returns) = std::sync::mpsc::channel();
        let caller = session.clone();
        let calling = std::thread::spawn(move || {
            for _ in 0..2 * MAX_RECORDED_ITEMS {
                call(&caller);
                returned.send(()).unwrap();
            }
        });
        for _ in 1..MAX_RECORDED_ITEMS {
            returns.recv_timeout(Duration::from_secs(10)).unwrap();
        }
        // The call that fills the session does not return, nor does a later one.
        let next = returns.recv_timeout(Duration::from_millis(100));
        assert!(next.is_err(), "{name} does not wait");
        session.fail("over");
        calling.join().unwrap();
        assert_eq!(returns.iter().count(), MAX_RECORDED_ITEMS + 1, "{name}");
    }
}

#[test]
fn session_goes_on_only_from_marks_that_it_has_offered() {
    let (session, _) = pair();
    let in_process = |epoch, mark| Opened {
        epoch,
        mark,
        ..Opened::default()
    };
    let mut state = session.lock();
    assert!(state.accepts_restore(&in_process(0, 0)));
    assert!(!state.accepts_restore(&in_process(1, 0)), "it has none");
    state.begin_journal(0);
    state.record_due_mark(Instant::now());
    let [point] = state.restore_points()[..] else {
        panic!("the first mark is due at once");
    };
    assert!(state.accepts_restore(&in_process(1, point.mark)));
    assert!(!state.accepts_restore(&in_process(1, point.mark + 1)));
}
