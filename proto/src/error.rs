//! Methods and traits for the generated [`Error`] and [`Fault`].

use std::fmt;

use crate::{
    text::{MESSAGE_CHARS, NAME_CHARS, sanitize},
    v1::{Error, ErrorCode, Fault, FaultKind},
};

/// Most bytes of a name in a bounded fault: as much as is ever shown.
const NAME_BYTES: usize = 4 * NAME_CHARS;

impl Error {
    /// Creates an error with `code` and `message`.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code: code.into(),
            message: message.into(),
        }
    }
}

/// Prints the message, which may be a peer's, in a form that is safe to show.
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", sanitize(&self.message, MESSAGE_CHARS))
    }
}

impl std::error::Error for Error {}

impl FaultKind {
    /// Returns the kind in words.
    pub fn describe(self) -> &'static str {
        match self {
            Self::Unspecified => "failed",
            Self::UnknownTensor => "reads a tensor that does not exist",
            Self::Mismatch => "does not fit its tensors",
            Self::OutOfMemory => "needs more memory than the device has left",
            Self::Panic => "made the backend panic",
            Self::Unsupported => "is not supported here",
            Self::Backend => "was refused by the backend",
            Self::Peer => "depends on a peer that failed",
        }
    }
}

impl Fault {
    /// Returns the fault in the form that is sent to peers, with at most `reason_bytes`
    /// of its reason, as a backend may put the source of a whole kernel there, and with at
    /// most four bytes of each name for each character that is ever shown.
    pub fn bounded(&self, reason_bytes: usize) -> Self {
        let cut = |text: &str, most| text[..text.floor_char_boundary(most)].to_owned();
        Self {
            kind: self.kind,
            op_number: self.op_number,
            op_name: cut(&self.op_name, NAME_BYTES),
            worker: cut(&self.worker, NAME_BYTES),
            reason: cut(&self.reason, reason_bytes),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "op {} ({}) on worker {} {}: {}",
            self.op_number,
            sanitize(&self.op_name, NAME_CHARS),
            sanitize(&self.worker, NAME_CHARS),
            self.kind().describe(),
            sanitize(&self.reason, MESSAGE_CHARS)
        )
    }
}

impl std::error::Error for Fault {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fault_reason_sent_to_peers_is_bounded() {
        let fault = Fault {
            reason: "a€b".into(),
            ..Fault::default()
        };
        let bounded = [1, 2, 3, 4, 9].map(|bytes| fault.bounded(bytes).reason);
        assert_eq!(bounded, ["a", "a", "a", "a€", "a€b"]);
        let long = Fault {
            op_name: "o".repeat(5000),
            worker: "w".repeat(5000),
            ..fault
        };
        let bounded = long.bounded(4);
        let lengths = [bounded.op_name.len(), bounded.worker.len()];
        assert_eq!(lengths, [NAME_BYTES; 2]);
    }

    #[test]
    fn a_fault_names_op_worker_and_reason() {
        let fault = Fault {
            kind: FaultKind::OutOfMemory.into(),
            op_number: 17,
            op_name: "Float.Matmul".into(),
            worker: "gpu-1".into(),
            reason: "4.0 GiB requested, 1.2 GiB free".into(),
        };
        assert_eq!(
            fault.to_string(),
            "op 17 (Float.Matmul) on worker gpu-1 needs more memory than the device has left: 4.0 GiB requested, 1.2 GiB free"
        );
    }
}
