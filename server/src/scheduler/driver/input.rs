//! The inputs to the driver.

use std::collections::BTreeMap;

use futures::future::BoxFuture;
use tensord_proto::{
    credential::CredentialHash,
    ids::{ClientId, LeaseId, WorkerId},
    v1::{
        ClientMessage, DrainedWorker, EndedLease, Error, LeaseList, PoolMessage, PrioritySet,
        ResumedLease, Revoked, SuspendedLease, TenantInfo, TenantPlan, WaitingList, WorkerCommand,
        WorkerMessage,
    },
};
use tensord_scheduler::{StreamId, TenantName};
use tokio::sync::{mpsc, oneshot};

use super::{JoiningWorker, status::StatusSender};
use crate::scheduler::{
    access::AuthContext,
    convert,
    stream::{AcceptedStream, Queued},
    tenants::{Plan, Proposal, TenantError},
};

/// The sending end of the driver's queue.
pub(in crate::scheduler) type InputSender = mpsc::Sender<Queued<Input>>;

/// An input to the driver.
pub(in crate::scheduler) enum Input {
    /// A client attaches; its hello has been checked.
    Attach {
        client: ClientId,
        credential: CredentialHash,
        auth: AuthContext,
        held: convert::ClaimedLeases,
        opened: AcceptedStream<ClientMessage, PoolMessage>,
        /// Receives whether the client may attach. After an error, nothing has changed.
        reply_sender: oneshot::Sender<Result<(), Error>>,
    },
    /// A message from a client.
    FromClient(ClientId, StreamId, ClientMessage),
    /// A worker joins; it is enrolled and its registration has been checked.
    Join {
        joining_worker: Box<JoiningWorker>,
        opened: AcceptedStream<WorkerMessage, WorkerCommand>,
    },
    /// A message from a worker.
    FromWorker(WorkerId, StreamId, WorkerMessage),
    /// A request for the pool's status.
    Status(StatusSender),
    /// The token of this name was revoked: the streams and leases that depend on it end.
    Revoke {
        token: String,
        reply: oneshot::Sender<Revoked>,
    },
    /// The worker of this name was removed from the enrolled ones: its stream and leases
    /// end. The reply is whether it was in the pool.
    Remove {
        name: String,
        reply: oneshot::Sender<bool>,
    },
    /// A request for all leases.
    ListLeases(oneshot::Sender<LeaseList>),
    /// A request for what waits for devices, or for this lease or request alone.
    ListWaiting(Option<LeaseId>, oneshot::Sender<WaitingList>),
    /// The guarantee, limit or weight of a tenant has changed on disk.
    TenantsChanged,
    /// A request for the average share that each tenant has had.
    PastShares(oneshot::Sender<BTreeMap<TenantName, f64>>),
    /// A request for the tenant of this name, or all, with what they have.
    ListTenants(Option<String>, oneshot::Sender<Vec<TenantInfo>>),
    /// Tenants are to become those of a list. The reply is what changes, or why nothing may change. The caller
    /// writes the changes to disk, and sends [`Input::TenantsChanged`] then.
    PlanTenants(
        Box<Proposal>,
        oneshot::Sender<Result<(Plan, TenantPlan), TenantError>>,
    ),
    /// The worker of this name is to be drained, or no longer. The reply is `None` if it is not in
    /// the pool.
    DrainWorker {
        name: String,
        is_drained: bool,
        reply: oneshot::Sender<Option<DrainedWorker>>,
    },
    /// A lease is to move. The reply is the name of its new worker, or why it cannot move.
    MoveLease(LeaseId, oneshot::Sender<Result<String, String>>),
    /// A lease is to end, or a request that waits is to be refused. The reply is an error if there is
    /// neither.
    EndLease(LeaseId, oneshot::Sender<Result<EndedLease, String>>),
    /// The priority of a request that waits is to change. The reply is an error if there is none.
    SetPriority(LeaseId, i32, oneshot::Sender<Result<PrioritySet, String>>),
    /// A lease is to be suspended. The reply is an error if it cannot be.
    SuspendLease(
        LeaseId,
        oneshot::Sender<Result<Recorded<SuspendedLease>, String>>,
    ),
    /// A suspended lease is to go on. The reply is an error if it is not suspended.
    ResumeLease(
        LeaseId,
        oneshot::Sender<Result<Recorded<ResumedLease>, String>>,
    ),
    /// The process is about to stop: all further requests are refused.
    StopGranting,
    /// The process stops now: every stream ends with an error that states the reason.
    Stop,
}

/// The reply to a request that has changed a lease.
pub(in crate::scheduler) struct Recorded<T> {
    pub(in crate::scheduler) reply: T,
    /// Ends when the record of the change is on disk, or writing it takes too long.
    pub(in crate::scheduler) written: BoxFuture<'static, ()>,
}
