//! A worker with a custom op, `swish(x) = x * sigmoid(beta * x)`: in Burn's ops for any
//! backend, and as a kernel for GPUs.
//!
//! ```sh
//! export TENSORD_URL='...'    # the `workers:` line of the scheduler
//! cargo run -p tensord-worker --example custom_op
//! cargo run -p tensord-worker --example custom_op --features vulkan -- --devices vulkan:0
//! ```
//!
//! A program calls it like this:
//!
//! ```ignore
//! let y: Tensor<2> = CustomOp::new("swish").input(x).scalar(1.5).call([64, 10]);
//! ```

use std::{error::Error, process::ExitCode, sync::Arc, time::Duration};

use burn_ir::{BackendIr, CustomOpIr, ScalarIr, TensorIr};
use tensord_transport::Identity;
use tensord_worker::{
    CustomOps, Isolation, OpResult, PortableOp, Worker, WorkerOptions, custom::Tensors,
    parse_devices,
};

/// The argument with which the worker starts this program for a lease.
#[cfg(target_os = "linux")]
const LEASE_PROCESS: &str = "lease-process";

/// Returns the input, the output and beta of a call. An error is what a program gets when
/// it reads the output.
fn arguments(call: &CustomOpIr) -> Result<(&TensorIr, &TensorIr, ScalarIr), String> {
    match (&call.inputs[..], &call.outputs[..], &call.scalars[..]) {
        ([x], [y], [beta]) if x.shape == y.shape => Ok((x, y, *beta)),
        (_, _, scalars) => Err(format!(
            "swish has one input, one output of its shape and one scalar, not {} scalars",
            scalars.len()
        )),
    }
}

/// The op on any backend.
#[derive(Clone)]
struct Swish;

impl PortableOp for Swish {
    fn run<B: BackendIr>(
        &self,
        tensors: &mut Tensors<B>,
        call: &CustomOpIr,
        _: &B::Device,
    ) -> OpResult {
        let (x, y, beta) = arguments(call)?;
        let beta = burn_backend::Scalar::from(beta);
        let x = tensors.get_float_tensor::<B>(x);
        let gate = B::sigmoid(B::float_mul_scalar(x.clone(), beta));
        tensors.register_float_tensor::<B>(&y.id, B::float_mul(x, gate));
        Ok(())
    }
}

/// The op as one kernel, in CubeCL, for every kind of GPU.
#[cfg(feature = "cube")]
mod kernel {
    use burn_backend::TensorMetadata as _;
    use burn_cubecl::{
        CubeBackend, CubeDevice,
        cubecl::{
            self, CubeDim, calculate_cube_count_elemwise,
            prelude::*,
            std::tensor::layout::linear::{LinearView, LinearViewMut},
        },
        ops::numeric::empty_device_dtype,
    };
    use burn_ir::CustomOpIr;
    use tensord_worker::{OpResult, custom::Tensors};

    #[cube(launch)]
    fn swish(x: LinearView<'_, f32>, mut y: LinearViewMut<'_, f32>, beta: f32) {
        if y.is_in_bounds(ABSOLUTE_POS) {
            let value = x.read(ABSOLUTE_POS);
            y.write(ABSOLUTE_POS, value / (1.0 + (-beta * value).exp()));
        }
    }

    pub(crate) fn run(
        tensors: &mut Tensors<CubeBackend>,
        call: &CustomOpIr,
        _: &CubeDevice,
    ) -> OpResult {
        let (x, y, beta) = super::arguments(call)?;
        let beta = beta.elem::<f32>();
        let x = tensors.get_float_tensor::<CubeBackend>(x);
        let (client, device) = (x.client.clone(), x.device.clone());
        let out = empty_device_dtype(client.clone(), device, x.shape(), x.dtype);
        let units = x.meta.num_elements();
        let dim = CubeDim::new(&client, units);
        let count = calculate_cube_count_elemwise(&client, units, dim);
        let views = (x.into_linear_view(), out.clone().into_linear_view());
        swish::launch(&client, count, dim, views.0, views.1, beta);
        tensors.register_float_tensor::<CubeBackend>(&y.id, out);
        Ok(())
    }
}

fn custom_ops() -> CustomOps {
    let ops = CustomOps::new().portable("swish", Swish);
    #[cfg(feature = "cube")]
    let ops = ops.cube("swish", kernel::run);
    ops
}

/// Where leases run: each in a process of its own, which is this program with the argument
/// [`LEASE_PROCESS`].
fn isolation() -> Isolation {
    #[cfg(target_os = "linux")]
    return Isolation::Processes(tensord_worker::ProcessProgram::current(
        "custom_op",
        LEASE_PROCESS,
    ));
    #[cfg(not(target_os = "linux"))]
    return Isolation::None;
}

async fn run(args: &[String]) -> Result<(), Box<dyn Error>> {
    let devices = match args {
        [] => "auto",
        [flag, devices] if flag == "--devices" => devices,
        _ => return Err("usage: custom_op [--devices LIST]".into()),
    };
    // The identity is not saved, so the worker enrols as a new one each time.
    let identity = Arc::new(Identity::self_signed()?);
    let scheduler = std::env::var("TENSORD_URL")?.parse()?;
    let mut options = WorkerOptions::new(identity, scheduler, parse_devices(devices)?);
    options.custom_ops = custom_ops();
    options.isolation = isolation();
    let worker = Worker::start(options).await?;
    worker.joined().await?;
    println!("joined the pool; Ctrl+C ends it");
    tokio::select! {
        refused = worker.failed() => return Err(refused.into()),
        signal = tokio::signal::ctrl_c() => signal?,
    }
    worker.drain(Duration::from_secs(10)).await;
    Ok(())
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    #[cfg(target_os = "linux")]
    if args.first().is_some_and(|arg| arg == LEASE_PROCESS) {
        return tensord_worker::run_lease_process(custom_ops(), || {});
    }
    let ran = tokio::runtime::Runtime::new()
        .map_err(Into::into)
        .and_then(|runtime| runtime.block_on(run(&args)));
    match ran {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}
