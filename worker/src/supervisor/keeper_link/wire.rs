//! The messages between a worker and the keeper of a lease.

use std::{fs::File, io, os::unix::fs::FileExt, sync::Arc};

use bytes::Bytes;
use tensord_proto::{
    ids::PartId,
    v1::{OfferSnapshots, SnapshotBegin, SnapshotId, SnapshotPart, SnapshotStored, frame::Body},
    version,
};
use tensord_transport::{
    Dialer, Identity, Link, LinkError, TransportChoice, channel::duplex, tls::Trust,
};
use tokio::time::timeout;

use super::{CONNECT_DEADLINE, Keeper};
use crate::supervisor::{pending_marks::STORE_DEADLINE, snapshots::KeptSnapshot};

/// Bytes of a snapshot in one frame.
const PART_BYTES: usize = 1 << 20;

/// Returns the keeper's reply in a frame that was received.
///
/// # Errors
///
/// Why the connection must end.
pub(in crate::supervisor) fn stored(
    frame: Result<Option<Bytes>, LinkError>,
) -> Result<SnapshotStored, String> {
    let frame = frame.map_err(|e| e.to_string())?;
    let frame = frame.ok_or("it closed the connection")?;
    match duplex::decode(frame).map_err(|e| e.to_string())?.body {
        Some(Body::SnapshotStored(stored)) => Ok(stored),
        _ => Err("it sent a frame out of place".into()),
    }
}

/// Connects to a keeper, and returns the snapshots that it has.
pub(in crate::supervisor) async fn connect(
    identity: Arc<Identity>,
    part: PartId,
    keeper: &Keeper,
) -> Result<(Link, Vec<SnapshotId>), String> {
    let dialer = Dialer::new(TransportChoice::Auto).with_identity(identity);
    let trust = Trust::Pin(keeper.certificate);
    let link = dialer
        .dial_bulk(&keeper.address, &trust, CONNECT_DEADLINE)
        .await;
    let mut link = link.map_err(|e| e.to_string())?;
    let offer = OfferSnapshots {
        hello: Some(version::hello()),
        lease_id: part.lease.0,
        part: part.index,
        assignment: keeper.assignment.number,
    };
    send(&mut link, Body::OfferSnapshots(offer)).await?;
    let answer = link.receiver.recv().await.map_err(|e| e.to_string())?;
    let answer = answer.ok_or("it closed the connection before it answered")?;
    match duplex::decode(answer).map_err(|e| e.to_string())?.body {
        Some(Body::SnapshotsOffered(offered)) => Ok((link, offered.kept)),
        Some(Body::Rejected(rejected)) => Err(rejected.error.unwrap_or_default().to_string()),
        _ => Err("it did not answer the offer of snapshots".into()),
    }
}

/// Returns the frames that send a snapshot, with its base if the keeper lacks that. They are read one by
/// one.
pub(in crate::supervisor) fn frames(
    snapshot: &KeptSnapshot,
    has_base: bool,
) -> impl Iterator<Item = io::Result<Body>> {
    let base = snapshot.base.as_ref().filter(|_| !has_base);
    let begin = Body::SnapshotBegin(SnapshotBegin {
        id: Some(snapshot.id()),
        committed: snapshot.info.committed,
        size_bytes: snapshot.info.size_bytes,
        base_bytes: base.map_or(0, |base| base.size_bytes),
    });
    let base = base.map(|base| parts(&base.file, base.size_bytes));
    let snapshot = parts(&snapshot.file, snapshot.info.size_bytes);
    let parts = base.into_iter().flatten().chain(snapshot);
    std::iter::once(Ok(begin)).chain(parts)
}

fn parts(file: &File, size_bytes: u64) -> impl Iterator<Item = io::Result<Body>> {
    let starts = (0..size_bytes).step_by(PART_BYTES);
    starts.map(move |at| {
        let length = (size_bytes - at).min(PART_BYTES as u64) as usize;
        let mut data = vec![0; length];
        file.read_exact_at(&mut data, at)?;
        Ok(Body::SnapshotPart(SnapshotPart { data: data.into() }))
    })
}

/// Sends a frame. A keeper that does not read it for long is given up.
pub(in crate::supervisor) async fn send(link: &mut Link, body: Body) -> Result<(), String> {
    let frame = [duplex::encode(body)];
    match timeout(STORE_DEADLINE, link.sender.send(&frame)).await {
        Ok(sent) => sent.map_err(|e| e.to_string()),
        Err(_) => Err(format!("it read nothing for {STORE_DEADLINE:?}")),
    }
}
