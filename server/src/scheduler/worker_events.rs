//! Conversion of messages of workers to the engine's events.
//!
//! The messages are checked here, so the engine can rely on their contents, and text that others will
//! see (names, kinds, reasons) is safe to print.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use tensord_proto::{
    MAX_STORED_LEASES, MAX_SUSPENDED_LEASES,
    grant::number,
    ids::{LeaseId, PartId, StoreId, WorkerId},
    share::MAX_LANES,
    text::{MESSAGE_CHARS, sanitize},
    v1::{self, Error, ErrorCode},
};
use tensord_scheduler::{
    AssignedKeeper, DeviceFingerprint, DeviceGrant, DeviceSpec, Endpoint, HandedOver,
    HandoverOutcome, HeldDevice, Outages, Registration, WorkerEvent,
};
use tensord_transport::{identity, tls::Fingerprint};

use super::{
    address,
    convert::{check_text, protocol_error},
    share_messages,
};

/// The largest number of devices of one worker, more than any host has.
const MAX_DEVICES: usize = 256;

/// The largest number of leases of one worker: one in each lane of each device.
const MAX_LEASES: usize = MAX_DEVICES * MAX_LANES as usize;

/// The largest number of grants that have ended of one worker: the latest one in each lane of each device, and of each
/// device as a whole.
const MAX_ENDED_GRANTS: usize = MAX_LEASES + MAX_DEVICES;

/// Maximum number of suspended leases that a worker may report: those that it holds, and those whose processes are
/// ending.
const MAX_SUSPENDED: usize = MAX_SUSPENDED_LEASES + MAX_DEVICES;

/// A worker's registration and the state that it reports.
#[derive(Debug)]
pub(super) struct RegistrationReport {
    pub(super) registration: Registration,
    /// The devices that a lease uses, or that an ended lease has not left yet.
    pub(super) held: Vec<HeldDevice>,
    /// The latest grant that has ended on each device.
    pub(super) ended: Vec<DeviceGrant>,
    /// The suspended leases whose snapshots it holds.
    pub(super) suspended: Vec<LeaseId>,
    /// The devices that the worker cannot offer.
    pub(super) out_of_service: Outages,
}

/// Checks that a registration belongs to the certificate `peer_certificate`, whose key the worker
/// proved in the handshake. Returns the worker's id and certificate.
pub(super) fn verify_identity(
    register: &v1::Register,
    peer_certificate: Option<&Fingerprint>,
) -> Result<(WorkerId, Fingerprint), Error> {
    let refuse = |words: &str| Err(Error::new(ErrorCode::Enrolment, words));
    let Some(peer_certificate) = peer_certificate else {
        return refuse(
            "a worker must present a certificate, and this worker presented none; update tensord on its host",
        );
    };
    if register.certificate_sha256 != peer_certificate.0[..] {
        return refuse(
            "the worker registered a certificate that differs from the one it presented",
        );
    }
    let start = register.start.as_ref().try_into();
    let start = start
        .or_else(|_| protocol_error("the field `start` of the registration must have 16 bytes"))?;
    let worker = WorkerId(register.worker_id);
    match identity::worker_id(peer_certificate, start) {
        own if own == worker => Ok((worker, *peer_certificate)),
        _ => refuse("the worker's id is not derived from its certificate and start"),
    }
}

/// Checks and converts the registration of a worker that calls from `peer`.
pub(super) fn registration(
    register: v1::Register,
    peer: IpAddr,
) -> Result<RegistrationReport, Error> {
    let count = register.devices.len();
    if count > MAX_DEVICES {
        return protocol_error(format!(
            "the worker registered {count} devices; the limit is {MAX_DEVICES}"
        ));
    }
    let held = register.held.iter().map(|held| held.device_index);
    check_reported("held devices", held, MAX_LEASES, count)?;
    let ended = register.ended.iter().map(|ended| ended.device_index);
    check_reported("ended grants", ended, MAX_ENDED_GRANTS, count)?;
    let Ok(certificate_sha256) = register.certificate_sha256.as_ref().try_into() else {
        let length = register.certificate_sha256.len();
        return protocol_error(format!(
            "the field `certificate_sha256` has {length} bytes; it must have 32"
        ));
    };
    let address = address::reachable_address(&register.address, peer).or_else(protocol_error)?;
    let device = |device: v1::Device| {
        Ok(DeviceSpec {
            kind: check_text("a device's kind", device.kind)?,
            name: check_text("a device's name", device.name)?,
            memory_bytes: device.memory_bytes,
            fingerprint: device.fingerprint.map(fingerprint).transpose()?,
            takes_shares: register.takes_shares,
        })
    };
    let held = register.held.iter().map(held_device);
    let held = held.collect::<Result<_, Error>>()?;
    let ended = register.ended.iter().map(share_messages::ended_grant);
    let ended = ended.collect::<Result<_, Error>>()?;
    let suspended = register.suspended_leases.into_iter().map(LeaseId);
    let suspended = suspended.take(MAX_SUSPENDED).collect();
    let out_of_service = outages(register.out_of_service);
    let registration = Registration {
        endpoint: Endpoint {
            name: check_text("the worker's name", register.name)?,
            address,
            certificate_sha256,
        },
        devices: register
            .devices
            .into_iter()
            .map(device)
            .collect::<Result<_, Error>>()?,
        store: (register.store_id > 0).then_some(StoreId(register.store_id)),
    };
    Ok(RegistrationReport {
        registration,
        held,
        ended,
        suspended,
        out_of_service,
    })
}

/// Checks a list of a registration with `devices` devices, before anything is done for each of its entries: its length,
/// and the device of each entry.
fn check_reported(
    what: &str,
    mut indices: impl ExactSizeIterator<Item = u32>,
    limit: usize,
    devices: usize,
) -> Result<(), Error> {
    let count = indices.len();
    if count > limit {
        return protocol_error(format!(
            "the worker's list of {what} has {count} entries; the limit is {limit}"
        ));
    }
    let is_unknown = |index: &u32| usize::try_from(*index).map_or(true, |index| index >= devices);
    match indices.find(is_unknown) {
        None => Ok(()),
        Some(index) => protocol_error(format!(
            "the worker's list of {what} names the device {index}, but the worker registered {devices} devices"
        )),
    }
}

fn held_device(held: &v1::HeldDevice) -> Result<HeldDevice, Error> {
    Ok(HeldDevice {
        lease: LeaseId(held.lease_id),
        index: held.device_index,
        grant: number(held.grant),
        ended: held.ended,
        share: share_messages::share("the share of a device that a lease holds", held.share)?,
    })
}

/// Converts a worker's list of devices out of service. Takes at most [`MAX_DEVICES`]
/// entries, and makes the reasons safe to print.
pub(super) fn outages(out_of_service: Vec<v1::OutOfService>) -> Outages {
    let outage = |out: v1::OutOfService| {
        let reason = sanitize(&out.reason, MESSAGE_CHARS).to_string();
        (out.device_index, reason)
    };
    out_of_service
        .into_iter()
        .take(MAX_DEVICES)
        .map(outage)
        .collect()
}

/// Converts the lists of leases of `worker` whose snapshots their keepers have, or the worker itself, or
/// its snapshot store. Takes at most two entries of the former for each of [`MAX_LEASES`] leases, as
/// many as a worker can have.
pub(super) fn kept(worker: WorkerId, leases: &[v1::KeptLease], in_store: &[u64]) -> WorkerEvent {
    let (mut at_keepers, mut refused, mut handed_over) = (Vec::new(), Vec::new(), Vec::new());
    let mut here = BTreeMap::new();
    for kept in leases.iter().take(2 * MAX_LEASES) {
        let lease = LeaseId(kept.lease_id);
        let index = kept.part;
        let keeper = |assignment| AssignedKeeper {
            part: PartId { lease, index },
            worker: WorkerId(kept.keeper_id),
            assignment,
        };
        match kept.handover {
            0 if kept.keeper_id == worker.0 => drop(here.insert(lease, !kept.without_room)),
            0 if kept.failed => refused.push(keeper(kept.assignment)),
            0 => at_keepers.push(keeper(kept.assignment)),
            number => handed_over.push(HandedOver {
                to: keeper(number),
                outcome: match (kept.missing, kept.failed) {
                    (true, _) => HandoverOutcome::Missing,
                    (false, true) => HandoverOutcome::Failed,
                    (false, false) => HandoverOutcome::Done,
                },
            }),
        }
    }
    let in_store = in_store.iter().take(MAX_LEASES).copied();
    WorkerEvent::SnapshotsKept {
        at_keepers,
        refused,
        handed_over,
        here,
        in_store: in_store.map(LeaseId).collect(),
    }
}

/// Converts a worker's list of idle leases. Takes at most [`MAX_LEASES`] entries.
pub(super) fn idle_leases(leases: &[v1::IdleLease]) -> WorkerEvent {
    let leases = leases.iter().take(MAX_LEASES).map(|idle| {
        let idle_for = Duration::from_millis(idle.idle_ms);
        (LeaseId(idle.lease_id), idle_for)
    });
    WorkerEvent::Idle {
        leases: leases.collect(),
    }
}

/// Converts a worker's list of other workers that its leases cannot reach. Takes at most [`MAX_LEASES`] entries.
pub(super) fn missing_peers(missing: &[v1::MissingPeer]) -> WorkerEvent {
    let missing = missing.iter().take(MAX_LEASES);
    let missing = missing.map(|it| (LeaseId(it.lease_id), WorkerId(it.worker_id)));
    WorkerEvent::PeersMissing {
        missing: missing.collect(),
    }
}

/// Converts a worker's list of leases of which its snapshot store has snapshots.
pub(super) fn stored_leases(stored: v1::StoredLeases) -> WorkerEvent {
    let leases = stored.lease_ids.into_iter().take(MAX_STORED_LEASES);
    WorkerEvent::StoredLeases {
        leases: leases.map(LeaseId).collect(),
    }
}

/// Converts a worker's list of leases whose process there has died, and makes the reasons safe to
/// print.
pub(super) fn interrupted_leases(leases: &[v1::InterruptedLease]) -> WorkerEvent {
    let leases = leases.iter().take(MAX_LEASES).map(|interrupted| {
        let how = sanitize(&interrupted.reason, MESSAGE_CHARS).to_string();
        (LeaseId(interrupted.lease_id), how)
    });
    WorkerEvent::Interrupted {
        leases: leases.collect(),
    }
}

/// Converts a worker's report of released devices.
pub(super) fn released(released: v1::Released) -> WorkerEvent {
    WorkerEvent::Released {
        lease: LeaseId(released.lease_id),
        busy: released.busy_devices.into_iter().collect(),
    }
}

/// Converts the fingerprint that a worker reports.
fn fingerprint(fingerprint: v1::DeviceFingerprint) -> Result<DeviceFingerprint, Error> {
    let length = fingerprint.hash.len();
    let Ok(hash) = fingerprint.hash.as_ref().try_into() else {
        return protocol_error(format!(
            "the field `hash` of a fingerprint has {length} bytes; it must have 16"
        ));
    };
    Ok(DeviceFingerprint {
        hash,
        is_exact: fingerprint.is_exact,
    })
}
