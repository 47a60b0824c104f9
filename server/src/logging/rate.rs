//! Limits the rate of log lines about peers, and logs a count of the skipped lines.
//!
//! Lines are limited by the place in the code that logs them, as an event that a peer
//! repeats is logged at the same place each time. Lines that are not about peers are not
//! limited, nor are those below level info, which the operator has turned on.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Instant,
};

use tensord_proto::text::{EscapingWriter, NAME_CHARS};
use tracing::{
    Event, Level, Metadata, Subscriber,
    callsite::Identifier,
    field::{Field, Visit},
    warn,
};
use tracing_subscriber::layer::{Context, Layer};

use crate::rate::{Decision, Limiter, SECOND};

/// Fields that mark a line as being about a peer.
const PEER_FIELDS: [&str; 7] = [
    "peer", "client", "worker", "session", "lease", "address", "process",
];

/// The limiter, and the condition that wakes the thread that logs its counts.
#[derive(Default)]
struct Shared {
    limiter: Mutex<Limiter<Identifier>>,
    skipped: Condvar,
}

impl Shared {
    fn limiter(&self) -> MutexGuard<'_, Limiter<Identifier>> {
        self.limiter.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Logs the counts of skipped lines, once a second while there are any.
    fn run(&self) {
        loop {
            let limiter = self.limiter();
            let waiting = self
                .skipped
                .wait_while(limiter, |limiter| !limiter.has_skipped());
            drop(waiting);
            thread::sleep(SECOND);
            let skipped = self.limiter().skipped(Instant::now());
            for (lines, like) in skipped {
                warn!("suppressed {lines} lines within a second that were similar to: {like}");
            }
        }
    }
}

/// Layer that passes lines about peers at a limited rate.
pub(super) struct RateLimitLayer(Arc<Shared>);

impl RateLimitLayer {
    /// Creates the layer, and starts a thread that logs the counts for as long as the
    /// process lives. The thread sleeps while no lines are skipped.
    pub(super) fn start() -> Self {
        let shared = Arc::<Shared>::default();
        let limiter = shared.clone();
        let thread = thread::Builder::new().name("tensord-log".into());
        // Without the thread, lines are still limited, but the counts are not logged.
        let _ = thread.spawn(move || limiter.run());
        Self(shared)
    }
}

fn is_about_a_peer(metadata: &Metadata<'_>) -> bool {
    let fields = metadata.fields();
    *metadata.level() <= Level::INFO && PEER_FIELDS.iter().any(|name| fields.field(name).is_some())
}

/// The limit is the `event_enabled` of a layer, which applies to all layers, not a per-layer
/// filter: once such a filter refuses an event, its layer loses the events that follow.
impl<S: Subscriber> Layer<S> for RateLimitLayer {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let metadata = event.metadata();
        if !is_about_a_peer(metadata) {
            return true;
        }
        let kind = metadata.callsite();
        let verdict = self.0.limiter().line(kind, Instant::now(), || text(event));
        if verdict == Decision::Skip {
            self.0.skipped.notify_one();
        }
        verdict == Decision::Write
    }
}

/// Returns the message of an event, escaped and cut.
fn text(event: &Event<'_>) -> String {
    struct Message(String);
    impl Visit for Message {
        fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
            if field.name() == "message" {
                let mut escaping = EscapingWriter::new(&mut self.0, NAME_CHARS);
                // Writing to a string cannot fail.
                let _ = std::fmt::write(&mut escaping, format_args!("{value:?}"));
            }
        }
    }
    let mut message = Message(String::new());
    event.record(&mut message);
    message.0
}

#[cfg(test)]
mod tests {
    use std::io;

    use tracing::{debug, info};
    use tracing_subscriber::{EnvFilter, fmt, layer::SubscriberExt, registry};

    use super::*;

    #[derive(Clone, Default)]
    struct SharedBuffer(Arc<Mutex<Vec<u8>>>);

    impl io::Write for SharedBuffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn only_lines_about_peers_are_rate_limited() {
        let log = SharedBuffer::default();
        let writer = log.clone();
        let rated = RateLimitLayer(Arc::default());
        let shared = rated.0.clone();
        let subscriber = registry()
            .with(
                fmt::layer()
                    .with_ansi(false)
                    .with_writer(move || writer.clone()),
            )
            .with(EnvFilter::new("info"))
            .with(rated);
        tracing::subscriber::with_default(subscriber, || {
            for number in 0..30 {
                warn!(peer = number, "call {number} refused\n");
                info!("without a peer");
                debug!(peer = number, "below the level");
            }
        });
        let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        let lines = |text: &str| log.lines().filter(|line| line.contains(text)).count();
        assert_eq!(
            (lines("refused"), lines("without a peer")),
            (10, 30),
            "{log}"
        );
        assert_eq!(lines("below the level"), 0);
        assert!(shared.limiter().has_skipped());
        let skipped = shared.limiter().skipped(Instant::now() + SECOND);
        assert_eq!(skipped, [(20, "call 10 refused\\n".to_owned())]);
    }
}
