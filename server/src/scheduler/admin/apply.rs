//! Makes the tenants of a pool those of a list.
//!
//! [`Proposal`] has the rules. The plan is made by the driver, which knows the leases,
//! while no other tenant and no token can be added.

use std::net::SocketAddr;

use tensord_proto::v1::{ApplyTenantsRequest, TenantPlan};
use tensord_transport::control;
use tokio::sync::oneshot;
use tonic::{Request, Status};
use tracing::info;

use super::{named_change, refused};
use crate::scheduler::{
    access::{AuthContext, ChangeError},
    driver::Input,
    service::Service,
    tenants::{DeclaredTenants, Mode, Plan, Proposal, TenantError},
};

/// Who applies tenants.
struct Caller {
    auth: AuthContext,
    peer: SocketAddr,
}

impl Service {
    /// Plans that the tenants become those of a list, and unless it is a dry run, does so.
    pub(super) async fn apply(
        &self,
        request: Request<ApplyTenantsRequest>,
    ) -> Result<TenantPlan, Status> {
        let caller = Caller {
            auth: self.0.admit_admin(&request)?,
            peer: control::peer(&request),
        };
        let (declared, mode) = parsed(request.into_inner()).map_err(|e| refused(&e.into()))?;
        let service = self.clone();
        self.change_tenants(move || service.apply_declared(&caller, declared, mode))
            .await
    }

    /// As [`apply`](Self::apply). Blocks on the disk and the driver.
    fn apply_declared(
        &self,
        caller: &Caller,
        declared: DeclaredTenants,
        mode: Mode,
    ) -> Result<TenantPlan, ChangeError> {
        let registries = &self.0.registries;
        let is_dry_run = mode == Mode::DryRun;
        let mut disconnected_clients = 0;
        let revoke = |tokens: &[String]| {
            disconnected_clients = self.revoke_with_tenants(caller, tokens)?;
            Ok(())
        };
        let decide = |proposal| self.decide(proposal);
        let applied = registries
            .tenants
            .apply(&registries.access, declared, mode, decide, revoke);
        let (plan, reply) = applied?;
        if is_dry_run {
            return Ok(reply);
        }
        log(&plan, caller);
        Ok(TenantPlan {
            revoked_tokens: plan.revoked_tokens(),
            disconnected_clients,
            ..reply
        })
    }

    /// Has the driver plan a change of tenants.
    fn decide(&self, proposal: Proposal) -> Result<(Plan, TenantPlan), ChangeError> {
        let (reply, replied) = oneshot::channel();
        self.send_blocking(Input::PlanTenants(proposal.into(), reply))?;
        let planned = replied.blocking_recv().map_err(|_| ChangeError::Stopping)?;
        Ok(planned?)
    }

    /// Revokes tokens of tenants that are removed, and ends what was opened with them. Returns the number of
    /// clients that were disconnected.
    fn revoke_with_tenants(&self, caller: &Caller, tokens: &[String]) -> Result<u32, ChangeError> {
        let revoked = self.0.registries.access.revoke_all(tokens)?;
        for token in &revoked {
            info!(token = token.name, keep_leases = false, "token revoked");
            let reason = format!("by {}, with its tenant", caller.auth.token);
            self.record_revoked(token, caller.peer, reason);
        }
        let mut clients = 0;
        for token in revoked {
            let (reply, replied) = oneshot::channel();
            let token = token.name;
            // A driver that has stopped has ended all streams.
            if self.send_blocking(Input::Revoke { token, reply }).is_ok() {
                clients += replied.blocking_recv().map_or(0, |revoked| revoked.clients);
            }
        }
        Ok(clients)
    }

    fn send_blocking(&self, input: Input) -> Result<(), ChangeError> {
        let sent = self.0.driver.blocking_send(input.into());
        sent.map_err(|_| ChangeError::Stopping)
    }
}

/// Returns the tenants of a request by name, and what is to be done.
fn parsed(request: ApplyTenantsRequest) -> Result<(DeclaredTenants, Mode), TenantError> {
    let mut declared = DeclaredTenants::new();
    for tenant in request.tenants {
        let (name, change) = named_change(tenant);
        if declared.contains_key(&name) {
            return Err(TenantError::twice(&name));
        }
        declared.insert(name, change);
    }
    let mode = match request.dry_run {
        true => Mode::DryRun,
        false => Mode::Apply {
            revision: request.revision.into(),
            force: request.force,
        },
    };
    Ok((declared, mode))
}

fn log(plan: &Plan, caller: &Caller) {
    for (name, planned) in &plan.changes {
        let what = match (&planned.before, &planned.after) {
            (None, _) => "added",
            (_, None) => "removed",
            _ => "changed",
        };
        info!(name, by = %caller.auth.token, "tenant {what}");
    }
}
