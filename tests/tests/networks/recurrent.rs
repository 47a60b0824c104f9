//! Recurrent networks that classify sequences.

use burn::{
    module::Module,
    nn::{Gru, GruConfig, Linear, LinearConfig, Lstm, LstmConfig, loss::CrossEntropyLossConfig},
    optim::{AdamConfig, GradientsParams},
    tensor::{Device, Int, Tensor, TensorData},
};
use tensord_testkit::training::with_fixed_weights;

use super::{on_both, read};

const BATCH: usize = 24;
const LENGTH: usize = 12;
const CLASSES: usize = 3;
const HIDDEN: usize = 12;
const STEPS: usize = 40;

trait SequenceClassifier: Module {
    fn new(device: &Device) -> Self;
    /// Maps sequences of shape `[batch, length, 1]` to logits.
    fn forward(&self, sequences: Tensor<3>) -> Tensor<2>;
}

/// The last of the outputs of shape `[batch, length, hidden]`.
fn last(outputs: Tensor<3>) -> Tensor<2> {
    outputs.narrow(1, LENGTH - 1, 1).squeeze_dim(1)
}

#[derive(Module, Debug)]
struct LstmClassifier {
    lstm: Lstm,
    output: Linear,
}

impl SequenceClassifier for LstmClassifier {
    fn new(device: &Device) -> Self {
        Self {
            lstm: LstmConfig::new(1, HIDDEN, true).init(device),
            output: LinearConfig::new(HIDDEN, CLASSES).init(device),
        }
    }

    fn forward(&self, sequences: Tensor<3>) -> Tensor<2> {
        let (outputs, _) = self.lstm.forward(sequences, None);
        self.output.forward(last(outputs))
    }
}

#[derive(Module, Debug)]
struct GruClassifier {
    gru: Gru,
    output: Linear,
}

impl SequenceClassifier for GruClassifier {
    fn new(device: &Device) -> Self {
        Self {
            gru: GruConfig::new(1, HIDDEN, true).init(device),
            output: LinearConfig::new(HIDDEN, CLASSES).init(device),
        }
    }

    fn forward(&self, sequences: Tensor<3>) -> Tensor<2> {
        self.output.forward(last(self.gru.forward(sequences, None)))
    }
}

/// Sine waves of a frequency for each class, and with a different phase in each step.
fn batch(step: usize, device: &Device) -> (Tensor<3>, Tensor<1, Int>) {
    let mut waves = Vec::with_capacity(BATCH * LENGTH);
    let mut labels = Vec::with_capacity(BATCH);
    for i in 0..BATCH {
        let class = i % CLASSES;
        let phase = (i * 7 + step * 5) as f32 * 0.37;
        let frequency = 0.3 + 0.6 * class as f32;
        waves.extend((0..LENGTH).map(|t| (frequency * t as f32 + phase).sin()));
        labels.push(class as i32);
    }
    (
        Tensor::from_data(TensorData::new(waves, [BATCH, LENGTH, 1]), device),
        Tensor::from_data(TensorData::new(labels, [BATCH]), device),
    )
}

fn losses<M: SequenceClassifier>(device: &Device) -> Vec<f32> {
    let mut model = with_fixed_weights(M::new(device), device);
    let mut optimizer = AdamConfig::new().init();
    let cross_entropy = CrossEntropyLossConfig::new().init(device);
    let step = |step| {
        let (sequences, labels) = batch(step, device);
        let loss = cross_entropy.forward(model.forward(sequences), labels);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(2e-2, model.clone(), gradients);
        read(loss)
    };
    (0..STEPS).map(step).collect()
}

fn check<M: SequenceClassifier>() {
    let losses = on_both(losses::<M>);
    let (first, last) = (losses[0], losses[STEPS - 1]);
    assert!(last < 0.6 * first, "the model learns little: {losses:?}");
}

#[test]
fn an_lstm_learns_to_classify_sequences() {
    check::<LstmClassifier>();
}

#[test]
fn a_gru_learns_to_classify_sequences() {
    check::<GruClassifier>();
}
