//! How the first message of a connection finds its session.

use tensord_proto::{
    ids::SessionId,
    v1::{Error, ErrorCode, Open, RestorePoint},
};

use crate::session::Track;

/// Number of restore points that are considered: a client sends one at most.
const MAX_RESTORE_POINTS: usize = 4;

/// Limit of the positions in a restore point.
const MAX_POSITION: u64 = u64::MAX / 2;

/// What a connection requests.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Attachment {
    /// A new session.
    New,
    /// A track of a session that this process has.
    Existing(Track),
    /// A session whose process has died.
    Restored,
}

impl Attachment {
    /// Returns what `open` requests from a process of this epoch.
    ///
    /// # Errors
    ///
    /// When the track for bulk bytes comes before the session is restored.
    pub(crate) fn of(open: &Open, epoch: u64) -> Result<Self, Error> {
        let is_of_earlier_process = open.epoch < epoch;
        match (open.bulk, open.resume) {
            (true, _) if is_of_earlier_process => Err(Error::new(
                ErrorCode::Session,
                format!(
                    "session {} must resume on its track for ops before its bulk track",
                    SessionId(open.session_id)
                ),
            )),
            (true, _) => Ok(Self::Existing(Track::Bulk)),
            (false, true) if is_of_earlier_process => Ok(Self::Restored),
            (false, true) => Ok(Self::Existing(Track::Ops)),
            (false, false) => Ok(Self::New),
        }
    }

    /// Returns the track of the connection.
    pub(crate) fn track(&self) -> Track {
        match self {
            Self::Existing(track) => *track,
            Self::New | Self::Restored => Track::Ops,
        }
    }

    /// Returns the number of the last frame that the client has received from the session's
    /// process: none if the process is another one.
    pub(crate) fn received(&self, open: &Open) -> u64 {
        match self {
            Self::Restored => 0,
            Self::New | Self::Existing(_) => open.received,
        }
    }
}

/// Returns the restore point of a client from which the session goes on: the first for whose mark
/// `has` finds a snapshot.
pub(crate) fn restore_point(
    points: &[RestorePoint],
    has: impl Fn(u64) -> bool,
) -> Option<RestorePoint> {
    // Positions of real sessions leave room for what is counted on top of them.
    let is_real = |point: &&RestorePoint| {
        let RestorePoint {
            frames,
            bytes,
            bulk_frames,
            bulk_bytes,
            ..
        } = **point;
        [frames, bytes, bulk_frames, bulk_bytes]
            .iter()
            .all(|at| *at < MAX_POSITION)
    };
    let points = points.iter().take(MAX_RESTORE_POINTS);
    let mut points = points.filter(is_real);
    points.find(|point| has(point.mark)).copied()
}
