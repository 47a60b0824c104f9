//! Guarantees of the codec, tested from outside: an op stream survives the round trip
//! whatever it contains, costs little, and no bytes can harm the decoder.

mod corpus;
mod kinds;
mod malformed;
mod mutate;
mod program;
mod step;
mod streams;

use burn_backend::{Distribution, Shape, quantization::QuantScheme};
use burn_ir::{
    BinaryOpIr, FloatOperationIr, InitOperationIr, NumericOperationIr, OperationIr, RandomOpIr,
    TensorId,
};

use super::*;
use crate::collective_op::CollectiveOp;

fn tensor(id: u64) -> TensorIr {
    TensorIr::uninit(TensorId::new(id), Shape::new([2, 3]), DType::F32)
}

fn add(lhs: u64, rhs: u64, out: u64) -> OperationIr {
    let [lhs, rhs, out] = [lhs, rhs, out].map(tensor);
    OperationIr::NumericFloat(
        DType::F32,
        NumericOperationIr::Add(BinaryOpIr { lhs, rhs, out }),
    )
}

fn drop_of(id: u64) -> OperationIr {
    OperationIr::Drop(tensor(id))
}

fn some_ops() -> Vec<OperationIr> {
    let random = RandomOpIr {
        out: tensor(4),
        distribution: Distribution::Uniform(0.0, 1.0),
    };
    vec![
        add(1, 2, 3),
        OperationIr::Float(DType::F32, FloatOperationIr::Random(random)),
        drop_of(3),
    ]
}

/// The two ends of a stream.
#[derive(Default)]
struct Pair {
    encoder: OpEncoder,
    decoder: OpDecoder,
}

impl Pair {
    fn encode(&mut self, ops: &[OperationIr]) -> Vec<u8> {
        let mut frame = Vec::new();
        ops.iter()
            .for_each(|op| self.encoder.encode(op, &mut frame));
        self.encoder.finish(&mut frame);
        frame
    }

    /// Sends a frame of `ops` across and returns its size.
    fn send(&mut self, ops: &[OperationIr]) -> usize {
        let frame = self.encode(ops);
        let decoded = self.decoder.decode(&frame, ops.len() as u32).unwrap();
        assert_eq!(decoded.len(), ops.len());
        for (decoded, op) in decoded.iter().zip(ops) {
            // Not compared as ops: a NaN is not equal to itself.
            let plain = postcard::to_stdvec(op).unwrap();
            assert!(
                postcard::to_stdvec(&decoded.op).unwrap() == plain,
                "{decoded:?}\nis not\n{op:?}"
            );
            assert_eq!(decoded.plain_bytes as usize, plain.len());
        }
        frame.len()
    }

    fn note(&mut self, id: u64) {
        self.encoder.note_tensor(TensorId::new(id));
        self.decoder.note_tensor(TensorId::new(id));
    }

    fn assert_in_step(&self) {
        assert!(self.encoder.model() == self.decoder.model());
    }
}

/// A random number generator for loops that are too long for proptest: SplitMix64
/// (Steele, Lea and Flood, 2014).
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

fn named(op: &OperationIr) -> String {
    OpName::of(op).to_string()
}

#[test]
fn names_are_short() {
    let names: Vec<String> = some_ops().iter().map(named).collect();
    assert_eq!(names, ["NumericFloat.Add", "Float.Random", "Drop"]);
    let OperationIr::NumericFloat(_, sum) = add(1, 2, 3) else {
        panic!("it is one")
    };
    let out = tensor(1);
    let others = [
        OperationIr::NumericFloat(DType::QFloat(QuantScheme::default()), sum),
        CollectiveOp::Sync.into(),
        OperationIr::Init(InitOperationIr { out }),
    ];
    let names = others.each_ref().map(named);
    assert_eq!(
        names,
        ["NumericFloat.Add", "Distributed.SyncCollective", "Init"]
    );
}

#[test]
fn a_type_that_cannot_be_addressed_is_refused() {
    let rule = |kind: Option<&v1::TensorType>| decode_type(kind).unwrap_err().rule;
    let huge = encode_type(&Shape::new([1 << 40, 1 << 40]), DType::F32);
    assert!(rule(Some(&huge)).contains("more bytes"));
    let shape = vec![1; MAX_RANK + 1];
    let deep = v1::TensorType { shape, ..huge };
    assert!(rule(Some(&deep)).contains("dimensions"));
    assert!(decode_type(None).is_err());
}

#[test]
fn malformed_tensor_error_names_the_offset_and_the_rule() {
    let bytes = encode_tensor(&tensor(5));
    assert_eq!(decode_tensor(&bytes).unwrap(), tensor(5));
    let longer = [&bytes[..], &[0]].concat();
    let no_status = [5, 0, 9, 0];
    let deep = Shape::from(vec![1; MAX_RANK + 1]);
    let deep = encode_tensor(&TensorIr::uninit(TensorId::new(5), deep, DType::F32));
    let cases: [(&[u8], usize, &str); 4] = [
        (&bytes[..3], 3, "end of buffer"),
        (&longer, bytes.len(), "bytes follow the end of the value"),
        (&no_status, 3, ""),
        (&deep, 0, "a shape has 33 dimensions; the limit is 32"),
    ];
    for (bytes, offset, rule) in cases {
        let error = decode_tensor(bytes).unwrap_err();
        assert_eq!((error.what, error.offset), ("tensor", offset), "{error}");
        assert!(
            error.rule.contains(rule) && !error.rule.is_empty(),
            "{error}"
        );
    }
}
