//! No op's output shows what the device's memory held before.
//!
//! Each of Burn's ops runs twice: in memory that held one pattern, and in memory that held
//! another. A kernel that leaves a part of its output unwritten, or adds to the memory's
//! old content, gives outputs that differ. The op `unfilled` of `examples/unfilled.rs`
//! writes nothing to its output; it shows that the device does reuse the memory with the
//! pattern.

use std::collections::HashMap;

use burn_backend::{DType, Shape};
use burn_ir::{
    CustomOpIr, FullOpIr, IrVisitorMut, NumericOperationIr, OperationIr, ScalarIr, TensorId,
    TensorIr, TensorStatus,
};
use bytes::Bytes;
use tensord_proto::codec::{DeviceProfile, OpName, tensor_bytes};
use tensord_testkit::{
    cluster::{Cluster, Process},
    host,
    raw::{self, ClientStream, RawSession, Target},
};
use tensord_worker::testing::sample_ops;

/// The bytes that fill the memory before an op runs.
const PATTERNS: [u8; 2] = [0x4e, 0x2b];

/// Number of tensors of each size that leave the pattern before each op. An op with its
/// scratch memory takes fewer.
const TENSORS_PER_SIZE: usize = 24;

/// Sizes in bytes of the tensors that leave the pattern, besides those of the op's outputs:
/// kernels take scratch memory of about these sizes.
const SCRATCH_BYTES: [usize; 2] = [4 << 10, 256 << 10];

/// The maximum share of ops, in percent, that a kind of device may lack.
const LACKING_PERCENT: usize = 2;

/// An op's name, and its outputs or the reason of its fault.
type OpResult = (OpName, Result<Vec<Bytes>, String>);

fn each_tensor(op: &mut OperationIr, visit: impl FnMut(&mut TensorIr)) {
    struct Visit<F>(F);
    impl<F: FnMut(&mut TensorIr)> IrVisitorMut for Visit<F> {
        fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
            (self.0)(tensor);
        }
    }
    op.visit_mut(&mut Visit(visit));
}

/// Returns whether an op runs a kernel by itself, without other ranks or a custom op.
fn computes(op: &OperationIr) -> bool {
    use OperationIr as Op;
    !matches!(
        op,
        Op::Init(_) | Op::Drop(_) | Op::Custom(_) | Op::Distributed(_)
    )
}

/// Returns bytes for an input: small numbers, which are valid as indices too.
fn contents(tensor: &TensorIr) -> Vec<u8> {
    let size = tensor_bytes(&tensor.shape, tensor.dtype).expect("a size");
    let width = tensor.dtype.size();
    let value = |number: usize| -> Vec<u8> {
        let small = 0.25 + (number % 5) as f32 * 0.125;
        match tensor.dtype {
            DType::F32 => small.to_le_bytes().to_vec(),
            DType::F16 => burn_backend::f16::from_f32(small).to_le_bytes().to_vec(),
            _ => ((number % 2) as u64).to_le_bytes()[..width].to_vec(),
        }
    };
    (0..size / width.max(1)).flat_map(value).collect()
}

/// Fills tensors of `sizes` bytes with `pattern` and drops them.
async fn fill_and_drop(session: &mut RawSession, pattern: u8, sizes: &[usize]) {
    let value = f32::from_bits(u32::from_le_bytes([pattern; 4]));
    let mut left = Vec::new();
    for size in sizes {
        for _ in 0..TENSORS_PER_SIZE {
            let shape = [size.div_ceil(4)];
            let out = raw::out(session.new_id(), &shape);
            left.push(raw::tensor(out.id.value(), &shape));
            let value = ScalarIr::Float(value.into());
            let full = NumericOperationIr::Full(FullOpIr { out, value });
            session.ops(&[OperationIr::NumericFloat(DType::F32, full)]);
        }
    }
    assert_eq!(session.sync().await.unwrap(), None);
    let drops: Vec<_> = left
        .iter()
        .map(|tensor| OperationIr::Drop(raw::last(tensor)))
        .collect();
    session.ops(&drops);
    assert_eq!(session.sync().await.unwrap(), None);
}

/// Runs `op` in memory that held `pattern`.
async fn run(session: &mut RawSession, mut op: OperationIr, pattern: u8) -> OpResult {
    let name = OpName::of(&op);
    let encoded = session.opened.settings.clone().expect("settings").encoded;
    let settings = DeviceProfile::decode(&encoded).unwrap().settings;
    let mut ids: HashMap<TensorId, TensorId> = HashMap::new();
    let mut inputs = Vec::new();
    each_tensor(&mut op, |tensor| {
        // The device may lack the dtype that the op has on a CPU.
        match tensor.dtype {
            DType::Bool(_) => tensor.dtype = settings.bool_dtype.into(),
            DType::I64 => tensor.dtype = settings.int_dtype.into(),
            _ => {}
        }
        let is_output = tensor.status == TensorStatus::NotInit;
        let id = ids.entry(tensor.id).or_insert_with(|| {
            let id = TensorId::new(session.new_id());
            if !is_output {
                inputs.push(TensorIr {
                    id,
                    ..tensor.clone()
                });
            }
            id
        });
        tensor.id = *id;
    });
    for input in &inputs {
        session.upload_as(input.clone(), contents(input));
    }
    let outputs: Vec<_> = op.outputs().cloned().collect();
    let bytes = |shape: &Shape, dtype| tensor_bytes(shape, dtype).unwrap_or(0).max(4);
    let mut sizes: Vec<_> = outputs.iter().map(|o| bytes(&o.shape, o.dtype)).collect();
    sizes.extend(SCRATCH_BYTES);
    fill_and_drop(session, pattern, &sizes).await;
    session.ops(&[op]);
    let mut made = Vec::new();
    for output in outputs {
        let output = raw::typed(output.id.value(), output.shape.as_slice(), output.dtype);
        match session.fetch(&output).await.unwrap() {
            Ok(bytes) => made.push(bytes),
            Err(fault) => {
                // Takes the fault, which the next op's sync would report otherwise.
                let _ = session.sync().await.unwrap();
                return (name, Err(fault.reason));
            }
        }
    }
    (name, Ok(made))
}

/// Opens a session whose first ops may have to wait for their kernels.
async fn open(target: &Target) -> RawSession {
    let mut session = RawSession::open(target).await.unwrap();
    session.answer_deadline = host::COMPILE_DEADLINE;
    session
}

/// Starts a pool of one worker that has the op `unfilled`.
fn cluster(kind: &str) -> Cluster {
    let mut cluster = host::cluster(&[]);
    let env = [("TENSORD_URL", cluster.worker_url())];
    let log = cluster.path("unfilled.log");
    let process = Process::start_of(&host::example("unfilled"), &[kind], &env, log);
    process.wait_for("joining", |line| line.contains("joined").then_some(()));
    cluster.workers.push(process);
    cluster
}

/// Returns the output of the op `unfilled`, in memory that held `pattern`.
async fn unfilled(session: &mut RawSession, pattern: u8) -> Bytes {
    let out = raw::out(session.new_id(), &[1024]);
    let custom = CustomOpIr {
        id: "unfilled".into(),
        inputs: Vec::new(),
        outputs: vec![out],
        scalars: Vec::new(),
    };
    let (_, made) = run(session, OperationIr::Custom(custom), pattern).await;
    made.expect("a value").remove(0)
}

#[test]
fn outputs_reveal_no_previous_memory() {
    for kind in host::kinds() {
        let cluster = cluster(&format!("{kind}:0"));
        raw::block(async {
            let mut attached = ClientStream::to(cluster.client_url()).await.unwrap();
            let target = attached.lease(1).await.unwrap().remove(0);
            let mut session = open(&target).await;
            for pattern in PATTERNS {
                let shown = unfilled(&mut session, pattern).await;
                assert!(
                    shown.iter().all(|byte| *byte == pattern),
                    "{kind} does not reuse the memory that was freed last: {:?}",
                    &shown[..16]
                );
            }
            let mut runs = Vec::new();
            for pattern in PATTERNS {
                // Every new session draws the same random numbers.
                let mut session = open(&target).await;
                let mut made = Vec::new();
                for op in sample_ops().into_iter().filter(computes) {
                    made.push(run(&mut session, op, pattern).await);
                }
                runs.push(made);
            }
            check(kind, &runs[0], &runs[1]);
        });
    }
}

fn check(kind: &str, one: &[OpResult], other: &[OpResult]) {
    assert_eq!(one.len(), other.len());
    let (mut lacking, mut differing) = (Vec::new(), Vec::new());
    for ((name, one), (_, other)) in one.iter().zip(other) {
        match (one, other) {
            (Ok(one), Ok(other)) if one == other => {}
            (Err(one), Err(other)) if one == other => lacking.push(format!("{name}: {one}")),
            _ => differing.push(name),
        }
    }
    println!(
        "{kind}: {} ops; failed: {}",
        one.len(),
        lacking.join("\n  ")
    );
    assert!(
        differing.is_empty(),
        "{kind}: the outputs of these ops depend on what memory held before: {differing:?}"
    );
    assert!(
        lacking.len() * 100 <= one.len() * LACKING_PERCENT,
        "{kind}: {} of {} ops failed",
        lacking.len(),
        one.len()
    );
}
