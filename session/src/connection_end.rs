//! How a connection of a session ends.

use std::time::Duration;

use tensord_channel::{Broken, Ended, duplex::FrameError};
use tensord_proto::{
    codec::DeviceProfile,
    v1::{Error, ErrorCode, Opened},
    version,
};

use crate::state::Track;

/// Why a connection ended.
#[derive(Debug)]
pub enum ConnectionEnd {
    /// The connection was lost; the session may continue on another.
    Lost(String),
    /// The worker ended the session because its lease is over, as this text says. The pool reports why.
    LeaseOver(String),
    /// The session is over.
    Over(String),
    /// The worker broke this rule, so the session is over.
    BrokeRule(String),
    /// The session is over, as another process computed another answer than the one that the program has.
    Diverged(String),
}

/// Converts `ended`, which the pump returned for a connection, into the connection's end.
pub fn after_pump(ended: Ended<ConnectionEnd>) -> ConnectionEnd {
    match ended {
        Ended::Lost(reason) => ConnectionEnd::Lost(reason),
        // This does not happen: a track's only driver uses one connection at a time.
        Ended::Replaced => ConnectionEnd::Lost("a later connection replaced this one".into()),
        Ended::Done => ConnectionEnd::Over("closed".into()),
        Ended::Over(end) => end,
    }
}

/// Returns the end of a connection whose session the worker closed with `error`. A session that
/// `can_be_restored` may go on elsewhere if its lease has left the worker, or the worker stops: the
/// pool reports where, or that the lease has ended.
pub(crate) fn closed_by(error: &Error, can_be_restored: bool) -> ConnectionEnd {
    match error.code() {
        ErrorCode::Lease | ErrorCode::Draining if can_be_restored => {
            ConnectionEnd::Lost(error.to_string())
        }
        ErrorCode::Lease => {
            ConnectionEnd::LeaseOver(format!("the worker ended the session: {error}"))
        }
        ErrorCode::Unspecified => ConnectionEnd::Over("closed".into()),
        _ => ConnectionEnd::Over(format!("the worker ended the session: {error}")),
    }
}

/// Returns the end of a connection whose session the worker has refused to open with `error`. `resume`
/// is whether the track was connected before, and `is_durable` whether the session could go on from a
/// snapshot.
pub fn rejected_by(error: &Error, track: Track, resume: bool, is_durable: bool) -> ConnectionEnd {
    match track {
        // A new process rejects the bulk track until the track for ops is connected.
        Track::Bulk if is_durable => ConnectionEnd::Lost(error.to_string()),
        Track::Ops | Track::Bulk => closed_by(error, resume && is_durable),
    }
}

/// Returns how a frame that was refused with `error` ends the connection.
pub fn broken(error: &FrameError) -> Broken<ConnectionEnd> {
    match error.is_loss() {
        true => Broken::Loss(error.to_string()),
        false => Broken::Over(ConnectionEnd::BrokeRule(error.to_string()), Duration::ZERO),
    }
}

/// Returns the device's profile, which the worker sent in `opened`.
///
/// # Errors
///
/// When the worker does not use a protocol of this client, or the profile is malformed.
pub fn accepted_profile(opened: &Opened) -> Result<DeviceProfile, String> {
    let ours = version::hello();
    let theirs = opened.hello.clone().unwrap_or_default();
    let protocol = version::negotiate(&ours, &theirs).map_err(|e| e.message)?;
    if opened.protocol != protocol {
        let chosen = opened.protocol;
        return Err(format!(
            "the worker chose protocol {chosen} instead of {protocol}"
        ));
    }
    let settings = opened.settings.clone().unwrap_or_default();
    DeviceProfile::decode(&settings.encoded).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how a connection ends whose session the worker closed with this code.
    fn end(code: ErrorCode, can_be_restored: bool) -> &'static str {
        match closed_by(&Error::new(code, "it ended"), can_be_restored) {
            ConnectionEnd::Lost(_) => "lost",
            ConnectionEnd::LeaseOver(_) => "lease over",
            ConnectionEnd::Over(_) => "over",
            ConnectionEnd::BrokeRule(_) => "broke a rule",
            ConnectionEnd::Diverged(_) => "diverged",
        }
    }

    #[test]
    fn only_the_pool_knows_why_a_lease_has_left_a_worker() {
        assert_eq!(end(ErrorCode::Lease, true), "lost");
        assert_eq!(end(ErrorCode::Lease, false), "lease over");
        assert_eq!(end(ErrorCode::Draining, true), "lost");
        assert_eq!(end(ErrorCode::Draining, false), "over");
        assert_eq!(end(ErrorCode::Session, true), "over");
    }
}
