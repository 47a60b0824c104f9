//! Forwards custom ops of workers from Burn's client to a session.
//!
//! Burn's server rejects custom ops whose id is not registered with it. So the bridge
//! registers one that stands for all custom ops of the workers, and its scalars carry
//! the name of the worker's op.

use burn_ir::{
    BackendIr, CustomOpIr, HandleContainer, OperationIr, ScalarIr, TensorError, TensorIr,
};
use burn_router::{RouterClient, RouterTensor, get_client};

use crate::backend::{Tensord, TensordChannel, TensordClient, TensordDevice};

/// The custom op that stands for any custom op of a worker.
pub(crate) const FORWARD: &str = "tensord.forward";

/// Bytes of the name in each scalar.
const BYTES_PER_SCALAR: usize = size_of::<u64>();

/// The tensors of a connection of Burn's client.
pub(super) type Handles = HandleContainer<<Tensord as BackendIr>::Handle>;

/// The scalars of a forwarded call of `name`: the name's length, its bytes, then the
/// call's own scalars.
pub(crate) fn pack(name: &str, scalars: Vec<ScalarIr>) -> Vec<ScalarIr> {
    let chunks = name.as_bytes().chunks(BYTES_PER_SCALAR).map(|chunk| {
        let mut bytes = [0; BYTES_PER_SCALAR];
        bytes[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(bytes)
    });
    let mut packed = vec![ScalarIr::UInt(name.len() as u64)];
    packed.extend(chunks.map(ScalarIr::UInt));
    packed.extend(scalars);
    packed
}

/// Returns the name and the scalars of a forwarded call, or `None` if `packed` is malformed.
fn unpack(packed: &[ScalarIr]) -> Option<(String, Vec<ScalarIr>)> {
    let (length, rest) = packed.split_first()?;
    let length = usize::try_from(length.elem::<u64>()).ok()?;
    let (chunks, scalars) = rest.split_at_checked(length.div_ceil(BYTES_PER_SCALAR))?;
    let bytes = chunks
        .iter()
        .flat_map(|chunk| chunk.elem::<u64>().to_le_bytes());
    let name = String::from_utf8(bytes.take(length).collect()).ok()?;
    Some((name, scalars.to_vec()))
}

/// Executes [`FORWARD`]: records the worker's op in the device's session.
pub(super) fn forward(handles: &mut Handles, ir: &CustomOpIr, device: TensordDevice) {
    let mut error: Option<TensorError> = None;
    let mut inputs: Vec<TensorIr> = Vec::with_capacity(ir.inputs.len());
    for input in &ir.inputs {
        if let Some(failed) = handles.take_error(input) {
            error = Some(failed.propagated());
            continue;
        }
        // Tensors of all kinds have the router's handle type.
        let tensor: RouterTensor<TensordClient> = handles.get_float_tensor::<Tensord>(input);
        inputs.push(tensor.into_ir());
    }
    let client = get_client::<TensordChannel>(&device);
    let call = unpack(&ir.scalars).filter(|_| error.is_none());
    let Some((id, scalars)) = call else {
        let error = error.unwrap_or_else(|| TensorError::new(malformed_call_error()));
        return set_error_of_outputs(handles, ir, &error);
    };
    let outputs = ir.outputs.iter().map(|out| {
        let id = client.create_empty_handle();
        TensorIr::uninit(id, out.shape.clone(), out.dtype)
    });
    let op = CustomOpIr {
        id,
        outputs: outputs.collect(),
        inputs,
        scalars,
    };
    let made = client.register(OperationIr::Custom(op));
    for (out, made) in ir.outputs.iter().zip(made) {
        handles.register_float_tensor::<Tensord>(&out.id, made);
    }
}

/// Gives all outputs of a call an error.
pub(super) fn set_error_of_outputs(handles: &mut Handles, ir: &CustomOpIr, error: &TensorError) {
    for out in &ir.outputs {
        handles.set_error(out.id, error.clone());
    }
}

fn malformed_call_error() -> burn_backend::ExecutionError {
    burn_backend::ExecutionError::with_context(
        "the bridge received a custom op without a readable name",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_any_length_round_trip_with_scalars() {
        for name in ["", "swish", "eight_by", "a_longer_name_ü"] {
            let scalars = vec![ScalarIr::Float(1.5), ScalarIr::Int(-3)];
            let packed = pack(name, scalars.clone());
            assert_eq!(unpack(&packed), Some((name.into(), scalars)));
        }
    }

    #[test]
    fn malformed_calls_unpack_to_none() {
        assert_eq!(unpack(&[]), None);
        assert_eq!(unpack(&[ScalarIr::UInt(9), ScalarIr::UInt(0)]), None);
        assert_eq!(unpack(&[ScalarIr::UInt(1), ScalarIr::UInt(0xff)]), None);
    }
}
