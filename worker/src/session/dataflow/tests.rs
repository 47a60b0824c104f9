//! Tests of the table alone: which ops may run. The tests of costs are in `costs`.

mod costs;

use burn_ir::{BinaryOpIr, NumericOperationIr};

use super::*;
use crate::{backend::StorageInfo, memory::DeviceMemory};

/// Bytes charged for a tensor of these tests.
const TENSOR: u64 = 16 + NAME_BYTES;

/// The lookup of a backend that does not report storages.
fn unknown(_: &TensorIr) -> Option<StorageInfo> {
    None
}

/// Returns the bytes charged for a tensor that is the only one with a fault of this
/// reason.
fn poisoned(reason: &str) -> u64 {
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
fn memory_follows_the_tensors() {
    let (mut flow, device) = flow(4 * TENSOR);
    let op = add(1, tensor(2, TensorStatus::ReadWrite), 3);
    flow.begin(&op).unwrap();
    assert_eq!(device.live_bytes(), 3 * TENSOR);
    flow.finish(&mut unknown);
    assert_eq!((flow.len(), device.live_bytes()), (2, 2 * TENSOR));
    let drop = OperationIr::Drop(tensor(3, TensorStatus::ReadWrite));
    flow.begin(&drop).unwrap();
    flow.finish(&mut unknown);
    assert_eq!((flow.len(), device.live_bytes()), (1, TENSOR));
}

#[test]
fn what_an_op_that_was_refused_would_have_made_does_not_come_to_be() {
    let (mut flow, device) = flow(2 * TENSOR + 8);
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
        flow.finish(&mut unknown);
    }
    assert_eq!((flow.len(), device.live_bytes()), (2, 2 * TENSOR));
}

#[test]
fn an_op_over_the_capacity_is_refused_with_both_numbers() {
    let (mut flow, device) = flow(2 * TENSOR + 8);
    let op = add(1, tensor(2, TensorStatus::ReadOnly), 3);
    let refusal = flow.begin(&op).unwrap_err();
    assert_eq!(
        refusal,
        Refusal::New(FaultKind::OutOfMemory, "1.0 KiB requested, 8 B free".into())
    );
    flow.poison(&op, &fault("full"));
    assert_eq!(device.live_bytes(), 2 * TENSOR + poisoned("full"));
}

#[test]
fn the_first_cause_travels_and_the_rest_is_untouched() {
    let (mut flow, device) = flow(100 * TENSOR);
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
    flow.finish(&mut unknown);
    assert_eq!(device.live_bytes(), 3 * TENSOR + poisoned("first"));
}

#[test]
fn a_failed_op_gives_its_memory_back_and_names_what_to_forget() {
    let (mut flow, device) = flow(100 * TENSOR);
    let op = add(1, tensor(2, TensorStatus::ReadWrite), 3);
    flow.begin(&op).unwrap();
    let left = flow.fail(&fault("panic"));
    let made = tensor(3, TensorStatus::NotInit);
    assert_eq!(left, [tensor(2, TensorStatus::ReadWrite), made]);
    assert_eq!(device.live_bytes(), TENSOR + poisoned("panic"));
}

#[test]
fn an_op_on_what_burn_cannot_run_is_refused() {
    let (mut flow, device) = flow(100 * TENSOR);
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
    let left = TENSOR + poisoned("unsupported");
    assert_eq!((flow.len(), device.live_bytes()), (2, left));
}

#[test]
fn a_wrong_belief_about_a_tensor_is_refused() {
    let (mut flow, _) = flow(100 * TENSOR);
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
