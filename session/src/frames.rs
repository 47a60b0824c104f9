//! Makes the frames about tensors other than frames of ops.

use burn_ir::{TensorId, TensorIr};
use tensord_proto::{
    codec::{encode_tensor, encode_type},
    v1::{Alias, Fault, Offer, Poison, Take, frame::Body},
};

use super::Capability;

/// Returns the frame that declares `id` as a poisoned tensor with the shape and dtype of
/// `tensor`.
pub fn poison(id: TensorId, tensor: &TensorIr, reason: String) -> Body {
    let fault = Fault {
        op_name: "to_device".into(),
        reason,
        ..Fault::default()
    };
    Body::Poison(Poison {
        tensor_id: id.value(),
        r#type: Some(encode_type(&tensor.shape, tensor.dtype)),
        fault: Some(fault),
    })
}

/// Returns the frame that gives a tensor a second id.
pub fn alias(id: TensorId, source: TensorId) -> Body {
    Body::Alias(Alias {
        tensor_id: id.value(),
        source_id: source.value(),
    })
}

/// Returns the frame that offers a tensor's value to the session with lease rank `to`.
pub fn offer(tensor: &TensorIr, capability: &Capability, to: u32) -> Body {
    Body::Offer(Offer {
        tensor: encode_tensor(tensor),
        capability: capability.to_vec().into(),
        to,
    })
}

/// Returns the frame that creates tensor `id` on the worker, with the value that lease rank
/// `from` offers.
pub fn take(id: TensorId, tensor: &TensorIr, capability: &Capability, from: u32) -> Body {
    Body::Take(Take {
        tensor_id: id.value(),
        r#type: Some(encode_type(&tensor.shape, tensor.dtype)),
        capability: capability.to_vec().into(),
        from,
    })
}
