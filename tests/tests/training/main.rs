//! Training on tensord takes exactly the same steps as training on local Flex.

mod determinism;
#[cfg(target_os = "linux")]
mod events;
#[cfg(target_os = "linux")]
mod failover;
#[cfg(target_os = "linux")]
mod idle;
#[cfg(target_os = "linux")]
mod making_room;
#[cfg(target_os = "linux")]
mod object_storage;
#[cfg(target_os = "linux")]
mod random_kills;
#[cfg(target_os = "linux")]
mod reclaim;
#[cfg(target_os = "linux")]
mod scheduler_restart;
#[cfg(target_os = "linux")]
mod snapshot_store;
mod suspension;
#[cfg(target_os = "linux")]
mod worker_failover;

use burn::tensor::Device;
use tensord_client::{LeaseRequest, testing::Options};
use tensord_testkit::{
    cluster::Cluster,
    models::{Classifier, Cnn, Mlp},
    training::losses,
};
use tensord_transport::faults::FaultSwitch;

const STEPS: usize = 200;

/// Trains the model on a device of `cluster` and on local Flex, and checks that the losses
/// are bit-identical. The connections to `cluster` are cut `cuts` times.
fn check<M: Classifier>(cluster: &Cluster, option: &str, cuts: usize) {
    let faults = FaultSwitch::default();
    let options = Options {
        faults: Some(faults.clone()),
    };
    let pool = cluster.pool_with(option, options);
    let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
    let every = STEPS / (cuts + 1);
    let mut cut = 0;
    let ours = losses::<M>(&lease.devices()[0], STEPS, |step| {
        if step > 0 && step % every == 0 && cut < cuts {
            faults.cut();
            cut += 1;
        }
    });
    let ours = ours.unwrap();
    let reference = losses::<M>(&Device::flex(), STEPS, |_| {}).unwrap();
    assert!(
        reference[STEPS - 1] < reference[0],
        "the model learns nothing"
    );
    let bits = |losses: &[f32]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&ours), bits(&reference));
    assert_eq!(cut, cuts);
    assert!(faults.links() as usize > cuts, "every cut makes a new link");
}

#[test]
fn losses_are_bit_identical_over_tcp() {
    let cluster = Cluster::start(&["flex"]);
    check::<Mlp>(&cluster, "transport=tcp", 0);
    check::<Cnn>(&cluster, "transport=tcp", 0);
}

#[test]
fn losses_are_bit_identical_over_quic() {
    let cluster = Cluster::start(&["flex"]);
    check::<Mlp>(&cluster, "transport=quic", 0);
    check::<Cnn>(&cluster, "transport=quic", 0);
}

#[test]
fn losses_are_bit_identical_over_grpc() {
    let cluster = Cluster::start(&["flex"]);
    check::<Mlp>(&cluster, "transport=grpc", 0);
    check::<Cnn>(&cluster, "transport=grpc", 0);
}

#[test]
fn losses_are_bit_identical_over_a_link_that_is_cut_five_times() {
    let cluster = Cluster::start(&["flex"]);
    check::<Mlp>(&cluster, "transport=tcp", 5);
    check::<Mlp>(&cluster, "transport=quic", 5);
    check::<Cnn>(&cluster, "transport=grpc", 5);
}
