//! Lease tokens in the driver: signed when a lease is granted, and renewed before they
//! expire.

use tensord_proto::{
    ids::{ClientId, LeaseId},
    v1::LeaseClaims,
};
use tensord_scheduler::{LeaseSnapshot, LeasedDevice};

use super::Driver;
use crate::scheduler::{access::UnixMillis, convert};

impl Driver {
    /// Signs a token for a lease of `client` and schedules its renewal. Returns `None` if the
    /// client is unknown.
    pub(super) fn sign(
        &mut self,
        client: ClientId,
        lease: LeaseId,
        devices: &[LeasedDevice],
    ) -> Option<Vec<u8>> {
        let credential = self.holders.credential(client)?;
        let terms = self.engine.lease(lease)?;
        let now = UnixMillis::now();
        let claims = LeaseClaims {
            lease_id: lease.0,
            client_id: client.0,
            shares: devices.iter().map(convert::lease_share).collect(),
            tenant: self.holders.tenant(client)?.into(),
            credential_hash: credential.to_bytes(),
            issued_at_ms: now.0,
            expires_at_ms: now.after(self.lease_token_life).0,
            durability: convert::durability_message(terms.durability).into(),
            epoch: terms.epoch,
            spot: terms.is_spot,
            may_end: terms.may_end,
            time_left_ms: terms.time_left.map(|left| left.as_millis() as u64),
        };
        self.renewals.schedule(lease, self.now());
        Some(self.signer.sign(&claims))
    }

    /// Renews the tokens that are due.
    pub(super) fn renew_tokens(&mut self) {
        for lease in self.renewals.take_due(self.now()) {
            self.renew(lease);
        }
    }

    /// Renews the tokens of all leases of a client that has attached.
    pub(super) fn renew_all_of(&mut self, client: ClientId) {
        for lease in self.engine.leases_of(client) {
            self.renew(lease);
        }
    }

    /// Sends a new token to the lease's client if the client is attached and may open new
    /// sessions. If a worker of the lease has yet to join, schedules another attempt.
    fn renew(&mut self, lease: LeaseId) {
        let Some(LeaseSnapshot { owner, devices, .. }) = self.engine.lease(lease) else {
            return;
        };
        let Some(client) = owner.filter(|client| self.may_renew(*client)) else {
            return;
        };
        let Some(devices) = devices else {
            return self.renewals.retry_later(lease, self.now());
        };
        let Some(token) = self.sign(client, lease, &devices) else {
            return;
        };
        if let Some(gone) = self.send(client, convert::renewed(lease, token)) {
            self.apply(gone);
        }
    }

    fn may_renew(&self, client: ClientId) -> bool {
        let auth = self.holders.auth(client);
        let is_attached = self.clients.contains_key(&client);
        is_attached && auth.is_some_and(|auth| self.access.check_may_open(auth).is_ok())
    }
}
