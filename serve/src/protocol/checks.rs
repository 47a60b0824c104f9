//! The rules for requests that HTTP and gRPC share: names, data types, shapes, and how many bytes these make.
//!
//! An error names the input, what was sent, and what is right. A client's text in it is cut and escaped.

use std::time::Duration;

use bytes::Bytes;

use crate::{
    error::InferError,
    protocol::{DataType, InputTensor, MAX_DIMS, MAX_ID_BYTES, MAX_TENSORS},
};

/// Most characters of a client's text in an error.
const SHOWN_CHARS: usize = 64;

/// The parameter that has an input or output in memory that client and server share.
pub(crate) const SHARED_MEMORY: &str = "shared_memory_region";

/// The parameter that has an output sorted, and its first elements returned with labels.
pub(crate) const CLASSIFICATION: &str = "classification";

/// An input as a client declares it, without its elements.
#[derive(Debug)]
pub(crate) struct Declared {
    pub(crate) name: String,
    pub(crate) datatype: DataType,
    pub(crate) shape: Vec<usize>,
    /// The size of all elements.
    pub(crate) len_bytes: usize,
}

impl Declared {
    /// Checks a declaration. `dims` is the number of dimensions that were sent; of `shape`, at least the first
    /// [`MAX_DIMS`] are there.
    pub(crate) fn new(
        name: &str,
        datatype: &str,
        shape: &[i64],
        dims: usize,
    ) -> Result<Self, InferError> {
        let invalid = |problem: String| invalid_input(name, &problem);
        let datatype = data_type(datatype).map_err(invalid)?;
        if dims > MAX_DIMS {
            return Err(invalid(format!(
                "the shape has {dims} dimensions, and at most {MAX_DIMS} are possible"
            )));
        }
        let sizes: Result<Vec<usize>, _> =
            shape.iter().map(|size| usize::try_from(*size)).collect();
        let Ok(sizes) = sizes else {
            return Err(invalid(format!("the shape {shape:?} has a negative size")));
        };
        let len_bytes = sizes
            .iter()
            .try_fold(datatype.size(), |len, size| len.checked_mul(*size));
        let Some(len_bytes) = len_bytes else {
            return Err(invalid(format!(
                "a tensor of type {datatype} and shape {shape:?} has too many bytes to count"
            )));
        };
        Ok(Self {
            name: name.to_owned(),
            datatype,
            shape: sizes,
            len_bytes,
        })
    }

    /// Returns the number of elements.
    pub(crate) fn elements(&self) -> usize {
        self.len_bytes / self.datatype.size()
    }

    /// Checks that the elements are sent as so many bytes.
    pub(crate) fn check_len(&self, len_bytes: u64) -> Result<(), InferError> {
        let Self {
            datatype,
            shape,
            len_bytes: expected,
            ..
        } = self;
        if u64::try_from(*expected) == Ok(len_bytes) {
            return Ok(());
        }
        Err(self.invalid(&format!(
            "the binary part has {len_bytes} bytes, and a tensor of type {datatype} and shape {shape:?} has {expected}"
        )))
    }

    /// Returns the input with elements that were sent as bytes.
    pub(crate) fn with_bytes(self, bytes: Bytes) -> Result<InputTensor, InferError> {
        self.check_len(bytes.len() as u64)?;
        if self.datatype == DataType::Bool
            && let Some(index) = bytes.iter().position(|byte| *byte > 1)
        {
            let problem = format!(
                "element {index} is the byte {}, and BOOL has the bytes 0 and 1",
                bytes[index]
            );
            return Err(self.invalid(&problem));
        }
        Ok(self.with_elements(bytes))
    }

    /// Returns the input with elements that are known to be valid.
    pub(crate) fn with_elements(self, bytes: Bytes) -> InputTensor {
        debug_assert_eq!(bytes.len(), self.len_bytes);
        InputTensor {
            name: self.name,
            datatype: self.datatype,
            shape: self.shape,
            bytes,
        }
    }

    pub(crate) fn invalid(&self, problem: &str) -> InferError {
        invalid_input(&self.name, problem)
    }

    /// Returns the error for an element that the data type does not have.
    pub(crate) fn invalid_element(&self, index: usize, sent: &str) -> InferError {
        let (sent, datatype) = (shown(sent), self.datatype);
        let values = values(datatype);
        self.invalid(&format!(
            "element {index} is {sent}, and {datatype} has {values}"
        ))
    }
}

fn data_type(name: &str) -> Result<DataType, String> {
    if let Some(datatype) = DataType::from_name(name) {
        return Ok(datatype);
    }
    let known = DataType::ALL.map(DataType::name).join(", ");
    Err(match name {
        "BYTES" => format!(
            "the data type BYTES is not supported, as no model takes strings; there are {known}"
        ),
        _ => format!(
            "the data type `{}` is unknown; there are {known}",
            shown(name)
        ),
    })
}

/// Returns which values a data type has, for errors.
fn values(datatype: DataType) -> String {
    let integers = |min: i64, max: u64| format!("integers from {min} to {max}");
    match datatype {
        DataType::Bool => "true and false".into(),
        DataType::UInt8 => integers(0, u8::MAX.into()),
        DataType::UInt16 => integers(0, u16::MAX.into()),
        DataType::UInt32 => integers(0, u32::MAX.into()),
        DataType::UInt64 => integers(0, u64::MAX),
        DataType::Int8 => integers(i8::MIN.into(), i8::MAX as u64),
        DataType::Int16 => integers(i16::MIN.into(), i16::MAX as u64),
        DataType::Int32 => integers(i32::MIN.into(), i32::MAX as u64),
        DataType::Int64 => integers(i64::MIN, i64::MAX as u64),
        DataType::Fp16 => "numbers from -65504 to 65504".into(),
        DataType::Bf16 => "numbers from -3.3895314e38 to 3.3895314e38".into(),
        DataType::Fp32 => format!("numbers from {:e} to {:e}", f32::MIN, f32::MAX),
        DataType::Fp64 => format!("numbers from {:e} to {:e}", f64::MIN, f64::MAX),
    }
}

/// Returns the error for a problem of an input.
pub(crate) fn invalid_input(name: &str, problem: &str) -> InferError {
    InferError::Invalid(format!("input `{}`: {problem}", shown(name)))
}

/// Returns the error for a problem of an output that is requested.
pub(crate) fn invalid_output(name: &str, problem: &str) -> InferError {
    InferError::Invalid(format!("output `{}`: {problem}", shown(name)))
}

/// Returns what is wrong with a parameter that is of an extension which the server does not have.
pub(crate) fn not_supported(parameter: &str) -> String {
    let instead = match parameter {
        CLASSIFICATION => "request the scores, and sort them",
        _ => "send tensors in the request, and get them in the answer",
    };
    format!("the parameter `{parameter}` is not supported; {instead}")
}

pub(crate) fn check_id(id: &str) -> Result<(), InferError> {
    let len = id.len();
    match len > MAX_ID_BYTES {
        true => Err(InferError::Invalid(format!(
            "the id has {len} bytes, and at most {MAX_ID_BYTES} are possible"
        ))),
        false => Ok(()),
    }
}

/// Checks how many `kind`s, inputs or outputs, a request has.
pub(crate) fn check_count(kind: &str, count: usize) -> Result<(), InferError> {
    match count > MAX_TENSORS {
        true => {
            let text =
                format!("the request has {count} {kind}s, and at most {MAX_TENSORS} are possible");
            Err(InferError::Invalid(text))
        }
        false => Ok(()),
    }
}

/// Checks that no two `kind`s, inputs or outputs, have the same name.
pub(crate) fn check_unique<'a>(
    kind: &str,
    names: impl Iterator<Item = &'a str>,
) -> Result<(), InferError> {
    let mut seen = Vec::with_capacity(MAX_TENSORS);
    for name in names {
        if seen.contains(&name) {
            return Err(InferError::Invalid(format!(
                "the request has the {kind} `{}` twice",
                shown(name)
            )));
        }
        seen.push(name);
    }
    Ok(())
}

/// Returns how long a client waits that sent this number of microseconds; as in Triton, 0 is for no limit.
pub(crate) fn timeout(micros: u64) -> Option<Duration> {
    (micros > 0).then(|| Duration::from_micros(micros))
}

/// Returns a client's text as it is shown in an error: cut, and without characters that change the text around it.
pub(crate) fn shown(text: &str) -> String {
    cut(text, SHOWN_CHARS)
}

/// Returns the first characters of a text, escaped where they are not printable.
pub(crate) fn cut(text: &str, chars: usize) -> String {
    let mut shown = String::new();
    for c in text.chars().take(chars) {
        match c {
            '"' | '\'' | '\\' => shown.push(c),
            _ => shown.extend(c.escape_debug()),
        }
    }
    if text.chars().nth(chars).is_some() {
        shown.push('…');
    }
    shown
}
