//! Sessions on GPUs that go on in another process, or at another worker.

use burn::tensor::{Bool, Device, Distribution, Int, Tensor, TensorData};
use tensord_client::{Lease, LeaseRequest};
use tensord_testkit::{
    cluster::Cluster,
    host,
    models::{Classifier, Mlp, Transformer},
    training::losses,
};

/// Relative difference of two losses of one training on the same kind of device, whose kernels are
/// chosen by measurements. On an NVIDIA H200 two trainings differed by 3e-3 after 16 steps; a lost
/// step differs by far more.
const TOLERANCE: f32 = 1e-2;

fn lease(cluster: &Cluster, kind: &str) -> Lease {
    let request = LeaseRequest::devices(1).kind(kind);
    cluster.pool().lease(request).unwrap()
}

pub(super) fn is_close(ours: &[f32], undisturbed: &[f32]) -> bool {
    let is_close = |(a, b): (&f32, &f32)| (a - b).abs() <= TOLERANCE * b.abs().max(1.0);
    ours.len() == undisturbed.len() && ours.iter().zip(undisturbed).all(is_close)
}

/// Trains a model twice, and calls `kill` before the steps `kills` of the second training. The losses
/// are close to those of the first, and the same on an exact device.
fn check<M: Classifier>(
    cluster: &mut Cluster,
    kind: &str,
    kills: &[usize],
    mut kill: impl FnMut(&mut Cluster),
) {
    const STEPS: usize = 16;
    let undisturbed = {
        let lease = lease(cluster, kind);
        losses::<M>(&lease.devices()[0], STEPS, |_| {}).unwrap()
    };
    let lease = lease(cluster, kind);
    let ours = losses::<M>(&lease.devices()[0], STEPS, |step| {
        if kills.contains(&step) {
            kill(cluster);
        }
    });
    let ours = ours.unwrap_or_else(|e| panic!("{e}\n{}", cluster.logs()));
    assert!(is_close(&ours, &undisturbed), "{ours:?} {undisturbed:?}");
    assert_eq!(lease.ended(), None);
    let fingerprint = lease.descriptions()[0].fingerprint;
    let is_exact = fingerprint.is_some_and(|it| it.is_exact);
    let is_same = ours == undisturbed;
    println!("{kind}: the same bits: {is_same}, on an exact device: {is_exact}");
    assert!(is_same || !is_exact, "{ours:?} {undisturbed:?}");
}

/// Kills the process of the only lease, once its worker has a snapshot of it.
fn kill_process(cluster: &mut Cluster) {
    let worker = &cluster.workers[0];
    cluster.wait("a snapshot", || !worker.snapshots_bytes().is_empty());
    worker.signal_child(worker.process_of_lease(), "KILL");
}

/// Kills the worker of the only lease, once the other worker has a snapshot.
fn kill_worker(cluster: &mut Cluster) {
    let source = cluster.worker_of_lease().unwrap();
    cluster.wait_for_copy(source);
    cluster.workers[source].kill();
}

#[test]
fn trainings_go_on_in_another_process() {
    for kind in host::kinds() {
        let mut cluster = host::cluster(&[kind]);
        check::<Mlp>(&mut cluster, kind, &[3, 9], kill_process);
        check::<Transformer>(&mut cluster, kind, &[5], kill_process);
        let log = cluster.workers[0].log();
        let restarts = log.matches("the lease goes on in another process").count();
        assert_eq!(restarts, 3, "{log}");
    }
}

#[test]
fn training_goes_on_at_another_worker() {
    for kind in host::kinds() {
        let mut cluster = host::cluster(&[kind, kind]);
        check::<Mlp>(&mut cluster, kind, &[6], kill_worker);
    }
}

/// Tensors of all kinds and layouts, which later ops use.
struct Layouts {
    transposed: Tensor<2>,
    row: Tensor<2>,
    expanded: Tensor<2>,
    copies: [Tensor<2>; 2],
    random: Tensor<2>,
    thirds: Tensor<2>,
    /// Views of one buffer, which overlap: rows of 256 bytes, as views must begin at such distances.
    views: [Tensor<2>; 2],
    numbers: Tensor<1, Int>,
    bits: Tensor<2, Bool>,
    empty: Tensor<2>,
    scalar: Tensor<1>,
    large: Tensor<2>,
}

impl Layouts {
    fn new(device: &Device) -> Self {
        device.seed(7);
        let values = |rows: usize, columns: usize| {
            let values = (0..rows * columns).map(|i| (i * 31 % 17) as f32 - 8.0);
            let data = TensorData::new(values.collect::<Vec<_>>(), [rows, columns]);
            Tensor::<2>::from_data(data, device)
        };
        let whole = values(5, 7);
        let source = values(1, 6);
        let copy = values(3, 3);
        let rows = values(64, 64);
        Self {
            transposed: whole.clone().transpose(),
            row: whole.clone().slice([2..4, 1..6]),
            expanded: source.expand([4, 6]),
            copies: [copy.clone(), copy],
            random: Tensor::random([6, 5], Distribution::Default, device),
            thirds: values(4, 4) / 3.0,
            views: [
                rows.clone().slice([0..32, 0..64]),
                rows.slice([16..48, 0..64]),
            ],
            numbers: Tensor::arange(3..40, device),
            bits: whole.greater_elem(0.5),
            empty: Tensor::zeros([0, 3], device),
            scalar: Tensor::from_floats([0.1], device),
            large: Tensor::random([600, 700], Distribution::Default, device),
        }
    }

    /// Uses the tensors, in place where that is possible, and returns the results.
    fn used(self) -> Vec<TensorData> {
        let Self {
            transposed,
            row,
            expanded,
            copies: [copy, other],
            random,
            thirds,
            views: [upper, lower],
            numbers,
            bits,
            empty,
            scalar,
            large,
        } = self;
        let random = random.clone() * random.transpose().slice([0..1, 0..5]);
        vec![
            (transposed * 2.0 + 1.0).into_data(),
            (row - 3.0).into_data(),
            (expanded + 0.25).into_data(),
            (copy * 4.0).into_data(),
            other.into_data(),
            random.into_data(),
            thirds.into_data(),
            (upper * 3.0).into_data(),
            (lower + 7.0).into_data(),
            (numbers * 3).into_data(),
            bits.bool_not().int().into_data(),
            (empty + 1.0).into_data(),
            scalar.into_data(),
            large.sort(1).slice([100..102, 0..700]).into_data(),
        ]
    }
}

/// The results must have the same bits: those of elementwise ops and of a sort do not depend on which
/// kernel the device chooses.
#[test]
fn tensors_of_every_layout_are_restored() {
    for kind in host::kinds() {
        let cluster = host::cluster(&[kind]);
        let undisturbed = {
            let lease = lease(&cluster, kind);
            Layouts::new(&lease.devices()[0]).used()
        };
        let lease = lease(&cluster, kind);
        let device = &lease.devices()[0];
        let layouts = Layouts::new(device);
        let worker = &cluster.workers[0];
        let large_bytes = 600 * 700 * size_of::<f32>() as u64;
        cluster.wait("a snapshot of all tensors", || {
            let _ = Tensor::<1>::ones([1], device).into_data();
            let mut taken = worker.snapshots_bytes().into_iter();
            taken.any(|bytes| bytes > large_bytes)
        });
        worker.signal_child(worker.process_of_lease(), "KILL");
        assert_eq!(layouts.used(), undisturbed, "{}", worker.log());
        assert_eq!(lease.ended(), None);
    }
}
