//! A training goes on at another worker when its own is lost, and computes the same bits.

use std::{
    thread::{sleep, spawn},
    time::{Duration, Instant},
};

use burn::{
    remote::RemoteHost,
    tensor::{Device, Tensor, TensorData},
};
use tensord_client::{Durability, LeaseEvent, LeaseRequest, Pool, data};
use tensord_testkit::{
    administrator::Administrator,
    cluster::Cluster,
    gateway::{GATEWAY_TOKEN, Gateway},
    models::{Classifier, Cnn, Mlp, Transformer},
    training::losses,
};

use crate::events::{changes, with_events};

/// How long another lease has the only device that is left: longer than a worker without a
/// connection counts as present.
const RELEASE_AFTER: Duration = Duration::from_secs(8);

/// How long a worker that is stopped may take to exit after its lease has moved.
const EXIT_DEADLINE: Duration = Duration::from_secs(60);

/// Waits until the only lease of the pool could move to another worker, which has its snapshots.
pub(crate) fn wait_for_keeper(administrator: &Administrator) {
    administrator.wait("a snapshot at the other worker", || {
        administrator.leases()[0]["move_to"].is_string()
    });
}

/// Trains a model while the worker of its lease is killed before some steps, and another worker is
/// started each time. The losses are those of an undisturbed training.
fn check<M: Classifier>(kills: &[usize], steps: usize) {
    let mut cluster = Cluster::start(&["flex", "flex"]);
    let undisturbed = losses::<M>(&Device::flex(), steps, |_| {}).unwrap();
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let ours = losses::<M>(&lease.devices()[0], steps, |step| {
        if kills.contains(&step) {
            let source = cluster.worker_of_lease().unwrap();
            cluster.wait_for_copy(source);
            cluster.workers[source].kill();
            cluster.add_worker("flex");
        }
    });
    assert_eq!(ours, Ok(undisturbed), "{}", cluster.logs());
    assert_eq!(lease.ended(), None);
}

#[test]
fn mlp_trains_on_when_its_worker_is_killed() {
    check::<Mlp>(&[3, 20, 40], 60);
}

#[test]
fn cnn_trains_on_when_its_worker_is_killed() {
    check::<Cnn>(&[4], 12);
}

#[test]
fn transformer_trains_on_when_its_worker_is_killed() {
    check::<Transformer>(&[5], 12);
}

/// Bytes of uploads that the workers of the next two tests keep. A session on a device of the first
/// worker may keep half of it, and one that begins on one of the four devices of the second an
/// eighth. All devices have as much memory, so that leases can move between them.
const KEPT_UPLOADS: [&str; 4] = ["--upload-cache", "8MiB", "--memory", "64MiB"];

/// Uploads 1 MiB, which differs by `number`, and returns whether the device has it.
fn uploads(device: &Device, number: u8) -> bool {
    let values = TensorData::new(vec![f32::from(number); 1 << 18], [1 << 18]);
    let uploaded: Tensor<1> = data::from_data(values, device);
    let mean = data::into_data(uploaded.mean());
    mean.is_ok_and(|mean| mean.try_to_vec::<f32>().unwrap() == [f32::from(number)])
}

/// Kills the worker of the lease once the other one has its snapshots.
fn kill_worker(cluster: &mut Cluster) {
    cluster.wait_for_copy(0);
    cluster.workers[0].kill();
}

#[test]
fn session_that_keeps_many_uploads_goes_on_at_a_worker_with_more_devices() {
    let mut cluster = Cluster::start(&[]);
    cluster.add_worker_with("flex", &KEPT_UPLOADS);
    cluster.wait_for_workers(1);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let device = &lease.devices()[0];
    assert!((0..3).all(|number| uploads(device, number)));
    cluster.add_worker_with("flex*4", &KEPT_UPLOADS);
    cluster.wait_for_workers(2);
    kill_worker(&mut cluster);
    assert!(
        (0..9).all(|number| uploads(device, number)),
        "{}",
        cluster.logs()
    );
    assert_eq!(lease.ended(), None);
}

#[test]
fn uploads_that_only_the_lost_worker_had_are_sent_again() {
    let mut cluster = Cluster::start(&[]);
    cluster.add_worker_with("flex", &KEPT_UPLOADS);
    cluster.wait_for_workers(1);
    // The uploads of this lease are kept for the next one.
    let earlier = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    assert!((0..3).all(|number| uploads(&earlier.devices()[0], number)));
    earlier.share_uploads().unwrap();
    drop(earlier);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let device = &lease.devices()[0];
    cluster.add_worker_with("flex", &KEPT_UPLOADS);
    cluster.wait_for_workers(2);
    // A session that has done nothing yet has no snapshot.
    assert!(uploads(device, 9));
    wait_for_keeper(&Administrator::of(&cluster));
    let before = lease.traffic().tensor_bytes_up;
    assert!(uploads(device, 0) && uploads(device, 1));
    let sent = lease.traffic().tensor_bytes_up - before;
    assert!(sent < 1 << 20, "{sent} bytes: the worker has the uploads");
    // An op before the mark is not executed again.
    let uploaded = Instant::now();
    cluster.wait("a mark after the uploads", || {
        // Marks are placed while the program uses the device.
        assert!(uploads(device, 9));
        let since_commit = lease.durability_status().since_commit;
        since_commit.is_some_and(|age| age < uploaded.elapsed())
    });
    cluster.workers[0].kill();
    // Now the session goes on at the other worker, which has this upload from the snapshot.
    assert!(uploads(device, 9));
    assert!(
        (0..4).all(|number| uploads(device, number)),
        "{}",
        cluster.logs()
    );
    assert_eq!(lease.ended(), None);
}

#[test]
fn training_goes_on_when_the_host_of_its_worker_hangs() {
    let cluster = Cluster::start(&["flex", "flex"]);
    let undisturbed = losses::<Mlp>(&Device::flex(), 20, |_| {}).unwrap();
    let (request, events) = with_events(LeaseRequest::devices(1));
    let lease = cluster.pool().lease(request).unwrap();
    let source = cluster.worker_of_lease().unwrap();
    let ours = losses::<Mlp>(&lease.devices()[0], 20, |step| {
        if step == 5 {
            cluster.wait_for_copy(source);
            cluster.workers[source].signal_all("STOP");
        }
    });
    assert_eq!(ours, Ok(undisturbed), "{}", cluster.logs());
    drop(lease);
    let to = format!("worker-{}", 1 - source);
    let moved = [
        LeaseEvent::Moving { worker: to.clone() },
        LeaseEvent::Running { worker: to },
    ];
    assert_eq!(events.iter().collect::<Vec<_>>(), moved);
}

#[test]
fn stock_program_trains_on_when_the_worker_of_its_lease_is_killed() {
    let mut cluster = Cluster::start(&["flex", "flex"]);
    let undisturbed = losses::<Mlp>(&Device::flex(), 20, |_| {}).unwrap();
    let gateway = Gateway::start(&cluster);
    let host = RemoteHost::websocket(&gateway.url).with_credential(GATEWAY_TOKEN);
    let device = host.devices().unwrap().into_iter().next().unwrap();
    let ours = losses::<Mlp>(&device, 20, |step| {
        if [5, 12].contains(&step) {
            let source = cluster.worker_of_lease().unwrap();
            cluster.wait_for_copy(source);
            cluster.workers[source].kill();
            cluster.add_worker("flex");
        }
    });
    assert_eq!(ours, Ok(undisturbed), "{}", cluster.logs());
}

#[test]
fn rolling_restart_disturbs_no_training() {
    // Longer than the test waits for a worker to exit.
    let drain = ["--drain-seconds", "300"];
    let mut cluster = Cluster::start(&[]);
    cluster.add_worker_with("flex", &drain);
    cluster.add_worker_with("flex", &drain);
    cluster.wait_for_workers(2);
    let undisturbed = losses::<Mlp>(&Device::flex(), 30, |_| {}).unwrap();
    let (request, events) = with_events(LeaseRequest::devices(1));
    let lease = cluster.pool().lease(request).unwrap();
    let ours = losses::<Mlp>(&lease.devices()[0], 30, |step| {
        if [4, 8, 20].contains(&step) {
            let source = cluster.worker_of_lease().unwrap();
            assert_eq!(lease.descriptions()[0].worker, format!("worker-{source}"));
            cluster.add_worker_with("flex", &drain);
            cluster.workers[source].signal("TERM");
            let code = cluster.workers[source].exit_code(EXIT_DEADLINE);
            assert_eq!(code, Some(0), "{}", cluster.logs());
        }
    });
    assert_eq!(ours, Ok(undisturbed), "{}", cluster.logs());
    assert_eq!(lease.ended(), None);
    drop(lease);
    let events: Vec<_> = events.iter().collect();
    assert_eq!(events.len(), 6, "{events:?}");
    for pair in events.chunks(2) {
        let [
            LeaseEvent::Moving { worker: to },
            LeaseEvent::Running { worker: at },
        ] = pair
        else {
            panic!("{events:?}");
        };
        assert_eq!(to, at);
    }
}

#[test]
fn training_goes_on_while_administrators_move_it() {
    let cluster = Cluster::start(&["flex", "flex"]);
    let undisturbed = losses::<Mlp>(&Device::flex(), 20, |_| {}).unwrap();
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let administrator = Administrator::of(&cluster);
    let listed_lease = || administrator.leases()[0].clone();
    let can_move = || listed_lease()["move_to"].is_string();
    let ours = losses::<Mlp>(&lease.devices()[0], 20, |step| {
        if ![5, 10].contains(&step) {
            return;
        }
        cluster.wait("the lease to be able to move", can_move);
        let listed = listed_lease();
        let worker = listed["places"][0]["worker"].as_str().unwrap();
        assert_eq!(listed["moves"], step / 5 - 1);
        if step == 5 {
            let id = listed["lease"].as_str().unwrap();
            let text = administrator.run(&["lease", "move", id]);
            let expected = format!(
                "lease {id} moves to worker {}\n",
                listed["move_to"].as_str().unwrap()
            );
            assert_eq!(text, expected);
        } else {
            let drain = ["worker", "drain", worker];
            let text = administrator.run(&[&drain[..], &["--wait", "60s"]].concat());
            let expected = format!("worker {worker} has no lease left\n");
            assert!(text.ends_with(&expected), "{text}");
            let text = administrator.run(&[&drain[..], &["--undo"]].concat());
            assert_eq!(text, format!("worker {worker} gets leases again\n"));
        }
    });
    assert_eq!(ours, Ok(undisturbed), "{}", cluster.logs());
    assert_eq!(listed_lease()["moves"], 2);
}

#[test]
fn training_goes_on_where_its_program_moves_it() {
    let cluster = Cluster::start(&["flex", "flex"]);
    let undisturbed = losses::<Mlp>(&Device::flex(), 20, |_| {}).unwrap();
    let (request, events) = with_events(LeaseRequest::devices(1));
    let lease = cluster.pool().lease(request).unwrap();
    let source = cluster.worker_of_lease().unwrap();
    let other = format!("worker-{}", 1 - source);
    let administrator = Administrator::of(&cluster);
    let ours = losses::<Mlp>(&lease.devices()[0], 20, |step| match step {
        5 => {
            wait_for_keeper(&administrator);
            lease.move_elsewhere().unwrap();
            assert_eq!(administrator.leases()[0]["places"][0]["worker"], *other);
        }
        10 => {
            lease.suspend().unwrap();
            let refused = lease.move_elsewhere().unwrap_err().to_string();
            assert!(refused.ends_with("it is suspended"), "{refused}");
            lease.resume().unwrap();
        }
        _ => {}
    });
    assert_eq!(ours, Ok(undisturbed), "{}", cluster.logs());
    assert_eq!(administrator.leases()[0]["moves"], 2, "it was resumed, too");
    drop(lease);
    let moving = LeaseEvent::Moving { worker: other };
    assert_eq!(events.iter().next(), Some(moving));
}

#[test]
fn training_waits_for_a_device_of_the_worker_with_its_snapshots() {
    let mut cluster = Cluster::start(&["flex", "flex"]);
    let undisturbed = losses::<Mlp>(&Device::flex(), 20, |_| {}).unwrap();
    let pool = cluster.pool();
    let (request, events) = with_events(LeaseRequest::devices(1));
    let lease = pool.lease(request).unwrap();
    let source = cluster.worker_of_lease().unwrap();
    let ours = losses::<Mlp>(&lease.devices()[0], 20, |step| {
        if step == 5 {
            let request = LeaseRequest::devices(1).durable(Durability::Off);
            let other = pool.lease(request).unwrap();
            cluster.wait_for_copy(source);
            cluster.workers[source].kill();
            spawn(move || {
                sleep(RELEASE_AFTER);
                drop(other);
            });
        }
    });
    assert_eq!(ours, Ok(undisturbed), "{}", cluster.logs());
    drop(lease);
    let events = changes(&events);
    let [
        LeaseEvent::Waiting { reason },
        LeaseEvent::Moving { .. },
        LeaseEvent::Running { .. },
    ] = &events[..]
    else {
        panic!("{events:?}");
    };
    let lost = format!("worker-{source}");
    assert!(
        reason.contains(&lost) && reason.contains("no like device became free"),
        "{reason}"
    );
}

#[test]
fn keeper_without_room_gives_way_to_another() {
    let mut cluster = Cluster::start(&["flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let ones = Tensor::<1>::ones([4], &lease.devices()[0]);
    assert_eq!(ones.clone().sum().into_scalar::<f32>(), 4.0);
    let administrator = Administrator::of(&cluster);
    cluster.add_worker_with("flex", &["--snapshot-memory", "0"]);
    cluster.wait("the first keeper to refuse a snapshot", || {
        let log = cluster.workers[0].log();
        log.contains("the keeper has not kept a snapshot")
    });
    cluster.add_worker("flex");
    administrator.wait("the snapshots at the other worker", || {
        administrator.leases()[0]["move_to"] == "worker-2"
    });
    cluster.workers[0].kill();
    assert_eq!(ones.sum().into_scalar::<f32>(), 4.0);
}

#[test]
fn one_tenant_leaves_others_room_at_a_keeper() {
    let mut cluster = Cluster::start(&["flex*4"]);
    let administrator = Administrator::of(&cluster);
    administrator.run(&["tenant", "add", "greedy"]);
    // 16 MiB are for the snapshots of other workers' leases, and 8 MiB of these for one tenant.
    cluster.add_worker_with("flex", &["--snapshot-memory", "32MiB"]);
    let url = administrator.create_token(&["--tenant", "greedy"]);
    // Leases of two devices run on the first worker.
    let lease = |pool: &Pool, mib: usize| {
        let lease = pool.lease(LeaseRequest::devices(2)).unwrap();
        let ones = Tensor::<1>::ones([mib << 18], &lease.devices()[0]);
        let sum = ones.clone().sum().into_scalar::<f32>();
        assert_eq!(sum, (mib << 18) as f32);
        (lease, ones)
    };
    let largest_kept = |cluster: &Cluster| {
        let kept = cluster.workers[1].snapshots_bytes();
        kept.into_iter().max().unwrap_or_default()
    };
    let _greedy = lease(&Pool::connect(&url).unwrap(), 12);
    cluster.wait("the keeper to refuse a snapshot", || {
        let log = cluster.workers[0].log();
        log.contains("of the 8388608 bytes that one tenant may use")
    });
    assert!(largest_kept(&cluster) < 1 << 20, "{}", cluster.logs());
    let _other = lease(&cluster.pool(), 3);
    cluster.wait("a snapshot of the other tenant at the keeper", || {
        largest_kept(&cluster) >= 3 << 20
    });
}

#[test]
fn lease_ends_if_it_cannot_go_on_in_time() {
    let mut cluster = Cluster::start(&["flex", "flex"]);
    let pool = cluster.pool();
    let request = LeaseRequest::devices(1).recover_within(Duration::ZERO);
    let lease = pool.lease(request).unwrap();
    let source = cluster.worker_of_lease().unwrap();
    let other = LeaseRequest::devices(1).durable(Durability::Off);
    let _other = pool.lease(other).unwrap();
    let ones = Tensor::<1>::ones([4], &lease.devices()[0]);
    assert_eq!(ones.clone().sum().into_scalar::<f32>(), 4.0);
    cluster.wait_for_copy(source);
    cluster.workers[source].kill();
    let error = ones.sum().try_into_data().unwrap_err().to_string();
    let reason = format!(
        "no like device became free for the lease, at worker worker-{}",
        1 - source
    );
    assert!(error.contains(&reason), "{error}");
}

#[test]
fn end_of_a_lease_names_the_worker_and_the_keeper_that_were_killed_together() {
    let mut cluster = Cluster::start(&["flex", "flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let source = cluster.worker_of_lease().unwrap();
    let ones = Tensor::<1>::ones([4], &lease.devices()[0]);
    assert_eq!(ones.clone().sum().into_scalar::<f32>(), 4.0);
    cluster.wait_for_copy(source);
    cluster.kill_workers();
    let error = ones.sum().try_into_data().unwrap_err().to_string();
    let named = [
        format!("worker worker-{source} ("),
        format!("worker worker-{} (", 1 - source),
        "which kept the snapshots of the lease".to_owned(),
        "`tensord worker --snapshots`".to_owned(),
    ];
    for text in named {
        assert!(error.contains(&text), "{error}");
    }
}

#[test]
fn lease_that_is_not_durable_ends_with_its_worker() {
    let mut cluster = Cluster::start(&["flex", "flex"]);
    let request = LeaseRequest::devices(1).durable(Durability::Off);
    let lease = cluster.pool().lease(request).unwrap();
    let ones = Tensor::<1>::ones([4], &lease.devices()[0]);
    assert_eq!(ones.clone().sum().into_scalar::<f32>(), 4.0);
    let source = cluster.worker_of_lease().unwrap();
    cluster.workers[source].kill();
    let error = ones.sum().try_into_data().unwrap_err().to_string();
    assert!(error.contains("lost"), "{error}");
}
