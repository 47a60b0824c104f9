//! Requests and answers in gRPC.
//!
//! The elements of a request are bytes, which are not copied, or numbers in the field for their data type. Those of an
//! answer are bytes.

mod message;
#[cfg(test)]
mod tests;

use std::{collections::HashMap, time::Duration};

use bytes::Bytes;

pub(crate) use self::message::check_parts;
use super::{
    DataType, InferRequest, InferResponse, InputTensor, OutputTensor, RequestedOutput,
    checks::{self, CLASSIFICATION, Declared, SHARED_MEMORY, invalid_output, not_supported},
    messages::{
        InferParameter, InferTensorContents, ModelInferRequest, ModelInferResponse,
        ModelMetadataResponse, ServerMetadataResponse, infer_parameter::ParameterChoice,
        model_infer_request as request, model_infer_response as response, model_metadata_response,
    },
    metadata::{ModelMetadata, ServerMetadata, TensorMetadata},
};
use crate::error::InferError;

/// Decodes a request. The names of the model and its version are left to the caller.
pub(crate) fn decode(message: ModelInferRequest) -> Result<InferRequest, InferError> {
    let ModelInferRequest {
        id,
        parameters,
        inputs,
        outputs,
        raw_input_contents: raw,
        ..
    } = message;
    checks::check_id(&id)?;
    let timeout = timeout(&parameters)?;
    checks::check_count("output", outputs.len())?;
    checks::check_unique("output", outputs.iter().map(|output| &*output.name))?;
    checks::check_count("input", inputs.len())?;
    checks::check_unique("input", inputs.iter().map(|input| &*input.name))?;
    if !raw.is_empty() && raw.len() != inputs.len() {
        let (raw, inputs) = (raw.len(), inputs.len());
        let text =
            format!("the request has {inputs} inputs, and {raw} parts in `raw_input_contents`");
        return Err(InferError::Invalid(text));
    }
    let mut raw = raw.into_iter();
    Ok(InferRequest {
        id,
        timeout,
        inputs: inputs
            .into_iter()
            .map(|sent| input(sent, raw.next()))
            .collect::<Result<_, _>>()?,
        outputs: outputs.into_iter().map(output).collect::<Result<_, _>>()?,
        is_binary_default: true,
    })
}

fn timeout(parameters: &HashMap<String, InferParameter>) -> Result<Option<Duration>, InferError> {
    let Some(choice) = parameters
        .get("timeout")
        .and_then(|it| it.parameter_choice.as_ref())
    else {
        return Ok(None);
    };
    let sent = match choice {
        ParameterChoice::Uint64Param(micros) => return Ok(checks::timeout(*micros)),
        ParameterChoice::Int64Param(micros) => match u64::try_from(*micros) {
            Ok(micros) => return Ok(checks::timeout(micros)),
            Err(_) => micros.to_string(),
        },
        ParameterChoice::BoolParam(sent) => sent.to_string(),
        ParameterChoice::DoubleParam(sent) => sent.to_string(),
        ParameterChoice::StringParam(sent) => format!("`{}`", checks::shown(sent)),
    };
    let text = format!("the parameter `timeout` is {sent}, and must be a number of microseconds");
    Err(InferError::Invalid(text))
}

fn input(sent: request::InferInputTensor, raw: Option<Bytes>) -> Result<InputTensor, InferError> {
    let declared = Declared::new(&sent.name, &sent.datatype, &sent.shape, sent.shape.len())?;
    if sent.parameters.contains_key(SHARED_MEMORY) {
        return Err(declared.invalid(&not_supported(SHARED_MEMORY)));
    }
    let contents = sent
        .contents
        .filter(|it| *it != InferTensorContents::default());
    match (raw, contents) {
        (Some(raw), None) => declared.with_bytes(raw),
        (None, Some(contents)) => {
            let elements = elements(&declared, &contents)?;
            Ok(declared.with_elements(elements.into()))
        }
        (None, None) if declared.len_bytes == 0 => Ok(declared.with_elements(Bytes::new())),
        (None, None) => {
            Err(declared.invalid("there are no elements, in `contents` or in `raw_input_contents`"))
        }
        (Some(_), Some(_)) => {
            Err(declared
                .invalid("there are both `contents` and `raw_input_contents`; one is possible"))
        }
    }
}

fn output(sent: request::InferRequestedOutputTensor) -> Result<RequestedOutput, InferError> {
    let mut refused = [CLASSIFICATION, SHARED_MEMORY].into_iter();
    if let Some(parameter) = refused.find(|it| sent.parameters.contains_key(*it)) {
        return Err(invalid_output(&sent.name, &not_supported(parameter)));
    }
    Ok(RequestedOutput {
        name: sent.name,
        is_binary: None,
    })
}

/// Returns the elements that are sent as numbers.
fn elements(declared: &Declared, contents: &InferTensorContents) -> Result<Vec<u8>, InferError> {
    check_field(declared, contents)?;
    let mut bytes = Vec::with_capacity(declared.len_bytes);
    macro_rules! append {
        ($field:ident) => {
            bytes.extend(contents.$field.iter().flat_map(|value| value.to_le_bytes()))
        };
        ($field:ident as $type:ty) => {
            for (index, value) in contents.$field.iter().enumerate() {
                let element = <$type>::try_from(*value);
                let element =
                    element.map_err(|_| declared.invalid_element(index, &value.to_string()))?;
                bytes.extend(element.to_le_bytes());
            }
        };
    }
    match declared.datatype {
        DataType::Bool => bytes.extend(contents.bool_contents.iter().map(|value| u8::from(*value))),
        DataType::UInt8 => append!(uint_contents as u8),
        DataType::UInt16 => append!(uint_contents as u16),
        DataType::UInt32 => append!(uint_contents),
        DataType::UInt64 => append!(uint64_contents),
        DataType::Int8 => append!(int_contents as i8),
        DataType::Int16 => append!(int_contents as i16),
        DataType::Int32 => append!(int_contents),
        DataType::Int64 => append!(int64_contents),
        DataType::Fp32 => append!(fp32_contents),
        DataType::Fp64 => append!(fp64_contents),
        // `check_field` found no elements.
        DataType::Fp16 | DataType::Bf16 => {}
    }
    Ok(bytes)
}

/// Checks that there are as many elements as the shape has, and all in the field for the data type.
fn check_field(declared: &Declared, contents: &InferTensorContents) -> Result<(), InferError> {
    let Declared {
        datatype, shape, ..
    } = declared;
    let field = match datatype {
        DataType::Bool => "bool_contents",
        DataType::UInt8 | DataType::UInt16 | DataType::UInt32 => "uint_contents",
        DataType::UInt64 => "uint64_contents",
        DataType::Int8 | DataType::Int16 | DataType::Int32 => "int_contents",
        DataType::Int64 => "int64_contents",
        DataType::Fp32 => "fp32_contents",
        DataType::Fp64 => "fp64_contents",
        DataType::Fp16 | DataType::Bf16 => "raw_input_contents",
    };
    let counts = [
        ("bool_contents", contents.bool_contents.len()),
        ("int_contents", contents.int_contents.len()),
        ("int64_contents", contents.int64_contents.len()),
        ("uint_contents", contents.uint_contents.len()),
        ("uint64_contents", contents.uint64_contents.len()),
        ("fp32_contents", contents.fp32_contents.len()),
        ("fp64_contents", contents.fp64_contents.len()),
        ("bytes_contents", contents.bytes_contents.len()),
    ];
    for (sent, count) in counts {
        if sent != field && count > 0 {
            let problem = format!(
                "elements of type {datatype} belong in `{field}`, and there are some in `{sent}`"
            );
            return Err(declared.invalid(&problem));
        }
        let expected = declared.elements();
        if sent == field && count != expected {
            let problem = format!(
                "`{field}` has {count} elements, and by the shape {shape:?} it must have {expected}"
            );
            return Err(declared.invalid(&problem));
        }
    }
    Ok(())
}

/// Returns the message of an answer.
pub(crate) fn encode(response: InferResponse) -> ModelInferResponse {
    let (outputs, raw) = response.outputs.into_iter().map(output_parts).unzip();
    ModelInferResponse {
        model_name: response.model,
        model_version: response.version,
        id: response.id,
        parameters: HashMap::new(),
        outputs,
        raw_output_contents: raw,
    }
}

fn output_parts(output: OutputTensor) -> (response::InferOutputTensor, Bytes) {
    let tensor = response::InferOutputTensor {
        name: output.name,
        datatype: output.datatype.name().into(),
        shape: output.shape.iter().map(|size| *size as i64).collect(),
        parameters: HashMap::new(),
        contents: None,
    };
    (tensor, output.bytes)
}

impl From<ServerMetadata> for ServerMetadataResponse {
    fn from(server: ServerMetadata) -> Self {
        Self {
            name: server.name,
            version: server.version,
            extensions: server.extensions,
        }
    }
}

impl From<ModelMetadata> for ModelMetadataResponse {
    fn from(model: ModelMetadata) -> Self {
        Self {
            name: model.name,
            versions: model.versions,
            platform: model.platform,
            inputs: model.inputs.into_iter().map(Into::into).collect(),
            outputs: model.outputs.into_iter().map(Into::into).collect(),
        }
    }
}

impl From<TensorMetadata> for model_metadata_response::TensorMetadata {
    fn from(tensor: TensorMetadata) -> Self {
        Self {
            name: tensor.name,
            datatype: tensor.datatype,
            shape: tensor.shape,
        }
    }
}
