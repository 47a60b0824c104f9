//! What happens to a lease that outlives a process or a worker, for the program's callback.

use std::{
    fmt, io,
    sync::mpsc::{SyncSender, sync_channel},
    thread::Builder,
};

use tracing::debug;

/// Number of events that wait for the callback. One beyond that is dropped.
const QUEUE: usize = 64;

/// What happens to a lease that outlives the process that runs it, or its worker; for the callback
/// of [`LeaseRequest::on_event`](crate::LeaseRequest::on_event).
///
/// Reads that wait meanwhile take longer, and return the same values.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LeaseEvent {
    /// The request for the lease waits in the pool's queue. Sent again when one of the two changes.
    Queued {
        /// The position in the queue; 1 is next.
        position: u32,
        /// Why it waits.
        reason: String,
    },
    /// A worker of the lease is gone, a process of a lease on several workers has died, a request that
    /// comes first needs its devices, or the lease was resumed and has no devices yet: it waits until
    /// it can go on.
    Waiting {
        /// What has happened, and what the lease waits for.
        reason: String,
    },
    /// Why the request or the lease waits, in full: follows [`Queued`](Self::Queued) and
    /// [`Waiting`](Self::Waiting), at once in a pool that is not busy, and again when the text changes: within five
    /// seconds of such an event, and otherwise within a minute, as the devices of others and estimates change.
    Explained {
        /// The lines that `tensord why` shows to administrators, without what other tenants have: what it waits
        /// for, by which rule others come before it, what its tenant has and may have, how the suitable
        /// devices are used, what would end the wait, and an estimate.
        explanation: String,
    },
    /// The lease was suspended, by an administrator or by [`Lease::suspend`](crate::Lease::suspend): it
    /// has no devices, and keeps its state. Ops and reads wait until it is resumed.
    Suspended,
    /// The pool has suspended the lease, as it had been idle for a while and others waited for its
    /// devices: it has none now, and keeps its state. It is resumed when the program uses its devices again,
    /// and that waits until some are free.
    Idle,
    /// The lease moves to a worker that has its snapshots: another one, or the one where it was.
    Moving {
        /// The name of that worker; the names of all, if the lease has devices of several.
        worker: String,
    },
    /// The lease runs again: at another worker, or in another process of the same worker.
    Running {
        /// The name of the worker.
        worker: String,
    },
}

impl fmt::Display for LeaseEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Queued { position, reason } => {
                write!(
                    f,
                    "the request waits at position {position} of the queue: {reason}"
                )
            }
            Self::Waiting { reason } => write!(f, "the lease waits: {reason}"),
            Self::Explained { explanation } => f.write_str(explanation),
            Self::Suspended => f.write_str("the lease is suspended"),
            Self::Idle => f.write_str("the lease is suspended, as it was idle"),
            Self::Moving { worker } => write!(f, "the lease moves to worker {worker}"),
            Self::Running { worker } => write!(f, "the lease runs again, at worker {worker}"),
        }
    }
}

pub(crate) type EventCallback = Box<dyn FnMut(LeaseEvent) + Send>;

/// Passes the events of a lease to the program's callback, if it has one. Clones share the callback.
#[derive(Debug, Clone, Default)]
pub(crate) struct LeaseEvents(Option<SyncSender<LeaseEvent>>);

impl LeaseEvents {
    /// Starts a thread that calls `callback`, until all clones are dropped.
    ///
    /// # Errors
    ///
    /// When the system starts no thread.
    pub(crate) fn start(callback: Option<EventCallback>) -> io::Result<Self> {
        let Some(mut callback) = callback else {
            return Ok(Self::default());
        };
        let (events, received) = sync_channel(QUEUE);
        let call = move || received.into_iter().for_each(&mut callback);
        Builder::new().name("tensord-events".into()).spawn(call)?;
        Ok(Self(Some(events)))
    }

    /// Returns whether the program has a callback.
    pub(crate) fn has_callback(&self) -> bool {
        self.0.is_some()
    }

    /// Never blocks.
    pub(crate) fn send(&self, event: LeaseEvent) {
        if let Some(events) = &self.0
            && let Err(e) = events.try_send(event)
        {
            debug!("an event of a lease is dropped: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn running(worker: &str) -> LeaseEvent {
        let worker = worker.into();
        LeaseEvent::Running { worker }
    }

    #[test]
    fn callback_gets_events_in_order_and_ends_with_the_lease() {
        let (sender, received) = mpsc::channel();
        let callback = Box::new(move |event| sender.send(event).unwrap());
        let events = LeaseEvents::start(Some(callback)).unwrap();
        let clone = events.clone();
        events.send(running("a"));
        clone.send(running("b"));
        drop((events, clone));
        assert_eq!(
            received.iter().collect::<Vec<_>>(),
            [running("a"), running("b")]
        );
    }

    #[test]
    fn slow_callback_blocks_nobody() {
        let (go_on, waits) = mpsc::channel::<()>();
        let (sender, received) = mpsc::channel();
        let callback = Box::new(move |event| {
            let _ = waits.recv();
            sender.send(event).unwrap();
        });
        let events = LeaseEvents::start(Some(callback)).unwrap();
        for _ in 0..2 * QUEUE {
            events.send(running("a"));
        }
        drop((go_on, events));
        let count = received.iter().count();
        assert!((QUEUE..=QUEUE + 1).contains(&count), "{count}");
    }
}
