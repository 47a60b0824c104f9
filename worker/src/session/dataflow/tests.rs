//! Tests of the table alone: which ops may run. The tests of costs are in `costs`.

mod costs;

use burn_ir::{BinaryOpIr, NumericOperationIr};
use tensord_backend::StorageInfo;

use super::*;
use crate::memory::DeviceMemory;

/// Bytes charged for a tensor of these tests.
const TENSOR_COST: u64 = 16 + NAME_BYTES;

/// The lookup of a backend that does not report storages.
fn no_lookup(_: &TensorIr) -> Option<StorageInfo> {
    None
}

/// Returns the bytes charged for a tensor that is the only one with a fault of this
/// reason.
fn fault_cost(reason: &str) -> u64 {
    NAME_BYTES + (size_of::<Fault>() + 64 + reason.len()) as u64
}

fn tensor(id: u64, status: TensorStatus) -> TensorIr {
    TensorIr {
        id: TensorId::new(id),
        shape: Shape::new([4]),
        status,
        dtype: DType::F32,
    }
}

fn add(lhs: u64, rhs: TensorIr, out: u64) -> OperationIr {
    let lhs = tensor(lhs, TensorStatus::ReadOnly);
    let out = tensor(out, TensorStatus::NotInit);
    let op = NumericOperationIr::Add(BinaryOpIr { lhs, rhs, out });
    OperationIr::NumericFloat(DType::F32, op)
}

fn flow(capacity: u64) -> (Dataflow, Arc<DeviceMemory>) {
    let device = DeviceMemory::new(capacity);
    let mut flow = Dataflow::new(device.open());
    for id in [1, 2] {
        let mut held = device.open();
        held.take(16 + NAME_BYTES).unwrap();
        flow.insert(TensorId::new(id), Shape::new([4]), DType::F32, held);
    }
    (flow, device)
}

fn fault(reason: &str) -> Arc<Fault> {
    Arc::new(Fault {
        reason: reason.into(),
        ..Fault::default()
    })
}

#[test]
fn memory_is_taken_and_returned_with_tensors() {
    let (mut flow, device) = flow(4 * TENSOR_COST);
    let op = add(1, tensor(2, TensorStatus::ReadWrite), 3);
    flow.begin(&op).unwrap();
    assert_eq!(device.live_bytes(), 3 * TENSOR_COST);
    flow.finish(&mut no_lookup);
    assert_eq!((flow.len(), device.live_bytes()), (2, 2 * TENSOR_COST));
    let drop = OperationIr::Drop(tensor(3, TensorStatus::ReadWrite));
    flow.begin(&drop).unwrap();
    flow.finish(&mut no_lookup);
    assert_eq!((flow.len(), device.live_bytes()), (1, TENSOR_COST));
}

#[test]
fn outputs_of_a_refused_op_are_poisoned() {
    let (mut flow, device) = flow(2 * TENSOR_COST + 8);
    let op = add(1, tensor(2, TensorStatus::ReadOnly), 3);
    flow.begin(&op).unwrap_err();
    flow.poison(&op, &fault("full"));
    let on = add(1, tensor(3, TensorStatus::ReadOnly), 4);
    flow.begin(&on).unwrap_err();
    flow.poison(&on, &fault("full"));
    // A drop is finished even if the tensor is poisoned.
    for id in [4, 3] {
        let drop = OperationIr::Drop(tensor(id, TensorStatus::ReadWrite));
        assert!(matches!(flow.begin(&drop), Err(Refusal::Inherited(_))));
        flow.finish(&mut no_lookup);
    }
    assert_eq!((flow.len(), device.live_bytes()), (2, 2 * TENSOR_COST));
}

#[test]
fn refusal_over_capacity_names_needed_and_free_bytes() {
    let (mut flow, device) = flow(2 * TENSOR_COST + 8);
    let op = add(1, tensor(2, TensorStatus::ReadOnly), 3);
    let refusal = flow.begin(&op).unwrap_err();
    assert_eq!(
        refusal,
        Refusal::New(FaultKind::OutOfMemory, "1.0 KiB requested, 8 B free".into())
    );
    flow.poison(&op, &fault("full"));
    assert_eq!(device.live_bytes(), 2 * TENSOR_COST + fault_cost("full"));
}

#[test]
fn poison_carries_the_first_fault_and_spares_other_tensors() {
    let (mut flow, device) = flow(100 * TENSOR_COST);
    let bad = add(1, tensor(9, TensorStatus::ReadWrite), 3);
    let refusal = flow.begin(&bad).unwrap_err();
    assert!(
        matches!(&refusal, Refusal::New(FaultKind::UnknownTensor, _)),
        "{refusal:?}"
    );
    let first = fault("first");
    flow.poison(&bad, &first);
    let next = add(1, tensor(3, TensorStatus::ReadWrite), 4);
    assert_eq!(flow.begin(&next), Err(Refusal::Inherited(first.clone())));
    flow.poison(&next, &first);
    assert_eq!(
        flow.check(&tensor(4, TensorStatus::ReadOnly)),
        Err(Refusal::Inherited(first))
    );
    let good = add(1, tensor(2, TensorStatus::ReadOnly), 5);
    flow.begin(&good).unwrap();
    flow.finish(&mut no_lookup);
    assert_eq!(device.live_bytes(), 3 * TENSOR_COST + fault_cost("first"));
}

#[test]
fn failed_op_returns_memory_and_lists_tensors_to_drop() {
    let (mut flow, device) = flow(100 * TENSOR_COST);
    let op = add(1, tensor(2, TensorStatus::ReadWrite), 3);
    flow.begin(&op).unwrap();
    let left = flow.fail(&fault("panic"));
    let made = tensor(3, TensorStatus::NotInit);
    assert_eq!(left, [tensor(2, TensorStatus::ReadWrite), made]);
    assert_eq!(device.live_bytes(), TENSOR_COST + fault_cost("panic"));
}

#[test]
fn op_that_burn_cannot_run_is_refused() {
    let (mut flow, device) = flow(100 * TENSOR_COST);
    let quantized = TensorIr {
        dtype: DType::QFloat(burn_std::QuantScheme::default()),
        ..tensor(2, TensorStatus::ReadWrite)
    };
    let op = add(1, quantized, 3);
    let refusal = flow.begin(&op).unwrap_err();
    assert!(
        matches!(&refusal, Refusal::New(FaultKind::Unsupported, _)),
        "{refusal:?}"
    );
    let consumed = flow.poison(&op, &fault("unsupported"));
    assert_eq!(consumed.len(), 1);
    let left = TENSOR_COST + fault_cost("unsupported");
    assert_eq!((flow.len(), device.live_bytes()), (2, left));
}

#[test]
fn mismatched_tensor_type_is_refused() {
    let (mut flow, _) = flow(100 * TENSOR_COST);
    let wrong = TensorIr {
        shape: Shape::new([5]),
        ..tensor(2, TensorStatus::ReadOnly)
    };
    let op = add(1, wrong, 3);
    assert!(matches!(
        flow.begin(&op),
        Err(Refusal::New(FaultKind::Mismatch, _))
    ));
    let wrong = TensorIr {
        dtype: DType::I32,
        ..tensor(2, TensorStatus::ReadOnly)
    };
    assert!(matches!(
        flow.check(&wrong),
        Err(Refusal::New(FaultKind::Mismatch, _))
    ));
    let twice = add(1, tensor(2, TensorStatus::ReadOnly), 1);
    assert!(matches!(
        flow.begin(&twice),
        Err(Refusal::New(FaultKind::Mismatch, _))
    ));
}
