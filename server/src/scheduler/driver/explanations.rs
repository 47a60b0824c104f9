//! Why requests and leases wait, for the programs whose they are.

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
    scheduler::{convert, stream::OpenStream},
};

/// The period over which explanations are counted.
const PERIOD: Duration = Duration::from_secs(1);

/// The most explanations in a period. Each goes through all devices of the pool and all that waits, a few
/// milliseconds in a pool of thousands, in which nothing else is decided.
const MAX_EXPLAINED: usize = 20;

/// The most explanations for one client in a period, so that one cannot use up those of the others.
const MAX_OF_CLIENT: usize = 4;

/// Counts explanations, in periods that begin with the first one. Pure: the time is an argument.
#[derive(Debug, Default)]
pub(super) struct ExplanationLimit {
    until: Option<Instant>,
    by_client: HashMap<ClientId, usize>,
}

impl ExplanationLimit {
    /// Counts an explanation for a client at `now`, and returns true, unless there were too many.
    fn admit(&mut self, client: ClientId, now: Instant) -> bool {
        if self.until.is_none_or(|until| until <= now) {
            self.until = Some(now + PERIOD);
            self.by_client.clear();
        }
        let total: usize = self.by_client.values().sum();
        let of_client = self.by_client.get(&client).copied().unwrap_or_default();
        let is_admitted = total < MAX_EXPLAINED && of_client < MAX_OF_CLIENT;
        if is_admitted {
            self.by_client.insert(client, of_client + 1);
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
        if is_busy || !self.explained.admit(client, Instant::now()) {
            return;
        }
        let explained = self.explained_wait(client, explain);
        if let Some(explained) = explained {
            let message = convert::pool_message(pool_message::Body::WaitExplained(explained));
            self.reply(client, stream, message);
        }
    }

    fn explained_wait(&self, client: ClientId, explain: &ExplainWait) -> Option<WaitExplained> {
        let (id, waiter) = match explain.waiter? {
            explain_wait::Waiter::RequestId(id) => (
                self.engine.lease_of_request(client, RequestId(id))?,
                wait_explained::Waiter::RequestId(id),
            ),
            explain_wait::Waiter::LeaseId(id) => (LeaseId(id), wait_explained::Waiter::LeaseId(id)),
        };
        let waiting = self.engine.waiting(id)?;
        if waiting.client != Some(client) {
            return None;
        }
        let waiting = self.list_waiting(Some(id)).waiting.pop()?;
        let text = explanation(&waiting, Reader::Program);
        Some(WaitExplained {
            waiter: Some(waiter),
            lines: text
                .lines()
                .take(MAX_EXPLANATION_LINES)
                .map(str::to_owned)
                .collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn explanations_are_limited_for_each_client_and_for_all() {
        let (mut limit, now) = (ExplanationLimit::default(), Instant::now());
        let mut admitted = |client, at| limit.admit(ClientId(client), now + at);
        let at_once = Duration::ZERO;
        let of_one = (0..10).filter(|_| admitted(1, at_once)).count();
        assert_eq!(of_one, MAX_OF_CLIENT);
        let of_others = (2..100).filter(|client| admitted(*client, at_once)).count();
        assert_eq!(of_others, MAX_EXPLAINED - MAX_OF_CLIENT);
        assert!(!admitted(200, PERIOD - Duration::from_nanos(1)));
        assert!(admitted(200, PERIOD) && admitted(1, PERIOD));
    }
}
