//! Explains to programs why their requests and leases wait.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use tensord_proto::{
    ids::{ClientId, LeaseId, RequestId},
    text::MAX_EXPLANATION_LINES,
    v1::{ExplainWait, WaitExplained, explain_wait, pool_message, wait_explained},
};
use tensord_scheduler::StreamId;

use super::Driver;
use crate::{
    explanation::{Reader, explanation},
    scheduler::{access::DEFAULT_TENANT, convert, stream::OpenStream},
};

/// The period over which explanations are counted.
const PERIOD: Duration = Duration::from_secs(1);

/// The most explanations in a period. Each goes through all devices of the pool and all that waits, a few
/// milliseconds in a pool of thousands, in which nothing else is decided.
const MAX_EXPLAINED: usize = 20;

/// The most explanations for one client in a period, and for one tenant, so that none uses up those of the others.
const MAX_OF_CLIENT: usize = 4;
const MAX_OF_TENANT: usize = 10;

/// Counts explanations, in periods that begin with the first one. Pure: the time is an argument.
#[derive(Debug, Default)]
pub(super) struct ExplanationLimit {
    until: Option<Instant>,
    total: usize,
    by_client: HashMap<ClientId, usize>,
    by_tenant: HashMap<String, usize>,
}

impl ExplanationLimit {
    /// Counts an explanation for a client of a tenant at `now`, and returns true, unless there were too many.
    fn admit(&mut self, client: ClientId, tenant: &str, now: Instant) -> bool {
        if self.until.is_none_or(|until| until <= now) {
            *self = Self {
                until: Some(now + PERIOD),
                ..Self::default()
            };
        }
        let of_client = self.by_client.get(&client).copied().unwrap_or_default();
        let of_tenant = self.by_tenant.get(tenant).copied().unwrap_or_default();
        let is_admitted =
            self.total < MAX_EXPLAINED && of_client < MAX_OF_CLIENT && of_tenant < MAX_OF_TENANT;
        if is_admitted {
            self.total += 1;
            self.by_client.insert(client, of_client + 1);
            self.by_tenant.insert(tenant.to_owned(), of_tenant + 1);
        }
        is_admitted
    }
}

impl Driver {
    /// Sends a client why a request or lease of it waits, unless it does not wait, or there were too many
    /// explanations of late.
    pub(super) fn explain_wait(
        &mut self,
        client: ClientId,
        stream: StreamId,
        explain: &ExplainWait,
    ) {
        let is_busy = self.clients.get(&client).is_some_and(OpenStream::is_busy);
        let Some((id, waiter)) = self.waiter(client, explain).filter(|_| !is_busy) else {
            return;
        };
        // `holders` has recorded the client.
        let tenant = self.holders.tenant(client).unwrap_or(DEFAULT_TENANT);
        if !self.explained.admit(client, tenant, Instant::now()) {
            return;
        }
        let Some(waiting) = self.list_waiting(Some(id)).waiting.pop() else {
            return;
        };
        let text = explanation(&waiting, Reader::Program);
        let lines = text.lines().take(MAX_EXPLANATION_LINES);
        let explained = WaitExplained {
            waiter: Some(waiter),
            lines: lines.map(str::to_owned).collect(),
        };
        let message = convert::pool_message(pool_message::Body::WaitExplained(explained));
        self.reply(client, stream, message);
    }

    /// Returns which lease or request of a client a question is about, if it is one.
    fn waiter(
        &self,
        client: ClientId,
        explain: &ExplainWait,
    ) -> Option<(LeaseId, wait_explained::Waiter)> {
        match explain.waiter? {
            explain_wait::Waiter::RequestId(id) => {
                let lease = self.engine.lease_of_request(client, RequestId(id))?;
                Some((lease, wait_explained::Waiter::RequestId(id)))
            }
            explain_wait::Waiter::LeaseId(id) => {
                let lease = LeaseId(id);
                let is_its = self.engine.lease(lease)?.owner == Some(client);
                is_its.then_some((lease, wait_explained::Waiter::LeaseId(id)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn explanations_are_limited_for_each_client_and_tenant_and_for_all() {
        let (mut limit, now) = (ExplanationLimit::default(), Instant::now());
        let mut admitted =
            |client, tenant: &str, at| limit.admit(ClientId(client), tenant, now + at);
        let at_once = Duration::ZERO;
        let of_one = (0..10).filter(|_| admitted(1, "a", at_once)).count();
        assert_eq!(of_one, MAX_OF_CLIENT);
        let of_tenant = (2..100).filter(|client| admitted(*client, "a", at_once));
        assert_eq!(of_tenant.count(), MAX_OF_TENANT - MAX_OF_CLIENT);
        let of_others = (100..200).filter(|client| {
            let tenant = client.to_string();
            admitted(*client, &tenant, at_once)
        });
        assert_eq!(of_others.count(), MAX_EXPLAINED - MAX_OF_TENANT);
        assert!(!admitted(300, "b", PERIOD - Duration::from_nanos(1)));
        assert!(admitted(300, "b", PERIOD) && admitted(1, "a", PERIOD));
    }
}
