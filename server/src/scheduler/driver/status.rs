//! What the holder of a token sees of the pool.

use tensord_proto::{ids::ClientId, v1::StatusReply};

use super::{Driver, workers::JoinedWorker};
use crate::scheduler::{
    access::{AuthContext, Role},
    view,
};

impl Driver {
    /// Returns the pool's status as visible to the holder of `auth`: a program sees only
    /// the leases of its own tenant.
    pub(super) fn status(&self, auth: &AuthContext) -> StatusReply {
        let usage = |worker| self.workers.get(&worker).map(JoinedWorker::usage);
        let is_shown = |client: Option<ClientId>| match auth.role {
            Role::Admin => true,
            Role::Client | Role::Worker => client
                .and_then(|client| self.holders.tenant(client))
                .is_some_and(|tenant| tenant == &*auth.tenant),
        };
        view::status(self.engine.snapshot(), self.now(), usage, is_shown)
    }
}
