//! Every kind of op in Burn's IR.

use std::collections::BTreeSet;

use burn_backend::Slice;
use burn_ir::{
    BaseOperationIr, BatchNormOpIr, ClampOpIr, CustomOpIr, ModuleOperationIr, NumericOperationIr,
    PadModeIr, PadOpIr, ScalarIr, ScalarOpIr, SliceOpIr,
};

use super::{super::flatten::FlatOp, super::template::Template, *};

/// Reads an op of any kind from random bytes, mostly small ones so that they are valid;
/// `None` if they are not.
pub(super) fn any_op(rng: &mut Rng) -> Option<OperationIr> {
    let mut bytes = [0; 160];
    for byte in &mut bytes {
        *byte = match rng.below(12) {
            0 => rng.below(16) as u8,
            _ => rng.below(3) as u8,
        };
    }
    bytes[0] = rng.below(14) as u8;
    bytes[1] = rng.below(70) as u8;
    bytes[2] = rng.below(70) as u8;
    let (op, _) = postcard::take_from_bytes(&bytes).ok()?;
    Some(op)
}

/// Ops with features that are rare in random bytes.
fn unusual_ops() -> Vec<OperationIr> {
    let float = |op| OperationIr::NumericFloat(DType::F32, op);
    let pad = PadOpIr {
        input: tensor(7),
        out: tensor(8),
        padding: vec![(1, 2), (300, 4)],
        mode: PadModeIr::Constant(ScalarIr::Float(f64::NAN)),
    };
    let norm = BatchNormOpIr {
        x: tensor(1),
        gamma: tensor(2),
        beta: tensor(3),
        mean: tensor(u64::MAX),
        variance: tensor(u64::MAX - 1),
        epsilon: ScalarIr::Float(1e-5),
        out: tensor(0),
    };
    let slice = SliceOpIr {
        tensor: tensor(1 << 63),
        ranges: vec![Slice::new(-5, None, -1), Slice::new(0, Some(isize::MAX), 1)],
        out: tensor(11),
    };
    let clamp = ClampOpIr {
        tensor: tensor(12),
        min: ScalarIr::Int(i64::MIN),
        max: ScalarIr::UInt(u64::MAX),
        out: tensor(13),
    };
    let scalars = vec![
        ScalarIr::Bool(true),
        ScalarIr::Bool(false),
        ScalarIr::Float(-0.0),
    ];
    let inputs: Vec<_> = (0..100).map(tensor).collect();
    let custom = CustomOpIr::with_scalars("my_op_ü", &inputs, &[], scalars);
    let elem = ScalarOpIr {
        lhs: tensor(14),
        rhs: ScalarIr::Float(f64::MIN_POSITIVE),
        out: tensor(15),
    };
    vec![
        float(NumericOperationIr::Pad(pad)),
        OperationIr::Module(ModuleOperationIr::BatchNorm(norm)),
        OperationIr::BaseFloat(BaseOperationIr::Slice(slice)),
        float(NumericOperationIr::Clamp(clamp)),
        OperationIr::Custom(custom),
        OperationIr::Custom(CustomOpIr::new("", &[], &[])),
        float(NumericOperationIr::GreaterElem(elem)),
    ]
}

fn assert_spelt_as_postcard_does(op: &OperationIr) {
    let mut flat = FlatOp::default();
    flat.take(op).unwrap();
    let FlatOp { bytes, holes, .. } = &flat;
    let mut plain = Vec::new();
    Template { bytes, holes }.fill(flat.values.iter().copied(), &mut plain);
    assert_eq!(plain, postcard::to_stdvec(op).unwrap(), "{op:?}");
    assert!(plain.len() <= flat.plain_bytes());
}

#[test]
fn ops_of_every_kind_survive_the_round_trip() {
    let mut rng = Rng(1);
    let mut pair = Pair::default();
    let mut names = BTreeSet::new();
    for _ in 0..20_000 {
        let Some(op) = any_op(&mut rng) else {
            continue;
        };
        names.insert(OpName::of(&op));
        assert_spelt_as_postcard_does(&op);
        pair.send(&[op.clone(), op]);
    }
    pair.assert_in_step();
    assert!(names.len() > 200, "{}: {names:?}", names.len());
}

#[test]
fn unusual_ops_survive_the_round_trip() {
    let ops = unusual_ops();
    ops.iter().for_each(assert_spelt_as_postcard_does);
    let names: Vec<String> = ops.iter().map(named).collect();
    let expected = [
        "NumericFloat.Pad",
        "Module.BatchNorm",
        "BaseFloat.Slice",
        "NumericFloat.Clamp",
        "Custom",
        "Custom",
        "NumericFloat.GreaterElem",
    ];
    assert_eq!(names, expected);
    let mut pair = Pair::default();
    for _ in 0..3 {
        pair.send(&ops);
        pair.assert_in_step();
    }
}
