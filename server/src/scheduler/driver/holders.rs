//! Which token each client showed: what is revoked ends what hangs on it, and leases
//! belong to the token's tenant. And which credential: nobody else attaches with its id.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use tensord_proto::{
    credential::CredentialHash,
    ids::ClientId,
    v1::{Error, ErrorCode},
};

use crate::scheduler::access::Pass;

/// Clients that are attached, or may still hold leases.
pub(super) struct Holders {
    clients: HashMap<ClientId, Holder>,
    /// How long a lease outlives its client's stream.
    expiry: Duration,
}

struct Holder {
    credential: CredentialHash,
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
    ///
    /// # Errors
    ///
    /// When the client of this id has another credential; nothing has changed then.
    pub(super) fn attach(
        &mut self,
        client: ClientId,
        credential: CredentialHash,
        pass: Pass,
        now: Instant,
    ) -> Result<(), Error> {
        let expiry = self.expiry;
        let is_over = |gone: Instant| now.saturating_duration_since(gone) > 2 * expiry;
        self.clients
            .retain(|_, holder| !holder.gone.is_some_and(is_over));
        let known = self.clients.get(&client);
        if known.is_some_and(|known| known.credential != credential) {
            return Err(not_its_own(client));
        }
        let holder = Holder {
            credential,
            pass,
            gone: None,
        };
        self.clients.insert(client, holder);
        Ok(())
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

    /// What a client's id is bound to.
    pub(super) fn credential(&self, client: ClientId) -> Option<CredentialHash> {
        self.clients.get(&client).map(|holder| holder.credential)
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

/// Why nobody attaches as `client` with a credential that is not that client's.
pub(in crate::scheduler) fn not_its_own(client: ClientId) -> Error {
    let words = format!(
        "the credential is not that of client {client}; a client's id is made of its own credential"
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
                .attach(client, hash(1), Pass::of_program("a"), now)
                .is_ok()
        );
        let refused = holders.attach(client, hash(2), Pass::of_program("b"), now);
        assert_eq!(refused.unwrap_err().code(), ErrorCode::Token);
        assert_eq!(holders.credential(client), Some(hash(1)));
        assert_eq!(holders.with_token("a"), [client]);
        assert!(holders.with_token("b").is_empty());
        holders.detach(client, now);
        let later = now + EXPIRY;
        assert!(
            holders
                .attach(client, hash(2), Pass::of_program("b"), later)
                .is_err()
        );
        assert!(
            holders
                .attach(client, hash(1), Pass::of_program("b"), later)
                .is_ok()
        );
        holders.detach(client, later);
        let over = later + 3 * EXPIRY;
        assert!(
            holders
                .attach(client, hash(2), Pass::of_program("b"), over)
                .is_ok()
        );
    }
}
