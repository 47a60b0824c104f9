//! A test op, by which a device shows that it works.

use burn_backend::{DType, Shape, TensorData};
use burn_ir::{BinaryOpIr, NumericOperationIr, OperationIr, TensorId, TensorIr, TensorStatus};
use tensord_backend::Device;
use tokio::runtime::Handle;

/// Runs a small op on `device` as a session would, and checks the result. Blocks for as
/// long as the device takes, and may panic as backends do.
pub(crate) fn probe(device: &dyn Device, runtime: &Handle) -> Result<(), String> {
    const FIRST: [f32; 3] = [1.0, 2.0, 3.0];
    const SECOND: [f32; 3] = [4.0, 8.0, 16.0];
    const SUM: [f32; 3] = [5.0, 10.0, 19.0];
    let tensor = |id, status| TensorIr {
        id: TensorId::new(id),
        shape: Shape::new([SUM.len()]),
        status,
        dtype: DType::F32,
    };
    let mut store = device.open();
    store.upload(TensorId::new(1), TensorData::from(FIRST));
    store.upload(TensorId::new(2), TensorData::from(SECOND));
    let add = NumericOperationIr::Add(BinaryOpIr {
        lhs: tensor(1, TensorStatus::ReadWrite),
        rhs: tensor(2, TensorStatus::ReadWrite),
        out: tensor(3, TensorStatus::NotInit),
    });
    store.execute(Box::new(OperationIr::NumericFloat(DType::F32, add)));
    let read = store.read(tensor(3, TensorStatus::ReadWrite));
    let read = runtime.block_on(read).map_err(|e| e.reason().to_owned())?;
    store.sync().map_err(|e| e.reason().to_owned())?;
    match read == TensorData::from(SUM) {
        true => Ok(()),
        false => Err(format!("{FIRST:?} + {SECOND:?} gave {read}")),
    }
}
