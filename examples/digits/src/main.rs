//! An ordinary Burn program that trains on a leased device. What tensord adds is marked (1), (2)
//! and (3).
//!
//! Run it with `TENSORD_URL=<URL of your pool> cargo run --release -p tensord-example-digits`.

use std::io::Read;

use burn::nn::{Linear, LinearConfig, loss::CrossEntropyLossConfig};
use burn::optim::{AdamConfig, GradientsParams};
use burn::{prelude::*, tensor::activation::relu};
use tensord_client::{LeaseRequest, Pool, data};

/// 1,797 hand-written digits, gzipped: lines of 64 pixels, 0 to 16, and a label.
static DIGITS: &[u8] = include_bytes!("../../../data/digits.csv.gz");

#[derive(Module, Debug)]
struct Mlp {
    hidden: Linear,
    output: Linear,
}

impl Mlp {
    fn forward(&self, images: Tensor<2>) -> Tensor<2> {
        self.output.forward(relu(self.hidden.forward(images)))
    }
}

fn main() -> anyhow::Result<()> {
    let pool = Pool::connect_env()?; // (1) The pool at TENSORD_URL.
    let lease = pool.lease(LeaseRequest::devices(1))?; // (2) Until `lease` is dropped.
    let device = lease.devices()[0].clone().autodiff(); // (3) From here on, plain Burn.

    device.seed(42);
    let mut model = Mlp {
        hidden: LinearConfig::new(64, 128).init(&device),
        output: LinearConfig::new(128, 10).init(&device),
    };
    let mut optimizer = AdamConfig::new().init();
    let cross_entropy = CrossEntropyLossConfig::new().init(&device);
    let batches = load(&device)?;
    let (train, test) = batches.split_at(22);

    for epoch in 1..=15 {
        let mut sum = Tensor::<1>::zeros([1], &device);
        for (images, labels) in train.iter().cloned() {
            let loss = cross_entropy.forward(model.forward(images), labels);
            sum = sum + loss.clone().detach();
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(1e-2, model, gradients);
        }
        // Ops are sent without waiting. A read waits for the device, so read seldom.
        let loss = sum.try_into_scalar::<f32>()? / train.len() as f32;
        println!("epoch {epoch:>2}  loss {loss:.3}");
    }

    let (images, labels): (Vec<_>, Vec<_>) = test.iter().cloned().unzip();
    let guess = model.forward(Tensor::cat(images, 0)).argmax(1);
    let right = guess.squeeze_dim(1).equal(Tensor::cat(labels, 0)).float();
    let accuracy = right.mean().try_into_scalar::<f32>()?;
    println!("test accuracy {:.1} %", 100.0 * accuracy);
    Ok(())
}

/// Uploads all digits once and splits them, on the device, into batches of 64.
fn load(device: &Device) -> anyhow::Result<Vec<(Tensor<2>, Tensor<1, Int>)>> {
    let mut csv = String::new();
    flate2::read::GzDecoder::new(DIGITS).read_to_string(&mut csv)?;
    // The file is sorted by writer; taking every seventh line mixes the writers.
    let lines = (0..7).flat_map(|first| csv.lines().skip(first).step_by(7));
    let numbers: Result<Vec<i32>, _> = lines.flat_map(|l| l.split(',').map(str::parse)).collect();
    let table = data::from_data::<2, Int>(TensorData::new(numbers?, [1_797, 65]), device);
    let images = (table.clone().slice(s![.., ..64]).float() / 16.0).split(64, 0);
    let labels = table.slice(s![.., 64..]).squeeze_dim(1).split(64, 0);
    Ok(images.into_iter().zip(labels).collect())
}
