//! A worker with the custom op `unfilled`, which writes nothing to its output. So the
//! output shows what the memory held before. `backends::leftovers` uses this worker.

use std::{error::Error, sync::Arc};

use burn_ir::{BackendIr, CustomOpIr};
use tensord_testkit::host;
use tensord_transport::Identity;
use tensord_worker::{
    CustomOps, OpResult, PortableOp, Worker, WorkerOptions, custom::Tensors, parse_devices,
};

#[derive(Clone)]
struct Unfilled;

impl PortableOp for Unfilled {
    fn run<B: BackendIr>(
        &self,
        tensors: &mut Tensors<B>,
        call: &CustomOpIr,
        device: &B::Device,
    ) -> OpResult {
        let out = &call.outputs[0];
        let dtype = burn_backend::FloatDType::F32;
        let unfilled = B::float_empty(out.shape.clone(), device, dtype);
        tensors.register_float_tensor::<B>(&out.id, unfilled);
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let devices = std::env::args().nth(1).ok_or("usage: unfilled DEVICES")?;
    let identity = Arc::new(Identity::self_signed()?);
    let scheduler = std::env::var("TENSORD_URL")?.parse()?;
    let mut options = WorkerOptions::new(identity, scheduler, parse_devices(&devices)?);
    options.kernel_cache = std::env::var_os("TENSORD_KERNELS").map(|dir| {
        let dir = std::path::PathBuf::from(dir);
        // Those of leases of the tenant `default` of other workers.
        dir.join("kernels").join("default")
    });
    options.op_timeout = host::COMPILE_DEADLINE;
    options.custom_ops = CustomOps::new().portable("unfilled", Unfilled);
    let worker = Worker::start(options).await?;
    worker.joined().await?;
    println!("joined the pool");
    Err(worker.failed().await.into())
}
