//! The types of numbers that a device lacks.

use burn_backend::DType;
use burn_ir::OperationIr;

/// The types of numbers that a device cannot even store, for the check of each op.
///
/// CubeCL compiles a kernel on a thread of its own. If that fails, as with a type that the device
/// lacks, it reports nothing to the caller, and the output has whatever was in its memory. So no op
/// with such a type may reach the backend.
#[derive(Debug)]
pub(super) struct LackingDtypes {
    /// The device's name in messages.
    device: String,
    dtypes: Vec<DType>,
}

impl LackingDtypes {
    /// Collects the dtypes among `all` that the device lacks, as `is_there` returns. `chooses_bools` is whether the
    /// device has bools in a type of its own choice, so that it lacks none. Flex takes a bool of 4 bytes for
    /// one of 1.
    pub(super) fn new(
        device: String,
        all: &[DType],
        chooses_bools: bool,
        is_there: impl Fn(DType) -> bool,
    ) -> Self {
        // Devices have `flex32` in a type of their own choice.
        let is_own_choice =
            |dtype: &DType| chooses_bools && dtype.is_bool() || *dtype == DType::Flex32;
        let dtypes = all.iter().copied();
        let dtypes = dtypes.filter(|dtype| !is_own_choice(dtype) && !is_there(*dtype));
        Self {
            device,
            dtypes: dtypes.collect(),
        }
    }

    /// Returns why the device cannot execute `op`, if one of its inputs or outputs has a type that
    /// the device lacks.
    pub(super) fn error(&self, op: &OperationIr) -> Option<String> {
        // A drop computes nothing, and only the handler of a custom op knows what it does.
        if self.dtypes.is_empty() || matches!(op, OperationIr::Drop(_) | OperationIr::Custom(_)) {
            return None;
        }
        let mut dtypes = op.inputs().chain(op.outputs()).map(|tensor| tensor.dtype);
        let lacking = dtypes.find(|dtype| self.dtypes.contains(dtype))?;
        Some(format!(
            "the device {} has no {}; use a type for which Device::supports_dtype is true",
            self.device,
            lacking.name()
        ))
    }
}

#[cfg(test)]
mod tests {
    use burn_ir::{
        BaseOperationIr, CastOpIr, CreationOpIr, CustomOpIr, NumericOperationIr, ScalarIr,
        ScalarOpIr, TensorId, TensorIr, TensorStatus,
    };

    use super::*;

    fn tensor(id: u64, dtype: DType) -> TensorIr {
        TensorIr::uninit(TensorId::new(id), [2].into(), dtype)
    }

    fn cast(from: DType, to: DType) -> OperationIr {
        let (input, out) = (tensor(1, from), tensor(2, to));
        OperationIr::BaseFloat(BaseOperationIr::Cast(CastOpIr { input, out }))
    }

    fn add(dtype: DType) -> OperationIr {
        let (lhs, out) = (tensor(1, dtype), tensor(2, dtype));
        let rhs = ScalarIr::Float(1.0);
        let add = NumericOperationIr::AddScalar(ScalarOpIr { lhs, rhs, out });
        OperationIr::NumericFloat(dtype, add)
    }

    #[test]
    fn ops_with_types_that_a_device_lacks_are_refused() {
        use DType::{BF16, Bool, F16, F32, Flex32};
        let native = Bool(burn_backend::BoolStore::Native);
        let all = [F32, F16, BF16, Flex32, native];
        let lacking = |lacks: &[DType]| {
            let is_there = |dtype| !lacks.contains(&dtype);
            LackingDtypes::new("a GPU".into(), &all, true, is_there)
        };
        let without_bf16 = lacking(&[BF16, Flex32, native]);
        let dropped = OperationIr::Drop(TensorIr {
            status: TensorStatus::ReadWrite,
            ..tensor(1, BF16)
        });
        let custom = OperationIr::Custom(CustomOpIr {
            id: "own".into(),
            inputs: vec![tensor(1, BF16)],
            outputs: vec![tensor(2, BF16)],
            scalars: Vec::new(),
        });
        for (op, is_refused) in [
            (add(F32), false),
            (add(F16), false),
            (add(BF16), true),
            (add(Flex32), false),
            (cast(F32, BF16), true),
            (cast(BF16, F32), true),
            (cast(F32, F16), false),
            (dropped, false),
            (custom, false),
        ] {
            let error = without_bf16.error(&op);
            assert_eq!(error.is_some(), is_refused, "{op:?}");
            if let Some(error) = error {
                assert!(error.contains("the device a GPU has no bf16"), "{error}");
            }
            assert_eq!(lacking(&[]).error(&op), None, "{op:?}");
        }
    }

    #[test]
    fn bools_are_refused_where_the_device_does_not_choose_their_type() {
        let wide = DType::Bool(burn_backend::BoolStore::U32);
        let create = |dtype| {
            let out = tensor(1, dtype);
            OperationIr::BaseBool(BaseOperationIr::Zeros(CreationOpIr { out }))
        };
        for (chooses_bools, is_refused) in [(true, false), (false, true)] {
            let is_there = |dtype| dtype != wide;
            let lacking = LackingDtypes::new("CPU".into(), &[wide], chooses_bools, is_there);
            assert_eq!(lacking.error(&create(wide)).is_some(), is_refused);
            let native = DType::Bool(burn_backend::BoolStore::Native);
            assert_eq!(lacking.error(&create(native)), None);
        }
    }
}
