//! What the holder of a token sees of the pool.

use tensord_proto::{ids::ClientId, v1::StatusReply};

use super::{Driver, workers::JoinedWorker};
use crate::scheduler::{
    access::{AuthContext, Role},
    view,
};

impl Driver {
    /// Returns the pool's status as visible to the holder of `auth`: a program sees only
    /// the leases of its own tenant, and why devices are out of service only if there is no other tenant.
    pub(super) fn status(&self, auth: &AuthContext) -> StatusReply {
        let usage = |worker| self.workers.get(&worker).map(JoinedWorker::usage);
        let is_shown = |client: Option<ClientId>| match auth.role {
            Role::Admin => true,
            Role::Client | Role::Worker => client
                .and_then(|client| self.holders.tenant(client))
                .is_some_and(|tenant| tenant == &*auth.tenant),
        };
        let shows_reasons = auth.role == Role::Admin || !self.has_several_tenants();
        let snapshot = self.engine.snapshot();
        view::status(snapshot, self.now(), usage, shows_reasons, is_shown)
    }
}
