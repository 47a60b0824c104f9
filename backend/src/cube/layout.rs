//! Copies tensors from a device to the host as they lie in their storages, and back.
//!
//! A storage is a range of a buffer of the device. Tensors whose ranges overlap, as those of views
//! do, share one. Its bytes are copied as they are, so that strides and the padding of rows
//! stay the same: kernels are chosen by them.
//!
//! The device waits while it is copied from. If it went on, it could not update the tensors in
//! place until they are copied, and would need memory for that which nobody has reserved.

use std::{
    collections::HashMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use burn_cubecl::{
    Cube, CubeBackend, CubeDevice,
    cubecl::{client::Client, server::Handle},
    kernel::into_contiguous,
    tensor::CubeTensor,
};
use burn_fusion::{FusionRuntime, get_client, stream::Operation};
use burn_ir::{CustomOpIr, HandleContainer, HandleKind, OperationIr, TensorId, TensorIr};
use burn_std::{Metadata, Shape, future::block_on, stream::StreamId};
use tensord_proto::aligned;

use super::{ExecutionError, Runtime};
use crate::{
    panic_message,
    tensor_store::{HostStorage, StoredTensor, StoredTensors},
};

/// Bytes that are copied with one call, and at most one storage more: a driver takes as much memory
/// of the host for the call.
const BATCH_BYTES: u64 = 64 << 20;

/// Bytes that a storage counts at least: a driver may copy to pages of this size.
const MIN_COST_BYTES: u64 = 32 << 10;

/// Copies tensors of one device; see [`TensorStore::stored`](crate::TensorStore::stored).
pub(super) fn stored(
    tensors: Vec<HandleKind<Cube>>,
    max_bytes: u64,
) -> Result<StoredTensors, String> {
    let resolved: Vec<_> = tensors.into_iter().map(resolve).collect();
    // An op that has failed takes some tensors with it, and a device that has failed all.
    if let Some(Err(reason)) = resolved.first()
        && resolved.iter().all(Result::is_err)
    {
        return Err(reason.clone());
    }
    let mut ranges = Ranges::of(resolved.iter().flatten());
    let bytes = ranges
        .storages
        .iter()
        .map(cost)
        .fold(0, u64::saturating_add);
    if bytes > max_bytes {
        return Err(format!(
            "they need {bytes} bytes, and at most {max_bytes} bytes of the worker's --snapshot-memory are left for them"
        ));
    }
    let client = resolved.iter().flatten().next();
    let storages = match client.map(|tensor| tensor.client.clone()) {
        Some(client) => copy(&client, std::mem::take(&mut ranges.storages))?,
        None => Vec::new(),
    };
    let mut places = ranges.places.into_iter();
    let stored = resolved.into_iter().map(|tensor| {
        let tensor = tensor?;
        let place = places.next().ok_or("a tensor has no storage")?;
        let strides = tensor.meta.strides().iter();
        Ok(StoredTensor {
            storage: storages[place.storage].clone()?,
            shape: tensor.meta.shape().clone(),
            dtype: tensor.dtype,
            strides: strides.map(|&stride| stride as isize).collect(),
            offset: (place.offset_bytes / tensor.dtype.size() as u64) as usize,
            range_bytes: Some(tensor.handle.size_in_used()),
        })
    });
    Ok(stored.collect())
}

/// Returns the bytes of the storages of these tensors.
pub(super) fn copied_bytes(stored: &StoredTensors) -> u64 {
    let storages = stored.iter().flatten().map(|stored| &stored.storage);
    let sizes = storages.map(|storage| (Arc::as_ptr(storage), storage.len() as u64));
    sizes.collect::<HashMap<_, _>>().into_values().sum()
}

fn cost(handle: &Handle) -> u64 {
    handle.size_in_used().max(MIN_COST_BYTES)
}

/// Returns a tensor with its buffer, and has all ops executed that it depends on.
///
/// # Errors
///
/// If one of these ops has failed, so that the tensor has no value.
fn resolve(tensor: HandleKind<Cube>) -> Result<CubeTensor, String> {
    let resolve = || match tensor {
        HandleKind::Float(tensor) => {
            let client = tensor.client.clone();
            Ok(client.resolve_tensor_float::<CubeBackend>(tensor))
        }
        HandleKind::Int(tensor) => {
            let client = tensor.client.clone();
            Ok(client.resolve_tensor_int::<CubeBackend>(tensor))
        }
        HandleKind::Bool(tensor) => {
            let client = tensor.client.clone();
            Ok(client.resolve_tensor_bool::<CubeBackend>(tensor))
        }
        HandleKind::Quantized(_) => Err("a quantized tensor cannot be captured".to_owned()),
    };
    let resolved = catch_unwind(AssertUnwindSafe(resolve));
    let resolved = resolved.unwrap_or_else(|panic| Err(panic_message(panic.as_ref())))?;
    Ok(match resolved.meta.is_tiled() {
        // Its strides are those of the tiles.
        true => into_contiguous(resolved),
        false => resolved,
    })
}

/// Where tensors lie.
struct Ranges {
    /// The ranges of buffers to copy.
    storages: Vec<Handle>,
    /// The place of each tensor.
    places: Vec<Place>,
}

#[derive(Clone, Copy, Default)]
struct Place {
    /// Index of the storage.
    storage: usize,
    /// Where the tensor begins in it.
    offset_bytes: u64,
}

impl Ranges {
    fn of<'a>(tensors: impl Iterator<Item = &'a CubeTensor>) -> Self {
        let mut buffers = HashMap::new();
        let keyed = tensors.enumerate().map(|(at, tensor)| {
            let (buffer, start, end) = tensor.handle.clone().binding().claim_key();
            let count = buffers.len();
            let buffer = *buffers.entry(buffer).or_insert(count);
            ((buffer, start, end), at, tensor)
        });
        let mut keyed: Vec<_> = keyed.collect();
        keyed.sort_by_key(|(key, at, _)| (*key, *at));
        let mut ranges = Self {
            storages: Vec::new(),
            places: vec![Place::default(); keyed.len()],
        };
        // The buffer and the range of the last storage.
        let mut last = None;
        for ((buffer, start, end), at, tensor) in keyed {
            let elem_bytes = tensor.dtype.size() as u64;
            let is_in = |&(of, from, to): &(usize, u64, u64)| {
                of == buffer && start < to && (start - from).is_multiple_of(elem_bytes)
            };
            let (_, from, to) = *match last.as_mut().filter(|last| is_in(last)) {
                Some(last) => last,
                None => {
                    ranges.storages.push(tensor.handle.clone());
                    last.insert((buffer, start, end))
                }
            };
            let to = to.max(end);
            last = Some((buffer, from, to));
            if let Some(storage) = ranges.storages.last_mut() {
                storage.offset_start = Some(from);
                storage.offset_end = Some(storage.size() - to);
            }
            ranges.places[at] = Place {
                storage: ranges.storages.len() - 1,
                offset_bytes: start - from,
            };
        }
        ranges
    }
}

/// Copies storages to the host. One that a failed op should have written has an error.
///
/// # Errors
///
/// Those of the device.
fn copy(client: &Client, handles: Vec<Handle>) -> Result<Vec<Result<HostStorage, String>>, String> {
    let mut copied = Vec::with_capacity(handles.len());
    let (mut batch, mut batch_bytes) = (Vec::new(), 0);
    let mut handles = handles.into_iter().peekable();
    while let Some(handle) = handles.next() {
        batch_bytes += cost(&handle);
        batch.push(handle);
        if batch_bytes >= BATCH_BYTES || handles.peek().is_none() {
            let batch = std::mem::take(&mut batch);
            let mut written = Vec::with_capacity(batch.len());
            let checks = batch.iter().map(|handle| client.check([handle]));
            let checks: Vec<_> = checks
                .map(|check| check.map_err(|e| e.to_string()))
                .collect();
            for (handle, check) in batch.into_iter().zip(&checks) {
                written.extend(check.is_ok().then_some(handle));
            }
            let read = client.read(written).map_err(|e| e.to_string())?;
            let mut read = read.iter();
            for check in checks {
                copied.push(match check {
                    Ok(()) => Ok(exact_copy(
                        read.next().ok_or("the device copied too little")?,
                    )),
                    Err(reason) => Err(reason),
                });
            }
            batch_bytes = 0;
        }
    }
    Ok(copied)
}

/// Copies bytes out of the driver's memory, which is larger, and is needed again.
fn exact_copy(bytes: &[u8]) -> HostStorage {
    let mut exact = aligned::with_exact_capacity(bytes.len());
    exact.extend_from_byte_slice(bytes);
    Arc::new(exact)
}

/// Copies tensors to `device`; see [`TensorStore::restore`](crate::TensorStore::restore).
pub(super) fn restored(
    device: &CubeDevice,
    tensors: Vec<StoredTensor>,
) -> Result<Vec<HandleKind<Cube>>, String> {
    let client = device.client();
    // By address; `tensors` keeps the storages, so no two have the same one.
    let mut handles = HashMap::<usize, Handle>::new();
    let (mut batch, mut batch_bytes) = (Vec::new(), 0);
    let mut restored = Vec::with_capacity(tensors.len());
    for stored in &tensors {
        let storage = &stored.storage;
        let address = Arc::as_ptr(storage) as usize;
        let handle = handles.entry(address).or_insert_with(|| {
            batch_bytes += storage.len() as u64;
            let handle = client.create_from_slice(storage);
            batch.push(handle.clone());
            handle
        });
        let handle = part(handle.clone(), stored)?;
        if batch_bytes >= BATCH_BYTES {
            wait(&client, &std::mem::take(&mut batch))?;
            batch_bytes = 0;
        }
        let strides = stored.strides.iter();
        let strides = strides.map(|&stride| usize::try_from(stride));
        let strides: Vec<_> = strides
            .collect::<Result<_, _>>()
            .map_err(|_| "a stride is negative".to_owned())?;
        let metadata = Metadata::new(stored.shape.clone(), strides);
        let client = client.clone();
        let tensor = CubeTensor::new(client, handle, metadata, device.clone(), stored.dtype);
        restored.push(fused(device, stored.shape.clone(), tensor));
    }
    wait(&client, &batch)?;
    Ok(restored)
}

/// Returns the part of a storage that a tensor uses.
fn part(handle: Handle, stored: &StoredTensor) -> Result<Handle, String> {
    let size = stored.storage.len() as u64;
    let outside = || "a tensor is not within its storage".to_owned();
    let offset = stored.offset.checked_mul(stored.dtype.size());
    let offset = offset.ok_or_else(outside)? as u64;
    let rest = size.checked_sub(offset).ok_or_else(outside)?;
    let after = match stored.range_bytes {
        Some(range_bytes) => rest.checked_sub(range_bytes).ok_or_else(outside)?,
        None => 0,
    };
    let handle = match offset {
        0 => handle,
        offset => handle.offset_start(offset),
    };
    Ok(match after {
        0 => handle,
        after => handle.offset_end(after),
    })
}

/// Waits until the device has these storages.
///
/// # Errors
///
/// If it has no room for one of them.
fn wait(client: &Client, storages: &[Handle]) -> Result<(), String> {
    block_on(client.sync_buffers(storages)).map_err(|e| e.to_string())
}

/// Enters a tensor among those whose ops are fused.
fn fused(device: &CubeDevice, shape: Shape, tensor: CubeTensor) -> HandleKind<Cube> {
    let client = get_client::<CubeBackend>(device);
    let dtype = tensor.dtype;
    let out = TensorIr::uninit(client.create_empty_handle(), shape, dtype);
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
    id: TensorId,
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
