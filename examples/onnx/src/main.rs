//! Runs two models that `burn-onnx` made from ONNX, on a leased device: a CNN that was trained
//! on hand-written digits, and the encoder of a transformer.

use anyhow::Result;
use burn::tensor::Device;
use clap::Parser;
use onnx::{
    Models,
    data::{Digits, Expected},
    use_integers_of_onnx,
};
use tensord_client::{LeaseRequest, Pool, data};

/// Runs models that were generated from ONNX on a device of the pool at TENSORD_URL.
#[derive(Parser, Debug)]
struct Arguments {
    /// Run in this process, without a pool
    #[arg(long)]
    local: bool,
}

fn main() -> Result<()> {
    if Arguments::parse().local {
        return run(Device::flex());
    }
    let lease = Pool::connect_env()?.lease(LeaseRequest::devices(1))?;
    run(lease.devices()[0].clone())
}

/// Runs both models on `device` and prints what came out.
fn run(mut device: Device) -> Result<()> {
    use_integers_of_onnx(&mut device)?;
    let models = Models::load(&device)?;

    let digits = Digits::for_tests()?;
    let (_, guesses) = models.classify(&digits);
    let guesses = data::into_data(guesses)?.try_to_vec::<i64>()?;
    let right = guesses.iter().zip(&digits.labels).filter(|(a, b)| a == b);
    let right = 100.0 * right.count() as f64 / guesses.len() as f64;

    let expected = Expected::read()?;
    let vectors = data::into_data(models.encode(&expected))?.try_to_vec::<f32>()?;
    let apart = vectors.iter().zip(expected.pooled.concat());
    let apart = apart.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);

    let row = |model, input: &str, result: &str| println!("{model:<8} {input:<25} {result}");
    row("model", "input", "result");
    let input = format!("{} digits", digits.labels.len());
    row("cnn", &input, &format!("{right:.1} % right"));
    let input = format!(
        "{} sequences of {} tokens",
        expected.ids.len(),
        expected.ids[0].len()
    );
    let result = format!("at most {apart:.0e} from ONNX's own values");
    row("encoder", &input, &result);
    Ok(())
}
