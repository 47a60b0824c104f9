//! Casts integers on the worker.
//!
//! Burn's interpreter, which the bridge and the worker both use, takes a cast from one integer
//! type to another for unreachable code: it panics, which ends the connection of Burn's client.
//! So Burn's client sends a custom op instead. The bridge makes Burn's own op of it again,
//! which the worker executes without that interpreter.

use burn_backend::{ExecutionError, IntDType, ops::IntTensorOps};
use burn_ir::{CustomOpIr, TensorError};

use super::forward::{Handles, set_error_of_outputs};
use crate::backend::Tensord;

/// The custom op that casts its input to the integer type of its output.
pub(crate) const CAST_INT: &str = "tensord.cast_int";

/// Executes [`CAST_INT`].
pub(super) fn cast_int(handles: &mut Handles, ir: &CustomOpIr) {
    let ([input], [out]) = (ir.inputs.as_slice(), ir.outputs.as_slice()) else {
        return refuse(handles, ir);
    };
    if !(out.dtype.is_int() || out.dtype.is_uint()) {
        return refuse(handles, ir);
    }
    if let Some(error) = handles.take_error(input) {
        return handles.set_error(out.id, error.propagated());
    }
    let input = handles.get_int_tensor::<Tensord>(input);
    let cast = Tensord::int_cast(input, IntDType::from(out.dtype));
    handles.register_int_tensor::<Tensord>(&out.id, cast);
}

/// Refuses a call that only a client of a gateway can make.
fn refuse(handles: &mut Handles, ir: &CustomOpIr) {
    let error = "tensord.cast_int takes one tensor of integers and an integer type";
    let error = TensorError::new(ExecutionError::with_context(error));
    set_error_of_outputs(handles, ir, &error);
}
