//! A generative adversarial network: two modules, each with its own optimizer.

use burn::{
    module::Module,
    nn::{Linear, LinearConfig, loss::BinaryCrossEntropyLossConfig},
    optim::{AdamConfig, GradientsParams},
    tensor::{
        Device, Int, Tensor,
        activation::{leaky_relu, relu},
    },
};
use tensord_testkit::training::with_fixed_weights;

use super::{numbers, on_both, read};

const BATCH: usize = 32;
const LATENT: usize = 4;
const STEPS: usize = 60;
/// The middle of the points to be imitated.
const CENTER: [f32; 2] = [2.0, -1.0];

#[derive(Module, Debug)]
struct Network {
    hidden: Linear,
    output: Linear,
}

impl Network {
    fn new(inputs: usize, outputs: usize, device: &Device) -> Self {
        let network = Self {
            hidden: LinearConfig::new(inputs, 24).init(device),
            output: LinearConfig::new(24, outputs).init(device),
        };
        with_fixed_weights(network, device)
    }

    fn generate(&self, latent: Tensor<2>) -> Tensor<2> {
        self.output.forward(relu(self.hidden.forward(latent)))
    }

    fn judge(&self, points: Tensor<2>) -> Tensor<2> {
        let hidden = leaky_relu(self.hidden.forward(points), 0.2);
        self.output.forward(hidden)
    }
}

/// How far the mean of what `generator` makes is from [`CENTER`].
fn distance(generator: &Network, device: &Device) -> f32 {
    let center = Tensor::<1>::from_floats(CENTER, device).unsqueeze::<2>();
    let made = generator.generate(numbers([BATCH, LATENT], 9_999, device));
    let apart = made.mean_dim(0) - center;
    read(apart.square().sum().sqrt())
}

/// Trains both networks. Returns the distance at first, the losses of each step, and the
/// distance at last.
fn train(device: &Device) -> Vec<f32> {
    let mut generator = Network::new(LATENT, 2, device);
    let mut discriminator = Network::new(2, 1, device);
    let mut optimizers = [5e-1, 9e-1].map(|beta| AdamConfig::new().with_beta_1(beta).init());
    let loss = BinaryCrossEntropyLossConfig::new()
        .with_logits(true)
        .init(device);
    let center = Tensor::<1>::from_floats(CENTER, device).unsqueeze::<2>();
    let genuine = Tensor::<2, Int>::ones([BATCH, 1], device);
    let made = Tensor::<2, Int>::zeros([BATCH, 1], device);
    let mut results = vec![distance(&generator, device)];
    for step in 0..STEPS {
        let real = numbers([BATCH, 2], 2 * step, device) * 0.3 + center.clone();
        let fake = generator.generate(numbers([BATCH, LATENT], 2 * step + 1, device));

        let judged = discriminator.judge(fake.clone().detach());
        let to_discriminator = loss.forward(discriminator.judge(real), genuine.clone())
            + loss.forward(judged, made.clone());
        let mut gradients = to_discriminator.backward();
        let of_generator = GradientsParams::from_module(&mut gradients, &generator);
        assert!(of_generator.is_empty(), "detach cuts the generator off");
        let gradients = GradientsParams::from_grads(gradients, &discriminator);
        assert_eq!(gradients.len(), 4);
        discriminator = optimizers[0].step(2e-2, discriminator, gradients);

        let to_generator = loss.forward(discriminator.judge(fake), genuine.clone());
        let gradients = GradientsParams::from_grads(to_generator.backward(), &generator);
        assert_eq!(gradients.len(), 4);
        generator = optimizers[1].step(1e-2, generator, gradients);
        results.extend([read(to_discriminator), read(to_generator)]);
    }
    results.push(distance(&generator, device));
    results
}

#[test]
fn a_gan_trains_both_of_its_networks() {
    let results = on_both(train);
    let (first, last) = (results[0], results[results.len() - 1]);
    // How well a GAN of this size does after so few steps depends on luck. But the points move.
    assert!(
        (last - first).abs() > 0.1,
        "{first} at first, {last} at last"
    );
    let of_discriminator = [results[1], results[results.len() - 3]];
    assert_ne!(
        of_discriminator[0], of_discriminator[1],
        "it learns nothing"
    );
    assert!(
        results.iter().all(|number| number.is_finite()),
        "{results:?}"
    );
}
