//! Copies tensors from and to host memory without Burn's encoding.
//!
//! `Tensor::from_data` and `into_data` work on leased devices too, but Burn's
//! remote client encodes their bytes for a socket. The functions here have the
//! same results and hand the bytes over in memory. That hardly matters for a
//! batch, and is two to four times as fast for tensors of many MiB. On any other
//! device they call Burn's functions, so a program can use them throughout.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use burn::tensor::{Tensor, TensorData};
//! use tensord_client::{LeaseRequest, Pool, data};
//!
//! let lease = Pool::connect_env()?.lease(LeaseRequest::devices(1))?;
//! let device = &lease.devices()[0];
//! let pixels = TensorData::new(vec![0.5f32; 64 * 784], [64, 784]);
//! let batch: Tensor<2> = data::from_data(pixels, device);
//! let sums = data::into_data(batch.sum_dim(1))?;
//! # drop(sums); Ok(()) }
//! ```

#[cfg(feature = "ndarray")]
mod array;
mod cast;

use burn::{
    backend::{ExecutionError, Remote, tensor::FloatTensor},
    tensor::{
        BackendPrimitive, Bool, DType, Device, Float, Int, Tensor, TensorCreationOptions,
        TensorData, kind,
    },
};
use burn_ir::{CustomOpIr, OperationOutput, TensorIr};

#[cfg(feature = "ndarray")]
pub use self::array::{ArrayError, from_array, into_array};
pub use self::cast::cast_int;
use crate::bridge::{UPLOAD, leased};

/// The kinds of tensors: [`Float`], [`Int`] and [`Bool`].
pub trait Kind:
    kind::Basic + kind::Autodiff + BackendPrimitive<Remote> + sealed::Sealed + 'static
{
}

impl Kind for Float {}
impl Kind for Int {}
impl Kind for Bool {}

mod sealed {
    use super::*;

    /// Burn's remote backend has one type for tensors of all kinds. This trait
    /// proves that to the compiler.
    pub trait Sealed: BackendPrimitive<Remote> {
        fn of(tensor: FloatTensor<Remote>) -> Self::Primitive;
        fn handle(tensor: Self::Primitive) -> FloatTensor<Remote>;
        /// The default element type of tensors of this kind on `device`.
        fn default_dtype(device: &Device) -> DType;
    }

    macro_rules! kind {
        ($kind:ty, $dtype:ident) => {
            impl Sealed for $kind {
                fn of(tensor: FloatTensor<Remote>) -> Self::Primitive {
                    tensor
                }

                fn handle(tensor: Self::Primitive) -> FloatTensor<Remote> {
                    tensor
                }

                fn default_dtype(device: &Device) -> DType {
                    device.settings().$dtype.into()
                }
            }
        };
    }

    kind!(Float, float_dtype);
    kind!(Int, int_dtype);
    kind!(Bool, bool_dtype);
}

/// Makes a tensor of `data` on a device, as [`Tensor::from_data`] does: with the
/// device's default element type unless `options` name another.
///
/// Returns as soon as the bytes are queued. Blocks while more than 32 MiB are
/// queued already.
///
/// # Panics
///
/// As [`Tensor::from_data`]: when `data` does not have `D` dimensions, or has
/// elements that do not convert.
pub fn from_data<const D: usize, K: Kind>(
    data: impl Into<TensorData>,
    options: impl Into<TensorCreationOptions>,
) -> Tensor<D, K> {
    let (data, options) = (data.into(), options.into());
    let plain = options.device.clone().without_autodiff();
    let Some(exchange) = leased(&plain) else {
        return Tensor::from_data(data, options);
    };
    let shape = data.shape().clone();
    assert_eq!(
        shape.num_dims(),
        D,
        "data of shape {shape} does not fit a tensor of {D} dimensions"
    );
    let default = || K::default_dtype(&plain);
    let dtype = match K::KIND {
        kind::Kind::Bool => default(),
        kind::Kind::Float | kind::Kind::Int => options.dtype.unwrap_or_else(default),
    };
    let data = data
        .try_cast(dtype)
        .expect("the elements convert to the tensor's dtype");
    let tensor = exchange.stage_upload(data, |client, ticket| {
        let out = TensorIr::uninit(client.create_empty_handle(), shape, dtype);
        client
            .register(CustomOpIr::with_scalars(UPLOAD, &[], &[out], vec![ticket]))
            .output()
    });
    as_device_of(of(tensor), &options.device)
}

/// Reads a tensor's elements, as [`Tensor::try_into_data`] does. Waits for every
/// op that they depend on.
///
/// # Errors
///
/// The first cause, when an op that the tensor depends on failed or the device is
/// lost.
pub fn into_data<const D: usize, K: Kind>(
    tensor: Tensor<D, K>,
) -> Result<TensorData, ExecutionError> {
    let device = tensor.device().without_autodiff();
    match leased(&device) {
        Some(exchange) => exchange.read(handle(tensor)),
        None => tensor.try_into_data(),
    }
}

/// As [`into_data`], without blocking the thread. The tensor is read as it is when
/// this is called. The read is sent a millisecond later, whether the future is polled
/// or not, and at once when a future of any read of the device is polled. So start
/// many reads, then await one after the other: all of them take one round trip.
///
/// The future keeps the tensor alive until the read is done. Await or drop the future
/// on the thread that made it; otherwise the tensor lives until that thread reads
/// again.
///
/// # Errors
///
/// As [`into_data`].
pub fn into_data_async<const D: usize, K: Kind>(
    tensor: Tensor<D, K>,
) -> impl Future<Output = Result<TensorData, ExecutionError>> + Send {
    let device = tensor.device().without_autodiff();
    let reading = match leased(&device) {
        Some(exchange) => Ok(exchange.request(handle(tensor))),
        None => Err(tensor.into_data_async()),
    };
    async move {
        match reading {
            Ok(requested) => requested.answer().await,
            Err(encoded) => encoded.await,
        }
    }
}

/// Makes `tensor` track gradients if `device`, which is the tensor's own, does.
fn as_device_of<const D: usize, K: Kind>(tensor: Tensor<D, K>, device: &Device) -> Tensor<D, K> {
    match device.gradient_checkpointing_strategy() {
        Some(strategy) => tensor
            .autodiff()
            .with_gradient_checkpointing_strategy(strategy),
        None => tensor,
    }
}

/// The tensor of the remote backend's primitive.
fn of<const D: usize, K: Kind>(primitive: FloatTensor<Remote>) -> Tensor<D, K> {
    Tensor::from_primitive::<Remote>(K::of(primitive))
}

/// The remote backend's primitive of a tensor on a leased device.
///
/// # Panics
///
/// When the tensor is not on a remote device.
pub(crate) fn handle<const D: usize, K: Kind>(tensor: Tensor<D, K>) -> FloatTensor<Remote> {
    let primitive = tensor.without_autodiff().try_into_primitive::<Remote>();
    K::handle(primitive.expect("a tensor on a leased device is a remote one"))
}
