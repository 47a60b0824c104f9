//! The model: three layers, which predict a number.

use burn::{
    module::Module,
    nn::{Linear, LinearConfig, Relu},
    tensor::{Device, Tensor},
};

/// Outputs of the inner layers.
const WIDTH: usize = 128;

/// Predicts a number from the numbers of a row.
#[derive(Module, Debug)]
pub(crate) struct Model {
    first: Linear,
    second: Linear,
    last: Linear,
}

impl Model {
    pub(crate) fn new(inputs: usize, device: &Device) -> Self {
        Self {
            first: LinearConfig::new(inputs, WIDTH).init(device),
            second: LinearConfig::new(WIDTH, WIDTH).init(device),
            last: LinearConfig::new(WIDTH, 1).init(device),
        }
    }

    /// Draws the weights now. Otherwise Burn draws each where it is first used, which would be on
    /// another device, with other numbers.
    pub(crate) fn draw_weights(&self) {
        for layer in [&self.first, &self.second, &self.last] {
            layer.weight.val();
            layer.bias.as_ref().map(|bias| bias.val());
        }
    }

    /// Returns predictions of shape `[rows]` for inputs of shape `[rows, inputs]`.
    pub(crate) fn forward(&self, inputs: Tensor<2>) -> Tensor<1> {
        let hidden = Relu::new().forward(self.first.forward(inputs));
        let hidden = Relu::new().forward(self.second.forward(hidden));
        self.last.forward(hidden).squeeze_dim(1)
    }
}
