//! Casts between integer types.

use burn::{
    backend::DispatchDevice,
    tensor::{DType, Int, IntDType, Tensor, TensorData},
};
use burn_backend::DataError;
use burn_ir::{CustomOpIr, OperationOutput, TensorIr};

use super::{as_device_of, from_data, handle, into_data, of};
use crate::bridge::{CAST_INT, leased};

/// Casts a tensor of integers to another integer type, as [`Tensor::cast`] does on a local
/// device: a value that the type cannot represent keeps its lowest bits, as with Rust's `as`.
///
/// Use it instead of [`Tensor::cast`] wherever the device may be a remote one. On every remote
/// device, leased ones included, `cast` from one integer type to another ends the connection in
/// Burn 0.22.1; casts from and to floats and booleans are not affected.
///
/// On a leased device, the worker casts, and nothing is waited for. On a remote device that is
/// not leased (of a gateway, for example), the values travel to the program and back.
///
/// ```
/// use burn::tensor::{DType, Device, Int, IntDType, Tensor};
/// use tensord_client::data;
///
/// fn wrap(device: &Device) -> Tensor<1, Int> {
///     let wide = Tensor::<1, Int>::from_data([300i64, -1], (device, DType::I64));
///     data::cast_int(wide, IntDType::U8) // 44 and 255
/// }
/// ```
///
/// # Panics
///
/// When the device is remote, but not leased, and the tensor cannot be read.
pub fn cast_int<const D: usize>(tensor: Tensor<D, Int>, dtype: IntDType) -> Tensor<D, Int> {
    let to = DType::from(dtype);
    if tensor.dtype() == to {
        return tensor;
    }
    let device = tensor.device();
    let plain = device.clone().without_autodiff();
    if let Some(exchange) = leased(&plain) {
        let client = &exchange.burn().client;
        let out = TensorIr::uninit(client.create_empty_handle(), tensor.shape(), to);
        let input = handle(tensor).into_ir();
        let op = CustomOpIr::new(CAST_INT, &[input], &[out]);
        return as_device_of(of(client.register(op).output()), &device);
    }
    if !matches!(plain.as_dispatch(), DispatchDevice::Remote(_)) {
        return tensor.cast(dtype);
    }
    let data = into_data(tensor).expect("the tensor of integers to cast can be read");
    let cast = cast_data(data, dtype).expect("a tensor of integers has integers as data");
    from_data(cast, (&device, to))
}

/// Casts integers in host memory.
///
/// # Errors
///
/// When `data` has no integers.
fn cast_data(data: TensorData, dtype: IntDType) -> Result<TensorData, DataError> {
    macro_rules! wide {
        ($type:ty) => {
            data.as_slice::<$type>()?
                .iter()
                .map(|&x| x as i64)
                .collect()
        };
    }
    // An `i64` has all bits of each type. Where it takes the value of a `u64` for another one,
    // the bits are still the same.
    let values: Vec<i64> = match data.dtype() {
        DType::I32 => wide!(i32),
        DType::I16 => wide!(i16),
        DType::I8 => wide!(i8),
        DType::U64 => wide!(u64),
        DType::U32 => wide!(u32),
        DType::U16 => wide!(u16),
        DType::U8 => wide!(u8),
        _ => wide!(i64),
    };
    macro_rules! narrow {
        ($type:ty) => {
            TensorData::new(
                values.into_iter().map(|x| x as $type).collect::<Vec<_>>(),
                data.shape().clone(),
            )
        };
    }
    Ok(match dtype {
        IntDType::I64 => narrow!(i64),
        IntDType::I32 => narrow!(i32),
        IntDType::I16 => narrow!(i16),
        IntDType::I8 => narrow!(i8),
        IntDType::U64 => narrow!(u64),
        IntDType::U32 => narrow!(u32),
        IntDType::U16 => narrow!(u16),
        IntDType::U8 => narrow!(u8),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_beyond_a_type_keep_their_lowest_bits() {
        let cast = |data: TensorData, dtype| cast_data(data, dtype).unwrap();
        let wide = || TensorData::from([i64::MIN, -1, 0, 300, i64::MAX]);
        let table: [(IntDType, TensorData); 8] = [
            (IntDType::I64, wide()),
            (IntDType::I32, [0i32, -1, 0, 300, -1].into()),
            (IntDType::I16, [0i16, -1, 0, 300, -1].into()),
            (IntDType::I8, [0i8, -1, 0, 44, -1].into()),
            (
                IntDType::U64,
                [1u64 << 63, u64::MAX, 0, 300, u64::MAX >> 1].into(),
            ),
            (IntDType::U32, [0u32, u32::MAX, 0, 300, u32::MAX].into()),
            (IntDType::U16, [0u16, u16::MAX, 0, 300, u16::MAX].into()),
            (IntDType::U8, [0u8, 255, 0, 44, 255].into()),
        ];
        for (dtype, expected) in table {
            assert_eq!(cast(wide(), dtype), expected, "{dtype:?}");
        }
        let unsigned = cast(TensorData::from([u64::MAX, 7]), IntDType::I64);
        assert_eq!(unsigned, TensorData::from([-1i64, 7]));
        let bytes = cast(TensorData::from([[200u8], [7]]), IntDType::I8);
        assert_eq!(bytes, TensorData::from([[-56i8], [7]]));
    }

    #[test]
    fn only_integers_are_cast() {
        assert!(cast_data(TensorData::from([1.0f32]), IntDType::I32).is_err());
    }
}
