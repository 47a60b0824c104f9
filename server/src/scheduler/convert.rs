//! Conversion between messages of clients and the engine's events and commands; `worker_events` and
//! `worker_commands` convert those of workers.
//!
//! Incoming messages are checked here, so the engine can rely on their contents, and text
//! that others will see (names, kinds) is safe to print.

use std::{collections::BTreeMap, time::Duration};

use prost::Message;
use tensord_proto::{
    credential::CredentialHash,
    grant::number,
    ids::{ClientId, LeaseId, RequestId, WorkerId},
    v1::{self, Error, ErrorCode, LeaseClaims, PoolMessage, client_message, pool_message},
};
use tensord_scheduler::{
    Claim, ClientEvent, Demand, DeviceRef, DeviceSpec, Durability, EndReason, Endpoint,
    GrantedDevice, LeasedDevice, RefuseReason, WaitReason,
};
use tensord_transport::token;

use super::{access::UnixMillis, share_messages};

/// The size of the signature at the end of a lease token.
const SIGNATURE_BYTES: usize = 64;

/// The longest text that is shown to other users, in bytes.
const MAX_TEXT_BYTES: usize = 253;

/// Returns the error for a message that breaks the protocol.
pub(super) fn protocol_error<T>(message: impl Into<String>) -> Result<T, Error> {
    Err(Error::new(ErrorCode::Protocol, message))
}

/// Checks text that is shown to other users.
pub(super) fn check_text(what: &str, text: String) -> Result<String, Error> {
    if text.is_empty() || text.len() > MAX_TEXT_BYTES || text.chars().any(char::is_control) {
        return protocol_error(format!(
            "{what} is {text:?}; it must have 1 to {MAX_TEXT_BYTES} bytes and no control characters"
        ));
    }
    Ok(text)
}

/// The leases that a client claims by its tokens.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ClaimedLeases {
    /// The leases proved by valid tokens.
    pub(super) claims: Vec<Claim>,
    /// The leases named by tokens that prove nothing: signed with another key, or issued
    /// for another client, credential or tenant. The client is notified that these leases
    /// have ended.
    pub(super) invalid: Vec<LeaseId>,
}

/// Checks the lease tokens that `client` presents, whose pool token belongs to `tenant`.
/// The expiry of a lease token is ignored, since the lease goes on after it. Returns an error
/// only if a token is malformed.
pub(super) fn claimed_leases(
    client: ClientId,
    credential: CredentialHash,
    tenant: &str,
    tokens: &[impl AsRef<[u8]>],
    lease_key: &[u8],
    now: UnixMillis,
) -> Result<ClaimedLeases, Error> {
    let is_its_own = |claims: &LeaseClaims| {
        claims.client_id == client.0
            && claims.tenant == tenant
            && CredentialHash::from_bytes(&claims.credential_hash) == Some(credential)
    };
    let mut held = ClaimedLeases::default();
    for token in tokens.iter().map(AsRef::as_ref) {
        match token::verify(token, lease_key) {
            Ok(claims) if is_its_own(&claims) => held.claims.push(claim(&claims, now)?),
            Ok(claims) => held.invalid.push(LeaseId(claims.lease_id)),
            Err(_) => match unverified_lease_id(token) {
                Some(lease) => held.invalid.push(lease),
                None => {
                    return protocol_error("the client's hello contains a malformed lease token");
                }
            },
        }
    }
    Ok(held)
}

/// Returns the lease that an unverified token names. Use it only to report that the lease
/// has ended.
fn unverified_lease_id(token: &[u8]) -> Option<LeaseId> {
    let claims = token.get(..token.len().checked_sub(SIGNATURE_BYTES)?)?;
    Some(LeaseId(LeaseClaims::decode(claims).ok()?.lease_id))
}

fn claim(claims: &LeaseClaims, now: UnixMillis) -> Result<Claim, Error> {
    let granted = |granted: &v1::LeaseShare| {
        Ok(GrantedDevice {
            device_ref: DeviceRef {
                worker: WorkerId(granted.worker_id),
                index: granted.device_index,
            },
            grant: number(granted.grant),
            share: share_messages::share("a share in a lease token", granted.share)?,
        })
    };
    let lease_devices = claims.shares.iter().map(granted);
    Ok(Claim {
        lease: LeaseId(claims.lease_id),
        lease_devices: lease_devices.collect::<Result<_, Error>>()?,
        durability: durability(claims.durability()),
        epoch: claims.epoch,
        time_left: claims.time_left_ms.map(|left| {
            let since = now.0.saturating_sub(claims.issued_at_ms);
            Duration::from_millis(left.saturating_sub(since))
        }),
        is_spot: claims.spot,
        may_end: claims.may_end,
    })
}

/// The shortest time after which a lease can end by its own request.
const MIN_DURATION: Duration = Duration::from_secs(1);

/// Converts a client's message after its hello. If the message is a request, `lease` becomes
/// the id of the lease that the engine grants for it.
pub(super) fn client_event(
    message: v1::ClientMessage,
    lease: LeaseId,
) -> Result<ClientEvent, Error> {
    use client_message::Body;
    match message.body {
        Some(Body::Request(request)) => Ok(ClientEvent::Request {
            request: RequestId(request.request_id),
            priority: request.priority,
            demand: demand(request)?,
            lease,
        }),
        Some(Body::Cancel(cancel)) => Ok(ClientEvent::Cancel {
            request: RequestId(cancel.request_id),
        }),
        Some(Body::Unreachable(unreachable)) => Ok(ClientEvent::Unreachable {
            lease: LeaseId(unreachable.lease_id),
            worker: unreachable.worker_id.map(WorkerId),
        }),
        Some(Body::Restorable(restorable)) => Ok(ClientEvent::Restorable {
            lease: LeaseId(restorable.lease_id),
            is_restorable: restorable.restorable,
        }),
        Some(Body::Release(release)) => Ok(ClientEvent::Release {
            lease: LeaseId(release.lease_id),
        }),
        // The driver handles it.
        Some(Body::ChangeStanding(_) | Body::MarkPlaced(_) | Body::ExplainWait(_)) => {
            protocol_error("the client sent a message out of place")
        }
        Some(Body::Hello(_)) => protocol_error("the client sent a second hello on the same stream"),
        None => protocol_error("the client sent an empty or unknown message"),
    }
}

/// Returns why a message is refused that requests a share which no device has, and the id of the request.
pub(super) fn share_refusal(message: &v1::ClientMessage) -> Option<(RequestId, Error)> {
    let Some(client_message::Body::Request(request)) = &message.body else {
        return None;
    };
    let error = share_messages::requested_permille(request).err()?;
    Some((RequestId(request.request_id), error))
}

/// Returns the counts of a message by kind; of those of one kind, the last.
pub(super) fn kinds(kinds: Vec<v1::KindCount>) -> BTreeMap<String, u32> {
    let kinds = kinds.into_iter();
    kinds.map(|it| (it.kind, it.count)).collect()
}

fn durability(message: v1::Durability) -> Durability {
    match message {
        v1::Durability::Off => Durability::Off,
        v1::Durability::Auto => Durability::Auto,
        v1::Durability::Exact => Durability::Exact,
        v1::Durability::Continue => Durability::Continue,
    }
}

/// Returns the durability of a lease as its token has it.
pub(super) fn durability_message(durability: Durability) -> v1::Durability {
    match durability {
        Durability::Off => v1::Durability::Off,
        Durability::Auto => v1::Durability::Auto,
        Durability::Exact => v1::Durability::Exact,
        Durability::Continue => v1::Durability::Continue,
    }
}

fn demand(request: v1::LeaseRequest) -> Result<Demand, Error> {
    let share_permille = share_messages::requested_permille(&request)?;
    Ok(Demand {
        devices: request.devices,
        kind: match request.kind {
            any if any.is_empty() => None,
            kind => Some(check_text("the requested kind of device", kind)?),
        },
        memory_bytes: request.memory_bytes,
        share_permille,
        durability: match v1::Durability::try_from(request.durability) {
            Ok(known) => durability(known),
            Err(unknown) => {
                return protocol_error(format!("the request has an unknown durability: {unknown}"));
            }
        },
        recover_within: request.recover_within_ms.map(Duration::from_millis),
        max_duration: request
            .max_duration_ms
            .map(|millis| Duration::from_millis(millis).max(MIN_DURATION)),
        is_spot: request.spot,
        may_end: request.may_end,
    })
}

/// Builds the message that has a client place marks in the sessions of a lease.
pub(super) fn place_mark(lease: LeaseId) -> PoolMessage {
    let lease_id = lease.0;
    pool_message(pool_message::Body::PlaceMark(v1::PlaceMark { lease_id }))
}

/// Builds the message that reports a request's position in the queue, and why it waits.
pub(super) fn queued(request: RequestId, position: u32, reason: WaitReason) -> PoolMessage {
    let (request_id, reason) = (request.0, reason.to_string());
    pool_message(pool_message::Body::Queued(v1::Queued {
        request_id,
        position,
        reason,
    }))
}

/// Builds the entry of a device in the claims of a lease token.
pub(super) fn lease_share(device: &LeasedDevice) -> v1::LeaseShare {
    v1::LeaseShare {
        worker_id: device.device_ref.worker.0,
        device_index: device.device_ref.index,
        worker: device.worker.name.clone(),
        address: device.worker.address.clone(),
        certificate_sha256: device.worker.certificate_sha256.to_vec().into(),
        grant: Some(device.grant.into()),
        share: device.share.map(Into::into),
    }
}

/// Builds the message with a renewed token of a lease.
pub(super) fn renewed(lease: LeaseId, token: Vec<u8>) -> PoolMessage {
    pool_message(pool_message::Body::Renewed(v1::Renewed {
        lease_id: lease.0,
        token: token.into(),
    }))
}

/// Builds the message that a lease goes on at another worker, with a new token.
pub(super) fn moved(lease: LeaseId, devices: Vec<LeasedDevice>, token: Vec<u8>) -> PoolMessage {
    pool_message(pool_message::Body::Moved(v1::Moved {
        lease_id: lease.0,
        token: token.into(),
        devices: devices.into_iter().map(leased_device).collect(),
    }))
}

/// Builds the message that grants a lease, with its token.
pub(super) fn granted(
    request: RequestId,
    lease: LeaseId,
    devices: Vec<LeasedDevice>,
    token: Vec<u8>,
) -> PoolMessage {
    pool_message(pool_message::Body::Granted(v1::Granted {
        request_id: request.0,
        lease_id: lease.0,
        token: token.into(),
        devices: devices.into_iter().map(leased_device).collect(),
    }))
}

fn leased_device(leased: LeasedDevice) -> v1::LeasedDevice {
    let Endpoint {
        name,
        address,
        certificate_sha256,
    } = leased.worker;
    v1::LeasedDevice {
        device: Some(device(leased.device)),
        worker: Some(v1::WorkerEndpoint {
            worker_id: leased.device_ref.worker.0,
            name,
            address,
            certificate_sha256: certificate_sha256.to_vec().into(),
        }),
        index: leased.device_ref.index,
        share: leased.share.map(Into::into),
    }
}

/// Converts a device description to its message.
pub(super) fn device(device: DeviceSpec) -> v1::Device {
    let DeviceSpec {
        kind,
        name,
        memory_bytes,
        fingerprint,
        // Only the scheduler needs to know.
        takes_shares: _,
    } = device;
    v1::Device {
        kind,
        name,
        memory_bytes,
        fingerprint: fingerprint.map(|fingerprint| v1::DeviceFingerprint {
            hash: fingerprint.hash.to_vec().into(),
            is_exact: fingerprint.is_exact,
        }),
    }
}

/// Builds the message that refuses a request.
pub(super) fn refused(request: RequestId, error: Error) -> PoolMessage {
    let (request_id, error) = (request.0, Some(error));
    pool_message(pool_message::Body::Refused(v1::Refused {
        request_id,
        error,
    }))
}

/// Converts the reason of a refusal to an error.
pub(super) fn refuse_error(reason: &RefuseReason) -> Error {
    let code = match reason {
        RefuseReason::NoDevices => ErrorCode::Protocol,
        RefuseReason::Unsatisfiable { .. } | RefuseReason::TenantLimit { .. } => {
            ErrorCode::Unsatisfiable
        }
        RefuseReason::PoolLimit { .. }
        | RefuseReason::TenantQueueLimit { .. }
        | RefuseReason::ClientLimit { .. } => ErrorCode::Limit,
        RefuseReason::Cancelled | RefuseReason::ByAdministrator => ErrorCode::Cancelled,
    };
    Error::new(code, reason.to_string())
}

/// Builds the message that reports the end of a lease to its client.
pub(super) fn lease_ended(lease: LeaseId, reason: &EndReason) -> PoolMessage {
    let code = match reason {
        EndReason::WorkerLost { .. }
        | EndReason::WorkerLeft { .. }
        | EndReason::WorkerMissing { .. }
        | EndReason::NotReplaced { .. }
        | EndReason::SnapshotsLost { .. }
        | EndReason::HolderMissing { .. }
        | EndReason::NothingLeft { .. }
        | EndReason::BeforeRestart { .. }
        | EndReason::ProcessDied { .. }
        | EndReason::NotRestored { .. }
        | EndReason::NotResumed { .. }
        | EndReason::WorkerDrains { .. }
        | EndReason::WorkerUnreachable { .. }
        | EndReason::WorkerMissed { .. }
        | EndReason::DeviceUnavailable { .. } => ErrorCode::WorkerLost,
        EndReason::Reclaimed
        | EndReason::TimeOver
        | EndReason::Idle
        | EndReason::ByAdministrator
        | EndReason::Unknown => ErrorCode::Lease,
        EndReason::TokenRevoked => ErrorCode::Token,
    };
    pool_message(pool_message::Body::Ended(v1::LeaseEnded {
        lease_id: lease.0,
        error: Some(Error::new(code, reason.to_string())),
    }))
}

/// Builds the message that the worker of a lease was lost and the lease waits.
pub(super) fn interrupted(lease: LeaseId, reason: &EndReason) -> PoolMessage {
    pool_message(pool_message::Body::Interrupted(v1::Interrupted {
        lease_id: lease.0,
        error: Some(Error::new(ErrorCode::WorkerLost, reason.to_string())),
    }))
}

/// Builds the message that a lease is suspended, or was resumed and waits for devices of these
/// workers.
pub(super) fn suspended(
    lease: LeaseId,
    waits_for: Vec<String>,
    needs_all: bool,
    cause: Option<&EndReason>,
) -> PoolMessage {
    pool_message(pool_message::Body::Suspended(v1::Suspended {
        lease_id: lease.0,
        waits_for,
        needs_all,
        cause: cause.map(ToString::to_string).unwrap_or_default(),
        idle: cause == Some(&EndReason::Idle),
    }))
}

/// Builds the reply to a client's request to suspend, resume or move a lease. `refused` is why that is not
/// possible.
pub(super) fn standing_changed(request_id: u64, refused: Option<String>) -> PoolMessage {
    let error = refused.map(|reason| Error::new(ErrorCode::Lease, reason));
    pool_message(pool_message::Body::StandingChanged(v1::StandingChanged {
        request_id,
        error,
    }))
}

/// Wraps the body of a message to a client.
pub(super) fn pool_message(body: pool_message::Body) -> PoolMessage {
    PoolMessage { body: Some(body) }
}
