//! What a program does besides single ops: threads, host reads that control the program,
//! records, copies of modules, many tensors at once.

use std::thread;

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer};
use burn::store::ModuleRecord;
use burn::tensor::{Device, Tensor, TensorData};

use super::autodiff::{fill, parameters};
use super::case::Case;
use super::data::{floats, ints};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = threads_and_loops();
    cases.extend(records());
    cases
}

fn threads_and_loops() -> Vec<Case> {
    vec![
        Case::approx("program.two_threads", |d| {
            let work = |seed| {
                let device = d.clone();
                thread::spawn(move || {
                    let start = floats(&device, [5, 5], seed);
                    (0..20)
                        .fold(start, |x, _| x.clone().matmul(x.transpose()).tanh())
                        .into_data()
                })
            };
            [1, 2]
                .map(work)
                .map(|thread| thread.join().expect("the thread should not panic"))
                .to_vec()
        }),
        // A tensor that is created on one thread, used on another and read on the first.
        Case::approx("program.moved_tensor", |d| {
            let x = floats(d, [4, 3], 1) * 1.5;
            let kept = x.clone();
            let other = thread::spawn(move || x.clone().exp() + x);
            let y = other.join().expect("the thread should not panic");
            (y.clone() * kept.clone(), kept, y)
        }),
        Case::approx("program.sync", |d| {
            let x = floats(d, [4, 3], 1).sin();
            d.sync().expect("nothing has failed");
            let y = x.clone() + 1.0;
            d.sync().expect("nothing has failed");
            (x, y)
        }),
        // A loop whose end depends on the values that it computes.
        Case::approx("program.into_scalar", |d| {
            let mut x = floats(d, [4, 3], 1) * 9.0;
            let mut steps = 0;
            while x.clone().abs().max().into_scalar::<f32>() > 1.0 {
                x = x * 0.7;
                steps += 1;
            }
            (
                x,
                TensorData::from([steps, ints(d, [3], 1, 5, 99).sum().into_scalar::<i32>()]),
            )
        }),
        Case::approx("program.many_tensors", |d| {
            let mut tensors: Vec<Tensor<1>> = (0..300).map(|seed| floats(d, [3], seed)).collect();
            // Drops two of every three, so that ids are freed out of order.
            let mut kept = 0..;
            tensors.retain(|_| kept.next().is_some_and(|i| i % 3 == 0));
            Tensor::stack::<2>(tensors, 0).sum_dim(0)
        }),
    ]
}

fn records() -> Vec<Case> {
    vec![
        Case::approx("program.record", |d| {
            let bytes = fill(layer(d))
                .into_record()
                .into_bytes()
                .expect("the record should encode");
            let record = ModuleRecord::from_bytes(bytes).expect("the record should decode");
            layer(d)
                .load_record(record)
                .forward(floats::<2>(d, [4, 3], 1))
        }),
        Case::approx("program.optimizer_record", |d| {
            let device = d.clone().autodiff();
            let mut optimizer = AdamConfig::new().init();
            let module = step(&device, &mut optimizer, fill(layer(&device)));
            let bytes = optimizer.into_bytes().expect("the state should encode");
            let restored = AdamConfig::new().init().from_bytes(bytes);
            let mut restored = restored.expect("the state should decode");
            parameters(&step(&device, &mut restored, module))
        }),
        Case::approx("program.fork", |d| {
            let device = d.clone().autodiff();
            let module = fill(layer(&device));
            let forked = step(
                &device,
                &mut AdamConfig::new().init(),
                module.clone().fork(&device),
            );
            let mut outputs = parameters(&module);
            outputs.extend(parameters(&forked));
            outputs
        }),
    ]
}

fn layer(device: &Device) -> Linear {
    LinearConfig::new(3, 5).init(device)
}

/// Trains one step on a fixed batch.
fn step(device: &Device, optimizer: &mut ModuleOptimizer, layer: Linear) -> Linear {
    let loss = layer
        .forward(floats::<2>(device, [4, 3], 1))
        .square()
        .mean();
    let grads = GradientsParams::from_grads(loss.backward(), &layer);
    optimizer.step(0.05, layer, grads)
}
