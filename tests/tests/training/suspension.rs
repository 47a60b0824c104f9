//! A training whose lease is suspended goes on when the lease is resumed, and computes the same bits.

use std::{ops::Range, thread::scope, time::Duration};

use burn::tensor::Device;
use tensord_client::{Durability, LeaseEvent, LeaseRequest, Pool, StandingError};
use tensord_testkit::{
    administrator::Administrator,
    cluster::Cluster,
    models::{Classifier, Cnn, Mlp},
    training::losses,
};

use crate::{events::with_events, worker_failover::wait_for_keeper};

/// Steps of each of two trainings that take turns a hundred times.
const STEPS: usize = 55;

/// How long a worker that is stopped may take to exit.
const EXIT_DEADLINE: Duration = Duration::from_secs(30);

/// Trains on a lease of its own, and passes the device on to the other training before each of the
/// `turns` steps, and in the end.
fn train_in_turns<M: Classifier>(
    pool: &Pool,
    administrator: &Administrator,
    steps: usize,
    turns: Range<usize>,
) -> Result<Vec<f32>, String> {
    let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
    let losses = losses::<M>(&lease.devices()[0], steps, |step| {
        if turns.contains(&step) {
            administrator.suspend_running();
            administrator.resume_suspended();
        }
    });
    assert_eq!(lease.ended(), None);
    drop(lease);
    administrator.resume_suspended();
    losses
}

#[test]
fn two_trainings_take_turns_on_the_only_device() {
    let cluster = Cluster::start(&["flex"]);
    let mlp = losses::<Mlp>(&Device::flex(), STEPS, |_| {}).unwrap();
    let cnn = losses::<Cnn>(&Device::flex(), STEPS, |_| {}).unwrap();
    let administrator = Administrator::of(&cluster);
    let pools = [cluster.pool(), cluster.pool()];
    let (ours_mlp, ours_cnn) = scope(|scope| {
        let [first, second] = &pools;
        let train = || train_in_turns::<Mlp>(first, &administrator, STEPS, 1..51);
        let mlp = scope.spawn(train);
        let train = || train_in_turns::<Cnn>(second, &administrator, STEPS, 3..53);
        let cnn = scope.spawn(train);
        (mlp.join().unwrap(), cnn.join().unwrap())
    });
    assert_eq!(ours_mlp, Ok(mlp), "{}", cluster.logs());
    assert_eq!(ours_cnn, Ok(cnn), "{}", cluster.logs());
    administrator.wait("the leases to end", || administrator.leases().is_empty());
    cluster.wait("the snapshots to be dropped", || {
        cluster.workers[0].snapshots_bytes().is_empty()
    });
}

#[test]
fn suspended_training_goes_on_although_its_worker_is_killed() {
    let mut cluster = Cluster::start(&["flex", "flex"]);
    let undisturbed = losses::<Mlp>(&Device::flex(), 20, |_| {}).unwrap();
    let (request, events) = with_events(LeaseRequest::devices(1));
    let lease = cluster.pool().lease(request).unwrap();
    let source = cluster.worker_of_lease().unwrap();
    let other = format!("worker-{}", 1 - source);
    let administrator = Administrator::of(&cluster);
    let ours = losses::<Mlp>(&lease.devices()[0], 20, |step| {
        if step != 8 {
            return;
        }
        wait_for_keeper(&administrator);
        let id = administrator.suspend_running();
        assert_eq!(administrator.holders(), 2);
        assert_eq!(
            administrator.command(&["move", &id]),
            None,
            "it is suspended"
        );
        cluster.workers[source].kill();
        administrator.wait("the loss of the killed worker", || {
            administrator.holders() == 1
        });
        let text = administrator.command(&["resume", &id]).unwrap();
        assert_eq!(text, format!("lease {id} goes on at worker {other}\n"));
    });
    assert_eq!(ours, Ok(undisturbed), "{}", cluster.logs());
    drop(lease);
    let events: Vec<_> = events.iter().collect();
    let expected = [
        LeaseEvent::Suspended,
        LeaseEvent::Moving {
            worker: other.clone(),
        },
        LeaseEvent::Running { worker: other },
    ];
    assert_eq!(events, expected);
}

/// Another program has the device of the only worker with the snapshots when the lease is resumed. The
/// first worker with a free device has no room for the snapshots.
#[test]
fn resumed_training_goes_on_at_a_worker_that_is_free() {
    let mut cluster = Cluster::start(&["flex"]);
    let undisturbed = losses::<Mlp>(&Device::flex(), 20, |_| {}).unwrap();
    let pool = cluster.pool();
    let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
    let administrator = Administrator::of(&cluster);
    let mut other = None;
    let ours = losses::<Mlp>(&lease.devices()[0], 20, |step| {
        if step != 8 {
            return;
        }
        let id = administrator.suspend_running();
        other = Some(pool.lease(LeaseRequest::devices(1)).unwrap());
        let text = administrator.command(&["resume", &id]).unwrap();
        let waits = "goes on when worker worker-0, or another worker, has devices for it";
        assert_eq!(text, format!("lease {id} {waits}\n"));
        cluster.add_worker_with("flex", &["--snapshot-memory", "0"]);
        cluster.wait("a handover to fail", || {
            let log = cluster.workers[0].log();
            log.contains("cannot hand the snapshots of the suspended lease over to worker worker-1")
        });
        cluster.add_worker("flex");
    });
    assert_eq!(ours, Ok(undisturbed), "{}", cluster.logs());
    assert_eq!(cluster.workers[2].processes_of_leases().len(), 1);
    assert_eq!((lease.ended(), other.unwrap().ended()), (None, None));
}

/// The workers that have the snapshots of a suspended lease are stopped, one after the other, and each
/// hands them over to the next one.
#[test]
fn suspended_training_survives_a_restart_of_every_worker() {
    let mut cluster = Cluster::start(&["flex", "flex"]);
    let undisturbed = losses::<Mlp>(&Device::flex(), 20, |_| {}).unwrap();
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let administrator = Administrator::of(&cluster);
    let ours = losses::<Mlp>(&lease.devices()[0], 20, |step| {
        if step != 8 {
            return;
        }
        wait_for_keeper(&administrator);
        let id = administrator.suspend_running();
        for old in 0..3 {
            if old > 0 {
                cluster.add_worker("flex");
                // Of the two that are there, only the older one has the snapshots.
                cluster.wait_for_workers(2);
            }
            cluster.workers[old].signal("TERM");
            let code = cluster.workers[old].exit_code(EXIT_DEADLINE);
            assert_eq!(code, Some(0), "{}", cluster.workers[old].log());
            cluster.wait_for_workers(1);
            assert_eq!(administrator.holders(), 1, "{}", cluster.logs());
        }
        let text = administrator.command(&["resume", &id]).unwrap();
        assert_eq!(text, format!("lease {id} goes on at worker worker-3\n"));
    });
    assert_eq!(ours, Ok(undisturbed), "{}", cluster.logs());
    assert_eq!(lease.ended(), None);
}

#[test]
fn programs_that_end_take_their_suspended_leases_with_them() {
    let cluster = Cluster::start(&["flex"]);
    let administrator = Administrator::of(&cluster);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let trained = losses::<Mlp>(&lease.devices()[0], 3, |_| {});
    assert!(trained.is_ok());
    let id = administrator.suspend_running();
    assert_eq!(
        administrator.command(&["suspend", &id]),
        None,
        "it is suspended"
    );
    cluster.wait("the process to end and its snapshot to stay", || {
        let worker = &cluster.workers[0];
        worker.processes_of_leases().is_empty() && !worker.snapshots_bytes().is_empty()
    });
    drop(lease);
    administrator.wait("the lease to end", || administrator.leases().is_empty());
    cluster.wait("the snapshots to be dropped", || {
        cluster.workers[0].snapshots_bytes().is_empty()
    });
    assert_eq!(administrator.command(&["resume", &id]), None, "it is over");
}

#[test]
fn program_suspends_its_lease_and_resumes_it() {
    const STEPS: usize = 20;
    let cluster = Cluster::start(&["flex"]);
    let undisturbed = losses::<Mlp>(&Device::flex(), STEPS, |_| {}).unwrap();
    let administrator = Administrator::of(&cluster);
    let pool = cluster.pool();
    let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
    let refusal = |changed: Result<(), StandingError>| changed.unwrap_err().to_string();
    let error = refusal(lease.resume());
    assert!(error.ends_with("it is not suspended"), "{error}");
    let ours = losses::<Mlp>(&lease.devices()[0], STEPS, |step| match step {
        5 => {
            administrator.wait("a snapshot", || lease.suspend().is_ok());
            let error = refusal(lease.suspend());
            assert!(error.ends_with("it is suspended"), "{error}");
            let other = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
            drop(other);
            lease.resume().unwrap();
        }
        10 => {
            administrator.suspend_running();
            let error = refusal(lease.resume());
            assert!(
                error.ends_with("an administrator has suspended it"),
                "{error}"
            );
            administrator.resume_suspended();
        }
        _ => {}
    });
    assert_eq!(ours.unwrap(), undisturbed, "{}", cluster.logs());
    drop(lease);
    let request = LeaseRequest::devices(1).durable(Durability::Off);
    let lease = pool.lease(request).unwrap();
    let error = refusal(lease.suspend());
    assert!(error.contains("as its program requested"), "{error}");
}
