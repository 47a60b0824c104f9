//! Random ops. Different kinds of backend draw different numbers. So the cases
//! compare statistics of the numbers with the expected distribution, within six
//! standard errors, and draws with other draws from the same seed.

use burn::module::Module;
use burn::nn::activation::RReluConfig;
use burn::nn::{DropoutConfig, GaussianNoiseConfig, Initializer, LinearConfig};
use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};

use super::autodiff::{leaf, parameters};
use super::case::{Case, Outputs};
use super::data::positive;

/// Number of samples for one set of statistics.
const SAMPLES: usize = 20_000;
/// Bound of a statistic, in standard errors. A correct generator exceeds the bound in one
/// of five hundred million checks.
const ERRORS: f64 = 6.0;

type CheckResult = Result<(), String>;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = distributions();
    cases.extend(seeds());
    cases.extend(modules());
    cases.extend(initializers());
    cases
}

fn near(what: &str, seen: f64, expected: f64, allowed: f64) -> CheckResult {
    if (seen - expected).abs() <= allowed {
        return Ok(());
    }
    Err(format!(
        "{what} is {seen}, expected {expected} give or take {allowed:.2e}"
    ))
}

fn all(what: &str, values: &[f64], holds: impl Fn(f64) -> bool) -> CheckResult {
    match values.iter().find(|&&value| !holds(value)) {
        None => Ok(()),
        Some(value) => Err(format!("{what} cannot yield {value}")),
    }
}

/// Checks the frequency of an event of probability `p`.
fn frequency(what: &str, values: &[f64], p: f64, event: impl Fn(f64) -> bool) -> CheckResult {
    let n = values.len() as f64;
    let count = values.iter().filter(|&&value| event(value)).count() as f64;
    near(what, count / n, p, ERRORS * (p * (1.0 - p) / n).sqrt())
}

/// Checks mean and variance, and that neighbours are uncorrelated.
fn moments(values: &[f64], mean: f64, variance: f64) -> CheckResult {
    let n = values.len() as f64;
    let error = ERRORS / n.sqrt();
    let seen = values.iter().sum::<f64>() / n;
    near("mean", seen, mean, error * variance.sqrt())?;

    let squares = values.iter().map(|value| (value - seen).powi(2));
    let spread = squares.sum::<f64>() / n;
    // No distribution here has a kurtosis much above 3.
    near("variance", spread, variance, error * 2f64.sqrt() * variance)?;

    let products = values
        .windows(2)
        .map(|pair| (pair[0] - seen) * (pair[1] - seen));
    near(
        "correlation of neighbours",
        products.sum::<f64>() / n / spread,
        0.0,
        error,
    )
}

fn host(data: &TensorData) -> Vec<f64> {
    data.iter::<f64>().collect()
}

fn draw(device: &Device, seed: u64, distribution: Distribution) -> Vec<f64> {
    device.seed(seed);
    let drawn = Tensor::<2>::random([SAMPLES / 100, 100], distribution, device);
    host(&drawn.into_data())
}

fn distributions() -> Vec<Case> {
    vec![
        Case::law("random.default", |d| {
            let values = draw(d, 1, Distribution::Default);
            all("the default", &values, |x| (0.0..1.0).contains(&x))?;
            moments(&values, 0.5, 1.0 / 12.0)
        }),
        Case::law("random.uniform", |d| {
            let values = draw(d, 2, Distribution::Uniform(-3.0, 5.0));
            all("uniform", &values, |x| (-3.0..5.0).contains(&x))?;
            for eighth in 0..8 {
                let low = -3.0 + f64::from(eighth);
                frequency("one eighth", &values, 0.125, |x| {
                    (low..low + 1.0).contains(&x)
                })?;
            }
            moments(&values, 1.0, 64.0 / 12.0)
        }),
        Case::law("random.normal", |d| {
            let values = draw(d, 3, Distribution::Normal(2.0, 0.5));
            frequency("one deviation", &values, 0.682_69, |x| {
                (x - 2.0).abs() < 0.5
            })?;
            frequency("two deviations", &values, 0.954_50, |x| {
                (x - 2.0).abs() < 1.0
            })?;
            frequency("the upper half", &values, 0.5, |x| x > 2.0)?;
            moments(&values, 2.0, 0.25)
        }),
        Case::law("random.bernoulli", |d| {
            let values = draw(d, 4, Distribution::Bernoulli(0.3));
            all("Bernoulli", &values, |x| x == 0.0 || x == 1.0)?;
            moments(&values, 0.3, 0.21)
        }),
        Case::law("random.uniform/int", |d| {
            d.seed(5);
            let range = Distribution::Uniform(-5.0, 5.0);
            let values = host(&Tensor::<1, Int>::random([SAMPLES], range, d).into_data());
            all("uniform integers", &values, |x| {
                (-5.0..5.0).contains(&x) && x.fract() == 0.0
            })?;
            for value in -5..5 {
                frequency("each integer", &values, 0.1, |x| x == f64::from(value))?;
            }
            Ok(())
        }),
        Case::law("random.random_like", |d| {
            d.seed(6);
            let like = positive(d, [50, 4, 100], 1).random_like(Distribution::Uniform(1.0, 2.0));
            if like.dims() != [50, 4, 100] {
                return Err(format!("shape {:?}", like.dims()));
            }
            moments(&host(&like.into_data()), 1.5, 1.0 / 12.0)
        }),
        Case::law("random.categorical", |d| {
            d.seed(7);
            let weights = [[1.0, 2.0, 3.0, 4.0], [6.0, 0.0, 3.0, 1.0]];
            let drawn = Tensor::<2>::from_floats(weights, d).categorical(SAMPLES);
            for (row, weights) in drawn.iter_dim(0).zip(weights) {
                let values = host(&row.into_data());
                for (class, weight) in weights.into_iter().enumerate() {
                    let p = weight / 10.0;
                    frequency("each class", &values, p, |x| x == class as f64)?;
                }
            }
            Ok(())
        }),
    ]
}

/// Returns one draw of every kind that a program can make after one seed.
fn drawn(device: &Device, seed: u64) -> Vec<TensorData> {
    device.seed(seed);
    let uniform = Tensor::<2>::random([3, 5], Distribution::Default, device);
    let normal = Tensor::<2>::random([3, 5], Distribution::Normal(0.0, 1.0), device);
    let coins = Tensor::<2>::random([3, 5], Distribution::Bernoulli(0.5), device);
    let ints = Tensor::<1, Int>::random([15], Distribution::Uniform(0.0, 1000.0), device);
    let again = Tensor::<2>::random([3, 5], Distribution::Default, device);
    ((uniform, normal, coins), ints, again).into_outputs()
}

fn seeds() -> Vec<Case> {
    vec![
        Case::law("random.seed", |d| {
            let (first, other, second) = (drawn(d, 42), drawn(d, 43), drawn(d, 42));
            if first != second {
                return Err("the same seed gave other values".into());
            }
            if first.iter().zip(&other).any(|(a, b)| a == b) {
                return Err("another seed gave the same values".into());
            }
            if first[0] == first[4] {
                return Err("a second draw repeated the first".into());
            }
            Ok(())
        }),
        Case::law("random.seed/dropout", |d| {
            let dropped = || {
                d.seed(9);
                DropoutConfig::new(0.5)
                    .init()
                    .forward(leaf(d, [20, 20], 1))
                    .into_data()
            };
            let same = dropped() == dropped();
            same.then_some(())
                .ok_or_else(|| "the same seed dropped other elements".into())
        }),
        Case::law("random.seed/initialization", |d| {
            let init = || {
                d.seed(10);
                parameters(&LinearConfig::new(6, 4).init(d))
            };
            let same = init() == init();
            same.then_some(())
                .ok_or_else(|| "the same seed gave other parameters".into())
        }),
    ]
}

fn modules() -> Vec<Case> {
    vec![
        Case::law("random.dropout", |d| {
            d.seed(11);
            let x = Tensor::<2>::ones([200, 100], &d.clone().autodiff()).require_grad();
            let dropout = DropoutConfig::new(0.2).init();
            let y = dropout.forward(x.clone());
            let grads = y.clone().sum().backward();
            let values = host(&y.into_data());
            all("dropout of 1 by 0.2", &values, |y| {
                y == 0.0 || (y - 1.25).abs() < 1e-6
            })?;
            moments(&values, 1.0, 0.25)?;

            // A dropped element has a gradient of zero; a kept one has its scale.
            let grad = x.grad(&grads).ok_or("no gradient")?;
            if host(&grad.into_data()) != values {
                return Err("the gradient has another mask than the output".into());
            }
            let validating = dropout.valid().forward(positive(d, [3, 4], 1));
            let same = validating.into_data() == positive(d, [3, 4], 1).into_data();
            same.then_some(())
                .ok_or_else(|| "dropout is on when validating".into())
        }),
        Case::law("random.gaussian_noise", |d| {
            d.seed(12);
            let x = Tensor::<2>::full([200, 100], 3.0, &d.clone().autodiff());
            let noise = GaussianNoiseConfig::new(0.5).init();
            moments(&host(&noise.forward(x).into_data()), 3.0, 0.25)
        }),
        Case::law("random.rrelu", |d| {
            d.seed(13);
            let x = Tensor::<2>::full([200, 100], -1.0, &d.clone().autodiff());
            let rrelu = RReluConfig::new().with_lower(0.1).with_upper(0.4).init();
            let values = host(&rrelu.forward(x).into_data());
            all("a slope in [0.1, 0.4]", &values, |y| {
                (-0.400_001..=-0.099_999).contains(&y)
            })?;
            moments(&values, -0.25, 0.09 / 12.0)
        }),
    ]
}

fn initializers() -> Vec<Case> {
    vec![
        Case::law("random.initializer/kaiming_uniform", |d| {
            d.seed(14);
            let init = Initializer::KaimingUniform {
                gain: 1.0,
                fan_out_only: false,
            };
            let weights = init.init_with::<2, _>([200, 100], Some(200), Some(100), d);
            let values = host(&weights.val().into_data());
            let bound = (3.0f64 / 200.0).sqrt();
            all("Kaiming", &values, |x| x.abs() <= bound * 1.000_001)?;
            moments(&values, 0.0, bound * bound / 3.0)
        }),
        Case::law("random.initializer/xavier_normal", |d| {
            d.seed(15);
            let init = Initializer::XavierNormal { gain: 2.0 };
            let weights = init.init_with::<2, _>([200, 100], Some(200), Some(100), d);
            moments(&host(&weights.val().into_data()), 0.0, 4.0 * 2.0 / 300.0)
        }),
        Case::law("random.initializer/orthogonal", |d| {
            d.seed(16);
            let init = Initializer::Orthogonal { gain: 1.0 };
            let rows = init.init_with::<2, _>([4, 6], Some(4), Some(6), d).val();
            let product = host(&rows.clone().matmul(rows.transpose()).into_data());
            for (position, value) in product.into_iter().enumerate() {
                let expected = if position % 5 == 0 { 1.0 } else { 0.0 };
                near("an element of Q times its transpose", value, expected, 1e-4)?;
            }
            Ok(())
        }),
    ]
}
