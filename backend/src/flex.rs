//! Burn's Flex backend: tensors in host memory, which can be borrowed instead of copied.

mod sums;

use std::sync::Arc;

use burn_backend::{AllocationProperty, Bytes, DType, TensorData, TensorMetadata};
use burn_flex::{Flex, FlexTensor, Layout};
use burn_ir::{BackendIr, HandleKind, NumericOperationIr, OperationIr};
use burn_router::TensorInterpreter;

use crate::{
    custom::{CustomOps, Handlers},
    session_backend::SessionBackend,
    tensor_store::{DeferredTensors, StorageInfo, StoredTensor},
};

impl SessionBackend for Flex {
    const IS_HOST_READABLE: Option<fn(Self::Handle) -> bool> =
        Some(|handle| contiguous(handle).is_some());

    const DTYPES_MAY_DIFFER: bool = true;

    const STORAGE: Option<fn(Self::Handle) -> Option<StorageInfo>> = Some(storage);

    const TRUSTS_INDICES: bool = false;

    fn custom_ops(ops: &CustomOps) -> Handlers<Self> {
        ops.flex.clone()
    }

    fn execute_instead(interpreter: &mut TensorInterpreter<Self>, op: &OperationIr) -> bool {
        let OperationIr::NumericFloat(DType::F32 | DType::F16 | DType::BF16, op) = op else {
            return false;
        };
        let (reduce, run): (_, fn(FlexTensor) -> FlexTensor) = match op {
            NumericOperationIr::Sum(reduce) => (reduce, sums::sum),
            NumericOperationIr::Mean(reduce) => (reduce, sums::mean),
            _ => return false,
        };
        if reduce.input.shape.num_elements() < sums::SPLIT_FROM_ELEMENTS {
            return false;
        }
        let HandleKind::Float(input) = interpreter.get_tensor(&reduce.input) else {
            unreachable!("an op on floats has a float tensor");
        };
        let out = HandleKind::Float(run(input));
        interpreter.register_tensor_to_device(reduce.out.id, out);
        true
    }

    fn stored(tensors: Vec<HandleKind<Self>>, _: u64) -> Result<DeferredTensors, String> {
        let stored = |tensor: HandleKind<Self>| {
            let (HandleKind::Float(tensor) | HandleKind::Int(tensor) | HandleKind::Bool(tensor)) =
                tensor
            else {
                return Err("a quantized tensor cannot be captured".to_owned());
            };
            let layout = tensor.layout();
            Ok(StoredTensor {
                shape: layout.shape().clone(),
                dtype: tensor.dtype(),
                strides: layout.strides().to_vec(),
                offset: layout.start_offset(),
                storage: tensor.data_arc(),
                range_bytes: None,
            })
        };
        Ok(DeferredTensors {
            stored: Box::new(move || tensors.into_iter().map(stored).collect()),
            copied_bytes: 0,
        })
    }

    fn restored(
        _: &Self::Device,
        tensors: Vec<StoredTensor>,
    ) -> Result<Vec<HandleKind<Self>>, String> {
        let restored = tensors.into_iter().map(|stored| {
            let StoredTensor {
                storage,
                shape,
                dtype,
                strides,
                offset,
                range_bytes: _,
            } = stored;
            let layout = Layout::new(shape, strides, offset);
            let tensor = FlexTensor::from_arc(storage, layout, dtype);
            match dtype {
                DType::Bool(_) => Ok(HandleKind::Bool(tensor)),
                DType::QFloat(_) => Err("a quantized tensor cannot be restored".to_owned()),
                dtype if dtype.is_float() => Ok(HandleKind::Float(tensor)),
                _ => Ok(HandleKind::Int(tensor)),
            }
        });
        restored.collect()
    }

    fn borrow_value(handle: <Self as BackendIr>::Handle) -> Option<TensorData> {
        let tensor = contiguous(handle)?;
        let shape = tensor.shape();
        let dtype = FlexTensor::dtype(&tensor);
        // Flex copies memory before a change if the memory is shared.
        let borrowed = bytes::Bytes::from_owner(BorrowedBytes(tensor.data_arc()));
        let borrowed = Bytes::from_shared(borrowed, AllocationProperty::Native);
        TensorData::try_from_bytes(borrowed, shape, dtype).ok()
    }
}

/// Returns the tensor if its memory holds exactly its elements, in order.
fn contiguous(handle: <Flex as BackendIr>::Handle) -> Option<FlexTensor> {
    let (HandleKind::Float(tensor) | HandleKind::Int(tensor) | HandleKind::Bool(tensor)) = handle
    else {
        return None;
    };
    let layout = tensor.layout();
    let bytes = layout.num_elements() * tensor.dtype().size();
    let is_whole = layout.is_contiguous() && layout.start_offset() == 0;
    (is_whole && tensor.bytes().len() == bytes).then_some(tensor)
}

/// Most bytes by which an allocation may be rounded up. The cost of a tensor's name covers
/// them, so they do not make a storage larger than was declared.
const ROUNDING_BYTES: usize = 64;

/// Returns the storage that a tensor uses.
fn storage(handle: <Flex as BackendIr>::Handle) -> Option<StorageInfo> {
    let (HandleKind::Float(tensor) | HandleKind::Int(tensor) | HandleKind::Bool(tensor)) = handle
    else {
        return None;
    };
    let memory = tensor.data_arc();
    // References that do not count as shared: `memory`, `tensor`, and the interpreter's own
    // tensor.
    let ours = 3;
    Some(StorageInfo {
        id: Arc::as_ptr(&memory) as usize,
        bytes: match memory.capacity() {
            rounded if rounded < memory.len() + ROUNDING_BYTES => memory.len() as u64,
            capacity => capacity as u64,
        },
        is_shared: Arc::strong_count(&memory) > ours,
    })
}

/// Keeps a tensor's memory alive.
struct BorrowedBytes(Arc<Bytes>);

impl AsRef<[u8]> for BorrowedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use burn_backend::ops::FloatTensorOps;
    use burn_flex::FlexDevice;

    use super::*;

    fn data() -> TensorData {
        TensorData::from([[1.0f32, 2.0, 3.0], [4.0, 5.0, 6.0]])
    }

    #[test]
    fn borrowed_tensor_does_not_change() {
        let tensor = Flex::float_from_data(data(), &FlexDevice);
        let memory = tensor.bytes().as_ptr();
        let borrowed = Flex::borrow_value(Flex::float_tensor_handle(tensor.clone())).unwrap();
        assert_eq!(borrowed.as_bytes().as_ptr(), memory);
        let changed = Flex::float_mul_scalar(tensor, 2.0f32.into());
        assert_eq!(borrowed, data());
        assert_eq!(changed.bytes()[..4], 2.0f32.to_ne_bytes());
    }

    #[test]
    fn view_keeps_the_storage_of_its_tensor_alive() {
        let kept = Flex::float_from_data(data(), &FlexDevice);
        let storage_of =
            |tensor: &FlexTensor| storage(Flex::float_tensor_handle(tensor.clone())).unwrap();
        let contiguous = storage_of(&kept);
        assert_eq!((contiguous.bytes, contiguous.is_shared), (24, false));
        let row = Flex::float_slice(kept.clone(), &[burn_std::Slice::from(0..1)]);
        let shared = StorageInfo {
            is_shared: true,
            ..contiguous
        };
        assert_eq!([storage_of(&row), storage_of(&kept)], [shared, shared]);
        drop(kept);
        assert_eq!(storage_of(&row), contiguous);
        let moved = Flex::float_add_scalar(row.clone(), 1.0f32.into());
        assert_ne!(storage_of(&moved).id, contiguous.id);
    }

    #[test]
    fn views_are_not_borrowed() {
        let tensor = Flex::float_from_data(data(), &FlexDevice);
        let turned = Flex::float_transpose(tensor.clone());
        assert!(Flex::borrow_value(Flex::float_tensor_handle(turned)).is_none());
        let row = Flex::float_slice(tensor, &[burn_std::Slice::from(0..1)]);
        assert!(Flex::borrow_value(Flex::float_tensor_handle(row)).is_none());
    }
}
