//! What a session begins with: nothing, or the state of a session whose process has died.

use std::collections::HashMap;

use tensord_proto::{
    content::Hash,
    v1::{Error, ErrorCode, Held, RestorePoint, frame::Body},
};

use super::{outbound::Outbound, runner::Runner, snapshot::Snapshot};
use crate::blobs::HeldBlob;

/// The state that a session begins with.
pub(crate) enum SessionBegin {
    /// No tensors.
    New {
        /// The seed of the random ops.
        seed: u64,
    },
    /// That of a session whose process has died.
    Restored {
        point: RestorePoint,
        snapshot: Box<Snapshot>,
    },
}

/// The parts of a session that depend on what it begins with.
pub(super) struct Begun {
    pub(super) runner: Runner,
    pub(super) outbound: Outbound,
    /// The hashes of the kept uploads that the session was offered.
    pub(super) offered: Vec<Hash>,
    /// Number of the mark from which the session goes on, or 0.
    pub(super) restored_at: u64,
}

impl SessionBegin {
    /// Begins a session for which the worker keeps the uploads `blobs`. `open_runner` makes the
    /// runner of a session that was offered the given uploads, of which some may be gone, and has
    /// the given seed.
    ///
    /// # Errors
    ///
    /// When the snapshot cannot be restored.
    pub(super) fn begin(
        self,
        blobs: Vec<(Hash, HeldBlob)>,
        open_runner: impl FnOnce(Vec<Option<HeldBlob>>, u64) -> Runner,
    ) -> Result<Begun, Error> {
        match self {
            Self::New { seed } => {
                let (hashes, held): (Vec<_>, _) = blobs
                    .into_iter()
                    .map(|(hash, held)| (hash, Some(held)))
                    .unzip();
                let offer = (!hashes.is_empty()).then(|| Held {
                    hashes: hashes.concat().into(),
                });
                Ok(Begun {
                    runner: open_runner(held, seed),
                    outbound: Outbound::new(offer.map(Body::Held)),
                    offered: hashes,
                    restored_at: 0,
                })
            }
            Self::Restored { point, snapshot } => {
                // The client refers to the uploads by their places in the first offer.
                let blobs: HashMap<_, _> = blobs.into_iter().collect();
                let hashes = snapshot.held().to_vec();
                let held = hashes.iter().map(|hash| blobs.get(hash).cloned()).collect();
                let mut runner = open_runner(held, 0);
                let restored = runner.restore(&snapshot);
                restored.map_err(|e| Error::new(ErrorCode::Session, e.to_string()))?;
                Ok(Begun {
                    runner,
                    outbound: Outbound::restored(&point),
                    offered: hashes,
                    restored_at: point.mark,
                })
            }
        }
    }
}
