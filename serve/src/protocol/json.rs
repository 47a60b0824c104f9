//! Requests and answers in HTTP: JSON, after which the bytes of those tensors follow that are not in it.
//!
//! The JSON of a request borrows from the body. The field `data` stays a text until the input's type and shape are
//! known, and binary parts are slices of the body.

mod answer;
mod elements;
#[cfg(test)]
pub(super) mod testing;
#[cfg(test)]
mod tests;

use std::{borrow::Cow, fmt, marker::PhantomData};

use bytes::Bytes;
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, IgnoredAny, SeqAccess, Visitor},
};
use serde_json::value::RawValue;

pub(crate) use self::answer::encode;
use super::{
    InferRequest, InputTensor, MAX_DIMS, MAX_TENSORS, RequestedOutput,
    checks::{
        self, CLASSIFICATION, Declared, SHARED_MEMORY, cut, invalid_input, invalid_output,
        not_supported, shown,
    },
};
use crate::error::InferError;

/// The header with the length of the JSON, if binary parts follow it.
const HEADER_LEN: &str = "Inference-Header-Content-Length";

/// Most characters of an error of the JSON parser, which may have a client's text.
const PARSER_ERROR_CHARS: usize = 200;

#[derive(Deserialize)]
struct Head<'a> {
    id: Option<String>,
    #[serde(borrow)]
    parameters: Option<Parameters<'a>>,
    #[serde(borrow)]
    inputs: Bounded<Input<'a>, MAX_TENSORS>,
    #[serde(borrow)]
    outputs: Option<Bounded<Output<'a>, MAX_TENSORS>>,
}

#[derive(Deserialize)]
struct Input<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(borrow)]
    datatype: Cow<'a, str>,
    shape: Bounded<i64, MAX_DIMS>,
    #[serde(borrow)]
    parameters: Option<Parameters<'a>>,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Output<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(borrow)]
    parameters: Option<Parameters<'a>>,
}

/// The known parameters of requests, inputs and outputs.
#[derive(Deserialize, Default, Clone, Copy)]
struct Parameters<'a> {
    #[serde(borrow)]
    timeout: Option<&'a RawValue>,
    #[serde(borrow)]
    binary_data_output: Option<&'a RawValue>,
    #[serde(borrow)]
    binary_data_size: Option<&'a RawValue>,
    #[serde(borrow)]
    binary_data: Option<&'a RawValue>,
    #[serde(borrow)]
    classification: Option<&'a RawValue>,
    #[serde(borrow)]
    shared_memory_region: Option<&'a RawValue>,
}

/// Decodes a request. `header_len` is the value of [`HEADER_LEN`].
///
/// Binary parts are not copied. Elements in JSON take at most four times as many bytes as their text, whatever the
/// shapes are.
pub(crate) fn decode(body: Bytes, header_len: Option<usize>) -> Result<InferRequest, InferError> {
    let head_len = header_len.unwrap_or(body.len());
    let Some(head) = body.get(..head_len) else {
        let text = format!(
            "the header `{HEADER_LEN}` is {head_len}, and the body has only {} bytes",
            body.len()
        );
        return Err(InferError::Invalid(text));
    };
    let mut json = serde_json::Deserializer::from_slice(head);
    let head = Head::deserialize(&mut json).map_err(malformed)?;
    let id = head.id.unwrap_or_default();
    checks::check_id(&id)?;
    let parameters = head.parameters.unwrap_or_default();
    let micros = parameter(parameters.timeout, "timeout", "a number of microseconds")
        .map_err(InferError::Invalid)?;
    let is_binary = parameter(
        parameters.binary_data_output,
        "binary_data_output",
        "true or false",
    );

    let outputs = head.outputs.unwrap_or_default();
    checks::check_count("output", outputs.count)?;
    checks::check_unique("output", outputs.items.iter().map(|output| &*output.name))?;
    checks::check_count("input", head.inputs.count)?;
    checks::check_unique("input", head.inputs.items.iter().map(|input| &*input.name))?;
    let mut parts = Parts {
        left: body.slice(head_len..),
        has_header: header_len.is_some(),
    };
    let inputs = head
        .inputs
        .items
        .iter()
        .map(|sent| input(sent, &mut parts))
        .collect::<Result<_, _>>()?;
    // Only now, as a body with binary parts and no header has a clearer error.
    json.end().map_err(malformed)?;
    parts.end()?;
    Ok(InferRequest {
        id,
        timeout: micros.and_then(checks::timeout),
        inputs,
        outputs: outputs.items.iter().map(output).collect::<Result<_, _>>()?,
        is_binary_default: is_binary.map_err(InferError::Invalid)?.unwrap_or(false),
    })
}

fn malformed(error: serde_json::Error) -> InferError {
    let error = cut(&error.to_string(), PARSER_ERROR_CHARS);
    InferError::Invalid(format!(
        "the request is not the JSON of an inference: {error}"
    ))
}

fn input(sent: &Input<'_>, parts: &mut Parts) -> Result<InputTensor, InferError> {
    let declared = Declared::new(
        &sent.name,
        &sent.datatype,
        &sent.shape.items,
        sent.shape.count,
    )?;
    let parameters = sent.parameters.unwrap_or_default();
    if parameters.shared_memory_region.is_some() {
        return Err(declared.invalid(&not_supported(SHARED_MEMORY)));
    }
    let size = parameter(
        parameters.binary_data_size,
        "binary_data_size",
        "a number of bytes",
    );
    match (
        sent.data,
        size.map_err(|problem| declared.invalid(&problem))?,
    ) {
        (Some(data), None) => {
            let elements = elements::parse(&declared, data.get())?;
            Ok(declared.with_elements(elements.into()))
        }
        (None, Some(len_bytes)) => {
            let bytes = parts.take(&declared, len_bytes)?;
            declared.with_bytes(bytes)
        }
        (Some(_), Some(_)) => {
            Err(declared.invalid("there are both `data` and `binary_data_size`; one is possible"))
        }
        (None, None) => {
            Err(declared.invalid("there is no `data`, and no parameter `binary_data_size`"))
        }
    }
}

fn output(sent: &Output<'_>) -> Result<RequestedOutput, InferError> {
    let parameters = sent.parameters.unwrap_or_default();
    let invalid = |problem: String| invalid_output(&sent.name, &problem);
    if parameters.classification.is_some() {
        return Err(invalid(not_supported(CLASSIFICATION)));
    }
    if parameters.shared_memory_region.is_some() {
        return Err(invalid(not_supported(SHARED_MEMORY)));
    }
    Ok(RequestedOutput {
        name: sent.name.clone().into_owned(),
        is_binary: parameter(parameters.binary_data, "binary_data", "true or false")
            .map_err(invalid)?,
    })
}

/// Returns the value of a parameter, or what is wrong with it.
fn parameter<T: DeserializeOwned>(
    sent: Option<&RawValue>,
    name: &str,
    expected: &str,
) -> Result<Option<T>, String> {
    let Some(sent) = sent.map(RawValue::get) else {
        return Ok(None);
    };
    let value = serde_json::from_str(sent);
    value.map_err(|_| {
        format!(
            "the parameter `{name}` is {}, and must be {expected}",
            shown(sent)
        )
    })
}

/// The binary parts that are left.
struct Parts {
    left: Bytes,
    has_header: bool,
}

impl Parts {
    fn take(&mut self, declared: &Declared, len_bytes: u64) -> Result<Bytes, InferError> {
        if !self.has_header {
            let problem = format!(
                "there is a binary part, and no header `{HEADER_LEN}` with the length of the JSON"
            );
            return Err(invalid_input(&declared.name, &problem));
        }
        declared.check_len(len_bytes)?;
        let left = self.left.len();
        match declared.len_bytes <= left {
            true => Ok(self.left.split_to(declared.len_bytes)),
            false => Err(declared.invalid(&format!(
                "the binary part has {len_bytes} bytes, and the body has only {left} more"
            ))),
        }
    }

    fn end(&self) -> Result<(), InferError> {
        match self.left.len() {
            0 => Ok(()),
            left => Err(InferError::Invalid(format!(
                "after the binary parts of the inputs, the body has {left} more bytes"
            ))),
        }
    }
}

/// The first items of a list, and how many there are: a request gets no memory for items that are too many.
struct Bounded<T, const MAX: usize> {
    items: Vec<T>,
    count: usize,
}

impl<T, const MAX: usize> Default for Bounded<T, MAX> {
    fn default() -> Self {
        Self {
            items: Vec::new(),
            count: 0,
        }
    }
}

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for Bounded<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Items<T, const MAX: usize>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for Items<T, MAX> {
            type Value = Bounded<T, MAX>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut list = Bounded::default();
                while list.count < MAX {
                    match seq.next_element()? {
                        Some(item) => list.items.push(item),
                        None => return Ok(list),
                    }
                    list.count += 1;
                }
                while seq.next_element::<IgnoredAny>()?.is_some() {
                    list.count += 1;
                }
                Ok(list)
            }
        }

        from.deserialize_seq(Items(PhantomData))
    }
}
