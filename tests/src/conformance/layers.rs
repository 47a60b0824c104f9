//! Linear and embedding layers, encodings, distances and recurrent networks.

use burn::nn::{
    BiGruConfig, BiLstmConfig, BiRnnConfig, CosineSimilarityConfig, DropoutConfig, EmbeddingConfig,
    GruConfig, LinearConfig, LstmConfig, LstmState, PairwiseDistanceConfig,
    PositionalEncodingConfig, RnnConfig, RotaryEncodingConfig,
};
use burn::tensor::module::{embedding, linear};
use burn::tensor::{Int, Tensor};

use super::autodiff::{backward, fill, grad, grad2, grad3, module, param_grads};
use super::case::Case;
use super::data::{floats, ints};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = linear_layers();
    cases.extend(encodings());
    cases.extend(recurrent());
    cases.extend(gated_and_bidirectional());
    cases
}

fn linear_layers() -> Vec<Case> {
    vec![
        Case::approx("module.linear", |d| {
            grad3(d, [4, 3], [3, 5], [5], |x, w, b| linear(x, w, Some(b)))
        }),
        Case::approx("module.linear/rank_4", |d| {
            grad2(d, [2, 1, 4, 3], [3, 5], |x, w| linear(x, w, None))
        }),
        Case::approx("nn.linear", |d| {
            module(
                d,
                |d| LinearConfig::new(3, 5).init(d),
                [4, 3],
                |m, x| m.forward(x),
            )
        }),
        Case::approx("nn.linear/rank_3_no_bias", |d| {
            let config = LinearConfig::new(3, 5).with_bias(false);
            module(d, |d| config.init(d), [2, 4, 3], |m, x| m.forward(x))
        }),
        Case::approx("module.embedding", |d| {
            grad(d, [5, 3], |weights| {
                // Row 2 occurs twice, so its gradient is the sum of two gradients.
                let tokens = [[2, 0, 2], [4, 1, 0]];
                let tokens = Tensor::<2, Int>::from_ints(tokens, &weights.device());
                embedding(weights, tokens)
            })
        }),
        Case::approx("nn.embedding", |d| {
            let d = &d.clone().autodiff();
            let module = fill(EmbeddingConfig::new(7, 4).init(d));
            let y = module.forward(ints(d, [2, 5], 1, 0, 7));
            let mut outputs = param_grads(&module, &backward(&y));
            outputs.push(y.into_data());
            outputs
        }),
        Case::approx("nn.dropout/validating", |d| {
            DropoutConfig::new(0.5).init().forward(floats(d, [3, 4], 1))
        }),
    ]
}

fn encodings() -> Vec<Case> {
    vec![
        Case::approx("nn.positional_encoding", |d| {
            let config = PositionalEncodingConfig::new(6).with_max_sequence_size(10);
            config.init(d).forward(floats(d, [2, 5, 6], 1))
        }),
        Case::approx("nn.rotary_encoding", |d| {
            let config = RotaryEncodingConfig::new(8, 6);
            grad(d, [2, 3, 5, 6], |x| config.init(&x.device()).forward(x))
        }),
        Case::approx("nn.rotary_encoding/offset", |d| {
            RotaryEncodingConfig::new(8, 6)
                .init(d)
                .apply(floats(d, [2, 3, 6], 1), 4)
        }),
        Case::approx("nn.cosine_similarity", |d| {
            let similarity = CosineSimilarityConfig::new().init();
            grad2(d, [4, 5], [4, 5], |a, b| similarity.forward(a, b))
        }),
        Case::approx("nn.pairwise_distance", |d| {
            let distance = PairwiseDistanceConfig::new().with_p(3.0).init();
            grad2(d, [4, 5], [4, 5], |a, b| distance.forward(a, b))
        }),
    ]
}

/// Sequences, steps and features of the input of recurrent layers.
const INPUT: [usize; 3] = [2, 4, 3];

fn recurrent() -> Vec<Case> {
    vec![
        Case::approx("nn.rnn", |d| {
            module(
                d,
                |d| RnnConfig::new(3, 5, true).init(d),
                INPUT,
                |m, x| m.forward(x, None).0,
            )
        }),
        Case::approx("nn.bi_rnn", |d| {
            module(
                d,
                |d| BiRnnConfig::new(3, 5, true).init(d),
                INPUT,
                |m, x| m.forward(x, None).0,
            )
        }),
        Case::approx("nn.lstm", |d| {
            module(
                d,
                |d| LstmConfig::new(3, 5, true).init(d),
                INPUT,
                |m, x| m.forward(x, None).0,
            )
        }),
        Case::approx("nn.lstm/reverse_with_state", |d| {
            let config = || {
                LstmConfig::new(3, 5, false)
                    .with_reverse(true)
                    .with_clip(Some(0.9))
            };
            module(
                d,
                |d| config().init(d),
                INPUT,
                |m, x| {
                    let [cell, hidden] = [8, 9].map(|seed| floats(&x.device(), [2, 5], seed));
                    let (y, state) = m.forward(x, Some(LstmState::new(cell, hidden)));
                    y.sum_dim(1).squeeze_dim::<2>(1) + state.cell
                },
            )
        }),
        Case::approx("nn.lstm/input_forget", |d| {
            let config = || LstmConfig::new(3, 5, true).with_input_forget(true);
            module(
                d,
                |d| config().init(d),
                INPUT,
                |m, x| m.forward(x, None).1.hidden,
            )
        }),
    ]
}

fn gated_and_bidirectional() -> Vec<Case> {
    vec![
        Case::approx("nn.bi_lstm", |d| {
            module(
                d,
                |d| BiLstmConfig::new(3, 5, true).init(d),
                INPUT,
                |m, x| m.forward(x, None).0,
            )
        }),
        Case::approx("nn.gru", |d| {
            module(
                d,
                |d| GruConfig::new(3, 5, true).init(d),
                INPUT,
                |m, x| m.forward(x, None),
            )
        }),
        Case::approx("nn.gru/reset_before", |d| {
            let config = || GruConfig::new(3, 5, true).with_reset_after(false);
            module(
                d,
                |d| config().init(d),
                INPUT,
                |m, x| {
                    let state = floats(&x.device(), [2, 5], 9);
                    m.forward(x, Some(state))
                },
            )
        }),
        Case::approx("nn.bi_gru", |d| {
            module(
                d,
                |d| BiGruConfig::new(3, 5, true).init(d),
                INPUT,
                |m, x| m.forward(x, None).0,
            )
        }),
    ]
}
