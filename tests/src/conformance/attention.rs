//! Attention and transformers. Dropout is off in all cases.

use burn::nn::attention::{
    CrossAttentionConfig, MhaCache, MhaInput, MultiHeadAttentionConfig,
    generate_autoregressive_mask, generate_padding_mask,
};
use burn::nn::transformer::{
    PositionWiseFeedForwardConfig, TransformerDecoderConfig, TransformerDecoderInput,
    TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, Device, Tensor};

use super::autodiff::{fill, grad3, module};
use super::case::{Case, Tolerance};
use super::data::{bools, floats};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = functions();
    cases.extend(modules());
    let transformers = transformers().into_iter();
    cases.extend(transformers.map(|case| case.within(Tolerance::GELU)));
    cases
}

/// Returns queries, keys and values of two heads, with more keys than queries.
fn heads(device: &Device) -> [Tensor<4>; 3] {
    let shapes = [[2, 2, 3, 4], [2, 2, 5, 4], [2, 2, 5, 6]];
    let mut seed = 0;
    shapes.map(|shape| {
        seed += 1;
        floats(device, shape, seed)
    })
}

/// Hides some keys, but never all of them from a query.
fn mask(device: &Device) -> Tensor<4, Bool> {
    bools(device, [2, 2, 3, 5], 9).slice_fill([0..2, 0..2, 0..3, 1..2], false)
}

fn functions() -> Vec<Case> {
    let plain = AttentionModuleOptions::default;
    let causal = AttentionModuleOptions {
        is_causal: true,
        ..Default::default()
    };
    let capped = AttentionModuleOptions {
        scale: Some(0.4),
        softcap: Some(1.5),
        is_causal: false,
    };
    vec![
        Case::approx("attention.attention", move |d| {
            let [q, k, v] = heads(d);
            attention(q, k, v, None, None, plain())
        }),
        Case::approx("attention.attention/mask_bias", move |d| {
            let [q, k, v] = heads(d);
            let bias = floats(d, [2, 2, 3, 5], 8);
            attention(q, k, v, Some(mask(d)), Some(bias), plain())
        }),
        Case::approx("attention.attention/causal", move |d| {
            let x = |seed| floats(d, [1, 2, 5, 4], seed);
            attention(x(1), x(2), x(3), None, None, causal)
        }),
        Case::approx("attention.attention/scale_softcap", move |d| {
            let [q, k, v] = heads(d);
            attention(q, k, v, None, None, capped)
        }),
        Case::approx("attention.attention/gradient", move |d| {
            grad3(d, [2, 2, 3, 4], [2, 2, 5, 4], [2, 2, 5, 6], |q, k, v| {
                let mask = mask(&q.device());
                attention(q, k, v, Some(mask), None, plain())
            })
        }),
        Case::exact("attention.generate_autoregressive_mask", |d| {
            generate_autoregressive_mask(2, 4, d)
        }),
        Case::exact("attention.generate_padding_mask", |d| {
            let tokens = vec![vec![3, 1, 2], vec![7], vec![4, 4, 4, 4, 4]];
            let padded = generate_padding_mask(0, tokens, Some(4), d);
            (padded.tensor, padded.mask)
        }),
    ]
}

fn modules() -> Vec<Case> {
    let mha = || MultiHeadAttentionConfig::new(6, 2).with_dropout(0.0);
    vec![
        Case::approx("nn.multi_head_attention", move |d| {
            module(
                d,
                |d| mha().init(d),
                [2, 4, 6],
                |m, x| m.forward(MhaInput::self_attn(x)).context,
            )
        }),
        Case::approx("nn.multi_head_attention/masked", move |d| {
            module(
                d,
                |d| mha().with_quiet_softmax(true).init(d),
                [2, 4, 6],
                |m, x| {
                    let device = x.device();
                    let pad = Tensor::from_bool([[false; 4], [false, false, true, true]], &device);
                    let input = MhaInput::self_attn(x).mask_pad(pad);
                    let causal = generate_autoregressive_mask(2, 4, &device);
                    m.forward(input.mask_attn(causal)).weights
                },
            )
        }),
        Case::approx("nn.multi_head_attention/cached", move |d| {
            let module = fill(mha().init(d));
            let x = floats(d, [2, 4, 6], 1);
            let mut cache = MhaCache::autoregressive();
            let mut step = |end| {
                let input = MhaInput::self_attn(x.clone().narrow(1, 0, end));
                module.forward_cache(input, &mut cache).context
            };
            vec![step(1), step(2), step(3), step(4)]
        }),
        Case::approx("nn.cross_attention", |d| {
            let config = CrossAttentionConfig::new(6, 5, 4, 2, 3).with_dropout(0.0);
            module(
                d,
                |d| config.init(d),
                [2, 4, 6],
                |m, x| {
                    let context = floats(&x.device(), [2, 7, 5], 8);
                    m.forward(x, context, None)
                },
            )
        }),
    ]
}

fn transformers() -> Vec<Case> {
    let encoder = || TransformerEncoderConfig::new(4, 6, 2, 2).with_dropout(0.0);
    let decoder = || TransformerDecoderConfig::new(4, 6, 2, 2).with_dropout(0.0);
    vec![
        Case::approx("nn.position_wise_feed_forward", |d| {
            let config = PositionWiseFeedForwardConfig::new(4, 7).with_dropout(0.0);
            module(d, |d| config.init(d), [2, 3, 4], |m, x| m.forward(x))
        }),
        Case::approx("nn.transformer_encoder", move |d| {
            module(
                d,
                |d| encoder().init(d),
                [2, 3, 4],
                |m, x| m.forward(TransformerEncoderInput::new(x)),
            )
        }),
        Case::approx("nn.transformer_encoder/norm_first_masked", move |d| {
            module(
                d,
                |d| encoder().with_norm_first(true).init(d),
                [2, 3, 4],
                |m, x| {
                    let causal = generate_autoregressive_mask(2, 3, &x.device());
                    m.forward(TransformerEncoderInput::new(x).mask_attn(causal))
                },
            )
        }),
        Case::approx("nn.transformer_encoder/autoregressive", move |d| {
            let module = fill(encoder().init(d));
            let x = floats(d, [2, 3, 4], 1);
            let mut cache = module.new_autoregressive_cache();
            let mut step = |end| {
                let input = TransformerEncoderInput::new(x.clone().narrow(1, 0, end));
                module.forward_autoregressive_inference(input, &mut cache)
            };
            [step(1), step(2), step(3)]
        }),
        Case::approx("nn.transformer_decoder", move |d| {
            module(
                d,
                |d| decoder().init(d),
                [2, 3, 4],
                |m, x| {
                    let memory = floats(&x.device(), [2, 5, 4], 8);
                    m.forward(TransformerDecoderInput::new(x, memory))
                },
            )
        }),
    ]
}
