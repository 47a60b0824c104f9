//! An op of each variant, with which the fuzzer begins.

use std::collections::BTreeMap;

use burn_backend::{BoolStore, DType, Shape};
use burn_ir::{
    BaseOperationIr, DequantizeOpIr, FloatOperationIr, InitOperationIr, NumericOperationIr,
    OperationIr, QuantizationParametersIr, QuantizeOpIr, TensorId, TensorIr, TensorStatus,
};
use burn_std::quantization::QuantScheme;
use tensord_proto::{
    codec::OpName,
    collective_op::{AllReduce, CollectiveOp},
};
use tensord_worker::testing::sample_ops;

/// Variants that are always refused. No client sends them; the last one is missing in Flex,
/// which clients know from the device's profile.
pub const NEVER_EXECUTED: [&str; 7] = [
    "BaseBool.Cast",
    "BaseBool.GatherNd",
    "BaseBool.ScatterNd",
    "NumericFloat.IntRandom",
    "Float.Quantize",
    "Float.Dequantize",
    "Module.CtcLossBackward",
];

/// Variants without arguments, which cannot be invalid.
pub const NEVER_REFUSED: [&str; 1] = ["Distributed.SyncCollective"];

/// An op of each variant, with its name.
pub struct Templates {
    ops: Vec<(OpName, OperationIr)>,
    numbers: BTreeMap<OpName, usize>,
}

impl Default for Templates {
    fn default() -> Self {
        let mut ops = sample_ops();
        for op in &mut ops {
            if let Some(CollectiveOp::AllReduce(reduce)) = CollectiveOp::of(op) {
                let lease_ranks = vec![0];
                *op = CollectiveOp::AllReduce(AllReduce {
                    lease_ranks,
                    ..reduce
                })
                .into();
            }
        }
        let others: Vec<_> = ops.iter().flat_map(elsewhere).collect();
        ops.extend(others);
        ops.extend(quantized());
        let out = tensor([2, 3], TensorStatus::NotInit);
        ops.push(OperationIr::Init(InitOperationIr { out }));
        let ops: Vec<_> = ops.into_iter().map(|op| (OpName::of(&op), op)).collect();
        let numbers = ops.iter().enumerate().map(|(i, (name, _))| (*name, i));
        Self {
            numbers: numbers.collect(),
            ops,
        }
    }
}

impl Templates {
    /// Returns the number of templates.
    pub fn len(&self) -> usize {
        self.ops.len()
    }

    /// Returns whether there are no templates.
    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    /// Returns the number of a variant.
    pub fn number(&self, name: OpName) -> Option<usize> {
        self.numbers.get(&name).copied()
    }

    /// Returns the name and the op of a variant.
    pub fn get(&self, number: usize) -> &(OpName, OperationIr) {
        &self.ops[number]
    }
}

/// Returns `op` in those other families of the IR in which no client uses it.
fn elsewhere(op: &OperationIr) -> Vec<OperationIr> {
    use BaseOperationIr as Base;
    match op {
        OperationIr::BaseFloat(Base::Cast(op)) => {
            vec![OperationIr::BaseBool(Base::Cast(op.clone()))]
        }
        OperationIr::BaseFloat(op @ (Base::GatherNd(_) | Base::ScatterNd(_))) => {
            let mut op = OperationIr::BaseBool(op.clone());
            super::each_tensor(&mut op, |tensor| {
                if tensor.dtype == DType::F32 {
                    tensor.dtype = DType::Bool(BoolStore::Native);
                }
            });
            vec![op]
        }
        OperationIr::NumericInt(_, op @ NumericOperationIr::IntRandom(_)) => {
            vec![OperationIr::NumericFloat(DType::F32, op.clone())]
        }
        _ => Vec::new(),
    }
}

fn quantized() -> [OperationIr; 2] {
    let scheme = QuantScheme::default();
    let read = || tensor([4], TensorStatus::ReadOnly);
    let typed = |status| TensorIr {
        dtype: DType::QFloat(scheme),
        ..tensor([4], status)
    };
    let quantize = QuantizeOpIr {
        tensor: read(),
        qparams: QuantizationParametersIr {
            scales: read(),
            global: None,
        },
        scheme,
        out: typed(TensorStatus::NotInit),
    };
    let dequantize = DequantizeOpIr {
        input: typed(TensorStatus::ReadOnly),
        out: tensor([4], TensorStatus::NotInit),
    };
    [
        FloatOperationIr::Quantize(quantize),
        FloatOperationIr::Dequantize(dequantize),
    ]
    .map(|op| OperationIr::Float(DType::F32, op))
}

fn tensor<const N: usize>(dims: [usize; N], status: TensorStatus) -> TensorIr {
    TensorIr {
        id: TensorId::new(0),
        shape: Shape::from(dims),
        status,
        dtype: DType::F32,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::execute::variants;

    #[test]
    fn every_op_variant_has_a_template() {
        let templates = Templates::default();
        let have = templates.ops.iter().map(|(name, _)| name.to_string());
        let have: BTreeSet<String> = have.collect();
        let all: BTreeSet<String> = variants::names().into_iter().collect();
        assert_eq!(have, all);
        assert_eq!(templates.len(), all.len(), "each once");
        for name in NEVER_EXECUTED.iter().chain(&NEVER_REFUSED) {
            assert!(all.contains(*name), "{name}");
        }
    }
}
