//! Tests of the bytes charged, which must be exact.

use std::collections::HashMap;

use burn_flex::Flex;
use burn_ir::{BackendIr, BaseOperationIr, ShapeOpIr, UnaryOpIr};

use super::{
    super::account::{TABLE_BYTES, TABLE_NAMES},
    *,
};

/// The storages of a backend that reports them: id and bytes, by tensor.
#[derive(Default)]
struct Storages(HashMap<u64, (usize, u64)>);

impl Storages {
    fn lookup(&self, tensor: &TensorIr) -> Option<StorageInfo> {
        let (id, bytes) = *self.0.get(&tensor.id.value())?;
        let users = self.0.values().filter(|(of, _)| *of == id).count();
        Some(StorageInfo {
            id,
            bytes,
            is_shared: users > 1,
        })
    }
}

fn last_use(id: u64) -> TensorIr {
    tensor(id, TensorStatus::ReadWrite)
}

fn drop_tensor(flow: &mut Dataflow, id: u64) {
    // A drop is finished even if it is refused.
    let _ = flow.begin(&OperationIr::Drop(last_use(id)));
    flow.finish(&mut no_lookup);
}

fn sized(id: u64, elements: usize, status: TensorStatus) -> TensorIr {
    TensorIr {
        shape: Shape::new([elements]),
        ..tensor(id, status)
    }
}

fn view(input: TensorIr, out: TensorIr) -> OperationIr {
    OperationIr::BaseFloat(BaseOperationIr::Reshape(ShapeOpIr { input, out }))
}

fn neg(input: TensorIr, out: TensorIr) -> OperationIr {
    let op = NumericOperationIr::Neg(UnaryOpIr { input, out });
    OperationIr::NumericFloat(DType::F32, op)
}

/// Runs `op`, after which the backend reports these storages.
fn run(flow: &mut Dataflow, op: &OperationIr, storages: &[(u64, (usize, u64))]) {
    flow.begin(op).unwrap();
    let storages = Storages(storages.iter().copied().collect());
    flow.finish(&mut |tensor| storages.lookup(tensor));
}

#[test]
fn alias_keeps_the_storage_in_any_drop_order() {
    for order in [[1, 3, 4], [4, 3, 1], [3, 1, 4]] {
        let (mut flow, device) = flow(100 * TENSOR_COST);
        drop_tensor(&mut flow, 2);
        for (id, source) in [(3, 1), (4, 3)] {
            let ids = [id, source].map(TensorId::new);
            flow.alias(ids[0], ids[1], &mut no_lookup).unwrap();
        }
        assert_eq!(device.live_bytes(), 16 + 3 * NAME_BYTES);
        for (at, id) in order.into_iter().enumerate() {
            let storage = 16;
            assert_eq!(device.live_bytes(), storage + (3 - at as u64) * NAME_BYTES);
            drop_tensor(&mut flow, id);
        }
        assert_eq!((flow.len(), device.live_bytes()), (0, 0));
    }
}

#[test]
fn alias_over_capacity_is_refused() {
    let (mut flow, device) = flow(2 * TENSOR_COST + NAME_BYTES - 1);
    let refused = flow.alias(TensorId::new(3), TensorId::new(1), &mut no_lookup);
    assert!(matches!(
        refused,
        Err(Refusal::New(FaultKind::OutOfMemory, _))
    ));
    assert_eq!(device.live_bytes(), 2 * TENSOR_COST);
}

#[test]
fn view_that_outlives_its_tensor_is_charged_the_whole_storage() {
    let (mut flow, device) = flow(100 * TENSOR_COST);
    drop_tensor(&mut flow, 2);
    let slice = view(
        tensor(1, TensorStatus::ReadOnly),
        sized(3, 1, TensorStatus::NotInit),
    );
    run(&mut flow, &slice, &[(1, (77, 16)), (3, (77, 16))]);
    assert_eq!(device.live_bytes(), 16 + 2 * NAME_BYTES);
    drop_tensor(&mut flow, 1);
    assert_eq!(device.live_bytes(), TENSOR_COST);
    // An op on the view that works in place keeps the storage; one that copies frees it.
    let in_place = neg(
        sized(3, 1, TensorStatus::ReadWrite),
        sized(4, 1, TensorStatus::NotInit),
    );
    run(&mut flow, &in_place, &[(4, (77, 16))]);
    assert_eq!(device.live_bytes(), TENSOR_COST);
    let copy = neg(
        sized(4, 1, TensorStatus::ReadWrite),
        sized(5, 1, TensorStatus::NotInit),
    );
    run(&mut flow, &copy, &[(5, (78, 4))]);
    assert_eq!(device.live_bytes(), 4 + NAME_BYTES);
    drop(flow);
    assert_eq!(device.live_bytes(), 0);
}

#[test]
fn expanded_view_is_charged_its_own_size() {
    let (mut flow, device) = flow(100 * TENSOR_COST);
    let expand = view(last_use(1), sized(3, 1000, TensorStatus::NotInit));
    run(&mut flow, &expand, &[(3, (77, 16))]);
    assert_eq!(device.live_bytes(), 2 * TENSOR_COST);
}

#[test]
fn copied_view_has_its_own_storage() {
    let (mut flow, device) = flow(100 * TENSOR_COST);
    let copied = view(
        tensor(1, TensorStatus::ReadOnly),
        tensor(3, TensorStatus::NotInit),
    );
    run(&mut flow, &copied, &[(1, (77, 16)), (3, (78, 20))]);
    assert_eq!(
        device.live_bytes(),
        3 * TENSOR_COST + 4,
        "as it is, not as it seems"
    );
}

#[test]
fn storage_at_a_reused_address_is_a_new_storage() {
    let (mut flow, device) = flow(100 * TENSOR_COST);
    flow.alias(TensorId::new(3), TensorId::new(1), &mut |_| {
        Some(StorageInfo {
            id: 77,
            bytes: 16,
            is_shared: true,
        })
    })
    .unwrap();
    drop_tensor(&mut flow, 1);
    drop_tensor(&mut flow, 2);
    // The storage has another user, which is not in the table.
    flow.begin(&view(last_use(3), sized(4, 1, TensorStatus::NotInit)))
        .unwrap();
    flow.finish(&mut |_| {
        Some(StorageInfo {
            id: 77,
            bytes: 4,
            is_shared: true,
        })
    });
    assert_eq!(device.live_bytes(), 4 + NAME_BYTES);
}

#[test]
fn unknown_storage_keeps_possible_aliases_charged() {
    let (mut flow, device) = flow(100 * TENSOR_COST);
    drop_tensor(&mut flow, 2);
    let slice = view(
        tensor(1, TensorStatus::ReadOnly),
        sized(3, 1, TensorStatus::NotInit),
    );
    run(&mut flow, &slice, &[]);
    assert_eq!(device.live_bytes(), 16 + 4 + 2 * NAME_BYTES);
    drop_tensor(&mut flow, 1);
    assert_eq!(device.live_bytes(), 16 + 4 + NAME_BYTES);
    let on = neg(
        sized(3, 1, TensorStatus::ReadWrite),
        sized(4, 1, TensorStatus::NotInit),
    );
    run(&mut flow, &on, &[]);
    assert_eq!(
        device.live_bytes(),
        16 + 4 + NAME_BYTES,
        "it may be in place"
    );
    drop_tensor(&mut flow, 4);
    assert_eq!(device.live_bytes(), 0);
}

#[test]
fn possible_alias_costs_at_most_the_larger_storage() {
    let (mut flow, device) = flow(100 * TENSOR_COST);
    drop_tensor(&mut flow, 2);
    let slice = view(last_use(1), sized(3, 1, TensorStatus::NotInit));
    run(&mut flow, &slice, &[]);
    assert_eq!(device.live_bytes(), TENSOR_COST);
    let expand = view(
        sized(3, 1, TensorStatus::ReadWrite),
        sized(4, 100, TensorStatus::NotInit),
    );
    run(&mut flow, &expand, &[]);
    assert_eq!(device.live_bytes(), 400 + NAME_BYTES);
    drop_tensor(&mut flow, 4);
    assert_eq!(device.live_bytes(), 0);
}

#[test]
fn reply_keeps_its_storage_after_tensor_and_session_end() {
    let (mut flow, device) = flow(100 * TENSOR_COST);
    let held = flow
        .share_storage(TensorId::new(1), &mut no_lookup)
        .unwrap();
    assert_eq!(device.live_bytes(), 2 * TENSOR_COST);
    flow.release(&last_use(1));
    assert_eq!(device.live_bytes(), TENSOR_COST + 16);
    drop(flow);
    assert_eq!(device.live_bytes(), 16);
    drop(held);
    assert_eq!(device.live_bytes(), 0);
}

#[test]
fn fault_texts_are_charged_once_and_names_each() {
    let (mut flow, device) = flow(100 * TENSOR_COST);
    let (one, other) = (fault("one"), fault("another"));
    let before = device.live_bytes();
    for id in 3..6 {
        flow.insert_poisoned(TensorId::new(id), one.clone());
    }
    flow.insert_poisoned(TensorId::new(6), other.clone());
    let cost = fault_cost("one") + 2 * NAME_BYTES + fault_cost("another");
    assert_eq!(device.live_bytes() - before, cost);
    for id in [4, 3, 6, 5] {
        drop_tensor(&mut flow, id);
    }
    assert_eq!(device.live_bytes(), before);
}

#[test]
fn uncharged_faults_are_bounded() {
    let (mut flow, device) = flow(2 * TENSOR_COST);
    let fault = fault("full");
    for id in 3..10_000 {
        flow.insert_poisoned(TensorId::new(id), fault.clone());
    }
    let beyond = device.live_bytes() - 2 * TENSOR_COST;
    assert!(beyond <= 1 << 20 && beyond > 1 << 19, "{beyond}");
    assert!(flow.len() > 500, "{}", flow.len());
    (3..10_000).for_each(|id| drop_tensor(&mut flow, id));
    assert_eq!(device.live_bytes(), 2 * TENSOR_COST);
}

#[test]
fn empty_tensors_are_not_free() {
    let (mut flow, device) = flow(2 * TENSOR_COST + 10 * NAME_BYTES);
    let make = |id| {
        neg(
            tensor(1, TensorStatus::ReadOnly),
            sized(id, 0, TensorStatus::NotInit),
        )
    };
    for id in 3..13 {
        flow.begin(&make(id)).unwrap();
        flow.finish(&mut no_lookup);
    }
    assert_eq!(device.live_bytes(), 2 * TENSOR_COST + 10 * NAME_BYTES);
    let refusal = flow.begin(&make(13)).unwrap_err();
    assert!(matches!(refusal, Refusal::New(FaultKind::OutOfMemory, _)));
}

#[test]
fn tables_are_charged_for_their_peak_size() {
    let (mut flow, device) = flow(u64::MAX);
    let fault = fault("x");
    let names = 2 * TABLE_NAMES as u64 + 1;
    (3..=names).for_each(|id| flow.insert_poisoned(TensorId::new(id), fault.clone()));
    (1..=names).for_each(|id| drop_tensor(&mut flow, id));
    assert_eq!(flow.len(), 0);
    assert_eq!(device.live_bytes(), 2 * TABLE_NAMES as u64 * TABLE_BYTES);
    drop(flow);
    assert_eq!(device.live_bytes(), 0);
}

#[test]
fn table_entry_cost_matches_its_memory() {
    type Handles = HashMap<TensorId, burn_ir::Handle<<Flex as BackendIr>::Handle>>;
    fn entry<K, V, S>(_: Option<HashMap<K, V, S>>) -> usize {
        size_of::<(K, V)>()
    }
    let ours = entry(None::<HashMap<TensorId, TensorState, RandomState>>);
    let backends = entry(None::<Handles>);
    // A table is at most seven eighths full, and half of that just after it grew. Each
    // entry has one control byte in addition.
    let bytes = (ours + backends + 2) * 16 / 7;
    assert!(
        bytes as u64 <= TABLE_BYTES,
        "{ours} and {backends}: {bytes}"
    );
}

#[test]
fn scratch_memory_is_taken_while_the_op_runs() {
    let (mut flow, device) = flow(3 * TENSOR_COST + 100);
    let op = add(1, tensor(2, TensorStatus::ReadOnly), 3);
    let scratch = flow.reserve(101).unwrap();
    assert!(matches!(
        flow.begin(&op),
        Err(Refusal::New(FaultKind::OutOfMemory, _))
    ));
    drop(scratch);
    let scratch = flow.reserve(100).unwrap();
    flow.begin(&op).unwrap();
    assert_eq!(device.live_bytes(), 3 * TENSOR_COST + 100);
    drop(scratch);
    flow.finish(&mut no_lookup);
    assert_eq!(device.live_bytes(), 3 * TENSOR_COST);
}

#[test]
fn output_listed_twice_is_one_tensor() {
    let (mut flow, device) = flow(100 * TENSOR_COST);
    let out = || tensor(3, TensorStatus::NotInit);
    let op = burn_ir::CustomOpIr::new("twice", &[], &[out(), out()]);
    flow.begin(&OperationIr::Custom(op)).unwrap();
    flow.finish(&mut no_lookup);
    assert_eq!(device.live_bytes(), 3 * TENSOR_COST);
    drop_tensor(&mut flow, 3);
    assert_eq!(device.live_bytes(), 2 * TENSOR_COST);
}
