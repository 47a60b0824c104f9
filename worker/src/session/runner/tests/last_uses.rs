//! Reads and offers that are refused although they are the last use of a tensor.

use tensord_proto::{bulk::INLINE_BYTES, ids::WorkerId, v1::LeaseShare};

use super::*;
use crate::collective::{Capability, LeaseMembers};

/// A read or an offer that is refused may still be the last use of its tensor. The tensor
/// must then leave the backend as well as the table, or its memory would not be charged.
#[test]
fn refused_last_uses_drop_the_value() {
    let large = INLINE_BYTES / size_of::<f32>() / COLUMNS + 1;
    let full = |program: &mut Program| {
        program.step(ProgramStep::Full(large), false);
        program.pick(program.live.len() - 1, true).unwrap()
    };
    let has_value = |program: &mut Program, tensor: &TensorIr| {
        program.interpreter.tensors.store().is_host_readable(tensor)
    };
    let mut program = Program::new();

    let tensor = full(&mut program);
    assert!(has_value(&mut program, &tensor));
    let mismatched = TensorIr {
        shape: Shape::new([7]),
        ..tensor.clone()
    };
    let Reply::Value { result, .. } = program.interpreter.read(1, mismatched) else {
        panic!("a refused read is replied to at once");
    };
    assert!(result.is_err());
    assert_eq!(program.device.live_bytes(), 0);
    assert!(!has_value(&mut program, &tensor));

    // The device has no room for the copy that an offer holds.
    let tensor = full(&mut program);
    let mut rest = program.device.open();
    rest.take(CAPACITY - program.device.live_bytes()).unwrap();
    let membership = LeaseMembership {
        lease_members: LeaseMembers::new(vec![LeaseShare::default()], WorkerId(1)).into(),
        lease_rank: 0,
        bucket_bytes: Arc::default(),
    };
    let mut collectives = Collectives::new(membership);
    collectives.offer(&mut program.interpreter, &tensor, Capability::default(), 0);
    drop(rest);
    assert_eq!(program.device.live_bytes(), 0);
    assert!(!has_value(&mut program, &tensor));
}
