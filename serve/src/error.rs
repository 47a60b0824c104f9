//! Why a request has no answer, and what that is in HTTP and gRPC.

use std::time::Duration;

use http::StatusCode;
use tonic::Code;

/// Why a request has no answer. The text is for the client: it names what was wrong with which value, and what is right.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InferError {
    /// There is no such model, or no such version of it.
    #[error("{0}")]
    NotFound(String),
    /// The request breaks a rule of the protocol, or does not fit the model.
    #[error("{0}")]
    Invalid(String),
    /// The request has more bytes than the server takes.
    #[error("{0}")]
    TooLarge(String),
    /// The request has no token, or a wrong one.
    #[error("the request has no valid token: send the header `Authorization: Bearer <token>`")]
    Unauthorized,
    /// The body of the request did not arrive in time.
    #[error("{0}")]
    SlowBody(String),
    /// There is too much to do to answer in time.
    #[error("{reason}; try again in {retry_after:?}")]
    Overloaded {
        /// What is full.
        reason: String,
        /// When there may be room.
        retry_after: Duration,
    },
    /// The request was not answered by its deadline.
    #[error("{0}")]
    DeadlineExceeded(String),
    /// The model failed for this request.
    #[error("{0}")]
    ModelFailed(String),
    /// No device computes the model at present.
    #[error("{0}")]
    Unavailable(String),
}

impl InferError {
    pub(crate) fn http_status(&self) -> StatusCode {
        match self {
            Self::NotFound(_) => StatusCode::NOT_FOUND,
            Self::Invalid(_) => StatusCode::BAD_REQUEST,
            Self::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Self::Unauthorized => StatusCode::UNAUTHORIZED,
            Self::SlowBody(_) => StatusCode::REQUEST_TIMEOUT,
            Self::Overloaded { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::DeadlineExceeded(_) => StatusCode::GATEWAY_TIMEOUT,
            Self::ModelFailed(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// Returns a short name for metrics.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::NotFound(_) => "not_found",
            Self::Invalid(_) => "invalid",
            Self::TooLarge(_) => "too_large",
            Self::Unauthorized => "unauthorized",
            Self::SlowBody(_) => "slow_body",
            Self::Overloaded { .. } => "overloaded",
            Self::DeadlineExceeded(_) => "deadline_exceeded",
            Self::ModelFailed(_) => "model_failed",
            Self::Unavailable(_) => "unavailable",
        }
    }

    pub(crate) fn grpc_code(&self) -> Code {
        match self {
            Self::NotFound(_) => Code::NotFound,
            Self::Invalid(_) => Code::InvalidArgument,
            Self::TooLarge(_) | Self::Overloaded { .. } => Code::ResourceExhausted,
            Self::Unauthorized => Code::Unauthenticated,
            Self::SlowBody(_) | Self::DeadlineExceeded(_) => Code::DeadlineExceeded,
            Self::ModelFailed(_) => Code::Internal,
            Self::Unavailable(_) => Code::Unavailable,
        }
    }

    /// Returns after how many whole seconds, at least one, a client should try again, if that helps.
    pub(crate) fn retry_after_secs(&self) -> Option<u64> {
        match self {
            Self::Overloaded { retry_after, .. } => {
                Some(retry_after.as_secs_f64().ceil().max(1.0) as u64)
            }
            Self::Unavailable(_) => Some(1),
            _ => None,
        }
    }
}
