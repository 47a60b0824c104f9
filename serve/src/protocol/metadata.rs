//! The metadata of a server and of its models, in JSON. `grpc.rs` makes its messages of the same values.

use serde::Serialize;

/// The server, and which extensions of the protocol it has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct ServerMetadata {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) extensions: Vec<String>,
}

/// A model, and the tensors that it takes and returns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct ModelMetadata {
    pub(crate) name: String,
    pub(crate) versions: Vec<String>,
    pub(crate) platform: String,
    pub(crate) inputs: Vec<TensorMetadata>,
    pub(crate) outputs: Vec<TensorMetadata>,
}

/// A tensor of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct TensorMetadata {
    pub(crate) name: String,
    /// The name of the data type in the protocol.
    pub(crate) datatype: String,
    /// -1 for a dimension of any size.
    pub(crate) shape: Vec<i64>,
}

/// The body of an answer that is an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct ErrorBody<'a> {
    error: &'a str,
}

impl<'a> ErrorBody<'a> {
    pub(crate) fn new(error: &'a str) -> Self {
        Self { error }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_has_the_names_of_the_protocol() {
        let server = ServerMetadata {
            name: "tensord".into(),
            version: "0.1.0".into(),
            extensions: vec!["binary_tensor_data".into()],
        };
        let expected =
            r#"{"name":"tensord","version":"0.1.0","extensions":["binary_tensor_data"]}"#;
        assert_eq!(serde_json::to_string(&server).unwrap(), expected);
        let tensor = |name: &str, shape| TensorMetadata {
            name: name.into(),
            datatype: "FP32".into(),
            shape,
        };
        let model = ModelMetadata {
            name: "digits".into(),
            versions: vec!["3".into()],
            platform: "burn".into(),
            inputs: vec![tensor("image", vec![-1, 64])],
            outputs: vec![tensor("scores", vec![-1, 10])],
        };
        let expected = concat!(
            r#"{"name":"digits","versions":["3"],"platform":"burn","#,
            r#""inputs":[{"name":"image","datatype":"FP32","shape":[-1,64]}],"#,
            r#""outputs":[{"name":"scores","datatype":"FP32","shape":[-1,10]}]}"#
        );
        assert_eq!(serde_json::to_string(&model).unwrap(), expected);
    }

    #[test]
    fn an_error_is_valid_json_whatever_its_text_is() {
        let body = serde_json::to_string(&ErrorBody::new("a \"quoted\"\nname")).unwrap();
        assert_eq!(body, r#"{"error":"a \"quoted\"\nname"}"#);
    }
}
