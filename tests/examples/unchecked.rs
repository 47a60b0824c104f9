//! A worker that executes ops without checking them, so that tests see what the process of a lease keeps in when a
//! check is missing. Its custom ops crash, or have other results in each process. `hostile::processes` and
//! `hostile::other_answers` use it.
//!
//! `UNCHECKED_PROGRAM` names the file to run for each lease, if not this program's own,
//! `UNCHECKED_MEMORY` the bytes of memory of each device, `UNCHECKED_SNAPSHOTS` the bytes of
//! memory for snapshots, which is 0 by default, and `UNCHECKED_OP_TIMEOUT` the seconds that an op
//! may take.

use std::{error::Error, process::ExitCode, sync::Arc, time::Duration};

use burn_backend::TensorData;
use burn_ir::{BackendIr, CustomOpIr};
use tensord_transport::Identity;
use tensord_worker::{
    CustomOps, Isolation, OpResult, PortableOp, ProcessProgram, Worker, WorkerOptions,
    custom::Tensors, parse_devices, run_lease_process, testing,
};

/// The argument of the processes of leases.
const LEASE_PROCESS: &str = "lease-process";

/// How long the op `sleep` takes.
const SLEEP: Duration = Duration::from_millis(7500);

/// An op that calls a function, which ends the process or keeps the device busy.
#[derive(Clone)]
struct End(fn());

impl PortableOp for End {
    fn run<B: BackendIr>(&self, _: &mut Tensors<B>, _: &CustomOpIr, _: &B::Device) -> OpResult {
        (self.0)();
        Err("the process has not ended".into())
    }
}

/// An op whose result is the id of the process.
#[derive(Clone)]
struct ProcessId;

impl PortableOp for ProcessId {
    fn run<B: BackendIr>(
        &self,
        tensors: &mut Tensors<B>,
        call: &CustomOpIr,
        device: &B::Device,
    ) -> OpResult {
        let [out] = &call.outputs[..] else {
            return Err(format!("it has one output, not {}", call.outputs.len()).into());
        };
        // An `f32` has 24 bits for it, and process ids on Linux have 22 at most.
        let id = TensorData::from([std::process::id() as f32]);
        tensors.register_float_tensor::<B>(&out.id, B::float_from_data(id, device));
        Ok(())
    }
}

/// Takes 3 GiB of memory.
fn grow() {
    const PAGE_BYTES: usize = 4096;
    let mut taken = Vec::<u8>::with_capacity(3 << 30);
    for page in taken.spare_capacity_mut().chunks_mut(PAGE_BYTES) {
        page[0].write(1);
    }
    std::hint::black_box(&taken);
}

fn custom_ops() -> CustomOps {
    CustomOps::new()
        .portable("abort", End(|| std::process::abort()))
        .portable("exit", End(|| std::process::exit(7)))
        .portable("hang", End(|| std::thread::sleep(Duration::MAX)))
        .portable("grow", End(grow))
        .portable("process_id", ProcessId)
        .portable("sleep", End(|| std::thread::sleep(SLEEP)))
}

async fn run(devices: &str) -> Result<(), Box<dyn Error>> {
    let identity = Arc::new(Identity::self_signed()?);
    let scheduler = std::env::var("TENSORD_URL")?.parse()?;
    let mut program = ProcessProgram::current("unchecked", LEASE_PROCESS);
    if let Some(path) = std::env::var_os("UNCHECKED_PROGRAM") {
        program.path = path.into();
    }
    let mut options = WorkerOptions::new(identity, scheduler, parse_devices(devices)?);
    if let Ok(bytes) = std::env::var("UNCHECKED_MEMORY") {
        options.memory_bytes = Some(bytes.parse()?);
    }
    let snapshots = std::env::var("UNCHECKED_SNAPSHOTS").ok();
    options.snapshot_bytes = Some(snapshots.map_or(Ok(0), |bytes| bytes.parse())?);
    if let Ok(seconds) = std::env::var("UNCHECKED_OP_TIMEOUT") {
        options.op_timeout = Duration::from_secs(seconds.parse()?);
    }
    options.custom_ops = custom_ops();
    options.isolation = Isolation::Processes(program);
    let worker = Worker::start(options).await?;
    worker.joined().await?;
    println!("joined the pool");
    Err(worker.failed().await.into())
}

fn main() -> ExitCode {
    let argument = std::env::args().nth(1).unwrap_or_default();
    if argument == LEASE_PROCESS {
        testing::switch_off_op_checks();
        return run_lease_process(custom_ops(), || {});
    }
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .init();
    let runtime = tokio::runtime::Runtime::new().expect("the system starts threads");
    match runtime.block_on(run(&argument)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}
