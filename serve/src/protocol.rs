//! The Open Inference Protocol, version 2: what a request and an answer are, whichever way they travel.
//!
//! `json.rs` has the form of HTTP, with the binary parts of tensors, and `grpc.rs` that of gRPC. None of them knows models, queues or I/O.

mod checks;
mod datatype;
pub(crate) mod grpc;
pub(crate) mod json;
pub(crate) mod metadata;

use std::time::Duration;

use bytes::Bytes;

pub(crate) use self::{
    checks::shown,
    datatype::DataType,
    metadata::{ErrorBody, ModelMetadata, ServerMetadata, TensorMetadata},
};

/// The generated messages of gRPC.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod messages {
    tonic::include_proto!("inference");
}

/// Most inputs of a request, and most outputs that it may name.
pub(crate) const MAX_TENSORS: usize = 64;

/// Most dimensions of a tensor.
pub(crate) const MAX_DIMS: usize = 16;

/// Most bytes of the id of a request.
pub(crate) const MAX_ID_BYTES: usize = 256;

/// A request for an inference. Its tensors have as many bytes as their shapes need, but are not yet compared with the model.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct InferRequest {
    /// Chosen by the client, and repeated in the answer; empty if it has none.
    pub(crate) id: String,
    /// How long the client waits, if it sets that.
    pub(crate) timeout: Option<Duration>,
    pub(crate) inputs: Vec<InputTensor>,
    /// Empty for all outputs.
    pub(crate) outputs: Vec<RequestedOutput>,
    /// Whether outputs for which the client requests no form are sent as bytes, not as JSON.
    pub(crate) is_binary_default: bool,
}

impl InferRequest {
    /// Returns the bytes of all inputs.
    pub(crate) fn input_bytes(&self) -> usize {
        self.inputs.iter().map(|it| it.bytes.len()).sum()
    }
}

/// A tensor that a client sent.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct InputTensor {
    pub(crate) name: String,
    pub(crate) datatype: DataType,
    pub(crate) shape: Vec<usize>,
    /// The elements in row-major order, little-endian.
    pub(crate) bytes: Bytes,
}

/// An output that a client requests by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RequestedOutput {
    pub(crate) name: String,
    /// Whether it is sent as bytes, not as JSON, if the client chooses that.
    pub(crate) is_binary: Option<bool>,
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct InferResponse {
    pub(crate) model: String,
    pub(crate) version: String,
    /// That of the request.
    pub(crate) id: String,
    pub(crate) outputs: Vec<OutputTensor>,
}

impl InferResponse {
    /// Returns the bytes of all outputs.
    pub(crate) fn output_bytes(&self) -> usize {
        self.outputs.iter().map(|it| it.bytes.len()).sum()
    }
}

/// A tensor of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct OutputTensor {
    pub(crate) name: String,
    pub(crate) datatype: DataType,
    pub(crate) shape: Vec<usize>,
    /// The elements in row-major order, little-endian.
    pub(crate) bytes: Bytes,
    /// Whether it is sent as bytes, not as JSON.
    pub(crate) is_binary: bool,
}
