//! The classifier: Burn's transformer encoder over words.

use burn::{
    module::Module,
    nn::{
        Embedding, EmbeddingConfig, Linear, LinearConfig,
        transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput},
    },
    tensor::{Device, Int, Tensor, TensorData},
};
use tensord_client::data;

use crate::corpus::{PADDING, Sentence, TOPICS, Tokenizer};

/// Size of a word's representation.
pub(crate) const WIDTH: usize = 32;
const HEADS: usize = 4;
const LAYERS: usize = 2;

/// Sentences as a device takes them.
#[derive(Clone, Debug)]
pub(crate) struct Batch {
    /// `[sentences, length]`.
    tokens: Tensor<2, Int>,
    pub(crate) topics: Tensor<1, Int>,
}

impl Batch {
    /// Uploads sentences in two tensors. (Burn's `generate_padding_mask` uploads each sentence
    /// by itself.)
    pub(crate) fn new(sentences: &[Sentence], tokenizer: &Tokenizer, device: &Device) -> Self {
        let count = sentences.len();
        let (tokens, length) = tokenizer.encode_batch(sentences);
        let topics: Vec<i32> = sentences.iter().map(|one| one.topic as i32).collect();
        Self {
            tokens: data::from_data(TensorData::new(tokens, [count, length]), device),
            topics: data::from_data(TensorData::new(topics, [count]), device),
        }
    }
}

/// Classifies sentences by the mean of their words' representations.
#[derive(Module, Debug)]
pub(crate) struct Classifier {
    words: Embedding,
    positions: Embedding,
    encoder: TransformerEncoder,
    output: Linear,
}

impl Classifier {
    pub(crate) fn new(tokenizer: &Tokenizer, dropout: f64, device: &Device) -> Self {
        let encoder = TransformerEncoderConfig::new(WIDTH, 2 * WIDTH, HEADS, LAYERS);
        Self {
            words: EmbeddingConfig::new(tokenizer.size(), WIDTH).init(device),
            positions: EmbeddingConfig::new(tokenizer.longest(), WIDTH).init(device),
            encoder: encoder
                .with_dropout(dropout)
                .with_norm_first(true)
                .init(device),
            output: LinearConfig::new(WIDTH, TOPICS).init(device),
        }
    }

    /// Returns logits of shape `[sentences, TOPICS]`.
    pub(crate) fn forward(&self, batch: &Batch) -> Tensor<2> {
        let tokens = batch.tokens.clone();
        let [_, length] = tokens.dims();
        let positions = Tensor::<1, Int>::arange(0..length as i64, &tokens.device());
        let positions = self.positions.forward(positions.unsqueeze());
        let padding = tokens.clone().equal_scalar(PADDING);
        let words = self.words.forward(tokens) + positions;
        let input = TransformerEncoderInput::new(words).mask_pad(padding.clone());
        let encoded = self.encoder.forward(input);
        // The mean of the words, without the padding.
        let weights = padding.bool_not().float().unsqueeze_dim::<3>(2);
        let sum = (encoded * weights.clone()).sum_dim(1);
        let mean = sum / weights.sum_dim(1).clamp_min(1.0);
        self.output.forward(mean.squeeze_dim(1))
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tolerance;

    use super::*;

    #[test]
    fn padding_does_not_change_the_logits_of_a_sentence() {
        let sentence = |text: &str| Sentence {
            text: text.to_owned(),
            topic: 0,
        };
        let short = sentence("fog left the coast");
        let long = sentence("to the delight of the whole town fog left the coast again");
        let tokenizer = Tokenizer::new(std::slice::from_ref(&long));
        let device = Device::flex();
        let model = Classifier::new(&tokenizer, 0.1, &device);
        let logits = |sentences: &[Sentence]| {
            model
                .forward(&Batch::new(sentences, &tokenizer, &device))
                .narrow(0, 0, 1)
        };
        let alone = logits(std::slice::from_ref(&short)).into_data();
        let padded = logits(&[short, long.clone()]).into_data();
        padded.assert_approx_eq::<f32>(&alone, Tolerance::default());
        let other = logits(&[long]).into_data();
        assert_ne!(other, alone, "the words do not matter");
    }
}
