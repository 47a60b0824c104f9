//! Batch normalization in data-parallel training, as Burn 0.22.1 does it: each device
//! normalizes by the statistics of its own share of a batch, and the running statistics are
//! the mean of those of all devices.

use std::sync::Barrier;

use burn::{
    module::Module,
    nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, loss::CrossEntropyLossConfig},
    optim::{AdamConfig, GradientsAccumulator, GradientsParams},
    tensor::{Device, Tensor, activation::relu, distributed::DistributedContext},
};
use tensord_client::{LeaseRequest, data};
use tensord_testkit::{
    cluster::Cluster,
    digits::{self, Digit},
    replicas::{BATCH, MEAN, MarkShared, bits, training_lock, with_deadline},
    training::with_fixed_weights,
};

const RANKS: usize = 2;
const STEPS: usize = 8;
const RATE: f64 = 5e-3;

#[derive(Module, Debug)]
struct Network {
    hidden: Linear,
    norm: BatchNorm,
    output: Linear,
}

impl Network {
    /// Returns the same network on each call. The layer of batch normalization begins as
    /// Burn initializes it.
    fn new(device: &Device) -> Self {
        let hidden = LinearConfig::new(64, 16).init(device);
        let output = LinearConfig::new(16, 10).init(device);
        Self {
            hidden: with_fixed_weights(hidden, device),
            norm: BatchNormConfig::new(16).init(device),
            output: with_fixed_weights(output, device),
        }
    }

    fn forward(&self, images: Tensor<3>) -> Tensor<2> {
        let hidden = self
            .norm
            .forward(self.hidden.forward(images.flatten::<2>(1, 2)));
        self.output.forward(relu(hidden))
    }

    /// The loss of some digits.
    fn loss(&self, digits: &[Digit]) -> Tensor<1> {
        let device = self.hidden.weight.device();
        let (images, labels) = digits::batch(digits, &device);
        let cross_entropy = CrossEntropyLossConfig::new().init(&device);
        cross_entropy.forward(self.forward(images), labels)
    }

    /// The running mean, then the running variance.
    fn statistics(&self) -> Vec<f32> {
        // Burn puts together the threads' values in `valid`.
        let norm = self.norm.valid();
        let both = [norm.running_mean.value(), norm.running_var.value()];
        both.into_iter().flat_map(read).collect()
    }
}

fn read(tensor: Tensor<1>) -> Vec<f32> {
    data::into_data(tensor).unwrap().try_to_vec().unwrap()
}

/// The losses of all steps, the bits of the weights, and the running statistics.
type Outcome = (Vec<f32>, Vec<u32>, Vec<f32>);

/// Returns the bits of the weights without the running statistics.
fn weights(network: &Network) -> Vec<u32> {
    let norm = [&network.norm.gamma, &network.norm.beta].map(bits);
    [bits(&network.hidden), norm.concat(), bits(&network.output)].concat()
}

/// Trains on `devices`, each of which has a share of each batch. Returns what each saw.
fn train_in_parallel(devices: &[Device]) -> Vec<Outcome> {
    let devices: Vec<_> = devices.iter().map(|d| d.clone().autodiff()).collect();
    let context = DistributedContext::init(devices.clone(), MEAN);
    let network = Network::new(&devices[0]);
    let outcomes = with_deadline(move || {
        let barrier = Barrier::new(RANKS);
        let trained: Vec<_> = std::thread::scope(|scope| {
            let ranks = devices.iter().enumerate().map(|(rank, device)| {
                // Clones share their running statistics.
                let network = network.clone().fork(device).map(&mut MarkShared);
                let barrier = &barrier;
                scope.spawn(move || train_rank(network, rank, barrier))
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let outcomes = trained.into_iter().map(|(losses, network)| {
            let weights = weights(&network);
            (losses, weights, network.statistics())
        });
        outcomes.collect()
    });
    drop(context);
    outcomes
}

fn train_rank(mut network: Network, rank: usize, barrier: &Barrier) -> (Vec<f32>, Network) {
    let (train, _) = digits::split();
    let mut optimizer = AdamConfig::new().init();
    let share = BATCH / RANKS;
    let mut losses = Vec::new();
    for step in train.chunks(BATCH).take(STEPS) {
        barrier.wait();
        let loss = network.loss(&step[rank * share..][..share]);
        let gradients = GradientsParams::from_grads(loss.backward(), &network);
        network = optimizer.step(RATE, network, gradients);
        losses.extend(read(loss));
    }
    (losses, network)
}

/// Computes on local Flex what each rank should see: each share of a batch is normalized by
/// itself, the gradients of both are averaged, and so are the running statistics.
fn reference() -> Vec<Outcome> {
    let device = Device::flex().autodiff();
    let mut network = Network::new(&device);
    let mut optimizer = AdamConfig::new().init();
    let (train, _) = digits::split();
    let mut losses = vec![Vec::new(); RANKS];
    let mut running = [vec![0.0; 16], vec![1.0; 16]].concat();
    for step in train.chunks(BATCH).take(STEPS) {
        let mut gradients = GradientsAccumulator::new();
        let mut batch = vec![0.0; 32];
        for (rank, share) in step.chunks(BATCH / RANKS).enumerate() {
            let (images, _) = digits::batch(share, &device);
            let hidden = network.hidden.forward(images.flatten::<2>(1, 2));
            let mean = hidden.clone().mean_dim(0);
            let variance = (hidden - mean.clone()).square().mean_dim(0);
            for (sum, value) in batch
                .iter_mut()
                .zip(read(Tensor::cat(vec![mean, variance], 1).flatten(0, 1)))
            {
                *sum += value;
            }
            let loss = network.loss(share);
            // Dividing by a power of two is exact, so these are the bits of the mean.
            let half = (loss.clone() / RANKS as f32).backward();
            gradients.accumulate(&network, GradientsParams::from_grads(half, &network));
            losses[rank].extend(read(loss));
        }
        for (running, sum) in running.iter_mut().zip(batch) {
            *running = 0.9 * *running + 0.1 * sum / RANKS as f32;
        }
        network = optimizer.step(RATE, network, gradients.grads());
    }
    let weights = weights(&network);
    let seen = losses.into_iter();
    seen.map(|losses| (losses, weights.clone(), running.clone()))
        .collect()
}

#[test]
fn batch_norm_is_by_device_and_running_statistics_are_shared() {
    let _alone = training_lock();
    let cluster = Cluster::start(&["flex", "flex"]);
    let lease = cluster.pool().lease(LeaseRequest::devices(2)).unwrap();
    let seen = train_in_parallel(lease.devices());
    for (rank, (ours, expected)) in seen.iter().zip(reference()).enumerate() {
        assert_eq!(ours.0, expected.0, "losses of rank {rank}");
        assert!(ours.1 == expected.1, "weights of rank {rank}");
        for (i, (ours, expected)) in ours.2.iter().zip(&expected.2).enumerate() {
            let apart = (ours - expected).abs();
            assert!(
                apart <= 1e-4 * expected.abs().max(1e-2),
                "statistic {i} of rank {rank}: {ours} instead of {expected}"
            );
        }
    }
    // The statistics of the whole batch would give another loss.
    let (train, _) = digits::split();
    let whole = Network::new(&Device::flex().autodiff()).loss(&train[..BATCH]);
    let (whole, mean) = (read(whole)[0], (seen[0].0[0] + seen[1].0[0]) / 2.0);
    assert!((whole - mean).abs() > 1e-4 * whole, "{whole} and {mean}");
}
