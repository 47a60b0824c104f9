//! Many programs, one pool: queues, refusals, and clients that vanish.

use std::{
    process::Command,
    sync::{Arc, Mutex, mpsc},
    time::Duration,
};

use burn::tensor::{Device, Tensor};
use tensord_client::{LeaseError, LeaseRequest, Pool, RefusalKind};
use tensord_testkit::cluster::{Cluster, Process};

/// Returns live bytes and sessions of all workers, as last reported to the scheduler.
fn usage(pool: &Pool) -> (u64, u32) {
    let status = pool.status().unwrap();
    let devices = status.workers.iter().flat_map(|worker| &worker.devices);
    devices.fold((0, 0), |(bytes, sessions), device| {
        (bytes + device.live_bytes, sessions + device.sessions)
    })
}

fn sum_to(n: usize, device: &Device) -> f32 {
    let mut total = Tensor::<1>::zeros([1], device);
    for i in 0..n {
        total = total + i as f32;
    }
    total.into_scalar()
}

#[test]
fn threads_and_leases_of_one_pool_do_not_disturb_each_other() {
    let cluster = Cluster::start(&["flex*2", "flex"]);
    let pool = cluster.pool();
    let two = pool.lease(LeaseRequest::devices(2)).unwrap();
    let workers: Vec<_> = two.descriptions().into_iter().map(|d| d.worker).collect();
    assert_eq!(
        workers,
        ["worker-0", "worker-0"],
        "the fewest workers are preferred"
    );
    let one = pool.lease(LeaseRequest::devices(1)).unwrap();
    let devices: Vec<Device> = two.devices().iter().chain(one.devices()).cloned().collect();
    std::thread::scope(|scope| {
        for (at, device) in devices.iter().enumerate() {
            for thread in 0..3 {
                let n = 50 + 10 * at + thread;
                scope.spawn(move || assert_eq!(sum_to(n, device), (n * (n - 1) / 2) as f32));
            }
        }
    });
}

#[test]
fn unsatisfiable_requests_are_refused_and_busy_ones_queued() {
    let cluster = Cluster::start(&["flex*2"]);
    let pool = cluster.pool();
    let refused = |request: LeaseRequest| match pool.lease(request).unwrap_err() {
        LeaseError::Refused {
            kind: RefusalKind::Unsatisfiable,
            reason,
        } => reason,
        other => panic!("another error: {other}"),
    };
    let reason = refused(LeaseRequest::devices(3));
    assert!(
        reason.contains("3 devices") && reason.contains("2 flex"),
        "{reason}"
    );
    let reason = refused(LeaseRequest::devices(1).kind("cuda"));
    assert!(
        reason.contains("cuda") && reason.contains("2 flex"),
        "{reason}"
    );
    refused(LeaseRequest::devices(1).memory_bytes(1 << 60));

    let held = pool.lease(LeaseRequest::devices(2)).unwrap();
    let (event, events) = mpsc::channel();
    let short = LeaseRequest::devices(1).timeout(Duration::from_millis(300));
    let short = short.on_event(move |it| event.send(it.to_string()).unwrap());
    match pool.lease(short).unwrap_err() {
        LeaseError::TimedOut { position: 1, .. } => {}
        other => panic!("another error: {other}"),
    }
    let why = "the request waits at position 1 of the queue: too few suitable devices are free";
    assert!(events.iter().any(|event| event == why));
    let positions = Arc::new(Mutex::new(Vec::new()));
    let waiting: Vec<_> = (0..2)
        .map(|_| {
            let (pool, positions) = (cluster.pool(), positions.clone());
            std::thread::spawn(move || {
                let record_position = move |position| positions.lock().unwrap().push(position);
                let lease = pool
                    .lease(LeaseRequest::devices(2).on_queued(record_position))
                    .unwrap();
                assert_eq!(sum_to(10, &lease.devices()[1]), 45.0);
            })
        })
        .collect();
    cluster.wait("both to be queued", || positions.lock().unwrap().len() >= 2);
    drop(held);
    waiting
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
    let positions = positions.lock().unwrap();
    assert_eq!(positions[..2], [1, 2]);
    assert_eq!(
        positions[2..],
        [1],
        "the second moves up as the first is served"
    );
}

/// Not a test: the program that the next test kills.
#[test]
#[ignore = "run as a child process"]
fn helper_program_that_never_ends() {
    let pool = Pool::connect_env().unwrap();
    let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
    let device = &lease.devices()[0];
    let kept = Tensor::<2>::ones([1024, 1024], device);
    assert_eq!(kept.clone().sum().into_scalar::<f32>(), 1024.0 * 1024.0);
    println!("holding");
    std::thread::sleep(Duration::from_secs(300));
    drop(kept);
}

#[test]
fn killed_program_releases_devices_and_memory() {
    let cluster = Cluster::start(&["flex"]);
    let pool = cluster.pool();
    let before = usage(&pool);
    let mut program = Command::new(std::env::current_exe().unwrap());
    program
        .args([
            "--ignored",
            "--exact",
            "--nocapture",
            "sharing::helper_program_that_never_ends",
        ])
        .env("TENSORD_URL", cluster.client_url());
    let mut program = Process::spawn(program, cluster.path("program.log"));
    program.wait_for("holding", |line| line.contains("holding").then_some(()));
    cluster.wait("its use to show", || usage(&pool).0 >= 4 << 20);
    program.kill();
    // Waits in the queue until the lease of the killed program has expired.
    let lease = pool
        .lease(LeaseRequest::devices(1).timeout(Duration::from_secs(45)))
        .unwrap();
    assert_eq!(sum_to(10, &lease.devices()[0]), 45.0);
    drop(lease);
    cluster.wait("its memory to be back", || usage(&pool) == before);
}

#[test]
fn leases_can_be_awaited_and_cancelled_on_any_executor() {
    let cluster = Cluster::start(&["flex"]);
    let pool = cluster.pool();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap(); // It has no timer: the client uses its own.
    let request = || LeaseRequest::devices(1).timeout(Duration::from_secs(30));
    let held = runtime.block_on(pool.lease_async(request())).unwrap();
    assert_eq!(held.wait_ended(Duration::from_millis(1)), None);
    let waiting = |count| {
        cluster.wait("the queue", || {
            pool.status().unwrap().waiting_requests == count
        });
    };
    // A request whose future is dropped leaves the queue.
    let dropped = runtime.spawn(pool.lease_async(request()));
    runtime.block_on(async { tokio::task::yield_now().await });
    waiting(1);
    dropped.abort();
    assert!(runtime.block_on(dropped).is_err());
    waiting(0);
    let refused = runtime.block_on(pool.lease_async(LeaseRequest::devices(2)));
    assert!(matches!(refused, Err(LeaseError::Refused { .. })));
    // The blocking form works on a thread of a runtime.
    let timed_out = runtime.block_on(async {
        pool.lease(LeaseRequest::devices(1).timeout(Duration::from_millis(50)))
    });
    assert!(matches!(timed_out, Err(LeaseError::TimedOut { .. })));
    let ended = held.ended_async();
    drop(held);
    assert_eq!(runtime.block_on(ended), "the lease was dropped");
    let again = runtime.block_on(async { pool.lease(request()) }).unwrap();
    assert_eq!(again.devices().len(), 1);
}
