//! What tensord must be able to do on the preview, on two devices of the pool at TENSORD_URL.
//! Each check compares with Burn's CPU backend Flex in this process.

use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::{Result, anyhow, ensure};
use burn::{
    module::{Module, ModuleMapper, Param, Quantizer},
    nn::{Linear, LinearConfig, Relu},
    optim::{GradientsParams, SgdConfig},
    tensor::{
        DType, Device, Distribution, Tensor, TensorData, Tolerance,
        distributed::{DistributedConfig, DistributedContext, ReduceOperation},
        quantization::{Calibration, QuantScheme, QuantStore, QuantValue},
    },
};
use tensord_client::{LeaseRequest, Pool, data};

type Check = fn(&[Device]) -> Result<String>;

const CHECKS: &[(&str, Check)] = &[
    ("training an MLP", trains_an_mlp),
    ("all-reduce as one call", reduces_in_one_call),
    (
        "data-parallel training without a barrier",
        trains_data_parallel,
    ),
    ("quantizing, and a quantized product", multiplies_quantized),
    ("a module with quantized weights", infers_quantized),
    ("reading a quantized tensor", reads_quantized),
    ("uploading a quantized tensor", uploads_quantized),
];

fn main() -> Result<()> {
    let pool = Pool::connect_env()?;
    let mut failed = 0;
    for (name, check) in CHECKS {
        // A fault may end the session of a device, so each check has a lease of its own.
        let lease = pool.lease(LeaseRequest::devices(2))?;
        let checked = catch_unwind(AssertUnwindSafe(|| check(lease.devices())));
        match checked.unwrap_or_else(|panic| Err(anyhow!("panic: {}", message(&*panic)))) {
            Ok(detail) => println!("ok      {name}: {detail}"),
            Err(error) => {
                failed += 1;
                println!("FAILED  {name}: {error:#}");
            }
        }
    }
    ensure!(failed == 0, "{failed} of {} checks failed", CHECKS.len());
    Ok(())
}

/// Returns what a thread panicked with.
fn message(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref().copied())
        .unwrap_or("?")
}

#[derive(Module, Debug)]
struct Mlp {
    first: Linear,
    second: Linear,
}

impl Mlp {
    /// A model with the same weights each time.
    fn new(device: &Device) -> Self {
        let mut here = Device::flex();
        here.seed(7);
        if device.is_autodiff() {
            // Forked weights are tracked only if they were before.
            here = here.autodiff();
        }
        let model = Self {
            first: LinearConfig::new(16, 64).init(&here),
            second: LinearConfig::new(64, 4).init(&here),
        };
        // Weights are drawn when they are first used; after the fork, `device` would draw them.
        for layer in [&model.first, &model.second] {
            layer.weight.val();
            layer.bias.as_ref().map(Param::val);
        }
        model.fork(device)
    }

    fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        self.second
            .forward(Relu::new().forward(self.first.forward(input)))
    }
}

/// The same numbers for the same seed.
fn numbers(rows: usize, columns: usize, seed: u64) -> TensorData {
    let device = Device::flex();
    device.seed(seed);
    Tensor::<2>::random([rows, columns], Distribution::Default, &device).into_data()
}

/// Takes `steps` steps and returns the losses.
fn losses(device: &Device, steps: usize, rows: std::ops::Range<usize>) -> Result<Vec<f32>> {
    let device = device.clone().autodiff();
    let mut model = Mlp::new(&device);
    let mut optimizer = SgdConfig::new().init();
    let mut losses = Vec::new();
    for step in 0..steps {
        let inputs: Tensor<2> = data::from_data(numbers(8, 16, step as u64), &device);
        let targets: Tensor<2> = data::from_data(numbers(8, 4, 100 + step as u64), &device);
        let (inputs, targets) = (inputs.slice(rows.clone()), targets.slice(rows.clone()));
        let loss = (model.forward(inputs) - targets).square().mean();
        losses.push(loss.clone().detach().inner());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.1, model, gradients);
    }
    Ok(data::into_data(Tensor::cat(losses, 0))?.try_to_vec()?)
}

fn trains_an_mlp(devices: &[Device]) -> Result<String> {
    let leased = losses(&devices[0], 20, 0..8)?;
    let local = losses(&Device::flex(), 20, 0..8)?;
    ensure!(leased == local, "{leased:?} differ from {local:?}");
    ensure!(leased[19] < leased[0], "the loss does not fall: {leased:?}");
    Ok(format!(
        "20 losses with equal bits, {} to {}",
        leased[0], leased[19]
    ))
}

fn reduces_in_one_call(devices: &[Device]) -> Result<String> {
    for (op, expected) in [
        (ReduceOperation::Sum, [5.0f32, 7.0, 9.0]),
        (ReduceOperation::Mean, [2.5, 3.5, 4.5]),
    ] {
        let members = vec![
            Tensor::<1>::from_data([1.0f32, 2.0, 3.0], &devices[0]),
            Tensor::<1>::from_data([4.0f32, 5.0, 6.0], &devices[1]),
        ];
        for (rank, reduced) in Tensor::all_reduce(members, op).into_iter().enumerate() {
            ensure!(
                reduced.device() == devices[rank],
                "rank {rank} is on another device"
            );
            let reduced = data::into_data(reduced)?.try_to_vec::<f32>()?;
            ensure!(reduced == expected, "rank {rank} of {op:?}: {reduced:?}");
        }
    }
    Ok("sum and mean on two devices".into())
}

/// Has Burn average the gradients of all ranks.
struct MarkShared;

impl ModuleMapper for MarkShared {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, tensor.set_distributed(id), mapper)
    }
}

/// Two devices train, each on its own batches and as fast as it can.
fn trains_data_parallel(devices: &[Device]) -> Result<String> {
    const STEPS: usize = 30;
    let training: Vec<Device> = devices.iter().map(|d| d.clone().autodiff()).collect();
    let config = DistributedConfig {
        all_reduce_op: ReduceOperation::Mean,
    };
    let _context = DistributedContext::init(training.clone(), config);
    // The parameters of all replicas have the same ids, by which Burn knows whose gradients belong together.
    let untrained = Mlp::new(&Device::flex().autodiff());
    let replica = |device: &Device, rank: usize| -> Result<Vec<TensorData>> {
        let mut model = untrained.clone().fork(device).map(&mut MarkShared);
        let mut optimizer = SgdConfig::new().init();
        for step in 0..STEPS {
            let seed = (2 * step + rank) as u64;
            let inputs: Tensor<2> = data::from_data(numbers(8, 16, seed), device);
            let targets: Tensor<2> = data::from_data(numbers(8, 4, 100 + seed), device);
            let loss = (model.forward(inputs) - targets).square().mean();
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(0.1, model, gradients);
        }
        let model = model.valid();
        let weights = [&model.first, &model.second].map(|layer| layer.weight.val());
        let read = weights.map(|weight| data::into_data(weight));
        read.into_iter().map(|data| Ok(data?)).collect()
    };
    let replicas = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2)
            .map(|rank| {
                let (device, replica) = (&training[rank], &replica);
                scope.spawn(move || replica(device, rank))
            })
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined
            .map(|result| result.unwrap_or_else(|panic| Err(anyhow!("{}", message(&*panic)))))
            .collect::<Result<Vec<_>>>()
    })?;
    ensure!(replicas[0] == replicas[1], "the replicas differ");
    let untrained = untrained.valid().first.weight.val().into_data();
    ensure!(replicas[0][0] != untrained, "the weights have not changed");
    Ok(format!("replicas of equal bits after {STEPS} steps"))
}

/// 8 bits and one scale for a tensor.
fn scheme() -> QuantScheme {
    QuantScheme::default()
        .with_value(QuantValue::Q8S)
        .with_store(QuantStore::Native)
}

fn multiplies_quantized(devices: &[Device]) -> Result<String> {
    let product = |device: &Device| -> Result<TensorData> {
        let weights: Tensor<2> = data::from_data(numbers(16, 8, 1), device);
        let quantized = weights.quantize_dynamic(&scheme());
        ensure!(
            matches!(quantized.dtype(), DType::QFloat(_)),
            "it is not quantized"
        );
        let inputs: Tensor<2> = data::from_data(numbers(4, 16, 2), device);
        Ok(data::into_data(inputs.matmul(quantized))?)
    };
    let (leased, local) = (product(&devices[0])?, product(&Device::flex())?);
    leased.assert_approx_eq::<f32>(&local, Tolerance::default());
    let bits = if leased == local {
        "equal bits"
    } else {
        "within Burn's tolerance"
    };
    Ok(format!("as on Flex, {bits}"))
}

fn infers_quantized(devices: &[Device]) -> Result<String> {
    let outputs = |device: &Device, quantize: bool| -> Result<TensorData> {
        let mut model = Mlp::new(device);
        if quantize {
            model = model.quantize_weights(&mut Quantizer::new(Calibration::MinMax, scheme()));
            let dtype = model.first.weight.val().dtype();
            ensure!(
                matches!(dtype, DType::QFloat(_)),
                "the weights are {dtype:?}"
            );
        }
        let inputs: Tensor<2> = data::from_data(numbers(8, 16, 3), device);
        Ok(data::into_data(model.forward(inputs))?)
    };
    let leased = outputs(&devices[0], true)?;
    let local = outputs(&Device::flex(), true)?;
    leased.assert_approx_eq::<f32>(&local, Tolerance::default());
    let exact = outputs(&devices[0], false)?;
    leased.assert_approx_eq::<f32>(&exact, Tolerance::absolute(0.05));
    ensure!(leased != exact, "quantized weights make no difference");
    Ok("an MLP's outputs are those on Flex".into())
}

fn quantized(device: &Device) -> Tensor<2> {
    Tensor::<2>::from_data(numbers(16, 8, 1), device).quantize_dynamic(&scheme())
}

fn reads_quantized(devices: &[Device]) -> Result<String> {
    let leased = quantized(&devices[0]).try_into_data()?;
    let local = quantized(&Device::flex()).into_data();
    ensure!(leased == local, "{leased:?} differs from {local:?}");
    Ok("the bytes of Flex".into())
}

fn uploads_quantized(devices: &[Device]) -> Result<String> {
    let local = quantized(&Device::flex());
    let uploaded = Tensor::<2>::from_data(local.clone().into_data(), &devices[0]);
    let back = uploaded.dequantize().try_into_data()?;
    ensure!(
        back == local.dequantize().into_data(),
        "other numbers came back"
    );
    Ok("the numbers of Flex".into())
}
