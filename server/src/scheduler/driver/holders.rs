//! The token and credential that each client presented. The token decides which clients a
//! revocation disconnects and which tenant owns their leases; the credential binds the
//! client's id, so that no other process can attach with it.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use tensord_proto::{
    credential::CredentialHash,
    ids::ClientId,
    v1::{Error, ErrorCode},
};

use crate::scheduler::access::AuthContext;

/// The clients that are attached or may still hold leases.
pub(super) struct Holders {
    clients: HashMap<ClientId, Holder>,
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
    pub(super) fn new(expiry: Duration) -> Self {
        Self {
            clients: HashMap::new(),
            expiry,
        }
    }

    /// Records that a client is attached with `auth`, and forgets clients whose streams
    /// ended more than twice the lease expiry ago.
    ///
    /// # Errors
    ///
    /// If the client of this id has another credential; its record stays as it was.
    pub(super) fn attach(
        &mut self,
        client: ClientId,
        credential: CredentialHash,
        auth: AuthContext,
        now: Instant,
    ) -> Result<(), Error> {
        let expiry = self.expiry;
        let is_over =
            |detached_at: Instant| now.saturating_duration_since(detached_at) > 2 * expiry;
        self.clients
            .retain(|_, holder| !holder.detached_at.is_some_and(is_over));
        let known = self.clients.get(&client);
        if known.is_some_and(|known| known.credential != credential) {
            return Err(credential_mismatch(client));
        }
        let holder = Holder {
            credential,
            auth,
            detached_at: None,
        };
        self.clients.insert(client, holder);
        Ok(())
    }

    /// Records that the client's stream has ended.
    pub(super) fn detach(&mut self, client: ClientId, now: Instant) {
        if let Some(holder) = self.clients.get_mut(&client) {
            holder.detached_at = Some(now);
        }
    }

    /// Forgets a client, which must hold no leases.
    pub(super) fn remove(&mut self, client: ClientId) {
        self.clients.remove(&client);
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

    #[test]
    fn an_id_stays_with_its_credential_until_its_leases_have_expired() {
        let mut holders = Holders::new(EXPIRY);
        let (client, now) = (ClientId(7), Instant::now());
        assert!(
            holders
                .attach(client, hash(1), AuthContext::of_program("a"), now)
                .is_ok()
        );
        let refused = holders.attach(client, hash(2), AuthContext::of_program("b"), now);
        assert_eq!(refused.unwrap_err().code(), ErrorCode::Token);
        assert_eq!(holders.credential(client), Some(hash(1)));
        assert_eq!(holders.with_token("a"), [client]);
        assert!(holders.with_token("b").is_empty());
        holders.detach(client, now);
        let later = now + EXPIRY;
        assert!(
            holders
                .attach(client, hash(2), AuthContext::of_program("b"), later)
                .is_err()
        );
        assert!(
            holders
                .attach(client, hash(1), AuthContext::of_program("b"), later)
                .is_ok()
        );
        holders.detach(client, later);
        let over = later + 3 * EXPIRY;
        assert!(
            holders
                .attach(client, hash(2), AuthContext::of_program("b"), over)
                .is_ok()
        );
    }
}
