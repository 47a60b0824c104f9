//! A training goes on although the scheduler is killed while its lease is suspended, or while a worker
//! is lost.

use burn::tensor::Device;
use tensord_client::{Durability, LeaseRequest};
use tensord_testkit::{
    administrator::Administrator, cluster::Cluster, models::Mlp, training::losses,
};

use crate::worker_failover::wait_for_keeper;

const STEPS: usize = 20;

fn undisturbed() -> Vec<f32> {
    losses::<Mlp>(&Device::flex(), STEPS, |_| {}).unwrap()
}

#[test]
fn suspended_training_outlives_the_scheduler() {
    let mut cluster = Cluster::start(&["flex", "flex"]);
    let undisturbed = undisturbed();
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let administrator = Administrator::of(&cluster);
    let ours = losses::<Mlp>(&lease.devices()[0], STEPS, |step| match step {
        // By an administrator, at both workers.
        4 => {
            wait_for_keeper(&administrator);
            let id = administrator.suspend_running();
            assert_eq!(administrator.holders(), 2);
            cluster.restart_scheduler_with(&[]);
            administrator.wait("both workers to be back", || administrator.holders() == 2);
            administrator.command(&["resume", &id]).unwrap();
        }
        // By the program; and it is resumed, and waits for its device, when the scheduler is killed.
        12 => {
            let source = cluster.worker_of_lease().unwrap();
            administrator.wait("a snapshot", || lease.suspend().is_ok());
            let request = || LeaseRequest::devices(1).durable(Durability::Off);
            let pool = cluster.pool();
            let others = [(); 2].map(|()| pool.lease(request()).unwrap());
            lease.resume().unwrap();
            cluster.workers[1 - source].kill();
            cluster.restart_scheduler_with(&[]);
            // Leases that their program drops while it is away last 30 s.
            administrator.wait("both programs to be back", || {
                let leases = administrator.leases();
                leases.len() == 3 && leases.iter().all(|lease| lease["tenant"] != "")
            });
            drop(others);
        }
        _ => {}
    });
    assert_eq!(ours, Ok(undisturbed), "{}", cluster.logs());
    assert_eq!(lease.ended(), None);
    drop(lease);
    administrator.wait("the lease to end", || administrator.leases().is_empty());
}

#[test]
fn training_goes_on_whose_worker_dies_while_the_scheduler_is_away() {
    let mut cluster = Cluster::start(&["flex", "flex"]);
    let undisturbed = undisturbed();
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let administrator = Administrator::of(&cluster);
    let ours = losses::<Mlp>(&lease.devices()[0], STEPS, |step| {
        if step == 5 {
            wait_for_keeper(&administrator);
            let source = cluster.worker_of_lease().unwrap();
            cluster.without_scheduler(|cluster| cluster.workers[source].kill());
        }
    });
    assert_eq!(ours, Ok(undisturbed), "{}", cluster.logs());
    assert_eq!(lease.ended(), None);
}

#[test]
fn lost_training_waits_for_a_device_although_the_scheduler_is_killed() {
    let mut cluster = Cluster::start(&["flex", "flex"]);
    let undisturbed = undisturbed();
    let pool = cluster.pool();
    let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
    let administrator = Administrator::of(&cluster);
    let source = cluster.worker_of_lease().unwrap();
    let ours = losses::<Mlp>(&lease.devices()[0], STEPS, |step| {
        if step == 5 {
            let request = LeaseRequest::devices(1).durable(Durability::Off);
            let other = pool.lease(request).unwrap();
            cluster.wait_for_copy(source);
            cluster.workers[source].kill();
            administrator.wait("the lease to wait", || {
                let leases = administrator.leases();
                leases.iter().any(|lease| lease["waits"].is_string())
            });
            cluster.restart_scheduler_with(&[]);
            administrator.wait("the lease to wait again", || {
                let leases = administrator.leases();
                leases.iter().any(|lease| lease["waits"].is_string())
            });
            drop(other);
        }
    });
    assert_eq!(ours, Ok(undisturbed), "{}", cluster.logs());
    assert_eq!(lease.ended(), None);
}
