//! Copies tensors from a device to the host as they lie in their storages, and back.
//!
//! A storage is what one buffer of the device has, or a part of it if several tensors divide the
//! buffer among them. It is copied byte by byte, so that strides and the padding of rows stay as
//! they are: kernels are chosen by them.
//!
//! The device waits while it is copied from. If it went on, it could not update the tensors in
//! place until they are copied, and would need memory for that which nobody has reserved.

use std::{collections::HashMap, sync::Arc};

use burn_cubecl::{
    Cube, CubeBackend, CubeDevice,
    cubecl::{client::Client, server::Handle},
    kernel::into_contiguous,
    tensor::CubeTensor,
};
use burn_fusion::{FusionRuntime, get_client, stream::Operation};
use burn_ir::{CustomOpIr, HandleContainer, HandleKind, OperationIr};
use burn_std::{Metadata, Shape, stream::StreamId};

use super::{ExecutionError, Runtime};
use crate::backend::{HostStorage, StoredTensor};

/// Bytes that are copied with one call, beside the last storage: a driver may need as much memory
/// for the call.
const BATCH_BYTES: u64 = 64 << 20;

/// Copies tensors of one device; see [`TensorStore::stored`](crate::backend::TensorStore::stored).
pub(super) fn stored(
    tensors: Vec<HandleKind<Cube>>,
    max_bytes: u64,
) -> Result<Vec<StoredTensor>, String> {
    let tensors = tensors.into_iter().map(resolve);
    let tensors = tensors.collect::<Result<Vec<_>, _>>()?;
    let Some(client) = tensors.first().map(|tensor| tensor.client.clone()) else {
        return Ok(Vec::new());
    };
    let mut handles = Vec::new();
    let mut indices = HashMap::new();
    let storage_of = tensors.iter().map(|tensor| {
        let key = tensor.handle.clone().binding().claim_key();
        *indices.entry(key).or_insert_with(|| {
            handles.push(tensor.handle.clone());
            handles.len() - 1
        })
    });
    let storage_of: Vec<usize> = storage_of.collect();
    let bytes: u64 = handles.iter().map(Handle::size_in_used).sum();
    if bytes > max_bytes {
        return Err(format!(
            "they have {bytes} bytes, and the worker's limit is {max_bytes} bytes"
        ));
    }
    let storages = copy(&client, handles)?;
    let stored = tensors.into_iter().zip(storage_of);
    let stored = stored.map(|(tensor, storage)| StoredTensor {
        storage: storages[storage].clone(),
        shape: tensor.meta.shape().clone(),
        dtype: tensor.dtype,
        strides: tensor
            .meta
            .strides()
            .iter()
            .map(|&stride| stride as isize)
            .collect(),
        offset: 0,
    });
    Ok(stored.collect())
}

/// Returns a tensor with its buffer, and has all ops executed that it depends on.
fn resolve(tensor: HandleKind<Cube>) -> Result<CubeTensor, String> {
    let resolved = match tensor {
        HandleKind::Float(tensor) => {
            let client = tensor.client.clone();
            client.resolve_tensor_float::<CubeBackend>(tensor)
        }
        HandleKind::Int(tensor) => {
            let client = tensor.client.clone();
            client.resolve_tensor_int::<CubeBackend>(tensor)
        }
        HandleKind::Bool(tensor) => {
            let client = tensor.client.clone();
            client.resolve_tensor_bool::<CubeBackend>(tensor)
        }
        HandleKind::Quantized(_) => return Err("a quantized tensor cannot be captured".into()),
    };
    Ok(match resolved.meta.is_tiled() {
        // Its strides are those of the tiles.
        true => into_contiguous(resolved),
        false => resolved,
    })
}

/// Copies storages to the host.
fn copy(client: &Client, handles: Vec<Handle>) -> Result<Vec<HostStorage>, String> {
    let mut copied = Vec::with_capacity(handles.len());
    let (mut batch, mut batch_bytes) = (Vec::new(), 0);
    let mut handles = handles.into_iter().peekable();
    while let Some(handle) = handles.next() {
        batch_bytes += handle.size_in_used();
        batch.push(handle);
        if batch_bytes >= BATCH_BYTES || handles.peek().is_none() {
            let read = client.read(std::mem::take(&mut batch));
            copied.extend(read.map_err(|e| e.to_string())?.into_iter().map(Arc::new));
            batch_bytes = 0;
        }
    }
    Ok(copied)
}

/// Copies tensors to `device`; see [`TensorStore::restore`](crate::backend::TensorStore::restore).
pub(super) fn restored(
    device: &CubeDevice,
    tensors: Vec<StoredTensor>,
) -> Result<Vec<HandleKind<Cube>>, String> {
    let client = device.client();
    // By address; `tensors` keeps the storages, so no two have the same one.
    let mut handles = HashMap::<usize, Handle>::new();
    let restored = tensors.iter().map(|stored| {
        let storage = &stored.storage;
        let handle = handles.entry(Arc::as_ptr(storage) as usize);
        let handle = handle.or_insert_with(|| client.create_from_slice(storage));
        let handle = handle.clone();
        let handle = match stored.offset {
            0 => handle,
            offset => handle.offset_start((offset * stored.dtype.size()) as u64),
        };
        let strides = stored.strides.iter();
        let strides = strides.map(|&stride| usize::try_from(stride));
        let strides: Vec<_> = strides
            .collect::<Result<_, _>>()
            .map_err(|_| "a stride is negative".to_owned())?;
        let metadata = Metadata::new(stored.shape.clone(), strides);
        let client = client.clone();
        let tensor = CubeTensor::new(client, handle, metadata, device.clone(), stored.dtype);
        Ok(fused(device, stored.shape.clone(), tensor))
    });
    restored.collect()
}

/// Enters a tensor among those whose ops are fused.
fn fused(device: &CubeDevice, shape: Shape, tensor: CubeTensor) -> HandleKind<Cube> {
    let client = get_client::<CubeBackend>(device);
    let dtype = tensor.dtype;
    let out = burn_ir::TensorIr::uninit(client.create_empty_handle(), shape, dtype);
    let op = CustomOpIr {
        id: "tensord.restore".into(),
        inputs: Vec::new(),
        outputs: vec![out.clone()],
        scalars: Vec::new(),
    };
    let restoring = Restoring { id: out.id, tensor };
    let outputs = client.register(StreamId::current(), OperationIr::Custom(op), restoring);
    let [tensor] = outputs
        .try_into()
        .unwrap_or_else(|_| unreachable!("the op has one output"));
    match dtype {
        dtype if dtype.is_float() => HandleKind::Float(tensor),
        dtype if dtype.is_bool() => HandleKind::Bool(tensor),
        _ => HandleKind::Int(tensor),
    }
}

/// Makes a restored tensor the output of the op that enters it.
#[derive(Debug)]
struct Restoring {
    id: burn_ir::TensorId,
    tensor: CubeTensor,
}

impl Operation<Runtime> for Restoring {
    fn execute(
        &self,
        tensors: &mut HandleContainer<<Runtime as FusionRuntime>::FusionHandle>,
    ) -> Result<(), ExecutionError> {
        // Float, int and bool tensors have the same type of handle.
        tensors.register_float_tensor::<CubeBackend>(&self.id, self.tensor.clone());
        Ok(())
    }
}
