//! Whether the integers of a request are among those that the device computes with: devices have one type of integers.

use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::DType;

use crate::{
    error::InferError,
    protocol::{DataType, InputTensor},
};

/// The types of integers that a device may have.
const TYPES: [(DType, i128, i128); 8] = [
    (DType::I8, i8::MIN as i128, i8::MAX as i128),
    (DType::I16, i16::MIN as i128, i16::MAX as i128),
    (DType::I32, i32::MIN as i128, i32::MAX as i128),
    (DType::I64, i64::MIN as i128, i64::MAX as i128),
    (DType::U8, 0, u8::MAX as i128),
    (DType::U16, 0, u16::MAX as i128),
    (DType::U32, 0, u32::MAX as i128),
    (DType::U64, 0, u64::MAX as i128),
];

/// The integers of the devices of a model, which are known once it was loaded.
#[derive(Debug, Default)]
pub(crate) struct DeviceIntegers {
    /// One more than the place in [`TYPES`]; 0 before.
    known: AtomicUsize,
}

impl DeviceIntegers {
    pub(crate) fn set(&self, dtype: DType) {
        let place = TYPES.iter().position(|(it, ..)| *it == dtype);
        self.known
            .store(place.map_or(0, |place| place + 1), Ordering::Relaxed);
    }

    /// Checks the elements of an input, if they are integers and those of the devices are known.
    pub(crate) fn check(&self, input: &InputTensor) -> Result<(), InferError> {
        let known = self.known.load(Ordering::Relaxed).checked_sub(1);
        let Some(&(_, least, most)) = known.and_then(|place| TYPES.get(place)) else {
            return Ok(());
        };
        match first_beyond(input, least, most) {
            Some((index, element)) => Err(InferError::Invalid(format!(
                "input `{}` has {element} at index {index}; the device of the model has integers from {least} to {most}",
                input.name
            ))),
            None => Ok(()),
        }
    }
}

/// Returns the first element that is not within these bounds, with its index.
fn first_beyond(input: &InputTensor, least: i128, most: i128) -> Option<(usize, i128)> {
    macro_rules! find {
        ($element:ty) => {{
            let is_all =
                i128::from(<$element>::MIN) >= least && i128::from(<$element>::MAX) <= most;
            let chunks = input.bytes.as_chunks().0.iter();
            let mut elements = chunks
                .map(|chunk| i128::from(<$element>::from_le_bytes(*chunk)))
                .enumerate();
            match is_all {
                true => None,
                false => elements.find(|(_, element)| *element < least || *element > most),
            }
        }};
    }
    match input.datatype {
        DataType::UInt8 => find!(u8),
        DataType::UInt16 => find!(u16),
        DataType::UInt32 => find!(u32),
        DataType::UInt64 => find!(u64),
        DataType::Int8 => find!(i8),
        DataType::Int16 => find!(i16),
        DataType::Int32 => find!(i32),
        DataType::Int64 => find!(i64),
        DataType::Bool | DataType::Fp16 | DataType::Bf16 | DataType::Fp32 | DataType::Fp64 => None,
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[track_caller]
    fn check(device: DType, datatype: DataType, bytes: &[u8], expected: Option<&str>) {
        let integers = DeviceIntegers::default();
        let input = InputTensor {
            name: "ids".into(),
            datatype,
            shape: vec![bytes.len() / datatype.size()],
            bytes: Bytes::copy_from_slice(bytes),
        };
        assert_eq!(integers.check(&input), Ok(()), "nothing is known");
        integers.set(device);
        let error = integers.check(&input).err().map(|it| it.to_string());
        assert_eq!(error.as_deref(), expected);
    }

    #[test]
    fn integers_that_the_device_does_not_have_are_refused() {
        let wide = [7_i64, 1 << 31].map(i64::to_le_bytes).concat();
        check(DType::I64, DataType::Int64, &wide, None);
        let error = "input `ids` has 2147483648 at index 1; the device of the model has integers from -2147483648 to 2147483647";
        check(DType::I32, DataType::Int64, &wide, Some(error));
        check(DType::I32, DataType::Int64, &(-5_i64).to_le_bytes(), None);
        check(DType::I32, DataType::UInt8, &[255], None);
        let error = "input `ids` has -1 at index 0; the device of the model has integers from 0 to 4294967295";
        check(DType::U32, DataType::Int8, &[255], Some(error));
        check(DType::I8, DataType::Fp32, &f32::MAX.to_le_bytes(), None);
    }
}
