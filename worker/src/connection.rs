//! Serves one connection: a handshake, then a reader and a writer for a session.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use tensord_proto::v1::{Error, ErrorCode, Join, OfferSnapshots, Open, Rejected, frame::Body};
use tensord_transport::{
    Link, LinkReceiver,
    channel::{Broken, Connection, Endpoint, FrameParts, Look, Next, Timing, duplex, pump},
    tls::PeerCertificate,
};
use tokio::{
    sync::Notify,
    time::{sleep, timeout},
};
use tracing::{debug, warn};

use crate::{
    collective,
    registry::{Attached, Registry},
    session::{Session, Track},
};

/// How long a client may take to send its first frame.
const OPEN_DEADLINE: Duration = Duration::from_secs(5);

/// How long a client that broke the protocol stays connected, to receive the error.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the client may take to receive the remaining frames of a session that ended.
/// The limit exists because these frames hold device memory.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval of the check whether the session has ended.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Serves one connection until it ends.
pub(crate) async fn serve(registry: Arc<Registry>, link: Link) {
    let (peer, carrier, certificate) = (link.peer, link.carrier, link.certificate);
    let Link {
        mut sender,
        mut receiver,
        ..
    } = link;
    let opened = handshake(&registry, &mut receiver, certificate.as_ref()).await;
    let admitted = opened.and_then(|opened| match receiver.admit() {
        Ok(()) => Ok(opened),
        Err(e) => {
            if let ConnectionPurpose::Session(attached) = opened {
                attached.session.detach(attached.track, attached.connection);
            }
            Err(Error::new(ErrorCode::Limit, e.to_string()))
        }
    });
    let attached = match admitted {
        Ok(ConnectionPurpose::Session(attached)) => *attached,
        Ok(ConnectionPurpose::Worker(accepted)) => {
            debug!(%peer, "another worker joined over {carrier}");
            let link = Link {
                sender,
                receiver,
                carrier,
                peer,
                certificate,
            };
            return collective::serve(accepted, link).await;
        }
        Err(error) => {
            warn!(%peer, "refused a {carrier} connection: {error}");
            let rejected = Body::Rejected(Rejected { error: Some(error) });
            if sender.send(&[duplex::encode(rejected)]).await.is_ok() {
                sender.finish().await;
            }
            return;
        }
    };
    let Attached {
        session,
        track,
        connection,
        opened,
    } = attached;
    debug!(%peer, session = %session.id, "client connected track {track:?} over {carrier}");
    let sent = sender.send(&[duplex::encode(Body::Opened(opened))]).await;
    let ended = match sent {
        Ok(()) => {
            let link = Link {
                sender,
                receiver,
                carrier,
                peer,
                certificate,
            };
            let end = TrackEnd {
                session: &session,
                track,
            };
            tokio::select! {
                ended = pump(&end, connection, link, Timing::DEFAULT) => ended.to_string(),
                ended = drain_timeout(&session) => ended,
            }
        }
        Err(e) => e.to_string(),
    };
    session.detach(track, connection);
    debug!(%peer, session = %session.id, "connection ended: {ended}");
}

/// Waits until [`DRAIN_TIMEOUT`] after the end of the session. Returns the reason to close the
/// connection.
async fn drain_timeout(session: &Session) -> String {
    while !session.has_ended() {
        sleep(CHECK_INTERVAL).await;
    }
    sleep(DRAIN_TIMEOUT).await;
    format!("the client did not read the end of the session within {DRAIN_TIMEOUT:?}")
}

/// The purpose of a connection.
enum ConnectionPurpose {
    /// A client's session.
    Session(Box<Attached>),
    /// A link to another worker.
    Worker(collective::AcceptedLink),
}

async fn handshake(
    registry: &Registry,
    receiver: &mut LinkReceiver,
    certificate: Option<&PeerCertificate>,
) -> Result<ConnectionPurpose, Error> {
    match first_frame(receiver).await? {
        FirstFrame::Open(open) => Ok(ConnectionPurpose::Session(Box::new(
            registry.attach(&open)?,
        ))),
        FirstFrame::Join(join) => Ok(ConnectionPurpose::Worker(
            registry.join(&join, certificate)?,
        )),
        FirstFrame::OfferSnapshots(_) => Err(Error::new(
            ErrorCode::Protocol,
            "only a worker that runs its leases in processes keeps snapshots",
        )),
    }
}

/// The frame with which a connection begins.
pub(crate) enum FirstFrame {
    /// A client opens or resumes a session.
    Open(Open),
    /// Another worker of a lease joins.
    Join(Join),
    /// Another worker sends the snapshots of a lease.
    OfferSnapshots(OfferSnapshots),
}

/// Receives the first frame of a connection.
pub(crate) async fn first_frame(receiver: &mut LinkReceiver) -> Result<FirstFrame, Error> {
    let protocol = |what: String| Error::new(ErrorCode::Protocol, what);
    let first = timeout(OPEN_DEADLINE, receiver.recv()).await;
    let first =
        first.map_err(|_| protocol(format!("the peer sent no frame within {OPEN_DEADLINE:?}")))?;
    let first = first.map_err(|e| protocol(e.to_string()))?;
    let first = first
        .ok_or_else(|| protocol("the peer closed the connection before its first frame".into()))?;
    let frame = duplex::decode(first).map_err(|e| protocol(e.to_string()))?;
    match frame.body {
        Some(Body::Open(open)) => Ok(FirstFrame::Open(open)),
        Some(Body::Join(join)) => Ok(FirstFrame::Join(join)),
        Some(Body::OfferSnapshots(offer)) => Ok(FirstFrame::OfferSnapshots(offer)),
        _ => Err(protocol(
            "the first frame must open a session, join a worker or offer snapshots".into(),
        )),
    }
}

/// The session's end of a track.
struct TrackEnd<'a> {
    session: &'a Arc<Session>,
    track: Track,
}

impl Endpoint for TrackEnd<'_> {
    /// The rule that the client broke.
    type Reason = String;
    type Row = ();

    fn on_frame(
        &self,
        connection: Connection,
        frame: Bytes,
        _: &mut (),
    ) -> Result<(), Broken<String>> {
        match self.session.receive(self.track, connection, frame) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Broken::Replaced),
            Err(e) if e.is_loss() => Err(Broken::Loss(e.to_string())),
            Err(e) => {
                warn!(session = %self.session.id, "the client broke the protocol: {e}");
                let error = Error::new(ErrorCode::Protocol, e.to_string());
                self.session.end(error);
                Err(Broken::Over(e.to_string(), CLOSE_TIMEOUT))
            }
        }
    }

    fn next(&self, connection: Connection, _: Look) -> Next {
        self.session.next_to_send(self.track, connection)
    }

    fn ping(&self, connection: Connection, must: bool) -> Option<FrameParts> {
        self.session.ping(self.track, connection, must)
    }

    fn wake(&self) -> &Notify {
        self.session.writer_notify(self.track)
    }
}
