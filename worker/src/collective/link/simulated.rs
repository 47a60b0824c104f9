//! A link without a network: the caller moves the frames.

use std::{
    collections::BTreeSet,
    sync::{Arc, Weak},
};

use bytes::Bytes;
use tensord_proto::{
    ids::WorkerId,
    v1::{Error, Join, Joined},
};
use tensord_transport::channel::{Connection, Endpoint, Look, Next};

use super::{Cohort, Peer, PeerEnd, accept_from, join_request};

/// One end of a connection between two workers.
pub(crate) struct SimulatedLinkEnd {
    cohort: Weak<Cohort>,
    peer: Arc<Peer>,
    connection: Connection,
}

/// Returns the first message of a connection for each worker that `cohort` wants to dial.
pub(crate) fn join_requests(cohort: &Cohort) -> Vec<Join> {
    let lease_members = cohort.lease_members();
    let workers = lease_members
        .others()
        .map(|share| WorkerId(share.worker_id));
    let dialled: BTreeSet<_> = workers.filter(|it| lease_members.dials(*it)).collect();
    let peers = dialled.into_iter().filter_map(|it| cohort.peer(it));
    let wanted = peers.filter(|peer| peer.is_link_requested() && peer.violation().is_none());
    wanted.map(|peer| join_request(cohort, peer)).collect()
}

impl SimulatedLinkEnd {
    /// Accepts the connection of another worker. The caller has checked the token of `join`, and knows
    /// who has sent it.
    ///
    /// # Errors
    ///
    /// With which the connection is rejected.
    pub(crate) fn accept(cohort: &Arc<Cohort>, join: &Join) -> Result<(Self, Joined), Error> {
        let accepted = accept_from(cohort, join, |_| Ok(()))?;
        let end = Self {
            cohort: accepted.cohort,
            peer: accepted.peer,
            connection: accepted.connection,
        };
        Ok((end, accepted.joined))
    }

    /// Begins a connection that this side has dialled, and on which `worker` has sent `joined`. Returns
    /// `None` if the reply does not fit what was sent, so that the connection must end.
    pub(crate) fn joined(cohort: &Arc<Cohort>, worker: WorkerId, joined: &Joined) -> Option<Self> {
        let peer = cohort.peer(worker)?.clone();
        let attached = peer.attach(joined.received, joined.credit_bytes).ok()?;
        Some(Self {
            cohort: Arc::downgrade(cohort),
            peer,
            connection: attached.connection,
        })
    }

    fn endpoint(&self) -> PeerEnd<'_> {
        PeerEnd {
            cohort: &self.cohort,
            peer: &self.peer,
        }
    }

    /// Processes a frame.
    ///
    /// # Errors
    ///
    /// Why the connection must end.
    pub(crate) fn receive(&self, frame: Bytes) -> Result<(), String> {
        let received = self.endpoint().on_frame(self.connection, frame, &mut ());
        received.map_err(|broken| format!("{broken:?}"))
    }

    /// Returns the frames to send.
    pub(crate) fn next_frames(&self) -> Vec<Bytes> {
        let look = Look {
            patient: false,
            rested: true,
        };
        match self.endpoint().next(self.connection, look) {
            Next::Frames(frames) => frames.iter().map(|parts| parts.concat().into()).collect(),
            _ => Vec::new(),
        }
    }

    /// Returns a ping, which acknowledges what was received.
    pub(crate) fn ping(&self) -> Option<Bytes> {
        let parts = self.endpoint().ping(self.connection, true)?;
        Some(parts.concat().into())
    }

    /// Records that the connection was lost.
    pub(crate) fn detach(&self) {
        self.peer.detach(self.connection);
    }
}
