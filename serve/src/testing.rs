//! The decoders and encoders of the protocol on their own, for fuzzing.

use bytes::Bytes;
use prost::Message as _;

pub use crate::protocol::messages;
use crate::protocol::{InferRequest, InferResponse, OutputTensor, grpc, json};

/// A request that was decoded.
#[derive(Debug, Clone, PartialEq)]
pub struct Request(InferRequest);

/// Decodes the body of a request in HTTP. `json_length` is the header with the length of its JSON.
///
/// # Errors
///
/// The text that a client gets.
pub fn decode_http(body: Bytes, json_length: Option<usize>) -> Result<Request, String> {
    let decoded = json::decode(body, json_length);
    decoded.map(Request).map_err(|error| error.to_string())
}

/// Decodes the message of a call of gRPC.
///
/// # Errors
///
/// The text that a client gets.
pub fn decode_grpc(message: Bytes) -> Result<Request, String> {
    grpc::check_parts(&message).map_err(|error| error.to_string())?;
    let message = messages::ModelInferRequest::decode(message).map_err(|e| e.to_string())?;
    let decoded = grpc::decode(message);
    decoded.map(Request).map_err(|error| error.to_string())
}

impl Request {
    /// Returns the type, shape, bytes of an element, and bytes of each input.
    pub fn inputs(&self) -> impl Iterator<Item = (&'static str, &[usize], usize, &Bytes)> {
        let inputs = self.0.inputs.iter();
        inputs.map(|it| {
            let datatype = it.datatype;
            (datatype.name(), &it.shape[..], datatype.size(), &it.bytes)
        })
    }

    /// Encodes an answer in HTTP with the inputs as its outputs, as JSON or as bytes after it. Returns the body and the
    /// length of its JSON, if there are bytes after it.
    pub fn answer_http(&self, is_binary: bool) -> (Bytes, Option<usize>) {
        let encoded = json::encode(&self.answer(is_binary));
        (encoded.body, encoded.header_len)
    }

    /// Encodes an answer in gRPC with the inputs as its outputs.
    pub fn answer_grpc(&self) -> messages::ModelInferResponse {
        grpc::encode(self.answer(true))
    }

    fn answer(&self, is_binary: bool) -> InferResponse {
        let outputs = self.0.inputs.iter().map(|it| OutputTensor {
            name: it.name.clone(),
            datatype: it.datatype,
            shape: it.shape.clone(),
            bytes: it.bytes.clone(),
            is_binary,
        });
        InferResponse {
            model: "model".into(),
            version: "1".into(),
            id: self.0.id.clone(),
            outputs: outputs.collect(),
        }
    }
}
