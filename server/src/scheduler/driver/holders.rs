//! The token and credential that each client presented. The token decides which clients a
//! revocation disconnects and which tenant owns their leases; the credential binds the
//! client's id, so that no other process can attach with it.
//!
//! Each of these clients has one of a bounded number of places, attached or not: a client that is
//! away finds its place when it comes back to its leases. One tenant cannot take all places.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use tensord_proto::{
    credential::CredentialHash,
    ids::ClientId,
    v1::{Error, ErrorCode},
};

use crate::scheduler::access::AuthContext;

/// A tenant may have this many times as many places as are left for new clients, so that a single tenant can have three
/// quarters of these, and a new tenant finds some. The engine divides its queue of requests in the same way
/// (`scheduler/src/engine/requests.rs`).
const TENANT_FACTOR: usize = 3;

/// Of all places, one in this many is for clients that come back to leases and have no place yet, as after a restart of
/// the scheduler.
const RETURNING_PART: usize = 8;

/// How often clients that have been away for too long are looked for among all: often enough that few are there in
/// addition, and not at each attach, as it takes a step for each client.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// The clients that are attached or may still hold leases.
pub(super) struct Holders {
    clients: HashMap<ClientId, Holder>,
    /// The number of clients of each tenant that has some.
    by_tenant: HashMap<Arc<str>, usize>,
    /// The largest number of clients.
    max: usize,
    /// When clients that have been away for too long were last looked for.
    swept_at: Option<Instant>,
    /// How long a lease outlives its client's stream.
    expiry: Duration,
}

struct Holder {
    credential: CredentialHash,
    auth: AuthContext,
    /// The time at which the client's stream ended; `None` while the client is attached.
    detached_at: Option<Instant>,
}

impl Holders {
    pub(super) fn new(max: usize, expiry: Duration) -> Self {
        Self {
            clients: HashMap::new(),
            by_tenant: HashMap::new(),
            max,
            swept_at: None,
            expiry,
        }
    }

    /// Records that a client is attached with `auth`, and now and then forgets clients whose
    /// streams ended more than twice the lease expiry ago. A client that has no place gets one of
    /// those that are kept for this only if it `comes_back` to leases.
    ///
    /// # Errors
    ///
    /// If the client of this id has another credential, or there is no place for it; nothing is recorded then.
    pub(super) fn attach(
        &mut self,
        client: ClientId,
        credential: CredentialHash,
        auth: AuthContext,
        comes_back: impl FnOnce() -> bool,
        now: Instant,
    ) -> Result<(), Error> {
        self.sweep(now);
        match self.clients.get(&client) {
            Some(known) if known.credential != credential => {
                return Err(credential_mismatch(client));
            }
            Some(_) => {}
            None => self.check_place(&auth.tenant, comes_back)?,
        }
        self.remove(client);
        *self.by_tenant.entry(auth.tenant.clone()).or_default() += 1;
        let holder = Holder {
            credential,
            auth,
            detached_at: None,
        };
        self.clients.insert(client, holder);
        Ok(())
    }

    /// Checks that there is a place for a client of a tenant that has none yet.
    fn check_place(&self, tenant: &str, comes_back: impl FnOnce() -> bool) -> Result<(), Error> {
        let (max, taken) = (self.max, self.clients.len());
        let kept = max / RETURNING_PART;
        let room = (max - kept).saturating_sub(taken);
        let of_tenant = self.by_tenant.get(tenant).copied().unwrap_or_default();
        if of_tenant < TENANT_FACTOR * room || (taken < max && comes_back()) {
            return Ok(());
        }
        let words = match room {
            0 => format!(
                "{taken} programs are attached or may come back to leases, and the pool has {max} places, of which {kept} are only for programs that come back to leases; try again later"
            ),
            _ => format!(
                "{of_tenant} programs of the tenant are attached or may come back to leases, which is the limit while the pool has few places left; end one, or try again later"
            ),
        };
        Err(Error::new(ErrorCode::Limit, words))
    }

    /// Forgets clients whose streams ended more than twice the lease expiry ago, unless it did so just now.
    fn sweep(&mut self, now: Instant) {
        let is_recent = |at: Instant| now.saturating_duration_since(at) < SWEEP_INTERVAL;
        if self.swept_at.is_some_and(is_recent) {
            return;
        }
        self.swept_at = Some(now);
        let expiry = self.expiry;
        let is_over = |at: Instant| now.saturating_duration_since(at) > 2 * expiry;
        let over = self.clients.iter();
        let over = over.filter(|(_, holder)| holder.detached_at.is_some_and(is_over));
        for client in over.map(|(client, _)| *client).collect::<Vec<_>>() {
            self.remove(client);
        }
    }

    /// Records that the client's stream has ended.
    pub(super) fn detach(&mut self, client: ClientId, now: Instant) {
        if let Some(holder) = self.clients.get_mut(&client) {
            holder.detached_at = Some(now);
        }
    }

    /// Forgets a client, which must hold no leases.
    pub(super) fn remove(&mut self, client: ClientId) {
        let Some(Holder { auth, .. }) = self.clients.remove(&client) else {
            return;
        };
        if let Some(count) = self.by_tenant.get_mut(&auth.tenant) {
            *count -= 1;
            if *count == 0 {
                self.by_tenant.remove(&auth.tenant);
            }
        }
    }

    /// Returns the rights of the token that a client presented, or `None` if the client is
    /// unknown.
    pub(super) fn auth(&self, client: ClientId) -> Option<&AuthContext> {
        self.clients.get(&client).map(|holder| &holder.auth)
    }

    /// Returns the credential hash that a client's id is bound to.
    pub(super) fn credential(&self, client: ClientId) -> Option<CredentialHash> {
        self.clients.get(&client).map(|holder| holder.credential)
    }

    /// Returns the tenant that a client belongs to.
    pub(super) fn tenant(&self, client: ClientId) -> Option<&str> {
        self.auth(client).map(|auth| &*auth.tenant)
    }

    /// Returns each client with its tenant.
    pub(super) fn tenants(&self) -> impl Iterator<Item = (ClientId, Arc<str>)> {
        let clients = self.clients.iter();
        clients.map(|(client, holder)| (*client, holder.auth.tenant.clone()))
    }

    /// Returns the clients that presented the token of this name.
    pub(super) fn with_token(&self, token: &str) -> Vec<ClientId> {
        let clients = self.clients.iter();
        let clients = clients.filter(|(_, holder)| &*holder.auth.token == token);
        clients.map(|(client, _)| *client).collect()
    }
}

/// Returns the error for an attempt to attach as `client` with another credential.
pub(in crate::scheduler) fn credential_mismatch(client: ClientId) -> Error {
    let words = format!(
        "the credential does not belong to client {client}; a client's id is derived from its credential"
    );
    Error::new(ErrorCode::Token, words)
}

#[cfg(test)]
mod tests {
    use tensord_proto::credential::ClientCredential;

    use super::*;

    const EXPIRY: Duration = Duration::from_secs(30);

    fn hash(byte: u8) -> CredentialHash {
        ClientCredential::new([byte; 32]).hash()
    }

    /// Attaches a client that has no leases.
    fn attach(
        holders: &mut Holders,
        client: ClientId,
        credential: CredentialHash,
        token: &str,
        now: Instant,
    ) -> Result<(), Error> {
        let auth = AuthContext::of_program(token);
        holders.attach(client, credential, auth, || false, now)
    }

    #[test]
    fn an_id_stays_with_its_credential_until_its_leases_have_expired() {
        let mut holders = Holders::new(8, EXPIRY);
        let (client, now) = (ClientId(7), Instant::now());
        assert!(attach(&mut holders, client, hash(1), "a", now).is_ok());
        let refused = attach(&mut holders, client, hash(2), "b", now);
        assert_eq!(refused.unwrap_err().code(), ErrorCode::Token);
        assert_eq!(holders.credential(client), Some(hash(1)));
        assert_eq!(holders.with_token("a"), [client]);
        assert!(holders.with_token("b").is_empty());
        holders.detach(client, now);
        let later = now + EXPIRY;
        assert!(attach(&mut holders, client, hash(2), "b", later).is_err());
        assert!(attach(&mut holders, client, hash(1), "b", later).is_ok());
        holders.detach(client, later);
        let over = later + 3 * EXPIRY;
        assert!(attach(&mut holders, client, hash(2), "b", over).is_ok());
    }

    /// Attaches client `id` of a tenant. Returns whether it may attach.
    fn takes_place(holders: &mut Holders, tenant: &str, id: u64, comes_back: bool) -> bool {
        let mut auth = AuthContext::of_program(tenant);
        auth.tenant = tenant.into();
        let now = Instant::now();
        let attached = holders.attach(ClientId(id), hash(1), auth, || comes_back, now);
        attached.is_ok()
    }

    #[test]
    fn no_tenant_takes_all_places_and_some_are_for_those_that_come_back() {
        let mut holders = Holders::new(16, EXPIRY);
        let count_of = |holders: &mut Holders, tenant: &str, ids: std::ops::Range<u64>| {
            ids.filter(|id| takes_place(holders, tenant, *id, false))
                .count()
        };
        // 14 places are for new clients.
        assert_eq!(count_of(&mut holders, "red", 0..20), 11);
        assert_eq!(count_of(&mut holders, "blue", 20..40), 3);
        assert_eq!(count_of(&mut holders, "green", 40..60), 0);
        // A client that has a place keeps it while it is away.
        holders.detach(ClientId(20), Instant::now());
        assert!(!takes_place(&mut holders, "green", 40, false));
        assert!(takes_place(&mut holders, "blue", 20, false));
        // The other two places.
        assert!(takes_place(&mut holders, "green", 60, true));
        assert!(takes_place(&mut holders, "red", 61, true));
        assert!(!takes_place(&mut holders, "green", 62, true));
        holders.remove(ClientId(0));
        holders.remove(ClientId(61));
        holders.remove(ClientId(60));
        assert!(takes_place(&mut holders, "green", 62, false));
    }

    #[test]
    fn clients_that_were_away_for_too_long_leave_their_places() {
        let mut holders = Holders::new(4, EXPIRY);
        let now = Instant::now();
        for client in (0..3).map(ClientId) {
            assert!(attach(&mut holders, client, hash(1), "a", now).is_ok());
            holders.detach(client, now);
        }
        let later = now + 2 * EXPIRY;
        let full = attach(&mut holders, ClientId(3), hash(1), "a", later);
        assert_eq!(full.unwrap_err().code(), ErrorCode::Limit);
        let over = later + SWEEP_INTERVAL;
        assert!(attach(&mut holders, ClientId(3), hash(1), "a", over).is_ok());
        assert_eq!(holders.clients.len(), 1);
    }
}
