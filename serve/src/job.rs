//! The tensors of requests as those of a batch, and back.

use std::sync::Arc;

use burn::tensor::{DType, TensorData, bf16, f16};
use bytes::Bytes;

use crate::{
    answering::AnswerSender, limits::BodyPermit, protocol::DataType, queue::Waiting,
    signature::TensorSpec,
};

/// A request, for a replica.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    /// The inputs in the order in which the model declares them.
    pub(crate) inputs: Vec<Input>,
    pub(crate) answer: AnswerSender,
    /// Those for the bytes of the request, which are returned with it.
    pub(crate) permits: Vec<Arc<BodyPermit>>,
    /// How many replicas were lost while they computed it.
    pub(crate) losses: usize,
    pub(crate) duplicate: Duplicate,
}

/// Whether two replicas compute a request, as the first took very long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Duplicate {
    No,
    /// Another replica has a copy.
    Original,
    Copy,
}

/// An input of a request.
#[derive(Debug, Clone)]
pub(crate) struct Input {
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Bytes,
}

/// What a replica has computed for a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    /// The outputs in the order in which the model declares them.
    pub(crate) outputs: Vec<Output>,
    /// How many rows were computed together, without those that fill up the batch.
    pub(crate) batch_rows: usize,
}

/// An output for a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Output {
    pub(crate) shape: Vec<usize>,
    /// The elements in row-major order, little-endian.
    pub(crate) bytes: Bytes,
}

/// Returns the inputs of a batch of these requests, which is filled up to `padded_rows` with zeros; `None` for the rows
/// if the one request is computed as it is.
pub(crate) fn batch_inputs(
    specs: &[TensorSpec],
    requests: &[Waiting<Job>],
    padded_rows: Option<usize>,
) -> Vec<TensorData> {
    let input = |(index, spec): (usize, &TensorSpec)| {
        let inputs = requests.iter().map(|it| &it.request.inputs[index]);
        let mut shape = requests
            .first()
            .map_or_else(Vec::new, |it| it.request.inputs[index].shape.clone());
        if let (Some(rows), Some(padded_rows)) = (shape.first_mut(), padded_rows) {
            *rows = padded_rows;
        }
        tensor_data(spec.datatype, shape, inputs.map(|it| &it.bytes[..]))
    };
    specs.iter().enumerate().map(input).collect()
}

/// Returns inputs of zeros that a model with these declarations takes, with so many rows; dimensions of any size have
/// one element.
pub(crate) fn zero_inputs(specs: &[TensorSpec], rows: usize) -> Vec<TensorData> {
    let zeros = |spec: &TensorSpec| {
        let sizes = spec
            .shape
            .iter()
            .map(|size| usize::try_from(*size).unwrap_or(1));
        let mut shape: Vec<_> = sizes.collect();
        if spec.has_batch() {
            shape[0] = rows;
        }
        tensor_data(spec.datatype, shape, std::iter::empty())
    };
    specs.iter().map(zeros).collect()
}

/// Returns a tensor with the elements of these parts, which are little-endian, and zeros after them.
fn tensor_data<'a>(
    datatype: DataType,
    shape: Vec<usize>,
    parts: impl Iterator<Item = &'a [u8]>,
) -> TensorData {
    let count = shape.iter().product();
    macro_rules! elements {
        ($element:ty) => {{
            let mut elements = Vec::<$element>::with_capacity(count);
            for part in parts {
                let chunks = part.as_chunks().0.iter();
                elements.extend(chunks.map(|chunk| <$element>::from_le_bytes(*chunk)));
            }
            elements.resize(count, <$element>::default());
            TensorData::new(elements, shape)
        }};
    }
    match datatype {
        DataType::Bool => {
            let mut elements: Vec<bool> = parts.flatten().map(|byte| *byte != 0).collect();
            elements.resize(count, false);
            TensorData::new(elements, shape)
        }
        DataType::UInt8 => elements!(u8),
        DataType::UInt16 => elements!(u16),
        DataType::UInt32 => elements!(u32),
        DataType::UInt64 => elements!(u64),
        DataType::Int8 => elements!(i8),
        DataType::Int16 => elements!(i16),
        DataType::Int32 => elements!(i32),
        DataType::Int64 => elements!(i64),
        DataType::Fp16 => elements!(f16),
        DataType::Bf16 => elements!(bf16),
        DataType::Fp32 => elements!(f32),
        DataType::Fp64 => elements!(f64),
    }
}

/// Returns each request's part of the outputs of a batch, with so many rows each.
///
/// # Errors
///
/// If an output has another shape than the model declares, or other rows than the batch.
pub(crate) fn split_outputs(
    specs: &[TensorSpec],
    outputs: Vec<TensorData>,
    rows: &[usize],
    padded_rows: Option<usize>,
) -> Result<Vec<Vec<Output>>, String> {
    let mut split = vec![Vec::with_capacity(specs.len()); rows.len()];
    for (spec, output) in specs.iter().zip(outputs) {
        let shape = output.shape().to_vec();
        if !spec.accepts(&shape) || padded_rows.is_some_and(|rows| shape.first() != Some(&rows)) {
            return Err(unexpected_shape(spec, &shape, padded_rows));
        }
        let bytes = bytes_of(output, spec.datatype);
        let row_bytes = padded_rows.map(|rows| bytes.len() / rows.max(1));
        let mut first = 0;
        for (outputs, rows) in split.iter_mut().zip(rows) {
            let mut own = Output {
                shape: shape.clone(),
                bytes: bytes.clone(),
            };
            if let Some(row_bytes) = row_bytes {
                own.shape[0] = *rows;
                own.bytes = bytes.slice(first * row_bytes..(first + rows) * row_bytes);
                first += rows;
            }
            outputs.push(own);
        }
    }
    Ok(split)
}

fn unexpected_shape(spec: &TensorSpec, shape: &[usize], padded_rows: Option<usize>) -> String {
    let rows = padded_rows.map_or_else(String::new, |rows| {
        format!(", of which the batch has {rows} rows")
    });
    format!(
        "the model returned output `{}` with shape {shape:?}; it declares {:?}{rows}",
        spec.name, spec.shape
    )
}

/// Returns the elements in little-endian order, converted to a type.
fn bytes_of(data: TensorData, datatype: DataType) -> Bytes {
    let dtype = datatype.dtype();
    let data = match (data.dtype(), dtype) {
        // However the device stores them.
        (DType::Bool(_), DType::Bool(_)) => {
            TensorData::new(data.iter::<bool>().collect(), data.shape().clone())
        }
        (dtype, wanted) if dtype == wanted => data,
        _ => data.convert_dtype(dtype),
    };
    #[cfg(target_endian = "big")]
    compile_error!(
        "the elements of tensors are sent as they are in memory, which must be little-endian"
    );
    Bytes::copy_from_slice(data.bytes())
}

/// Returns the name of the first output that has a NaN or an infinity.
pub(crate) fn first_not_finite<'a>(specs: &'a [TensorSpec], outputs: &[Output]) -> Option<&'a str> {
    let is_finite = |(spec, output): &(&TensorSpec, &Output)| match spec.datatype {
        DataType::Fp16 => all::<2>(&output.bytes, |it| f16::from_le_bytes(it).is_finite()),
        DataType::Bf16 => all::<2>(&output.bytes, |it| bf16::from_le_bytes(it).is_finite()),
        DataType::Fp32 => all::<4>(&output.bytes, |it| f32::from_le_bytes(it).is_finite()),
        DataType::Fp64 => all::<8>(&output.bytes, |it| f64::from_le_bytes(it).is_finite()),
        _ => true,
    };
    let mut all = specs.iter().zip(outputs);
    all.find(|it| !is_finite(it))
        .map(|(spec, _)| spec.name.as_str())
}

fn all<const N: usize>(bytes: &[u8], is_one: impl Fn([u8; N]) -> bool) -> bool {
    bytes.as_chunks().0.iter().all(|chunk| is_one(*chunk))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::signature::BATCH;

    fn spec(datatype: DataType, shape: &[i64]) -> TensorSpec {
        TensorSpec {
            name: "x".into(),
            datatype,
            shape: shape.into(),
        }
    }

    /// A request with one input.
    fn waiting(shape: &[usize], bytes: &[u8]) -> Waiting<Job> {
        let (answer, _) = AnswerSender::new();
        let input = Input {
            shape: shape.into(),
            bytes: Bytes::copy_from_slice(bytes),
        };
        Waiting {
            request: Job {
                inputs: vec![input],
                answer,
                losses: 0,
                permits: Vec::new(),
                duplicate: Duplicate::No,
            },
            rows: shape[0],
            row_shapes: vec![shape[1..].into()],
            since: Instant::now(),
            deadline: Instant::now(),
            is_alone: false,
        }
    }

    #[test]
    fn a_batch_has_the_rows_of_its_requests_and_zeros() {
        let specs = [spec(DataType::Int16, &[BATCH, 2])];
        let bytes =
            |values: &[i16]| -> Vec<u8> { values.iter().flat_map(|it| it.to_le_bytes()).collect() };
        let requests = [
            waiting(&[1, 2], &bytes(&[1, -2])),
            waiting(&[2, 2], &bytes(&[3, 4, 5, 6])),
        ];
        let inputs = batch_inputs(&specs, &requests, Some(4));
        assert_eq!(
            inputs,
            [TensorData::new(vec![1_i16, -2, 3, 4, 5, 6, 0, 0], [4, 2])]
        );
    }

    #[test]
    fn a_model_without_batches_gets_the_request_as_it_is() {
        let specs = [spec(DataType::Bool, &[3])];
        let inputs = batch_inputs(&specs, &[waiting(&[3], &[1, 0, 1])], None);
        assert_eq!(inputs, [TensorData::new(vec![true, false, true], [3])]);
    }

    #[test]
    fn every_type_of_elements_is_read_and_written_unchanged() {
        for datatype in DataType::ALL {
            let bytes: Vec<u8> = match datatype {
                DataType::Bool => vec![0, 1, 1, 0],
                _ => (0..4 * datatype.size()).map(|it| 1 + it as u8).collect(),
            };
            let data = tensor_data(datatype, vec![4], std::iter::once(&bytes[..]));
            assert_eq!(data.dtype(), datatype.dtype());
            assert_eq!(bytes_of(data, datatype), bytes, "{datatype}");
        }
    }

    #[test]
    fn outputs_are_split_by_rows_and_converted_to_the_declared_type() {
        let specs = [spec(DataType::Int64, &[BATCH, 1])];
        let output = TensorData::new(vec![7_i32, 8, 9, 0], [4, 1]);
        let split = split_outputs(&specs, vec![output], &[1, 2], Some(4)).unwrap();
        let expected = |rows: usize, values: &[i64]| {
            vec![Output {
                shape: vec![rows, 1],
                bytes: values.iter().flat_map(|it| it.to_le_bytes()).collect(),
            }]
        };
        assert_eq!(split, [expected(1, &[7]), expected(2, &[8, 9])]);
    }

    #[test]
    fn an_output_of_another_shape_is_an_error_that_names_both() {
        let specs = [spec(DataType::Fp32, &[BATCH, 2])];
        let check = |shape: [usize; 2], expected: &str| {
            let output = TensorData::new(vec![0_f32; shape[0] * shape[1]], shape);
            assert_eq!(
                split_outputs(&specs, vec![output], &[3], Some(4)).unwrap_err(),
                expected
            );
        };
        check(
            [4, 3],
            "the model returned output `x` with shape [4, 3]; it declares [-1, 2], of which the batch has 4 rows",
        );
        check(
            [3, 2],
            "the model returned output `x` with shape [3, 2]; it declares [-1, 2], of which the batch has 4 rows",
        );
    }

    #[test]
    fn elements_that_are_not_finite_are_found() {
        let specs = [
            spec(DataType::Int32, &[BATCH]),
            spec(DataType::Fp32, &[BATCH]),
        ];
        let check = |value: f32, expected: Option<&str>| {
            let outputs = [i32::MAX as f32, value].map(|it| Output {
                shape: vec![1],
                bytes: Bytes::copy_from_slice(&it.to_le_bytes()),
            });
            assert_eq!(first_not_finite(&specs, &outputs), expected, "{value}");
        };
        check(1.0, None);
        check(f32::NAN, Some("x"));
        check(f32::NEG_INFINITY, Some("x"));
    }
}
