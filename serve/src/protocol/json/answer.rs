//! An answer in HTTP: JSON, then the bytes of those outputs that are not in it.

use burn::tensor::{bf16, f16};
use bytes::Bytes;
use serde::{Serialize, Serializer};

use crate::protocol::{DataType, InferResponse, OutputTensor};

/// The body of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Encoded {
    pub(crate) body: Bytes,
    /// The length of the JSON if bytes follow it: the value of the header `Inference-Header-Content-Length`, and the
    /// content type is `application/octet-stream`. Otherwise it is `application/json`.
    pub(crate) header_len: Option<usize>,
}

#[derive(Serialize)]
struct Answer<'a> {
    model_name: &'a str,
    model_version: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    id: &'a str,
    outputs: Vec<Output<'a>>,
}

#[derive(Serialize)]
struct Output<'a> {
    name: &'a str,
    datatype: &'static str,
    shape: &'a [usize],
    #[serde(skip_serializing_if = "Option::is_none")]
    parameters: Option<BinaryPart>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<Elements<'a>>,
}

#[derive(Serialize)]
struct BinaryPart {
    binary_data_size: usize,
}

/// Returns the body of an answer.
pub(crate) fn encode(response: &InferResponse) -> Encoded {
    let answer = Answer {
        model_name: &response.model,
        model_version: &response.version,
        id: &response.id,
        outputs: response.outputs.iter().map(output).collect(),
    };
    let mut body = serde_json::to_vec(&answer).expect("an answer has only texts and numbers");
    let header_len = body.len();
    let binary: Vec<&Bytes> = response
        .outputs
        .iter()
        .filter(|it| it.is_binary)
        .map(|it| &it.bytes)
        .collect();
    body.reserve_exact(binary.iter().map(|bytes| bytes.len()).sum());
    for bytes in &binary {
        body.extend_from_slice(bytes);
    }
    Encoded {
        body: body.into(),
        header_len: (!binary.is_empty()).then_some(header_len),
    }
}

fn output(tensor: &OutputTensor) -> Output<'_> {
    let elements = Elements {
        datatype: tensor.datatype,
        bytes: &tensor.bytes,
    };
    let binary = BinaryPart {
        binary_data_size: tensor.bytes.len(),
    };
    Output {
        name: &tensor.name,
        datatype: tensor.datatype.name(),
        shape: &tensor.shape,
        parameters: tensor.is_binary.then_some(binary),
        data: (!tensor.is_binary).then_some(elements),
    }
}

/// Elements as a flat list. Floats have the fewest digits that make the same value; those of 16 bits are written as ones
/// of 32 bits. A NaN or an infinity is `null`, of which numpy makes a NaN: Triton writes `NaN`, which is not JSON.
pub(super) struct Elements<'a> {
    pub(super) datatype: DataType,
    pub(super) bytes: &'a [u8],
}

impl Elements<'_> {
    /// Writes the list; each element has `N` bytes.
    fn list<S: Serializer, const N: usize, T: Serialize>(
        &self,
        to: S,
        read: fn([u8; N]) -> T,
    ) -> Result<S::Ok, S::Error> {
        let (elements, _) = self.bytes.as_chunks();
        to.collect_seq(elements.iter().map(|bytes| read(*bytes)))
    }
}

impl Serialize for Elements<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.datatype {
            DataType::Bool => self.list(to, |[byte]| byte != 0),
            DataType::UInt8 => self.list(to, u8::from_le_bytes),
            DataType::UInt16 => self.list(to, u16::from_le_bytes),
            DataType::UInt32 => self.list(to, u32::from_le_bytes),
            DataType::UInt64 => self.list(to, u64::from_le_bytes),
            DataType::Int8 => self.list(to, i8::from_le_bytes),
            DataType::Int16 => self.list(to, i16::from_le_bytes),
            DataType::Int32 => self.list(to, i32::from_le_bytes),
            DataType::Int64 => self.list(to, i64::from_le_bytes),
            DataType::Fp16 => self.list(to, |bytes| f16::from_le_bytes(bytes).to_f32()),
            DataType::Bf16 => self.list(to, |bytes| bf16::from_le_bytes(bytes).to_f32()),
            DataType::Fp32 => self.list(to, f32::from_le_bytes),
            DataType::Fp64 => self.list(to, f64::from_le_bytes),
        }
    }
}
