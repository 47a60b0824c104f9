//! The admin service: it creates, lists, rotates and revokes tokens, adds, changes, lists, removes and
//! applies tenants, lists, drains and removes workers, lists, moves, suspends and resumes leases, lists what
//! waits, and sums up usage, while the pool runs.

mod apply;
mod token_messages;
mod usage;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use tensord_proto::ids::LeaseId;
use tensord_proto::v1::{
    ApplyTenantsRequest, ChangeTenantRequest, CreateTokenRequest, DrainWorkerRequest,
    DrainedWorker, EndLeaseRequest, EndedLease, EnrolledDevices, EnrolledWorker, EnrolledWorkers,
    Error, ErrorCode, LeaseList, ListLeasesRequest, ListTenantsRequest, ListTokensRequest,
    ListWaitingRequest, ListWorkersRequest, MadeToken, MoveLeaseRequest, MovedLease, PrioritySet,
    RemoveTenantRequest, RemoveWorkerRequest, RemovedTenant, RemovedWorker, ResumeLeaseRequest,
    ResumedLease, RevokeTokenRequest, Revoked, RotateTokenRequest, SetPriorityRequest,
    SumUsageRequest, SuspendLeaseRequest, SuspendedLease, TenantInfo, TenantList, TenantPlan,
    TokenList, UsageSums, WaitingList, admin_server::Admin,
};
use tensord_scheduler::TenantLimit;
use tensord_transport::control;
use tokio::sync::oneshot;
use tonic::{Request, Response, Status};
use tracing::info;

use self::token_messages::{info_of, made_token};
use super::{
    Registries,
    access::{Access, ChangeError, NewToken, Role, Token, TokenError, UnixMillis},
    convert,
    driver::Input,
    service::{Service, blocking},
    tenants::{TenantChange, TenantError, Tenants},
};
use crate::{
    audit::{Entry, EntryKind},
    grpc_status,
};

#[tonic::async_trait]
impl Admin for Service {
    async fn create_token(
        &self,
        request: Request<CreateTokenRequest>,
    ) -> Result<Response<MadeToken>, Status> {
        self.0.admit_admin(&request)?;
        let CreateTokenRequest {
            name,
            role,
            tenant,
            life_ms,
            uses,
            user,
            note,
        } = request.into_inner();
        let role = role.parse().map_err(|e: String| protocol_error(&e))?;
        let new = NewToken {
            name,
            role,
            tenant: tenant.clone(),
            user,
            note,
            life: life_ms.map(Duration::from_millis),
            uses,
        };
        let tenants = self.0.registries.tenants.clone();
        let create = move |access: &Access| tenants.with_tenant(&tenant, || access.create(new));
        let made = self.change(create).await?;
        info!(token = made.0.name, role = %made.0.role, "token created");
        Ok(Response::new(made_token(&made)))
    }

    async fn list_tokens(
        &self,
        request: Request<ListTokensRequest>,
    ) -> Result<Response<TokenList>, Status> {
        self.0.admit_admin(&request)?;
        let (tokens, now) = (self.0.registries.access.tokens(), UnixMillis::now());
        let tokens = tokens.iter().map(|token| info_of(token, now)).collect();
        Ok(Response::new(TokenList { tokens }))
    }

    async fn rotate_token(
        &self,
        request: Request<RotateTokenRequest>,
    ) -> Result<Response<MadeToken>, Status> {
        self.0.admit_admin(&request)?;
        let RotateTokenRequest { name, grace_ms } = request.into_inner();
        let grace = Duration::from_millis(grace_ms);
        let made = self
            .change(move |access| access.rotate(&name, grace))
            .await?;
        info!(token = made.0.name, "token rotated");
        Ok(Response::new(made_token(&made)))
    }

    async fn revoke_token(
        &self,
        request: Request<RevokeTokenRequest>,
    ) -> Result<Response<Revoked>, Status> {
        let auth = self.0.admit_admin(&request)?;
        let peer = control::peer(&request);
        let RevokeTokenRequest { name, keep_leases } = request.into_inner();
        let by = match keep_leases {
            true => format!("by {}; its leases continue", auth.token),
            false => format!("by {}", auth.token),
        };
        let (reply, replied) = oneshot::channel();
        let service = self.clone();
        // The whole change is made, even if the caller no longer waits.
        let revoked = blocking(move || {
            let Registries {
                access, enrolment, ..
            } = &service.0.registries;
            let token = access.revoke(&name, keep_leases)?;
            info!(token = token.name, keep_leases, "token revoked");
            service.record_revoked(&token, peer, by);
            if keep_leases {
                return Ok(());
            }
            let forgotten = match token.role {
                Role::Worker => enrolment.revoke(&token.name),
                _ => Ok(()),
            };
            let token = token.name;
            let input = Input::Revoke { token, reply };
            // An error means that the driver has stopped.
            let _ = service.0.driver.blocking_send(input.into());
            forgotten
        });
        revoked.await?.map_err(|e: ChangeError| refused(&e))?;
        match keep_leases {
            true => Ok(Response::new(Revoked::default())),
            false => self.reply(replied).await.map(Response::new),
        }
    }

    async fn list_workers(
        &self,
        request: Request<ListWorkersRequest>,
    ) -> Result<Response<EnrolledWorkers>, Status> {
        self.0.admit_admin(&request)?;
        let (enrolment, now) = (&self.0.registries.enrolment, UnixMillis::now());
        let registry = enrolment.registry();
        let workers = registry.iter().map(|(name, worker)| {
            let joined = enrolment.is_live(name);
            let devices = worker.offer.iter().map(|(kind, most)| EnrolledDevices {
                kind: kind.into(),
                count: most.count,
                memory_bytes: most.memory_bytes,
            });
            EnrolledWorker {
                name: name.into(),
                certificate_sha256: worker.certificate().0.to_vec().into(),
                token: worker.token.clone(),
                enrolled_ms: worker.at.0,
                seen_ms: if joined { now.0 } else { worker.seen.0 },
                joined,
                devices: devices.collect(),
            }
        });
        let workers = workers.collect();
        Ok(Response::new(EnrolledWorkers { workers }))
    }

    async fn remove_worker(
        &self,
        request: Request<RemoveWorkerRequest>,
    ) -> Result<Response<RemovedWorker>, Status> {
        let auth = self.0.admit_admin(&request)?;
        let peer = control::peer(&request);
        let RemoveWorkerRequest { name } = request.into_inner();
        let by = format!("removed by {}", auth.token);
        let (reply, replied) = oneshot::channel();
        let service = self.clone();
        // The whole change is made, even if the caller no longer waits.
        let removed = blocking(move || {
            service.0.registries.enrolment.remove(&name)?;
            info!(name, "worker removed");
            let removed = Entry::new(EntryKind::Revoked).address(peer).name(&name);
            service.0.audit.record(removed.reason(by));
            let input = Input::Remove { name, reply };
            // An error means that the driver has stopped.
            let _ = service.0.driver.blocking_send(input.into());
            Ok(())
        });
        removed.await?.map_err(|e: Error| grpc_status::status(&e))?;
        let was_joined = self.reply(replied).await?;
        Ok(Response::new(RemovedWorker { was_joined }))
    }

    async fn drain_worker(
        &self,
        request: Request<DrainWorkerRequest>,
    ) -> Result<Response<DrainedWorker>, Status> {
        let auth = self.0.admit_admin(&request)?;
        let DrainWorkerRequest { name, undo } = request.into_inner();
        let (reply, replied) = oneshot::channel();
        let drain = Input::DrainWorker {
            name: name.clone(),
            is_drained: !undo,
            reply,
        };
        self.0.send_to_driver(drain).await?;
        let drained = self.reply(replied).await?;
        let drained = drained.ok_or_else(|| {
            let words = format!("worker {name} is not in the pool; `tensord status` shows who is");
            protocol_error(&words)
        })?;
        match undo {
            true => info!(name, by = %auth.token, "worker is no longer drained"),
            false => {
                info!(name, by = %auth.token, leases = drained.leases.len(), "worker is drained")
            }
        }
        Ok(Response::new(drained))
    }

    async fn list_leases(
        &self,
        request: Request<ListLeasesRequest>,
    ) -> Result<Response<LeaseList>, Status> {
        self.0.admit_admin(&request)?;
        let (reply, replied) = oneshot::channel();
        self.0.send_to_driver(Input::ListLeases(reply)).await?;
        self.reply(replied).await.map(Response::new)
    }

    async fn list_waiting(
        &self,
        request: Request<ListWaitingRequest>,
    ) -> Result<Response<WaitingList>, Status> {
        self.0.admit_admin(&request)?;
        let lease = request.into_inner().lease_id.map(LeaseId);
        let (reply, replied) = oneshot::channel();
        self.0
            .send_to_driver(Input::ListWaiting(lease, reply))
            .await?;
        self.reply(replied).await.map(Response::new)
    }

    async fn move_lease(
        &self,
        request: Request<MoveLeaseRequest>,
    ) -> Result<Response<MovedLease>, Status> {
        let auth = self.0.admit_admin(&request)?;
        let lease = LeaseId(request.into_inner().lease_id);
        let worker = self.change_lease(lease, Input::MoveLease).await?;
        info!(%lease, by = %auth.token, "lease moves to worker {worker}");
        Ok(Response::new(MovedLease { worker }))
    }

    async fn end_lease(
        &self,
        request: Request<EndLeaseRequest>,
    ) -> Result<Response<EndedLease>, Status> {
        let auth = self.0.admit_admin(&request)?;
        let lease = LeaseId(request.into_inner().lease_id);
        let ended = self.change_lease(lease, Input::EndLease).await?;
        match ended.was_request {
            true => info!(%lease, by = %auth.token, "request is refused"),
            false => info!(%lease, by = %auth.token, "lease is ended"),
        }
        Ok(Response::new(ended))
    }

    async fn set_priority(
        &self,
        request: Request<SetPriorityRequest>,
    ) -> Result<Response<PrioritySet>, Status> {
        let auth = self.0.admit_admin(&request)?;
        let SetPriorityRequest { lease_id, priority } = request.into_inner();
        let lease = LeaseId(lease_id);
        let input = |lease, reply| Input::SetPriority(lease, priority, reply);
        let set = self.change_lease(lease, input).await?;
        info!(%lease, by = %auth.token, priority, "priority of a request is changed");
        Ok(Response::new(set))
    }

    async fn suspend_lease(
        &self,
        request: Request<SuspendLeaseRequest>,
    ) -> Result<Response<SuspendedLease>, Status> {
        let auth = self.0.admit_admin(&request)?;
        let lease = LeaseId(request.into_inner().lease_id);
        let suspended = self.change_lease(lease, Input::SuspendLease).await?;
        info!(%lease, by = %auth.token, "lease is suspended");
        suspended.written.await;
        Ok(Response::new(suspended.reply))
    }

    async fn resume_lease(
        &self,
        request: Request<ResumeLeaseRequest>,
    ) -> Result<Response<ResumedLease>, Status> {
        let auth = self.0.admit_admin(&request)?;
        let lease = LeaseId(request.into_inner().lease_id);
        let resumed = self.change_lease(lease, Input::ResumeLease).await?;
        info!(%lease, by = %auth.token, "lease is resumed");
        resumed.written.await;
        Ok(Response::new(resumed.reply))
    }

    async fn add_tenant(
        &self,
        request: Request<ChangeTenantRequest>,
    ) -> Result<Response<TenantInfo>, Status> {
        self.change_tenant(request, "added", Tenants::add).await
    }

    async fn set_tenant(
        &self,
        request: Request<ChangeTenantRequest>,
    ) -> Result<Response<TenantInfo>, Status> {
        self.change_tenant(request, "changed", Tenants::set).await
    }

    async fn list_tenants(
        &self,
        request: Request<ListTenantsRequest>,
    ) -> Result<Response<TenantList>, Status> {
        self.0.admit_admin(&request)?;
        let ListTenantsRequest { name } = request.into_inner();
        let name = (!name.is_empty()).then_some(name);
        if let Some(name) = &name {
            let tenants = self.0.registries.tenants.read();
            tenants.get(name).map_err(|e| refused(&e.into()))?;
        }
        let tenants = self.tenants(name).await?;
        Ok(Response::new(TenantList { tenants }))
    }

    async fn remove_tenant(
        &self,
        request: Request<RemoveTenantRequest>,
    ) -> Result<Response<RemovedTenant>, Status> {
        let auth = self.0.admit_admin(&request)?;
        let RemoveTenantRequest { name } = request.into_inner();
        if let Some(tenant) = self.tenants(Some(name.clone())).await?.first() {
            let leases = (tenant.leases + tenant.suspended) as usize;
            let requests = tenant.waiting as usize;
            if leases + requests > 0 {
                let in_use = TenantError::HasLeases {
                    name,
                    leases,
                    requests,
                };
                return Err(refused(&in_use.into()));
            }
        }
        let (tenants, access) = (
            self.0.registries.tenants.clone(),
            self.0.registries.access.clone(),
        );
        let removing = name.clone();
        self.change_tenants(move || tenants.remove(&removing, &access))
            .await?;
        info!(name, by = %auth.token, "tenant removed");
        Ok(Response::new(RemovedTenant {}))
    }

    async fn apply_tenants(
        &self,
        request: Request<ApplyTenantsRequest>,
    ) -> Result<Response<TenantPlan>, Status> {
        self.apply(request).await.map(Response::new)
    }

    async fn sum_usage(
        &self,
        request: Request<SumUsageRequest>,
    ) -> Result<Response<UsageSums>, Status> {
        self.sum_up(request).await.map(Response::new)
    }
}

impl Service {
    /// Waits for the driver's reply.
    async fn reply<T>(&self, replied: oneshot::Receiver<T>) -> Result<T, Status> {
        let gone = |_| Status::unavailable("the scheduler is shutting down");
        replied.await.map_err(gone)
    }

    /// Has the driver change a lease. `input` takes the sender of the driver's reply, of which the
    /// error is the reason why the lease cannot be changed.
    async fn change_lease<T>(
        &self,
        lease: LeaseId,
        input: impl FnOnce(LeaseId, oneshot::Sender<Result<T, String>>) -> Input,
    ) -> Result<T, Status> {
        let (reply, replied) = oneshot::channel();
        self.0.send_to_driver(input(lease, reply)).await?;
        let changed = self.reply(replied).await?;
        changed.map_err(|reason| protocol_error(&reason))
    }

    /// Changes a tenant, and returns it. `what` completes "tenant … ".
    async fn change_tenant(
        &self,
        request: Request<ChangeTenantRequest>,
        what: &'static str,
        change: impl FnOnce(&Tenants, &str, TenantChange) -> Result<(), ChangeError> + Send + 'static,
    ) -> Result<Response<TenantInfo>, Status> {
        let auth = self.0.admit_admin(&request)?;
        let (name, parsed) = named_change(request.into_inner());
        let (tenants, changing) = (self.0.registries.tenants.clone(), name.clone());
        self.change_tenants(move || change(&tenants, &changing, parsed))
            .await?;
        info!(name, by = %auth.token, "tenant {what}");
        let info = self.tenants(Some(name)).await?.into_iter().next();
        // Another administrator may have removed it.
        let gone = || protocol_error("the tenant was removed meanwhile");
        info.map(Response::new).ok_or_else(gone)
    }

    /// Changes tenants, and has the driver follow that, also if the caller does not wait any more.
    async fn change_tenants<T: Send + 'static>(
        &self,
        change: impl FnOnce() -> Result<T, ChangeError> + Send + 'static,
    ) -> Result<T, Status> {
        let driver = self.0.driver.clone();
        let changed = blocking(move || {
            let changed = change();
            // An error means that the driver has stopped.
            let _ = driver.blocking_send(Input::TenantsChanged.into());
            changed
        });
        changed.await?.map_err(|e| refused(&e))
    }

    /// Returns this tenant, or all, with what they have.
    async fn tenants(&self, name: Option<String>) -> Result<Vec<TenantInfo>, Status> {
        let (reply, replied) = oneshot::channel();
        let list = Input::ListTenants(name, reply);
        self.0.send_to_driver(list).await?;
        self.reply(replied).await
    }

    /// Records in the audit log that a token was revoked by a caller at `peer`.
    fn record_revoked(&self, token: &Token, peer: SocketAddr, reason: String) {
        let entry = Entry::new(EntryKind::Revoked).address(peer);
        let entry = entry.token(&token.name, token.role.name(), &token.tenant);
        self.0.audit.record(entry.reason(reason));
    }

    /// Changes tokens on a thread that may block on the disk.
    async fn change<T: Send + 'static>(
        &self,
        change: impl FnOnce(&Access) -> Result<T, ChangeError> + Send + 'static,
    ) -> Result<T, Status> {
        let access: Arc<Access> = self.0.registries.access.clone();
        let changed = blocking(move || change(&access)).await?;
        changed.map_err(|e| refused(&e))
    }
}

fn refused(error: &ChangeError) -> Status {
    let code = match error {
        ChangeError::Token(TokenError::Full)
        | ChangeError::Tenant(TenantError::Full | TenantError::TooMany { .. }) => ErrorCode::Limit,
        ChangeError::Token(_) | ChangeError::Tenant(_) => ErrorCode::Protocol,
        ChangeError::State(_) | ChangeError::OnlyRevoked { .. } => ErrorCode::Internal,
        ChangeError::Stopping => ErrorCode::Draining,
    };
    grpc_status::status(&Error::new(code, error.to_string()))
}

fn protocol_error(message: &str) -> Status {
    grpc_status::status(&Error::new(ErrorCode::Protocol, message))
}

/// Returns the name and the change of a tenant in a message.
fn named_change(message: ChangeTenantRequest) -> (String, TenantChange) {
    let change = TenantChange {
        weight: message.weight,
        guaranteed: message.guaranteed.map(|it| convert::kinds(it.kinds)),
        limit: message.limit.map(|it| TenantLimit {
            devices: convert::kinds(it.kinds),
            memory_bytes: it.memory_bytes,
        }),
    };
    (message.name, change)
}
