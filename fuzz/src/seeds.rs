//! The first inputs: real streams, in the format of each target. They are generated anew
//! each time and are always the same; `examples/seeds.rs` writes them to files.

use burn_backend::{BoolStore, DType, DeviceSettings, Shape, Slice};
use burn_ir::{
    BaseOperationIr, BinaryOpIr, CustomOpIr, InitOperationIr, NumericOperationIr, OperationIr,
    ScalarIr, ScalarOpIr, SliceOpIr, TensorId, TensorIr,
};
use bytes::Bytes;
use tensord_proto::{
    codec::{DeviceProfile, OpEncoder, encode_tensor, encode_type},
    content::{self, Content, Entry},
    v1::{
        self, Alias, Chunk, Close, Fault, Held, Opened, Ops, Ping, Poison, Reads, Seed, Sync,
        TensorValue, Value, Values, frame, tensor_value, value,
    },
};

use crate::{frames, inference, op_round_trip::Step, op_stream};

/// Returns the seeds of a target.
///
/// # Panics
///
/// If there is no such target.
pub fn of(target: &str) -> Vec<Vec<u8>> {
    match target {
        "op_stream" => streams(),
        "op_round_trip" => programs(),
        "frames" => conversations(),
        "duplex" => scripts(),
        "inference" => inference::seeds(),
        _ => panic!("there is no fuzz target {target}"),
    }
}

/// A random number generator: SplitMix64 (Steele, Lea and Flood, 2014).
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

fn tensor(id: u64) -> TensorIr {
    TensorIr::uninit(TensorId::new(id), Shape::new([2, 3]), DType::F32)
}

/// Returns the ops of one iteration of a loop: an upload, some arithmetic, a slice, drops.
fn round(number: u64) -> Vec<OperationIr> {
    let id = 16 + 4 * number;
    let float = |op| OperationIr::NumericFloat(DType::F32, op);
    let [batch, sum, scaled, part] = [0, 1, 2, 3].map(|i| tensor(id + i));
    let out = batch.clone();
    let add = BinaryOpIr {
        lhs: batch.clone(),
        rhs: tensor(1),
        out: sum.clone(),
    };
    let scale = ScalarOpIr {
        lhs: sum.clone(),
        rhs: ScalarIr::Float(0.9f64.powi(number as i32)),
        out: scaled.clone(),
    };
    let start = number as isize * 64;
    let slice = SliceOpIr {
        tensor: tensor(2),
        ranges: vec![Slice::new(start, Some(start + 64), 1)],
        out: part.clone(),
    };
    vec![
        OperationIr::Init(InitOperationIr { out }),
        float(NumericOperationIr::Add(add)),
        float(NumericOperationIr::MulScalar(scale)),
        OperationIr::BaseFloat(BaseOperationIr::Slice(slice)),
        OperationIr::Drop(batch),
        OperationIr::Drop(sum),
        OperationIr::Drop(scaled),
        OperationIr::Drop(part),
    ]
}

/// Returns ops of all kinds, decoded from random bytes. Most bytes are small, so that many
/// ops are valid.
fn any_ops() -> Vec<OperationIr> {
    let mut rng = Rng(1);
    let bytes = std::iter::repeat_with(|| {
        let mut bytes = [0; 160].map(|_: u8| rng.below(3) as u8);
        bytes[0] = rng.below(14) as u8;
        bytes[1] = rng.below(70) as u8;
        bytes[2] = rng.below(70) as u8;
        bytes
    });
    let ops = bytes.take(3_000);
    ops.filter_map(|bytes| Some(postcard::take_from_bytes(&bytes).ok()?.0))
        .collect()
}

fn large_op() -> OperationIr {
    let inputs: Vec<_> = (0..300).map(tensor).collect();
    OperationIr::Custom(CustomOpIr::new("large", &inputs, &[]))
}

/// Returns frames of ops: loops, loops with an exception, and ops of each kind.
fn op_frames() -> Vec<Vec<Vec<OperationIr>>> {
    let loops = |rounds: u64| (0..rounds).map(round).collect();
    let mut odd: Vec<_> = loops(8);
    odd[5].insert(3, OperationIr::Drop(tensor(9)));
    odd[6].remove(1);
    odd[7].swap(4, 5);
    let mut streams: Vec<Vec<Vec<_>>> = vec![loops(2), loops(6), odd];
    streams.push(vec![vec![large_op()], vec![large_op(), large_op()]]);
    streams.extend(
        any_ops()
            .chunks(8)
            .take(60)
            .map(|ops| vec![ops.to_vec(); 2]),
    );
    streams
}

fn encode(encoder: &mut OpEncoder, ops: &[OperationIr]) -> Vec<u8> {
    let mut frame = Vec::new();
    ops.iter().for_each(|op| encoder.encode(op, &mut frame));
    encoder.finish(&mut frame);
    frame
}

fn streams() -> Vec<Vec<u8>> {
    let seed = |(i, frames): (usize, Vec<Vec<OperationIr>>)| {
        let (mut encoder, mut seed) = (OpEncoder::default(), Vec::new());
        for ops in frames {
            if i % 2 == 1 {
                encoder.note_tensor(TensorId::new(15));
                seed.push(op_stream::NOTE);
                seed.extend(15u64.to_le_bytes());
            }
            let frame = encode(&mut encoder, &ops);
            seed.push(0);
            seed.extend((ops.len() as u16).to_le_bytes());
            seed.extend((frame.len() as u16).to_le_bytes());
            seed.extend(frame);
        }
        seed
    };
    op_frames().into_iter().enumerate().map(seed).collect()
}

fn programs() -> Vec<Vec<u8>> {
    let seed = |frames: Vec<Vec<OperationIr>>| {
        let mut seed = Vec::new();
        for ops in &frames[..1] {
            for op in ops {
                seed.push(Step::Op as u8);
                seed.extend(postcard::to_stdvec(op).expect("ops serialize without failing"));
            }
            seed.extend([Step::Cut as u8, Step::Again as u8, 4, Step::Again as u8, 4]);
            seed.push(Step::Note as u8);
            seed.extend(99u64.to_le_bytes());
            seed.extend([Step::Again as u8, 4, Step::Forget as u8]);
        }
        seed
    };
    op_frames().into_iter().map(seed).collect()
}

/// Returns the ops of an iteration, with the bytes of its upload.
fn ops() -> Ops {
    let ops = round(0);
    let mut contents = Vec::new();
    let entries = [
        Entry::Forget(1),
        Entry::Upload(Content::Inline {
            bytes: Bytes::from_static(&[7; 24]),
            keep: Some(1),
        }),
    ];
    entries
        .iter()
        .for_each(|entry| content::put(&mut contents, entry));
    Ops {
        count: ops.len() as u32,
        encoded: encode(&mut OpEncoder::default(), &ops).into(),
        contents: contents.into(),
    }
}

fn opened() -> Opened {
    let (float, int, bool) = (DType::F32, DType::I32, BoolStore::Native);
    let profile = DeviceProfile {
        settings: DeviceSettings::with_dtypes(float, int, bool),
        dtypes: vec![(DType::F32, 7)],
    };
    let encoded = profile.encode();
    Opened {
        settings: Some(v1::DeviceSettings { encoded }),
        ..Opened::default()
    }
}

/// Returns the body of a frame that replies to a read.
fn value(content: tensor_value::Content) -> frame::Body {
    let tensor = TensorValue {
        r#type: Some(encode_type(&Shape::new([2, 3]), DType::F32)),
        content: Some(content),
    };
    let value = Value {
        request_id: 1,
        result: Some(value::Result::Tensor(tensor)),
    };
    frame::Body::Values(Values {
        values: vec![value],
    })
}

/// Returns a body of each kind.
fn bodies() -> Vec<frame::Body> {
    let bytes = Bytes::from_static(&[7; 24]);
    let poison = Poison {
        tensor_id: 6,
        r#type: Some(encode_type(&Shape::new([2, 3]), DType::F32)),
        fault: Some(Fault::default()),
    };
    let (request_id, tensor) = (1, encode_tensor(&tensor(3)));
    let (tensor_id, source_id) = (7, 5);
    let chunk = Chunk {
        size_bytes: 24,
        bytes: bytes.clone(),
    };
    vec![
        frame::Body::Ops(ops()),
        frame::Body::Reads(Reads {
            request_id,
            tensors: vec![tensor; 2],
        }),
        frame::Body::Sync(Sync {
            request_id,
            share_uploads: true,
        }),
        frame::Body::Seed(Seed { seed: 3 }),
        frame::Body::Poison(poison),
        frame::Body::Alias(Alias {
            tensor_id,
            source_id,
        }),
        value(tensor_value::Content::Payload(0)),
        value(tensor_value::Content::Bytes(bytes.clone())),
        frame::Body::Held(Held { hashes: bytes }),
        frame::Body::Chunk(chunk),
        frame::Body::Opened(opened()),
        frame::Body::Ping(Ping { sent: 4 }),
        frame::Body::Close(Close {}),
    ]
}

/// Returns inputs with each body alone, and one with all bodies in one session.
fn conversations() -> Vec<Vec<u8>> {
    let framed = |seq: u64, body: frame::Body| {
        let frame = frames::encode(seq, seq.min(2), Some(body));
        let mut bytes = (frame.len() as u16).to_le_bytes().to_vec();
        bytes.extend(frame);
        bytes
    };
    let mut seeds: Vec<_> = bodies().into_iter().map(|body| framed(1, body)).collect();
    let all = bodies().into_iter().zip(1..);
    seeds.push(all.flat_map(|(body, seq)| framed(seq, body)).collect());
    seeds
}

fn scripts() -> Vec<Vec<u8>> {
    let script = |seed: u64| {
        let mut rng = Rng(seed);
        (0..40 * seed).map(|_| rng.next() as u8).collect()
    };
    (1..=8).map(script).collect()
}
