//! The tasks behind a link between two workers: they dial or accept a connection, exchange
//! frames on it, and reconnect.

#[cfg(all(feature = "testing", target_os = "linux"))]
pub(crate) mod simulated;

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use bytes::Bytes;
use tensord_proto::{
    ids::{LeaseId, WorkerId},
    v1::{Error, ErrorCode, Join, Joined, LeaseShare, frame::Body},
    version,
};
use tensord_transport::{
    Dialer, Identity, Link, LinkSender, TransportChoice,
    channel::{
        Broken, Connection, Endpoint, FrameParts, Look, Next, Received, Timing, duplex, pump,
    },
    tls::{Fingerprint, PeerCertificate, Trust},
};
use tokio::{
    sync::Notify,
    time::{Instant, sleep, timeout},
};
use tracing::{debug, info};

use super::{cohort::Cohort, peer::Peer};

/// Deadline for one attempt to connect.
const DIAL_DEADLINE: Duration = Duration::from_secs(3);

/// First and longest pause between attempts.
const RETRY_DELAY: Duration = Duration::from_millis(50);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(1);

/// A connection that the other worker opened.
pub(crate) struct AcceptedLink {
    pub(crate) cohort: Weak<Cohort>,
    pub(crate) peer: Arc<Peer>,
    pub(crate) connection: Connection,
    pub(crate) joined: Joined,
}

/// Keeps the link to `peer` connected while the cohort exists and the other worker obeys
/// the rules. Presents the certificate of `identity`, which identifies this worker.
pub(crate) async fn dial(
    cohort: Weak<Cohort>,
    lease: LeaseId,
    peer: Arc<Peer>,
    identity: Arc<Identity>,
) {
    // `Auto` tries TCP first, which carries the most by far. The program that leases
    // devices of both workers has ensured that they can reach each other.
    let dialer = Dialer::new(TransportChoice::Auto)
        .for_lease(lease)
        .with_identity(identity);
    let name = peer.share.worker.clone();
    let mut pause = RETRY_DELAY;
    loop {
        match connect(&cohort, &peer, &dialer).await {
            Ok((connection, link)) => {
                info!(
                    worker = name,
                    "connected to the worker over {}", link.carrier
                );
                let ended = run(&cohort, &peer, connection, link).await;
                info!(worker = name, "the link to the worker ended: {ended}");
                pause = RETRY_DELAY;
            }
            Err(e) => debug!(worker = name, "cannot connect to the worker: {e}"),
        }
        if cohort.strong_count() == 0 || peer.violation().is_some() {
            return;
        }
        sleep(pause).await;
        pause = (pause * 2).min(MAX_RETRY_DELAY);
    }
}

async fn connect(
    cohort: &Weak<Cohort>,
    peer: &Peer,
    dialer: &Dialer,
) -> Result<(Connection, Link), String> {
    let share = &peer.share;
    let pin = <[u8; 32]>::try_from(&share.certificate_sha256[..]);
    let pin =
        pin.map_err(|_| "the lease has no fingerprint of the worker's certificate".to_owned())?;
    let join = join_request(&*cohort.upgrade().ok_or("the lease has ended")?, peer);
    let trust = Trust::Pin(Fingerprint(pin));
    let link = dialer
        .dial_bulk(&share.address, &trust, DIAL_DEADLINE)
        .await;
    peer.record_dial(link.is_ok());
    let mut link = link.map_err(|e| e.to_string())?;
    let joining = duplex::encode(Body::Join(join));
    let sent_at = Instant::now();
    let sent = link.sender.send(&[joining]).await;
    sent.map_err(|e| e.to_string())?;
    let answer = timeout(DIAL_DEADLINE, link.receiver.recv()).await;
    let answer = answer
        .map_err(|_| "the worker did not answer")?
        .map_err(|e| e.to_string())?;
    peer.record_round_trip(sent_at.elapsed());
    let answer =
        duplex::decode(answer.ok_or("the worker closed the connection before it answered")?);
    match answer.map_err(|e| e.to_string())?.body {
        Some(Body::Joined(joined)) => {
            let attached = peer.attach(joined.received, joined.credit_bytes);
            Ok((attached.map_err(|e| e.to_string())?.connection, link))
        }
        Some(Body::Rejected(rejected)) => Err(rejected.error.unwrap_or_default().to_string()),
        _ => Err("the worker did not answer the request to join".into()),
    }
}

/// Returns the first message of a connection to `peer`.
fn join_request(cohort: &Cohort, peer: &Peer) -> Join {
    let (received, credit_bytes) = peer.acknowledge();
    Join {
        hello: Some(version::hello()),
        lease_token: cohort.lease_token(),
        cohort: cohort.id,
        from_worker_id: cohort.lease_members().me().0,
        to_worker_id: peer.worker.0,
        received,
        credit_bytes,
    }
}

/// Accepts the connection of a worker that dialled. The caller has checked the token of
/// `join`; the TLS handshake has proved that the worker has the key of `peer_certificate`.
pub(crate) fn accept(
    cohort: &Arc<Cohort>,
    join: &Join,
    peer_certificate: Option<&PeerCertificate>,
) -> Result<AcceptedLink, Error> {
    accept_from(cohort, join, |share| {
        check_certificate(share, cohort.lease, peer_certificate)
    })
}

/// Accepts the connection of a worker that dialled, if `check` finds that it is the worker of this
/// share.
fn accept_from(
    cohort: &Arc<Cohort>,
    join: &Join,
    check: impl FnOnce(&LeaseShare) -> Result<(), String>,
) -> Result<AcceptedLink, Error> {
    let protocol = |what: String| Error::new(ErrorCode::Protocol, what);
    let ours = version::hello();
    let theirs = join.hello.clone().unwrap_or_default();
    let agreed = version::negotiate(&ours, &theirs)?;
    let from = WorkerId(join.from_worker_id);
    let peer = cohort
        .peer(from)
        .ok_or_else(|| protocol(format!("worker {from} is not part of the lease")))?;
    check(&peer.share).map_err(protocol)?;
    if let Some(violation) = peer.violation() {
        return Err(protocol(violation.to_string()));
    }
    peer.request_link();
    let attached = peer.attach(join.received, join.credit_bytes);
    let attached = attached.map_err(|e| protocol(e.to_string()))?;
    Ok(AcceptedLink {
        cohort: Arc::downgrade(cohort),
        peer: peer.clone(),
        connection: attached.connection,
        joined: Joined {
            hello: Some(ours),
            protocol: agreed,
            received: attached.received,
            credit_bytes: attached.credit_bytes,
        },
    })
}

/// Checks that `peer_certificate` belongs to the worker of `share`, or to a process that runs
/// `lease` for that worker. The token alone proves nothing, as all workers and programs of the
/// lease have it.
fn check_certificate(
    share: &LeaseShare,
    lease: LeaseId,
    peer_certificate: Option<&PeerCertificate>,
) -> Result<(), String> {
    let name = &share.worker;
    let expected = <[u8; 32]>::try_from(&share.certificate_sha256[..]).map(Fingerprint);
    match (peer_certificate, expected) {
        (Some(shown), Ok(expected)) if shown.is_of_lease(&expected, lease) => Ok(()),
        (Some(shown), _) => Err(format!(
            "the caller is not worker {name} of the lease: it presented the certificate {}, which is not the worker's",
            shown.fingerprint
        )),
        (None, _) => Err(format!(
            "the caller is not worker {name} of the lease: it presented no certificate"
        )),
    }
}

/// Serves an accepted connection until it ends.
pub(crate) async fn serve(accepted: AcceptedLink, mut link: Link) {
    let AcceptedLink {
        cohort,
        peer,
        connection,
        joined,
    } = accepted;
    let greeting = duplex::encode(Body::Joined(joined));
    let ended = match link.sender.send(&[greeting]).await {
        Ok(()) => run(&cohort, &peer, connection, link).await,
        Err(e) => {
            peer.detach(connection);
            e.to_string()
        }
    };
    debug!(
        worker = peer.share.worker,
        "the link from the worker ended: {ended}"
    );
}

/// Exchanges frames on `connection` until it ends. Returns the reason.
async fn run(cohort: &Weak<Cohort>, peer: &Peer, connection: Connection, link: Link) -> String {
    let lease = cohort.upgrade();
    let Some(mut alive) = lease.map(|cohort| cohort.alive()) else {
        return "the lease has ended".into();
    };
    let end = PeerEnd { cohort, peer };
    let ended = tokio::select! {
        ended = pump(&end, connection, link, Timing::DEFAULT) => ended.to_string(),
        _ = alive.changed() => "the lease has ended".into(),
    };
    peer.detach(connection);
    ended
}

/// This worker's end of a link.
struct PeerEnd<'a> {
    cohort: &'a Weak<Cohort>,
    peer: &'a Peer,
}

impl Endpoint for PeerEnd<'_> {
    /// The rule that the other worker broke.
    type Reason = String;
    type Row = ();

    fn on_frame(
        &self,
        connection: Connection,
        frame: Bytes,
        _: &mut (),
    ) -> Result<(), Broken<String>> {
        let rule_broken = |rule: &dyn std::error::Error| {
            Broken::Over(
                report_violation(self.cohort, self.peer, rule),
                Duration::ZERO,
            )
        };
        let _reader = self.peer.lock_reader();
        let body = match self.peer.receive(connection, frame) {
            Ok(Received::New(body, _)) => body,
            Ok(Received::Nothing) => return Ok(()),
            Ok(Received::Replaced) => return Err(Broken::Replaced),
            Err(e) if e.is_loss() => return Err(Broken::Loss(e.to_string())),
            Err(e) => return Err(rule_broken(&e)),
        };
        let Some(lease) = self.cohort.upgrade() else {
            return Ok(());
        };
        let handled = lease.on_frame(self.peer.worker, body);
        handled.map_err(|e| rule_broken(&e))
    }

    fn next(&self, connection: Connection, _: Look) -> Next {
        self.peer.next_to_send(connection)
    }

    fn ping(&self, connection: Connection, must: bool) -> Option<FrameParts> {
        self.peer.ping(connection, must)
    }

    fn wake(&self) -> &Notify {
        &self.peer.writer_notify
    }

    fn on_send(&self, sender: &LinkSender, _: &[FrameParts]) {
        if let Some(bytes) = self.peer.new_flight_limit() {
            sender.limit_in_flight(bytes);
        }
    }
}

/// Reports that the other worker broke `rule`: its groups and transfers fail, and it gets
/// no further connection. Returns the rule as a message.
fn report_violation(cohort: &Weak<Cohort>, peer: &Peer, rule: &dyn std::error::Error) -> String {
    if let Some(cohort) = cohort.upgrade() {
        cohort.on_violation(peer.worker, &rule.to_string());
    }
    rule.to_string()
}

#[cfg(test)]
mod tests;
