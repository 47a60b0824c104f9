//! A training computes the same bits while its workers are killed at random moments.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread::{self, sleep},
    time::Duration,
};

use burn::tensor::Device;
use tensord_client::LeaseRequest;
use tensord_testkit::{
    cluster::Cluster,
    models::{Classifier, Cnn, Mlp, Transformer},
    random_kills::RandomKills,
    training::{losses, losses_while},
};

/// From when a lease could go on elsewhere, its worker is killed within this time: longer than from one mark to the
/// next.
const LONGEST_WAIT: Duration = Duration::from_millis(2500);

/// Ends the training when this is dropped, and when the test fails.
struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn check<M: Classifier>() {
    let mut random = RandomKills::new(1);
    let mut cluster = Cluster::start(&["flex", "flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(1)).unwrap();
    let device = &lease.devices()[0];
    let is_over = AtomicBool::new(false);
    let ours = thread::scope(|scope| {
        let training = || losses_while::<M>(device, |_| !is_over.load(Ordering::Relaxed));
        let training = scope.spawn(training);
        let end = EndOnDrop(&is_over);
        for _ in 0..random.kills {
            cluster.wait("a worker to run the lease", || {
                cluster.worker_of_lease().is_some()
            });
            let source = cluster.worker_of_lease().unwrap();
            cluster.wait_for_copy(source);
            sleep(random.time(LONGEST_WAIT));
            cluster.workers[source].kill();
            cluster.add_worker("flex");
        }
        drop(end);
        training.join().unwrap()
    });
    let ours = ours.unwrap_or_else(|error| panic!("{error}\n{}", cluster.logs()));
    assert_eq!(lease.ended(), None);
    let undisturbed = losses::<M>(&Device::flex(), ours.len(), |_| {}).unwrap();
    let differs = (0..ours.len()).find(|at| ours[*at].to_bits() != undisturbed[*at].to_bits());
    assert_eq!(differs, None, "the first step with another loss");
}

#[test]
fn mlp_survives_kills_of_its_worker_at_random() {
    check::<Mlp>();
}

#[test]
fn cnn_survives_kills_of_its_worker_at_random() {
    check::<Cnn>();
}

#[test]
fn transformer_survives_kills_of_its_worker_at_random() {
    check::<Transformer>();
}
