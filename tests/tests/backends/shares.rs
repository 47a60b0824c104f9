//! Leases with shares of one device: their trainings take turns on it, and each computes what it computes alone.

use tensord_client::{Durability, Lease, LeaseRequest};
use tensord_testkit::{
    cluster::Cluster,
    host,
    models::{Mlp, Transformer},
    training::losses,
};

use super::failover::is_close;

const STEPS: usize = 12;

/// Leases a part of a device. The lease ends if its process does: none must in this test.
fn lease(cluster: &Cluster, kind: &str, part: f64) -> Lease {
    let request = LeaseRequest::devices(1).kind(kind).share(part);
    let request = request.durable(Durability::Off);
    cluster.pool().lease(request).unwrap()
}

#[test]
fn two_trainings_share_a_device() {
    for kind in host::kinds() {
        let cluster = host::cluster(&[kind]);
        let whole = lease(&cluster, kind, 1.0);
        let device = whole.devices()[0].clone();
        let alone = (
            losses::<Mlp>(&device, STEPS, |_| {}).unwrap(),
            losses::<Transformer>(&device, STEPS, |_| {}).unwrap(),
        );
        drop(whole);
        let leases = [0.5, 0.25].map(|part| lease(&cluster, kind, part));
        let parts = leases
            .each_ref()
            .map(|lease| lease.descriptions()[0].share());
        assert_eq!(parts, [Some(0.5), Some(0.25)]);
        let [first, second] = leases.each_ref().map(|lease| lease.devices()[0].clone());
        let ours = std::thread::scope(|scope| {
            let training = scope.spawn(|| losses::<Mlp>(&first, STEPS, |_| {}));
            let other = losses::<Transformer>(&second, STEPS, |_| {});
            (training.join().unwrap(), other)
        });
        let ours = match ours {
            (Ok(first), Ok(second)) => (first, second),
            failed => panic!("{failed:?}\n{}", cluster.logs()),
        };
        assert!(is_close(&ours.0, &alone.0), "{kind}: {ours:?} {alone:?}");
        assert!(is_close(&ours.1, &alone.1), "{kind}: {ours:?} {alone:?}");
        // No process has died and begun again.
        assert_eq!(leases.each_ref().map(Lease::ended), [None, None]);
    }
}
