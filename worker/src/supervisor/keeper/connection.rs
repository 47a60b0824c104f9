//! A connection on which another worker sends the snapshots of a lease.

use std::{
    fs::File,
    io::{self, Write},
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use rustix::fs::fcntl_add_seals;
use tensord_proto::{
    ids::{LeaseId, PartId, SessionId},
    v1::{
        Error, ErrorCode, Frame, OfferSnapshots, Rejected, SnapshotBegin, SnapshotId,
        SnapshotStored, SnapshotsOffered, frame::Body,
    },
    version,
};
use tensord_transport::{Link, channel::duplex, tls::Fingerprint};
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use crate::{
    locks::lock,
    memory_file::{MemoryFile, SEALS, unnamed_memory},
    process_message::SnapshotInfo,
    supervisor::{
        Supervisor,
        keeper::Reserved,
        pending_marks::STORE_DEADLINE,
        snapshots::{KeptSnapshot, Refused, SnapshotFiles},
    },
};

/// A connection on which nothing is received for this long is closed. The other worker sends a ping
/// every [`PING_INTERVAL`](crate::supervisor::keeper_link::PING_INTERVAL).
const SILENCE: Duration = Duration::from_secs(60);

/// How long a worker that may not send snapshots of a lease is kept waiting, and how often that is checked.
const ALLOWANCE_TIMEOUT: Duration = Duration::from_millis(500);
const ALLOWANCE_INTERVAL: Duration = Duration::from_millis(20);

/// Why a connection closes whose worker may no longer send snapshots of the lease. A snapshot that is
/// complete by then gets no reply, as the lease may go on here from an earlier one.
const MOVED: &str = "the lease has moved or ended";

/// Serves a connection of a worker that sends the snapshots of a lease.
pub(in crate::supervisor) async fn serve(
    supervisor: Arc<Supervisor>,
    offer: OfferSnapshots,
    mut link: Link,
) {
    if let Err(error) = try_serve(supervisor, offer, &mut link).await {
        warn!(peer = %link.peer, "refused the snapshots of another worker: {error}");
        let rejected = Body::Rejected(Rejected { error: Some(error) });
        if link.sender.send(&[duplex::encode(rejected)]).await.is_ok() {
            link.sender.finish().await;
        }
    }
}

async fn try_serve(
    supervisor: Arc<Supervisor>,
    offer: OfferSnapshots,
    link: &mut Link,
) -> Result<(), Error> {
    let part = PartId {
        lease: LeaseId(offer.lease_id),
        index: offer.part,
    };
    let ours = version::hello();
    let protocol = version::negotiate(&ours, &offer.hello.unwrap_or_default())?;
    let certificate = link.certificate.as_ref().map(|shown| shown.fingerprint);
    let assignment = offer.assignment;
    let connection = SourceConnection::allowed(&supervisor, part, certificate, assignment);
    let Some(connection) = connection.await else {
        return Err(Error::new(
            ErrorCode::Lease,
            "the scheduler has not allowed this worker to send snapshots of the lease",
        ));
    };
    link.receiver
        .admit()
        .map_err(|e| Error::new(ErrorCode::Limit, e.to_string()))?;
    let offered = SnapshotsOffered {
        hello: Some(ours),
        protocol,
        kept: connection.kept(),
    };
    let offered = [duplex::encode(Body::SnapshotsOffered(offered))];
    if send(link, &offered).await {
        let lease = part.lease;
        info!(%lease, "worker {} is connected and may send the snapshots of the lease", connection.name);
        let ended = connection.receive(link).await;
        debug!(%lease, "the connection from worker {} ended: {ended}", connection.name);
    }
    Ok(())
}

/// Sends a reply. Returns whether the other worker has taken it in time.
async fn send(link: &mut Link, reply: &[Bytes]) -> bool {
    let sent = timeout(STORE_DEADLINE, link.sender.send(reply)).await;
    sent.is_ok_and(|sent| sent.is_ok())
}

/// A connection of a worker that may send snapshots of a part of a lease.
pub(in crate::supervisor) struct SourceConnection {
    supervisor: Arc<Supervisor>,
    part: PartId,
    /// Number and name of the source.
    number: u64,
    name: String,
}

impl Drop for SourceConnection {
    fn drop(&mut self) {
        let mut kept = lock(&self.supervisor.kept_for_others);
        if let Some(source) = kept.numbered_source(self.part, self.number) {
            source.connections = source.connections.saturating_sub(1);
            source.last_seen = Instant::now();
        }
    }
}

/// A snapshot of which not all parts are received.
pub(in crate::supervisor) struct Receiving<'a> {
    supervisor: &'a Supervisor,
    begin: SnapshotBegin,
    received_bytes: u64,
    /// `None` if the snapshot is not kept, for the reason that was sent.
    files: Option<ReceivedFiles>,
    /// The bytes reserved for it, until it is stored or dropped.
    reserved: Option<Reserved>,
}

/// The memory to which the parts of a snapshot are written.
struct ReceivedFiles {
    base: Option<File>,
    snapshot: File,
}

impl ReceivedFiles {
    fn new(begin: &SnapshotBegin) -> io::Result<Self> {
        let has_base = begin.base_bytes > 0;
        let base = has_base.then(|| unnamed_memory("tensord-snapshot"));
        Ok(Self {
            base: base.transpose()?,
            snapshot: unnamed_memory("tensord-snapshot")?,
        })
    }

    /// Returns the memory, which nobody can change any more.
    fn seal(self) -> io::Result<SnapshotFiles> {
        let seal = |file: File| {
            fcntl_add_seals(&file, SEALS)?;
            Ok::<_, io::Error>(MemoryFile::from(file))
        };
        Ok(SnapshotFiles {
            base: self.base.map(seal).transpose()?,
            file: seal(self.snapshot)?,
        })
    }
}

/// Returns the bytes that follow the begin of a snapshot.
fn announced_bytes(begin: &SnapshotBegin) -> u64 {
    begin.size_bytes.saturating_add(begin.base_bytes)
}

impl Drop for Receiving<'_> {
    fn drop(&mut self) {
        self.discard();
    }
}

impl SourceConnection {
    /// As [`new`](Self::new), but waits for a moment: the scheduler sends `KeepSnapshots` and `SendSnapshots`
    /// at the same time, and the other worker may receive its command first.
    async fn allowed(
        supervisor: &Arc<Supervisor>,
        part: PartId,
        certificate: Option<Fingerprint>,
        assignment: u64,
    ) -> Option<Self> {
        let until = Instant::now() + ALLOWANCE_TIMEOUT;
        loop {
            let connection = Self::new(supervisor, part, certificate, assignment);
            if connection.is_some() || Instant::now() > until {
                return connection;
            }
            sleep(ALLOWANCE_INTERVAL).await;
        }
    }

    /// Returns the connection of the worker with this certificate, if it may send snapshots of the part under
    /// this assignment.
    pub(in crate::supervisor) fn new(
        supervisor: &Arc<Supervisor>,
        part: PartId,
        certificate: Option<Fingerprint>,
        assignment: u64,
    ) -> Option<Self> {
        let mut kept = lock(&supervisor.kept_for_others);
        let source = kept.source(part, certificate, assignment)?;
        source.connections += 1;
        let (number, name) = (source.number, source.name.clone());
        drop(kept);
        Some(Self {
            supervisor: supervisor.clone(),
            part,
            number,
            name,
        })
    }

    /// Returns the snapshots that are kept of the part.
    pub(in crate::supervisor) fn kept(&self) -> Vec<SnapshotId> {
        let kept = lock(&self.supervisor.kept_for_others).snapshots_of(self.part);
        kept.iter().map(KeptSnapshot::id).collect()
    }

    /// Receives snapshots until the connection ends or breaks a rule. Returns the reason.
    async fn receive(&self, link: &mut Link) -> String {
        let mut receiving: Option<Receiving<'_>> = None;
        loop {
            let frame = match timeout(SILENCE, link.receiver.recv()).await {
                Ok(Ok(Some(frame))) => frame,
                Ok(Ok(None)) => return "closed".into(),
                Ok(Err(e)) => return e.to_string(),
                Err(_) => return format!("nothing was received for {SILENCE:?}"),
            };
            if !self.may_send() {
                return MOVED.into();
            }
            let body = match duplex::decode(frame) {
                Ok(Frame {
                    body: Some(body), ..
                }) => body,
                Ok(_) => return self.broken("an empty or unknown frame"),
                Err(e) => return self.broken(&e.to_string()),
            };
            match self.on_frame(body, &mut receiving) {
                Ok(None) => {}
                Ok(Some(stored)) => {
                    let stored = [duplex::encode(Body::SnapshotStored(stored))];
                    if !send(link, &stored).await {
                        return "cannot reply".into();
                    }
                }
                Err(reason) => return reason,
            }
        }
    }

    /// Processes a frame. `receiving` is the snapshot of which not all parts are received. Returns the
    /// reply to a snapshot, if one is due.
    ///
    /// # Errors
    ///
    /// Why the connection must end.
    pub(in crate::supervisor) fn on_frame<'a>(
        &'a self,
        body: Body,
        receiving: &mut Option<Receiving<'a>>,
    ) -> Result<Option<SnapshotStored>, String> {
        match (body, receiving.take()) {
            (Body::Ping(_), pending) => *receiving = pending,
            (Body::SnapshotsEnded(ended), None) => {
                let session = SessionId(ended.session_id);
                let mut kept = lock(&self.supervisor.kept_for_others);
                if kept.numbered_source(self.part, self.number).is_some() {
                    kept.end_session(self.part, session, self.number);
                }
            }
            (Body::SnapshotBegin(begin), None) => {
                let (begun, reserved) = self.begin(begin);
                let id = begun.begin.id;
                *receiving = Some(begun);
                return Ok(reserved.err().map(|error| SnapshotStored { id, error }));
            }
            (Body::SnapshotPart(part), Some(pending)) => {
                return self.on_part(&part.data, pending, receiving);
            }
            _ => return Err(self.broken("a frame out of place")),
        }
        Ok(None)
    }

    /// Appends a part to the snapshot `pending`, and keeps the snapshot if the part is the last one. The
    /// results are those of [`on_frame`](Self::on_frame).
    fn on_part<'a>(
        &'a self,
        part: &[u8],
        mut pending: Receiving<'a>,
        receiving: &mut Option<Receiving<'a>>,
    ) -> Result<Option<SnapshotStored>, String> {
        match pending.append(part) {
            Ok(()) if pending.is_complete() => {
                let stored = self.store(pending);
                match stored.map_err(|rule| self.broken(&rule))? {
                    None if !self.may_send() => Err(MOVED.into()),
                    stored => Ok(stored),
                }
            }
            Ok(()) => {
                *receiving = Some(pending);
                Ok(None)
            }
            Err(AppendError::Memory(e)) => {
                pending.discard();
                let id = pending.begin.id.unwrap_or_default();
                // Its other parts follow all the same.
                *receiving = Some(pending).filter(|pending| !pending.is_complete());
                let size_bytes = part.len();
                let reason = format!("no memory for {size_bytes} bytes of the snapshot: {e}");
                Ok(Some(reply(id, reason)))
            }
            Err(AppendError::Violation(rule)) => Err(self.broken(rule)),
        }
    }

    /// Returns whether the worker may still send snapshots of the lease.
    fn may_send(&self) -> bool {
        let mut kept = lock(&self.supervisor.kept_for_others);
        kept.numbered_source(self.part, self.number).is_some()
    }

    fn broken(&self, rule: &str) -> String {
        let (lease, name) = (self.part.lease, &self.name);
        warn!(%lease, "worker {name} broke the protocol while it sent snapshots: {rule}");
        format!("it broke the protocol: {rule}")
    }

    /// Begins to receive a snapshot. An error is the reason why it is not kept; its parts follow
    /// all the same.
    fn begin(&self, begin: SnapshotBegin) -> (Receiving<'_>, Result<(), String>) {
        let mut receiving = Receiving {
            supervisor: &self.supervisor,
            begin,
            received_bytes: 0,
            files: None,
            reserved: None,
        };
        let session = SessionId(begin.id.unwrap_or_default().session_id);
        let mut kept = lock(&self.supervisor.kept_for_others);
        // Another worker's connection must not drop snapshots.
        let reserved = match kept.numbered_source(self.part, self.number) {
            Some(_) => {
                let (committed, size_bytes) = (begin.committed, announced_bytes(&begin));
                let now = Instant::now();
                kept.reserve(now, self.part, self.number, session, committed, size_bytes)
            }
            None => Err(MOVED.into()),
        };
        drop(kept);
        let reserved = match reserved {
            Ok(reserved) => reserved,
            Err(reason) => return (receiving, Err(reason)),
        };
        match ReceivedFiles::new(&begin) {
            Ok(files) => {
                (receiving.files, receiving.reserved) = (Some(files), Some(reserved));
                (receiving, Ok(()))
            }
            Err(e) => {
                lock(&self.supervisor.kept_for_others).release(reserved);
                (receiving, Err(format!("no memory for the snapshot: {e}")))
            }
        }
    }

    /// Keeps a snapshot of which all parts are received. Returns the reply, unless one was sent, or
    /// the worker may send no snapshots any more.
    ///
    /// # Errors
    ///
    /// The rule that the worker broke.
    fn store(&self, mut receiving: Receiving<'_>) -> Result<Option<SnapshotStored>, String> {
        let begin = receiving.begin;
        let Some(files) = receiving.files.take() else {
            return Ok(None);
        };
        let id = begin.id.unwrap_or_default();
        let info = SnapshotInfo {
            session_id: id.session_id,
            mark: id.mark,
            committed: begin.committed,
            size_bytes: begin.size_bytes,
            base_id: id.base_id,
        };
        let sealed = files.seal();
        let mut kept = lock(&self.supervisor.kept_for_others);
        if let Some(reserved) = receiving.reserved.take() {
            kept.release(reserved);
        }
        let files = match sealed {
            Ok(files) => files,
            Err(e) => {
                return Ok(Some(reply(
                    id,
                    format!("the snapshot cannot be sealed: {e}"),
                )));
            }
        };
        if kept.numbered_source(self.part, self.number).is_none() {
            return Ok(None);
        }
        match kept.add(self.part, self.number, id.epoch, info, files) {
            Ok(()) => Ok(Some(reply(id, String::new()))),
            Err(Refused::NotKept(reason)) => Ok(Some(reply(id, reason))),
            Err(Refused::Violation(rule)) => Err(format!("a snapshot breaks a rule: {rule}")),
        }
    }
}

impl Receiving<'_> {
    /// Appends a part.
    fn append(&mut self, part: &[u8]) -> Result<(), AppendError> {
        let base_bytes = self.begin.base_bytes;
        let is_of_base = self.received_bytes < base_bytes;
        self.received_bytes += part.len() as u64;
        let end = if is_of_base {
            base_bytes
        } else {
            announced_bytes(&self.begin)
        };
        if part.is_empty() || self.received_bytes > end {
            let rule = "a part is empty, or beyond the size of its snapshot or base";
            return Err(AppendError::Violation(rule));
        }
        if let Some(ReceivedFiles { base, snapshot }) = &mut self.files {
            let file = base.as_mut().filter(|_| is_of_base).unwrap_or(snapshot);
            file.write_all(part).map_err(AppendError::Memory)?;
        }
        Ok(())
    }

    /// Returns whether all parts were received.
    fn is_complete(&self) -> bool {
        self.received_bytes == announced_bytes(&self.begin)
    }

    /// Frees what was received. Parts that follow are dropped.
    fn discard(&mut self) {
        self.files = None;
        if let Some(reserved) = self.reserved.take() {
            lock(&self.supervisor.kept_for_others).release(reserved);
        }
    }
}

/// Why a part of a snapshot is not kept.
#[derive(Debug)]
enum AppendError {
    /// The rule that the worker broke.
    Violation(&'static str),
    /// This host has no memory for it.
    Memory(io::Error),
}

/// Returns the reply to a snapshot, with the reason if it is not kept.
fn reply(id: SnapshotId, error: String) -> SnapshotStored {
    SnapshotStored {
        id: Some(id),
        error,
    }
}

#[cfg(test)]
mod tests;
