//! Burn's own data-parallel training, on devices of any number of hosts. What tensord adds is
//! marked (1) to (4).
//!
//! Run it with `TENSORD_URL=<URL of your pool> cargo run --release -p tensord-example-ddp -- 4`,
//! where 4 is the number of devices.

mod progress;

use std::io::Read;

use burn::data::{
    dataloader::{DataLoaderBuilder, batcher::Batcher},
    dataset::InMemDataset,
};
use burn::nn::{Linear, LinearConfig, loss::CrossEntropyLossConfig};
use burn::optim::AdamConfig;
use burn::tensor::distributed::{DistributedConfig, ReduceOperation};
use burn::train::{
    ClassificationOutput, ExecutionStrategy, InferenceStep, Learner, SupervisedTraining,
    TrainOutput, TrainStep, logger::InMemoryMetricLogger, metric::LossMetric,
};
use burn::{prelude::*, tensor::activation::relu};
use tensord_client::{LeaseRequest, LockstepBatcher, Pool, data};

/// 1,797 hand-written digits, gzipped: lines of 64 pixels, 0 to 16, and a label.
static DIGITS: &[u8] = include_bytes!("../../../data/digits.csv.gz");
/// Digits in a step. The devices share them equally, so a step is the same for any number of
/// devices.
const BATCH: usize = 64;

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

type Batch = (Tensor<2>, Tensor<1, Int>);

impl InferenceStep for Mlp {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, (images, labels): Batch) -> ClassificationOutput {
        let logits = self.forward(images);
        let cross_entropy = CrossEntropyLossConfig::new().init(&logits.device());
        let loss = cross_entropy.forward(logits.clone(), labels.clone());
        ClassificationOutput::new(loss, logits, labels)
    }
}

impl TrainStep for Mlp {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let output = InferenceStep::step(self, batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

/// Makes batches of lines of the file.
struct Lines;

impl Batcher<Vec<i32>, Batch> for Lines {
    fn batch(&self, lines: Vec<Vec<i32>>, device: &Device) -> Batch {
        let table = TensorData::new(lines.concat(), [lines.len(), 65]);
        let table = data::from_data::<2, Int>(table, device);
        let images = table.clone().slice(s![.., ..64]).float() / 16.0;
        (images, table.slice(s![.., 64..]).squeeze_dim(1))
    }
}

fn main() -> anyhow::Result<()> {
    let count = std::env::args().nth(1).map_or(Ok(2), |n| n.parse())?;
    let pool = Pool::connect_env()?; // (1) The pool at TENSORD_URL.
    let lease = pool.lease(LeaseRequest::devices(count))?; // (2) All devices or none.
    let autodiff = |device: &Device| device.clone().autodiff();
    let devices: Vec<Device> = lease.devices().iter().map(autodiff).collect(); // (3) Plain Burn.

    devices[0].seed(42);
    let model = Mlp {
        hidden: LinearConfig::new(64, 128).init(&devices[0]),
        output: LinearConfig::new(128, 10).init(&devices[0]),
    };
    let model = model.fork(&devices[0]); // Initializes the weights now, not lazily.
    let mut train = read()?;
    let test = train.split_off(22 * BATCH);
    let loader = |lines: &[Vec<i32>], batch, ranks| {
        // (4) The devices wait for each other before each step, which Burn 0.22.1 needs.
        let loader = DataLoaderBuilder::new(LockstepBatcher::new(Lines, ranks)).batch_size(batch);
        let loader = loader.shuffle(42).set_device(devices[0].clone());
        loader.build(InMemDataset::new(lines.to_vec()))
    };
    let config = DistributedConfig {
        all_reduce_op: ReduceOperation::Mean,
    };
    let strategy = ExecutionStrategy::ddp(devices.clone(), config);
    let train = loader(&train, BATCH / devices.len(), devices.len());
    let valid = loader(&test, test.len(), 1); // Only the first device validates.
    let training = SupervisedTraining::new(".", train, valid)
        .num_epochs(15)
        .metrics((LossMetric::new(),))
        .with_metric_logger(InMemoryMetricLogger::new()) // No files in the directory.
        .with_application_logger(None)
        .renderer(Box::new(progress::Progress::new())) // A line for each epoch.
        .with_training_strategy(strategy.into());
    let trained = training.launch(Learner::new(model, AdamConfig::new().init(), 1e-2));

    let (images, labels) = Lines.batch(test, &lease.devices()[0]);
    let guess = trained.model.forward(images).argmax(1).squeeze_dim(1);
    let accuracy = guess.equal(labels).float().mean();
    let accuracy = 100.0 * accuracy.try_into_scalar::<f32>()?;
    println!("{count} devices, test accuracy {accuracy:.1} %");
    Ok(())
}

/// Reads the file. Returns the numbers of each line, with the lines of all writers mixed.
fn read() -> anyhow::Result<Vec<Vec<i32>>> {
    let mut csv = String::new();
    flate2::read::GzDecoder::new(DIGITS).read_to_string(&mut csv)?;
    // The file is sorted by writer; taking every seventh line mixes the writers.
    let lines = (0..7).flat_map(|first| csv.lines().skip(first).step_by(7));
    let numbers = |line: &str| line.split(',').map(|number| Ok(number.parse()?)).collect();
    lines.map(numbers).collect()
}
