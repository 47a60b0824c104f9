//! Which token each client showed: what is revoked ends what hangs on it, and leases
//! belong to the token's tenant.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use tensord_proto::ids::ClientId;

use crate::scheduler::access::Pass;

/// Clients that are attached, or may still hold leases.
pub(super) struct Holders {
    clients: HashMap<ClientId, Holder>,
    /// How long a lease outlives its client's stream.
    expiry: Duration,
}

struct Holder {
    pass: Pass,
    /// Since when its stream is gone.
    gone: Option<Instant>,
}

impl Holders {
    pub(super) fn new(expiry: Duration) -> Self {
        Self {
            clients: HashMap::new(),
            expiry,
        }
    }

    /// A client is attached with `pass`. Those whose leases have expired are forgotten.
    pub(super) fn attach(&mut self, client: ClientId, pass: Pass, now: Instant) {
        let expiry = self.expiry;
        let is_over = |gone: Instant| now.saturating_duration_since(gone) > 2 * expiry;
        self.clients
            .retain(|_, holder| !holder.gone.is_some_and(is_over));
        self.clients.insert(client, Holder { pass, gone: None });
    }

    /// The client's stream is gone.
    pub(super) fn detach(&mut self, client: ClientId, now: Instant) {
        if let Some(holder) = self.clients.get_mut(&client) {
            holder.gone = Some(now);
        }
    }

    /// Forgets a client that holds nothing any more.
    pub(super) fn remove(&mut self, client: ClientId) {
        self.clients.remove(&client);
    }

    /// What a client showed.
    pub(super) fn pass(&self, client: ClientId) -> Option<&Pass> {
        self.clients.get(&client).map(|holder| &holder.pass)
    }

    /// Whose a client is.
    pub(super) fn tenant(&self, client: ClientId) -> Option<&str> {
        self.pass(client).map(|pass| &*pass.tenant)
    }

    /// The clients that showed a token of this name.
    pub(super) fn with_token(&self, token: &str) -> Vec<ClientId> {
        let clients = self.clients.iter();
        let clients = clients.filter(|(_, holder)| &*holder.pass.token == token);
        clients.map(|(client, _)| *client).collect()
    }
}
