//! Trainings that make room for requests of their own tenant, and go on after that with the same bits: on a spot
//! lease, and on one that has passed a large request.

use std::{
    thread::{scope, sleep},
    time::Duration,
};

use burn::tensor::Device;
use tensord_client::{Durability, Lease, LeaseEvent, LeaseRequest};
use tensord_testkit::{
    administrator::Administrator, cluster::Cluster, models::Mlp, training::losses,
};

use crate::events::with_events;

const STEPS: usize = 20;

/// A lease runs for so long before it makes room.
const MIN_RUN_TIME: Duration = Duration::from_secs(10);

/// Trains on a lease, whose device others get meanwhile: calls `request` at a step after which the lease has
/// snapshots and has run for long enough.
fn train_and_make_room(cluster: &Cluster, lease: &Lease, request: impl FnOnce()) {
    let undisturbed = losses::<Mlp>(&Device::flex(), STEPS, |_| {}).unwrap();
    let mut request = Some(request);
    let ours = losses::<Mlp>(&lease.devices()[0], STEPS, |step| {
        if let Some(request) = request.take_if(|_| step == 8) {
            cluster.wait("a snapshot", || lease.durability_status().commits > 0);
            sleep(MIN_RUN_TIME);
            request();
        }
    });
    assert_eq!(ours, Ok(undisturbed), "{}", cluster.logs());
}

#[test]
fn spot_lease_makes_room_for_another_request_of_its_tenant() {
    let cluster = Cluster::start(&["flex"]);
    let administrator = Administrator::of(&cluster);
    let pool = cluster.pool();
    let lease = pool.lease(LeaseRequest::devices(1).spot()).unwrap();
    train_and_make_room(&cluster, &lease, || {
        // A request for another spot lease does not get the device.
        let spot = LeaseRequest::devices(1).spot();
        let refused = pool.lease(spot.timeout(Duration::from_millis(300)));
        assert!(refused.is_err());
        let other = pool.lease(LeaseRequest::devices(1)).unwrap();
        let of_other = losses::<Mlp>(&other.devices()[0], 3, |_| {});
        assert!(of_other.is_ok(), "{of_other:?}");
    });
    drop(lease);
    // One that could not go on ends.
    let request = LeaseRequest::devices(1).spot().durable(Durability::Off);
    let ends = pool.lease(request).unwrap();
    sleep(MIN_RUN_TIME);
    drop(pool.lease(LeaseRequest::devices(1)).unwrap());
    let reason = ends.wait_ended(Duration::from_secs(10)).unwrap();
    assert!(reason.contains("as this is a spot lease"), "{reason}");
    drop(ends);
    administrator.wait("the leases to end", || administrator.leases().is_empty());
}

#[test]
fn training_that_passed_a_large_request_makes_room_for_it() {
    let mut cluster = Cluster::start(&["flex*2"]);
    cluster.restart_scheduler_with(&["--reserve-after", "1s"]);
    cluster.wait_for_workers(1);
    let administrator = Administrator::of(&cluster);
    let first = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    scope(|scope| {
        let (large, events) = with_events(LeaseRequest::devices(2).kind("flex"));
        let pool = cluster.pool();
        let large = scope.spawn(move || pool.lease(large).unwrap());
        let queued = events.recv_timeout(Duration::from_secs(10)).unwrap();
        assert!(
            matches!(queued, LeaseEvent::Queued { position: 1, .. }),
            "{queued}"
        );
        sleep(Duration::from_secs(2));
        let alone = LeaseRequest::devices(1).durable(Durability::Off);
        let alone = cluster
            .pool()
            .lease(alone.timeout(Duration::from_millis(300)));
        assert!(alone.is_err(), "it could not be suspended");
        let passes = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
        let waiting = administrator.run(&["queue", "--json"]);
        assert!(waiting.contains("\"has_reservation\": true"), "{waiting}");
        train_and_make_room(&cluster, &passes, || {
            drop(first);
            let large = large.join().unwrap();
            assert_eq!(large.devices().len(), 2);
        });
        drop(passes);
    });
}
