//! Decodes the frames that workers send each other.

use tensord_proto::{
    codec::{CodecError, decode_type},
    v1::{self, PieceKind, frame::Body},
};

use super::{
    algorithm::{Arrival, PeerViolation, Piece},
    group::{REASON_BYTES, decode, received_fault},
    transfer::{Capability, FetchedPart},
};

/// The error when another worker broke a rule. The link to it cannot be used any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PeerFrameError {
    #[error(transparent)]
    PeerViolation(#[from] PeerViolation),
    #[error(transparent)]
    Codec(#[from] CodecError),
    #[error("{0}")]
    Rule(String),
}

/// A frame of another worker.
pub(super) enum PeerFrame {
    Ping,
    /// A frame for the group with these lease ranks.
    Group(Vec<u32>, GroupFrame),
    /// The worker requests the value that `from` offers to `to`.
    Fetch {
        capability: Capability,
        from: u32,
        to: u32,
    },
    /// A part of a value that this worker requested.
    Fetched(Capability, FetchedPart),
}

/// A frame for a group.
pub(super) enum GroupFrame {
    /// Ranks have reached their next all-reduces.
    Arrivals(Vec<(usize, Arrival)>),
    Piece(Piece),
    /// The group has failed, for this reason.
    Abort(String),
}

impl PeerFrame {
    /// Decodes a body.
    ///
    /// # Errors
    ///
    /// When workers do not send each other such a frame.
    pub(super) fn decode(body: Body) -> Result<Self, PeerFrameError> {
        Ok(match body {
            Body::Ping(_) => Self::Ping,
            Body::Arrivals(arrivals) => {
                let decoded = arrivals.arrivals.into_iter().map(decode);
                let decoded = decoded.collect::<Result<_, _>>()?;
                Self::Group(arrivals.group, GroupFrame::Arrivals(decoded))
            }
            Body::Piece(v1::Piece { group, kind, bytes }) => {
                let unknown =
                    |_| PeerFrameError::Rule(format!("a piece has the unknown kind {kind}"));
                let kind = PieceKind::try_from(kind).map_err(unknown)?;
                Self::Group(group, GroupFrame::Piece(Piece { kind, bytes }))
            }
            Body::Abort(v1::Abort { group, mut reason }) => {
                reason.truncate(reason.floor_char_boundary(REASON_BYTES));
                Self::Group(group, GroupFrame::Abort(reason))
            }
            Body::Fetch(fetch) => Self::Fetch {
                capability: capability(&fetch.capability)?,
                from: fetch.from,
                to: fetch.to,
            },
            Body::Fetched(fetched) => {
                let capability = capability(&fetched.capability)?;
                let part = match (fetched.fault, fetched.r#type) {
                    (Some(fault), _) => FetchedPart::Fault(received_fault(&fault)),
                    (None, Some(kind)) => {
                        let (shape, dtype, _) = decode_type(Some(&kind))?;
                        FetchedPart::Bytes(Some((shape, dtype)), fetched.bytes)
                    }
                    (None, None) => FetchedPart::Bytes(None, fetched.bytes),
                };
                Self::Fetched(capability, part)
            }
            _ => {
                return Err(PeerFrameError::Rule(
                    "the frame is not one that workers send each other".into(),
                ));
            }
        })
    }
}

fn capability(bytes: &[u8]) -> Result<Capability, PeerFrameError> {
    let size = bytes.len();
    let wrong = |_| PeerFrameError::Rule(format!("a capability has {size} bytes; it must have 16"));
    bytes.try_into().map_err(wrong)
}
