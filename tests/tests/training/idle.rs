//! A training that is idle for a while makes room for others, and goes on by itself with the same bits.

use std::{
    sync::mpsc::{Receiver, Sender, channel},
    thread::scope,
    time::Duration,
};

use burn::tensor::{Device, Tensor};
use tensord_client::{LeaseEvent, LeaseRequest, Pool};
use tensord_testkit::{
    administrator::Administrator,
    cluster::Cluster,
    models::{Classifier, Cnn, Mlp},
    training::losses,
};

use crate::events::with_events;

const STEPS: usize = 12;

/// Starts a pool whose leases make room for others after a second.
fn start(workers: &[&str]) -> Cluster {
    let mut cluster = Cluster::start(workers);
    cluster.restart_scheduler_with(&["--idle-timeout", "1s"]);
    cluster.wait_for_workers(workers.len());
    cluster
}

#[test]
fn idle_training_makes_room_and_goes_on_with_its_next_op() {
    let cluster = start(&["flex"]);
    let undisturbed = losses::<Mlp>(&Device::flex(), STEPS, |_| {}).unwrap();
    let administrator = Administrator::of(&cluster);
    let (request, events) = with_events(LeaseRequest::devices(1));
    let lease = cluster.pool().lease(request).unwrap();
    let ours = losses::<Mlp>(&lease.devices()[0], STEPS, |step| {
        if step != 5 {
            return;
        }
        let id = administrator.leases()[0]["lease"].clone();
        let id = id.as_str().unwrap();
        let other = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
        let of_other = losses::<Mlp>(&other.devices()[0], 3, |_| {});
        assert_eq!(of_other.as_deref(), Ok(&undisturbed[..3]));
        let listed = administrator.run(&["lease", "list"]);
        let words = "suspended as it was idle; its state is at worker worker-0";
        assert!(listed.contains(words), "{listed}");
        let why = administrator.run(&["why", id]);
        assert!(why.contains("it goes on when its program uses it"), "{why}");
        let leases = administrator.leases();
        let shown = leases.iter().find(|lease| lease["lease"] == id).unwrap();
        assert_eq!(shown["idle"], true);
        drop(other);
        administrator.wait("the device to be free", || {
            let status = cluster.pool().status().unwrap();
            status.workers[0].devices[0].is_free()
        });
    });
    assert_eq!(ours, Ok(undisturbed), "{}", cluster.logs());
    assert_eq!(lease.ended(), None);
    drop(lease);
    let worker = || "worker-0".to_owned();
    let expected = [
        LeaseEvent::Idle,
        LeaseEvent::Moving { worker: worker() },
        LeaseEvent::Running { worker: worker() },
    ];
    assert_eq!(events.iter().collect::<Vec<_>>(), expected);
}

/// Trains on a lease of its own. Before each of these steps it lets the other program go on, and waits until that
/// one does the same.
fn train_in_turns<M: Classifier>(
    pool: &Pool,
    turns: &[usize],
    go_on: &Sender<()>,
    waits: &Receiver<()>,
) -> Result<Vec<f32>, String> {
    let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
    let trained = losses::<M>(&lease.devices()[0], STEPS, |step| {
        if turns.contains(&step) {
            // The other one may be done.
            let _ = go_on.send(());
            let _ = waits.recv();
        }
    });
    assert_eq!(lease.ended(), None);
    trained
}

/// Nobody suspends or resumes them.
#[test]
fn two_programs_that_are_used_in_turns_share_the_only_device() {
    let cluster = start(&["flex"]);
    let mlp = losses::<Mlp>(&Device::flex(), STEPS, |_| {}).unwrap();
    let cnn = losses::<Cnn>(&Device::flex(), STEPS, |_| {}).unwrap();
    let (to_second, second_waits) = channel();
    let (to_first, first_waits) = channel();
    let pools = [cluster.pool(), cluster.pool()];
    let (ours_mlp, ours_cnn) = scope(|scope| {
        let [one, other] = &pools;
        // Each ends the other one's wait at its end.
        let first =
            scope.spawn(move || train_in_turns::<Mlp>(one, &[3, 6, 9], &to_second, &first_waits));
        let second = scope.spawn(move || {
            second_waits.recv().unwrap();
            train_in_turns::<Cnn>(other, &[4, 8], &to_first, &second_waits)
        });
        (first.join().unwrap(), second.join().unwrap())
    });
    assert_eq!(ours_mlp, Ok(mlp), "{}", cluster.logs());
    assert_eq!(ours_cnn, Ok(cnn), "{}", cluster.logs());
    let log = cluster.scheduler.as_ref().unwrap().log();
    assert!(!log.contains("cut off"), "{log}");
}

/// A device that computes keeps the whole lease; a value that is read, and an op, resume it.
#[test]
fn lease_on_two_workers_is_idle_only_if_all_its_devices_are() {
    let cluster = start(&["flex", "flex"]);
    let administrator = Administrator::of(&cluster);
    let pool = cluster.pool();
    let lease = pool.lease(LeaseRequest::devices(2)).unwrap();
    let [first, second] = lease.devices() else {
        panic!("two devices");
    };
    let kept = Tensor::<1>::from_floats([1.0, 2.0], first);
    let mut computed = Tensor::<1>::from_floats([1.0], second);
    let waits = || {
        let listed = administrator.run(&["queue", "--json"]);
        let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
        listed["count"] == 1
    };
    scope(|scope| {
        let other = scope.spawn(|| pool.lease(LeaseRequest::devices(1)).unwrap());
        administrator.wait("the request", waits);
        for _ in 0..40 {
            computed = computed.clone() + 1.0;
            assert!(computed.clone().try_into_data().is_ok());
            std::thread::sleep(Duration::from_millis(100));
        }
        assert!(!other.is_finished(), "one of the devices was not idle");
        let other = other.join().unwrap();
        let leases = administrator.leases();
        let idle = leases.iter().find(|lease| lease["idle"] == true).unwrap();
        assert_eq!(idle["suspended_at"].as_array().unwrap().len(), 2);
        drop(other);
    });
    let value = |tensor: Tensor<1>| tensor.into_data().try_to_vec::<f32>().unwrap();
    assert_eq!(value(kept * 2.0), [2.0, 4.0], "{}", cluster.logs());
    assert_eq!(value(computed), [41.0]);
    assert_eq!(lease.ended(), None);
}
