//! Converts tensord's errors to gRPC statuses, and back.
//!
//! A status carries the encoded [`Error`] in its details, so that the peer gets
//! tensord's error code as well as the message. The gRPC code is for tools that
//! do not decode the details.

use prost::Message;
use tensord_proto::v1::{Error, ErrorCode};
use tonic::{Code, Status};

/// Returns a status that carries `error`.
pub(crate) fn status(error: &Error) -> Status {
    let code = match error.code() {
        ErrorCode::Version => Code::FailedPrecondition,
        ErrorCode::Token => Code::Unauthenticated,
        ErrorCode::Enrolment => Code::PermissionDenied,
        ErrorCode::Protocol => Code::InvalidArgument,
        ErrorCode::Limit => Code::ResourceExhausted,
        ErrorCode::Draining => Code::Unavailable,
        ErrorCode::Cancelled => Code::Aborted,
        ErrorCode::Lease | ErrorCode::Session => Code::NotFound,
        ErrorCode::Unsatisfiable | ErrorCode::WorkerLost => Code::FailedPrecondition,
        ErrorCode::Internal | ErrorCode::Unspecified => Code::Internal,
    };
    Status::with_details(code, &error.message, error.encode_to_vec().into())
}

/// Returns the error that `status` carries, or `None` if it does not come from tensord.
pub(crate) fn error(status: &Status) -> Option<Error> {
    match Error::decode(status.details()) {
        Ok(error) if error.code() != ErrorCode::Unspecified => Some(error),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_survives_conversion_to_a_status() {
        let sent = Error::new(ErrorCode::Version, "update this side");
        let status = status(&sent);
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert_eq!(status.message(), "update this side");
        assert_eq!(error(&status), Some(sent));
    }

    #[test]
    fn foreign_status_has_no_error() {
        assert_eq!(error(&Status::unavailable("gone")), None);
        let foreign = Status::with_details(Code::Internal, "x", vec![0xff; 3].into());
        assert_eq!(error(&foreign), None);
    }
}
