//! Serves one connection: a handshake, then a reader and a writer for a session.

use std::{sync::Arc, time::Duration};

use tensord_proto::v1::{Error, ErrorCode, Rejected, frame::Body};
use tensord_transport::{Link, LinkReceiver, LinkSender, duplex, tls::Fingerprint};
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

use crate::{
    collective,
    registry::{Attached, Registry},
    session::{NextFrames, Session, Track},
};

/// How long a client may take to send its first frame.
const OPEN_DEADLINE: Duration = Duration::from_secs(5);

/// A connection on which nothing is received for this long counts as lost; clients send a
/// beat every second.
const SILENCE: Duration = Duration::from_secs(4);

/// How long an idle writer waits before it sends a beat.
const BEAT: Duration = Duration::from_secs(1);

/// How long a client that broke the protocol stays connected, to receive the error.
const GOODBYE: Duration = Duration::from_secs(1);

/// How long the client may take to receive the remaining frames of a session that ended.
/// The limit exists because these frames hold device memory.
const LINGER: Duration = Duration::from_secs(5);

/// Interval of the check whether the session has ended.
const LOOK: Duration = Duration::from_secs(1);

/// How long an acknowledgement or credit may wait for a frame to carry it.
const ACK_DELAY: Duration = Duration::from_millis(20);

/// Serves one connection until it ends.
pub(crate) async fn serve(registry: Arc<Registry>, link: Link) {
    let (peer, carrier, certificate) = (link.peer, link.carrier, link.certificate);
    let Link {
        mut sender,
        mut receiver,
        ..
    } = link;
    let opened = handshake(&registry, &mut receiver, certificate).await;
    let admitted = opened.and_then(|opened| match receiver.admit() {
        Ok(()) => Ok(opened),
        Err(e) => Err(Error::new(ErrorCode::Limit, e.to_string())),
    });
    let attached = match admitted {
        Ok(Opened::Session(attached)) => *attached,
        Ok(Opened::Worker(accepted)) => {
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
    let greeted = sender.send(&[duplex::encode(Body::Opened(opened))]).await;
    let ended = match greeted {
        Ok(()) => tokio::select! {
            ended = read(&session, track, connection, receiver) => ended,
            ended = write(&session, track, connection, sender) => ended,
            ended = outlive(&session) => ended,
        },
        Err(e) => e.to_string(),
    };
    session.detach(track, connection);
    debug!(%peer, session = %session.id, "connection ended: {ended}");
}

/// Waits until [`LINGER`] after the end of the session. Returns the reason to close the
/// connection.
async fn outlive(session: &Session) -> String {
    while !session.has_ended() {
        sleep(LOOK).await;
    }
    sleep(LINGER).await;
    format!("the client did not read the end of the session within {LINGER:?}")
}

/// The purpose of a connection.
enum Opened {
    /// A client's session.
    Session(Box<Attached>),
    /// A link to another worker.
    Worker(collective::Accepted),
}

async fn handshake(
    registry: &Registry,
    receiver: &mut LinkReceiver,
    certificate: Option<Fingerprint>,
) -> Result<Opened, Error> {
    let protocol = |what: String| Error::new(ErrorCode::Protocol, what);
    let first = timeout(OPEN_DEADLINE, receiver.recv()).await;
    let first =
        first.map_err(|_| protocol(format!("the peer sent no frame within {OPEN_DEADLINE:?}")))?;
    let first = first.map_err(|e| protocol(e.to_string()))?;
    let first = first
        .ok_or_else(|| protocol("the peer closed the connection before its first frame".into()))?;
    let frame = duplex::decode(first).map_err(|e| protocol(e.to_string()))?;
    match frame.body {
        Some(Body::Open(open)) => Ok(Opened::Session(Box::new(registry.attach(&open)?))),
        Some(Body::Join(join)) => Ok(Opened::Worker(registry.join(&join, certificate)?)),
        _ => Err(protocol(
            "the first frame must open a session or join a worker".into(),
        )),
    }
}

async fn read(
    session: &Arc<Session>,
    track: Track,
    connection: u64,
    mut receiver: LinkReceiver,
) -> String {
    loop {
        let frame = match timeout(SILENCE, receiver.recv()).await {
            Ok(Ok(Some(frame))) => frame,
            Ok(Ok(None)) => return "the client closed the connection".into(),
            Ok(Err(e)) => return e.to_string(),
            Err(_) => return format!("the client sent nothing for {SILENCE:?}"),
        };
        match session.receive(track, connection, frame) {
            Ok(true) => {}
            Ok(false) => return "a later connection replaced this one".into(),
            // The next connection retransmits the lost frames.
            Err(e) if e.is_loss() => return e.to_string(),
            Err(e) => {
                warn!(session = %session.id, "the client broke the protocol: {e}");
                session.end(Error::new(ErrorCode::Protocol, e.to_string()));
                // Leaves the writer time to send the error.
                tokio::time::sleep(GOODBYE).await;
                return e.to_string();
            }
        }
    }
}

async fn write(
    session: &Arc<Session>,
    track: Track,
    connection: u64,
    mut sender: LinkSender,
) -> String {
    loop {
        let wait = match session.next_to_send(track, connection) {
            NextFrames::Frames(frames) => {
                if let Err(e) = sender.send_all(&frames).await {
                    return e.to_string();
                }
                continue;
            }
            NextFrames::Done => {
                sender.finish().await;
                return "the session ended".into();
            }
            NextFrames::Replaced => return "a later connection replaced this one".into(),
            NextFrames::PendingAck => ACK_DELAY,
            NextFrames::Nothing => BEAT,
        };
        if timeout(wait, session.writer_woken(track)).await.is_err()
            && let Some(beat) = session.beat(track, connection)
            && let Err(e) = sender.send(&beat).await
        {
            return e.to_string();
        }
    }
}
