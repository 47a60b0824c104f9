//! How workers, leases and ops end: a draining worker keeps its sessions, the ops of a
//! lease that ended leave its devices before the next lease gets them, and an op that takes
//! too long ends only its own session.

use std::{
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use burn::tensor::{Device, Tensor};
use burn_backend::DType;
use burn_ir::{FloatOperationIr, MatmulOpIr, OperationIr};
use tensord_client::{DeviceStatus, LeaseRequest, Pool};
use tensord_proto::v1::{ErrorCode, ReleaseLease, client_message};
use tensord_testkit::{
    cluster::Cluster,
    raw::{self, ClientStream, RawSession, SessionError},
    resource_usage::control_groups,
};

use crate::ops::full;
#[cfg(target_os = "linux")]
use crate::processes::{UncheckedPool, custom};

/// Longer than a worker may be silent before its stream is closed (2.5 s), and than a lease
/// outlives a lost worker (5 s).
const PAST_ALL_TIMEOUTS: Duration = Duration::from_secs(11);

#[test]
fn draining_worker_lets_sessions_finish() {
    let mut cluster = Cluster::start(&[]);
    cluster.add_worker_with("flex", &["--drain-seconds", "120"]);
    cluster.wait_for_workers(1);
    let pool = cluster.pool();
    let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
    let device = lease.devices()[0].clone();
    let mut worker = cluster.workers.remove(0);
    worker.signal("TERM");
    cluster.wait("the pool to know that the worker drains", || {
        let workers = pool.status().unwrap().workers;
        workers.len() == 1 && workers[0].draining
    });
    let refused = cluster.pool().lease(LeaseRequest::devices(1));
    assert!(refused.is_err(), "a worker that drains gets no new lease");
    let until = Instant::now() + PAST_ALL_TIMEOUTS;
    let mut weight = Tensor::<1>::zeros([4], &device);
    let mut steps = 0_u16;
    while Instant::now() < until {
        weight = weight + 1.0;
        steps += 1;
        let sum = weight.clone().sum().into_scalar::<f32>();
        assert_eq!(sum, 4.0 * f32::from(steps));
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(lease.ended(), None);
    assert_eq!(pool.status().unwrap().leases, 1);
    drop((weight, device, lease));
    let id = worker.id();
    assert_eq!(
        worker.exit_code(Duration::from_secs(10)),
        Some(0),
        "the process ends with its last session"
    );
    assert_eq!(control_groups(id), Vec::<PathBuf>::new());
    cluster.wait("the worker to be gone", || {
        pool.status().unwrap().workers.is_empty()
    });
}

#[test]
fn draining_worker_ends_sessions_at_the_deadline() {
    let mut cluster = Cluster::start(&[]);
    cluster.add_worker_with("flex", &["--drain-seconds", "6"]);
    cluster.wait_for_workers(1);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let device = lease.devices()[0].clone();
    let mut worker = cluster.workers.remove(0);
    let signalled = Instant::now();
    worker.signal("TERM");
    let failed_after = loop {
        let sum = Tensor::<1>::ones([4], &device).sum().try_into_data();
        if sum.is_err() {
            break signalled.elapsed();
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    assert!(failed_after >= Duration::from_secs(6), "{failed_after:?}");
    assert_eq!(worker.exit_code(Duration::from_secs(10)), Some(0));
}

/// Time limit from a lease's grant to its first value. Waiting for the previous lease's ops
/// would take longer.
const FIRST_VALUE_DEADLINE: Duration = Duration::from_secs(5);

/// Rows of the matrices of [`matmul`]: of those that measure this host's speed, and the
/// largest size allowed.
const SMALL: usize = 1024;
const LARGEST: usize = 16 << 10;

/// Returns the op that squares a matrix of `size` rows.
fn matmul(id: u64, out: u64, size: usize) -> OperationIr {
    let matmul = MatmulOpIr {
        lhs: raw::tensor(id, &[size, size]),
        rhs: raw::tensor(id, &[size, size]),
        out: raw::out(out, &[size, size]),
    };
    OperationIr::Float(DType::F32, FloatOperationIr::Matmul(matmul))
}

fn drop_of(id: u64, size: usize) -> OperationIr {
    OperationIr::Drop(raw::last(&raw::tensor(id, &[size, size])))
}

/// Creates a matrix whose square takes about `time` to compute, and returns its id and
/// size.
async fn slow_matrix(session: &mut RawSession, time: Duration) -> (u64, usize) {
    let (small, large) = (session.new_id(), session.new_id());
    session.ops(&[full(raw::out(small, &[SMALL, SMALL]))]);
    let mut fastest = Duration::MAX;
    for _ in 0..4 {
        let out = session.new_id();
        session.ops(&[matmul(small, out, SMALL), drop_of(out, SMALL)]);
        let began = Instant::now();
        assert_eq!(session.sync().await, Ok(None));
        fastest = fastest.min(began.elapsed());
    }
    let times = time.as_secs_f64() / fastest.as_secs_f64();
    let size = (SMALL as f64 * times.cbrt()) as usize;
    let size = size.next_multiple_of(64).min(LARGEST);
    session.ops(&[drop_of(small, SMALL), full(raw::out(large, &[size, size]))]);
    assert_eq!(session.sync().await, Ok(None));
    (large, size)
}

/// Sets the flag when dropped, also by a panic, so that a thread that runs until then ends.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn device(pool: &Pool, index: usize) -> DeviceStatus {
    let mut status = pool.status().unwrap();
    status.workers[0].devices.swap_remove(index)
}

#[test]
fn unfinished_ops_of_a_lease_do_not_delay_the_next() {
    /// Number of queued ops, and the approximate time of each: minutes in total.
    const QUEUED: u64 = 300;
    const EACH: Duration = Duration::from_millis(500);

    let cluster = Cluster::start(&["flex"]);
    let pool = cluster.pool();
    let (attached, target, _session, before) = raw::block(async {
        let mut attached = ClientStream::to(cluster.client_url()).await.unwrap();
        let target = attached.lease(1).await.unwrap().remove(0);
        let mut session = RawSession::open(&target).await.unwrap();
        let (matrix, size) = slow_matrix(&mut session, EACH).await;
        let before = pool.status().unwrap().workers[0].devices[0].ops_executed;
        for _ in 0..QUEUED {
            let out = session.new_id();
            session.ops(&[matmul(matrix, out, size), drop_of(out, size)]);
        }
        session.flush().await.unwrap();
        (attached, target, session, before)
    });
    cluster.wait("the first of the ops to be done", || {
        device(&pool, 0).ops_executed > before + 2
    });
    // The most ops that the pool has reported. Of a device that is free it reports none.
    let mut most = before;
    let (is_granted, next) = (AtomicBool::new(false), cluster.pool());
    let is_granted = &is_granted;
    std::thread::scope(|scope| {
        let next = scope.spawn(move || {
            let lease = next.lease(LeaseRequest::devices(1));
            is_granted.store(true, Ordering::SeqCst);
            let (lease, granted) = (lease.unwrap(), Instant::now());
            let sum = Tensor::<1>::ones([4], &lease.devices()[0]).sum();
            assert_eq!(sum.into_scalar::<f32>(), 4.0);
            granted.elapsed()
        });
        cluster.wait("the next lease to wait", || {
            pool.status().unwrap().waiting_requests == 1
        });
        let release = ReleaseLease {
            lease_id: target.lease_id,
        };
        let release = client_message::Body::Release(release);
        raw::block(attached.send(release)).unwrap();
        let until = Instant::now() + PAST_ALL_TIMEOUTS;
        // A request waits for the device, so the device is never free.
        while !is_granted.load(Ordering::SeqCst) {
            let device = device(&pool, 0);
            most = most.max(device.ops_executed);
            // The next lease may have been granted and released meanwhile.
            let is_waited_for = !is_granted.load(Ordering::SeqCst);
            assert!(!device.is_free() || !is_waited_for, "{device:?}");
            assert!(Instant::now() < until, "the next lease is not granted");
        }
        let first_value = next.join().unwrap();
        assert!(
            first_value < FIRST_VALUE_DEADLINE,
            "{first_value:?} after the grant"
        );
    });
    let done = most.max(device(&pool, 0).ops_executed) - before;
    assert!(done < QUEUED, "{done} ops were carried out");
}

#[test]
fn a_device_whose_lease_ended_is_not_free_before_its_op_has_ended() {
    const OP: Duration = Duration::from_secs(6);

    let cluster = Cluster::start(&["flex"]);
    let pool = cluster.pool();
    let (attached, target, _session) = raw::block(async {
        let mut attached = ClientStream::to(cluster.client_url()).await.unwrap();
        let target = attached.lease(1).await.unwrap().remove(0);
        let mut session = RawSession::open(&target).await.unwrap();
        let (matrix, size) = slow_matrix(&mut session, OP).await;
        let out = session.new_id();
        session.ops(&[matmul(matrix, out, size)]);
        session
            .stay_connected(Duration::from_millis(500))
            .await
            .unwrap();
        (attached, target, session)
    });
    let lease_id = target.lease_id;
    let release = client_message::Body::Release(ReleaseLease { lease_id });
    raw::block(attached.send(release)).unwrap();
    cluster.wait("the device to be on its way", || device(&pool, 0).ending);
    assert_eq!(pool.status().unwrap().leases, 0);
    let mut was_busy = 0;
    cluster.wait("the device to be free", || {
        let device = device(&pool, 0);
        was_busy += usize::from(device.ending);
        device.is_free()
    });
    assert!(was_busy > 1, "the op had no time to be seen");
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let sum = Tensor::<1>::ones([4], &lease.devices()[0]).sum();
    assert_eq!(sum.into_scalar::<f32>(), 4.0);
}

/// Adds ones on `device` and checks the sums until `is_over`. Returns the number of sums.
fn count_until(device: &Device, is_over: &AtomicBool) -> u16 {
    let mut weight = Tensor::<1>::zeros([4], device);
    let mut steps = 0_u16;
    while !is_over.load(Ordering::SeqCst) {
        weight = weight + 1.0;
        steps += 1;
        let sum = weight.clone().sum().into_scalar::<f32>();
        assert_eq!(sum, 4.0 * f32::from(steps));
        std::thread::sleep(Duration::from_millis(20));
    }
    steps
}

/// The op of the worker that is used here takes 7.5 s: more than the limit, and less than twice the
/// limit, after which the process would end.
#[cfg(target_os = "linux")]
#[test]
fn op_timeout_ends_only_its_session() {
    let UncheckedPool {
        cluster,
        worker: _worker,
    } = UncheckedPool::start_with("flex*2", &[("UNCHECKED_OP_TIMEOUT", "5")]);
    let pool = cluster.pool();
    let (attached, target, mut session) = raw::block(async {
        let mut attached = ClientStream::to(cluster.client_url()).await.unwrap();
        let target = attached.lease(1).await.unwrap().remove(0);
        let session = RawSession::open(&target).await.unwrap();
        (attached, target, session)
    });
    let index = target.device_index as usize;
    let innocent = pool.lease(LeaseRequest::devices(1)).unwrap();
    let beside = innocent.devices()[0].clone();
    let is_over = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        let goes_on = scope.spawn(move || count_until(&beside, is_over));
        let over = SetOnDrop(is_over);
        let sleep = custom(&mut session, "sleep");
        session.ops(&[sleep]);
        let ended = raw::block(session.sync()).expect_err("the op exceeds the limit");
        let SessionError::Closed(error) = ended else {
            panic!("{ended}");
        };
        assert_eq!(error.code(), ErrorCode::Limit, "{error}");
        for words in ["(Custom) has not ended within 5s", "--op-timeout"] {
            assert!(error.message.contains(words), "{error}");
        }
        cluster.wait("the device to be out of service", || {
            device(&pool, index).out_of_service.is_some()
        });
        let reason = device(&pool, index).out_of_service.unwrap();
        assert!(reason.contains("Custom"), "{reason}");
        let again = raw::block(RawSession::open(&target));
        let refused = again.map(|_| ()).unwrap_err();
        assert!(
            refused.to_string().contains("is out of service"),
            "{refused}"
        );
        cluster.wait("the device to be in service", || {
            device(&pool, index).out_of_service.is_none()
        });
        drop(over);
        assert!(goes_on.join().unwrap() > 0);
    });
    // The lease can open another session, and the lease of the other device goes on.
    raw::block(async {
        let mut session = RawSession::open(&target).await.unwrap();
        let tensor = session.upload(&[1.0, 2.0]);
        let value = session.fetch(&tensor).await.unwrap();
        assert_eq!(raw::floats(&value.unwrap()), [1.0, 2.0]);
        let lease_id = target.lease_id;
        let release = client_message::Body::Release(ReleaseLease { lease_id });
        attached.send(release).await.unwrap();
    });
    assert_eq!(innocent.ended(), None);
    cluster.wait("the device to be free", || device(&pool, index).is_free());
}

#[test]
fn process_ends_if_its_device_does_not_recover() {
    /// Much longer than the 4 s after which the process gives up the device.
    const OP: Duration = Duration::from_secs(15);

    let mut cluster = Cluster::start(&[]);
    cluster.add_worker_with("flex", &["--op-timeout", "2"]);
    cluster.wait_for_workers(1);
    let pool = cluster.pool();
    let (attached, target, ended) = raw::block(async {
        let mut attached = ClientStream::to(cluster.client_url()).await.unwrap();
        let target = attached.lease(1).await.unwrap().remove(0);
        let mut session = RawSession::open(&target).await.unwrap();
        let (matrix, size) = slow_matrix(&mut session, OP).await;
        let out = session.new_id();
        session.ops(&[matmul(matrix, out, size)]);
        let ended = session.end().await;
        (attached, target, ended)
    });
    assert!(matches!(ended, SessionError::Closed(_)), "{ended}");
    let process_ended = |log: &str| {
        log.lines().any(|line| {
            line.contains("the process of lease") && line.contains("(Float.Matmul) has not ended")
        })
    };
    cluster.wait("the end of the process", || {
        process_ended(&cluster.workers[0].log())
    });
    let refused = raw::block(raw::refusal(&target)).message;
    assert!(refused.contains("the process of lease"), "{refused}");
    raw::block(attached.release(target.lease_id)).unwrap();
    let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
    let sum = Tensor::<1>::ones([4], &lease.devices()[0]).sum();
    assert_eq!(sum.into_scalar::<f32>(), 4.0);
}
