//! Loss functions: the value, and the gradients of the predictions.

use burn::nn::loss::*;
use burn::tensor::activation::{log_softmax, sigmoid, softmax};
use burn::tensor::loss::cross_entropy_with_logits;
use burn::tensor::{Device, Int, Tensor, TensorData};

use super::autodiff::{grad, grad2};
use super::case::Case;
use super::data::{floats, ints};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = classification();
    cases.extend(regression());
    cases.extend(ranking());
    cases.extend(sequences());
    cases
}

/// Returns class numbers below five.
fn classes(device: &Device) -> Tensor<1, Int> {
    Tensor::from_ints([3, 0, 4, 1], device)
}

/// Five logits for each of four items.
const LOGITS: [usize; 2] = [4, 5];

fn cross_entropy(device: &Device, config: &CrossEntropyLossConfig) -> Vec<TensorData> {
    grad(device, LOGITS, |logits| {
        let device = logits.device();
        config.init(&device).forward(logits, classes(&device))
    })
}

fn binary(device: &Device, config: &BinaryCrossEntropyLossConfig) -> Vec<TensorData> {
    grad(device, LOGITS, |logits| {
        let device = logits.device();
        let inputs = if config.logits {
            logits
        } else {
            sigmoid(logits)
        };
        config
            .init(&device)
            .forward(inputs, ints(&device, LOGITS, 2, 0, 2))
    })
}

fn classification() -> Vec<Case> {
    let weights = || Some(vec![0.4, 1.0, 2.0, 0.7, 1.3]);
    vec![
        Case::approx("loss.cross_entropy", |d| {
            cross_entropy(d, &CrossEntropyLossConfig::new())
        }),
        Case::approx("loss.cross_entropy/weights", move |d| {
            cross_entropy(d, &CrossEntropyLossConfig::new().with_weights(weights()))
        }),
        Case::approx("loss.cross_entropy/smoothing", |d| {
            cross_entropy(d, &CrossEntropyLossConfig::new().with_smoothing(Some(0.1)))
        }),
        Case::approx("loss.cross_entropy/padding", |d| {
            cross_entropy(
                d,
                &CrossEntropyLossConfig::new().with_pad_tokens(Some(vec![0])),
            )
        }),
        Case::approx("loss.cross_entropy/probabilities", |d| {
            grad(d, LOGITS, |logits| {
                let device = logits.device();
                let loss = CrossEntropyLossConfig::new()
                    .with_logits(false)
                    .init(&device);
                loss.forward(softmax(logits, 1), classes(&device))
            })
        }),
        Case::approx("loss.cross_entropy_with_logits", |d| {
            grad2(d, LOGITS, LOGITS, |x, y| {
                cross_entropy_with_logits(x, softmax(y, 1))
            })
        }),
        Case::approx("loss.binary_cross_entropy", |d| {
            binary(d, &BinaryCrossEntropyLossConfig::new())
        }),
        Case::approx("loss.binary_cross_entropy/logits_weights", move |d| {
            let config = BinaryCrossEntropyLossConfig::new().with_logits(true);
            binary(d, &config.with_weights(weights()).with_smoothing(Some(0.2)))
        }),
        Case::approx("loss.multi_margin", |d| {
            grad(d, LOGITS, |x| {
                let target = classes(&x.device());
                MultiMarginLossConfig::new()
                    .init()
                    .forward(x, target, Reduction::Mean)
            })
        }),
        Case::approx("loss.soft_margin", |d| {
            grad(d, LOGITS, |x| {
                let signs = floats(&x.device(), LOGITS, 2).sign();
                SoftMarginLoss::new().forward(x, signs, Reduction::Sum)
            })
        }),
    ]
}

const SHAPE: [usize; 2] = [3, 4];

fn regression() -> Vec<Case> {
    vec![
        Case::approx("loss.mse", |d| {
            grad2(d, SHAPE, SHAPE, |x, y| {
                MseLoss::new().forward(x, y, Reduction::Mean)
            })
        }),
        Case::approx("loss.mse/sum", |d| {
            grad2(d, SHAPE, SHAPE, |x, y| {
                MseLoss::new().forward(x, y, Reduction::Sum)
            })
        }),
        Case::approx("loss.mse/unreduced", |d| {
            grad2(d, SHAPE, SHAPE, |x, y| {
                MseLoss::new().forward_no_reduction(x, y)
            })
        }),
        Case::approx("loss.huber", |d| {
            let loss = HuberLossConfig::new(0.7).init();
            grad2(d, SHAPE, SHAPE, |x, y| loss.forward(x, y, Reduction::Mean))
        }),
        Case::approx("loss.smooth_l1", |d| {
            let loss = SmoothL1LossConfig::new().with_beta(0.6).init();
            grad2(d, SHAPE, SHAPE, |x, y| loss.forward(x, y))
        }),
        Case::approx("loss.lp/l1", |d| {
            grad2(d, SHAPE, SHAPE, |x, y| {
                LpLossConfig::l1().forward(x, y, Reduction::Mean)
            })
        }),
        Case::approx("loss.lp/p_3", |d| {
            let loss = LpLossConfig::new(3.0).init();
            grad2(d, SHAPE, SHAPE, |x, y| loss.forward(x, y, Reduction::Sum))
        }),
        Case::approx("loss.kl_div", |d| {
            let loss = KLDivLossConfig::new().init();
            grad2(d, SHAPE, SHAPE, |x, y| {
                loss.forward(log_softmax(x, 1), softmax(y, 1), Reduction::BatchMean)
            })
        }),
        Case::approx("loss.kl_div/log_target", |d| {
            let loss = KLDivLossConfig::new().with_log_target(true).init();
            grad2(d, SHAPE, SHAPE, |x, y| {
                loss.forward(log_softmax(x, 1), log_softmax(y, 1), Reduction::Sum)
            })
        }),
        Case::approx("loss.poisson_nll", |d| {
            let loss = PoissonNllLossConfig::new().with_full(true).init();
            grad(d, SHAPE, |x| {
                let counts = ints(&x.device(), SHAPE, 2, 0, 6).float();
                loss.forward(x, counts, Reduction::Mean)
            })
        }),
        Case::approx("loss.gaussian_nll", |d| {
            let loss = GaussianNLLLossConfig::new().with_full(true).init();
            grad2(d, SHAPE, SHAPE, |x, var| {
                let target = floats(&x.device(), SHAPE, 3);
                loss.forward(x, target, var.exp(), Reduction::Mean)
            })
        }),
    ]
}

fn ranking() -> Vec<Case> {
    vec![
        Case::approx("loss.cosine_embedding", |d| {
            let loss = CosineEmbeddingLossConfig::new().with_margin(0.1).init();
            grad2(d, LOGITS, LOGITS, |x, y| {
                let target = Tensor::from_ints([1, -1, -1, 1], &x.device());
                loss.forward(x, y, target)
            })
        }),
        Case::approx("loss.margin_ranking", |d| {
            let loss = MarginRankingLossConfig::new().with_margin(0.3).init();
            grad2(d, SHAPE, SHAPE, |x, y| {
                let order = floats(&x.device(), SHAPE, 3).sign();
                loss.forward(x, y, order, Reduction::Mean)
            })
        }),
        Case::approx("loss.hinge_embedding", |d| {
            grad(d, SHAPE, |x| {
                let signs = floats(&x.device(), SHAPE, 3).sign();
                HingeEmbeddingLossConfig::new()
                    .init()
                    .forward(x, signs, Reduction::Sum)
            })
        }),
        Case::approx("loss.triplet_margin", |d| {
            let loss = TripletMarginLossConfig::new().with_margin(2.0).init();
            grad2(d, LOGITS, LOGITS, |anchor, positive| {
                let negative = floats(&anchor.device(), LOGITS, 3);
                loss.forward(anchor, positive, negative, Reduction::Mean)
            })
        }),
    ]
}

fn sequences() -> Vec<Case> {
    vec![
        Case::approx("loss.ctc", |d| {
            grad(d, [6, 2, 4], |x| {
                let device = x.device();
                let targets = Tensor::from_ints([[1, 3, 3], [2, 1, 0]], &device);
                let input_lengths = Tensor::from_ints([6, 5], &device);
                let target_lengths = Tensor::from_ints([3, 2], &device);
                let loss = CTCLossConfig::new().init();
                loss.forward(log_softmax(x, 2), targets, input_lengths, target_lengths)
            })
        }),
        Case::approx("loss.rnnt", |d| {
            grad(d, [2, 4, 3, 5], |x| {
                let device = x.device();
                let targets = Tensor::from_ints([[1, 3], [2, 0]], &device);
                let logit_lengths = Tensor::from_ints([4, 3], &device);
                let target_lengths = Tensor::from_ints([2, 1], &device);
                let loss = RNNTLossConfig::new().init();
                loss.forward(x, targets, logit_lengths, target_lengths)
            })
        }),
    ]
}
