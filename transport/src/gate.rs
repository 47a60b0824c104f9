//! Carries out the decisions of [`admission`](crate::admission) on the connections of one
//! listener.
//!
//! A [`GateEntry`] stands for a connection. Its holder waits until the connection is
//! served, closes it when it is expelled, and admits its peer. Dropping the entry reports
//! that the connection has ended.

use std::{
    collections::HashMap,
    fmt, fs,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::{
    sync::watch,
    time::{Interval, MissedTickBehavior, interval},
};
use tracing::warn;

use crate::admission::{Action, Admission, Full, Id, Limits};

/// Maximum number of strangers, where the descriptor limit allows it. A waiting stranger
/// takes a socket and about a kilobyte.
const STRANGERS: usize = 16_384;

/// File descriptors left to everything else.
const OTHER_DESCRIPTORS: usize = 256;

/// Assumed descriptor limit of a process where the system does not report one.
const USUAL_DESCRIPTORS: usize = 1024;

/// Number of strangers served at once: about 60 KiB each, so 30 MiB.
const SERVED: usize = 512;

/// Number of strangers served at once from one address, which may be that of a whole
/// office. Under attack from there, 340 strangers a second have their turn.
const SERVED_PER_ADDRESS: usize = 256;

/// Number of admitted peers: as many as the streams of clients and workers that the
/// scheduler keeps. A quarter of the places is for workers alone.
const ADMITTED: usize = 4096;
const RESERVED: usize = ADMITTED / 4;

/// How long a waiting stranger may use the places kept for those that have just come:
/// several ticks, so that an honest peer that finds no free place is still served first.
const FRESH: Duration = Duration::from_secs(1);

/// How long a stranger is served while others wait. A handshake and a call take four
/// round trips: this is enough for them across an ocean, and short enough that under
/// attack a new peer is served at once.
const TURN: Duration = Duration::from_millis(750);

/// Time limit from the start of a peer's handshake to its first authorized call.
const PATIENCE: Duration = Duration::from_secs(5);

/// Interval between checks for strangers that were served for too long.
const TICK: Duration = Duration::from_millis(50);

/// Number of strangers from which on carriers that can validate a peer's address must do
/// so.
const BUSY: usize = 32;

/// Minimum interval between two log lines about expelled connections.
const REPORT: Duration = Duration::from_secs(10);

/// Admission control for the connections of one listener.
pub(crate) struct Gate(Mutex<Table>);

struct Table {
    admission: Admission,
    stages: HashMap<Id, watch::Sender<Stage>>,
    expelled: u64,
    reported: Option<Instant>,
}

/// State of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Waiting,
    Served,
    Expelled,
}

impl Gate {
    /// Creates a gate with limits that fit this process's descriptor limit.
    pub(crate) fn new() -> Arc<Self> {
        Self::with_limits(limits(descriptors()))
    }

    fn with_limits(limits: Limits) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Table {
            admission: Admission::new(limits),
            stages: HashMap::new(),
            expelled: 0,
            reported: None,
        })))
    }

    /// Adds a connection from `address`.
    pub(crate) fn enter(self: &Arc<Self>, address: IpAddr) -> GateEntry {
        let (sender, stage) = watch::channel(Stage::Waiting);
        let mut table = self.table();
        let (id, actions) = table.admission.accepted(address.into(), Instant::now());
        table.stages.insert(id, sender);
        table.carry_out(actions);
        GateEntry {
            gate: self.clone(),
            id,
            stage,
        }
    }

    /// Returns whether there are at least [`BUSY`] strangers.
    pub(crate) fn is_busy(&self) -> bool {
        let (served, waiting) = self.table().admission.strangers();
        served + waiting >= BUSY
    }

    /// Returns a timer for [`tick`](Self::tick). The task that accepts connections must
    /// poll it while there are strangers.
    pub(crate) fn ticks() -> Interval {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks
    }

    /// Returns whether there are strangers, for whom [`tick`](Self::tick) must be called.
    pub(crate) fn has_strangers(&self) -> bool {
        self.table().admission.strangers() != (0, 0)
    }

    /// Expels the strangers whose time is over.
    pub(crate) fn tick(&self) {
        let mut table = self.table();
        let actions = table.admission.tick(Instant::now());
        table.carry_out(actions);
        table.report();
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn carry_out(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Serve(id) => {
                    if let Some(stage) = self.stages.get(&id) {
                        stage.send_replace(Stage::Served);
                    }
                }
                Action::Close(id) => {
                    self.expelled += 1;
                    if let Some(stage) = self.stages.remove(&id) {
                        stage.send_replace(Stage::Expelled);
                    }
                }
            }
        }
    }

    /// Logs how many connections were expelled, at most once every [`REPORT`].
    fn report(&mut self) {
        let due = |reported: Instant| reported.elapsed() >= REPORT;
        if self.expelled > 0 && self.reported.is_none_or(due) {
            let (served, waiting) = self.admission.strangers();
            let expelled = std::mem::take(&mut self.expelled);
            self.reported = Some(Instant::now());
            warn!(
                served,
                waiting, "closed {expelled} connections whose peers showed no right to call"
            );
        }
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Gate")
    }
}

/// A connection's entry in a [`Gate`].
#[derive(Debug)]
pub(crate) struct GateEntry {
    gate: Arc<Gate>,
    id: Id,
    stage: watch::Receiver<Stage>,
}

impl GateEntry {
    /// Returns whether the connection is served now.
    pub(crate) fn is_served(&self) -> bool {
        *self.stage.borrow() == Stage::Served
    }

    /// Waits until the connection is served. Returns `false` if it must be closed
    /// instead.
    pub(crate) async fn served(&mut self) -> bool {
        let over = |stage: &Stage| *stage != Stage::Waiting;
        // The sender is dropped only after it has sent the final stage.
        let stage = self.stage.wait_for(over).await;
        stage.is_ok_and(|stage| *stage == Stage::Served)
    }

    /// Returns a watch on this entry that does not keep the place.
    pub(crate) fn watch(&self) -> Watch {
        Watch(self.stage.clone())
    }

    /// Admits the peer. A peer with a `reserved` place is admitted even when the other
    /// places are taken. A second call has no effect.
    ///
    /// # Errors
    ///
    /// When no place is free for the peer.
    pub(crate) fn admit(&self, reserved: bool) -> Result<(), Full> {
        let mut table = self.gate.table();
        let actions = table.admission.admit(self.id, reserved, Instant::now())?;
        table.carry_out(actions);
        Ok(())
    }
}

impl Drop for GateEntry {
    fn drop(&mut self) {
        let mut table = self.gate.table();
        table.stages.remove(&self.id);
        let actions = table.admission.closed(self.id, Instant::now());
        table.carry_out(actions);
    }
}

/// Watches a [`GateEntry`].
#[derive(Debug)]
pub(crate) struct Watch(watch::Receiver<Stage>);

impl Watch {
    /// Waits until the connection must be closed. Returns `false` if the entry was
    /// dropped instead.
    pub(crate) async fn expelled(&mut self) -> bool {
        let expelled = |stage: &Stage| *stage == Stage::Expelled;
        self.0.wait_for(expelled).await.is_ok()
    }
}

fn limits(descriptors: usize) -> Limits {
    let strangers = (descriptors / 2).saturating_sub(OTHER_DESCRIPTORS / 2);
    let strangers = strangers.clamp(SERVED_PER_ADDRESS, STRANGERS);
    Limits {
        strangers,
        served: SERVED.min(strangers),
        served_per_address: SERVED_PER_ADDRESS.min(strangers / 2),
        admitted: ADMITTED,
        reserved: RESERVED,
        fresh: FRESH,
        turn: TURN,
        patience: PATIENCE,
    }
}

/// Returns how many file descriptors this process may have open.
fn descriptors() -> usize {
    // Linux reports it here; elsewhere there is no way without unsafe code.
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    soft_limit(&limits).unwrap_or(USUAL_DESCRIPTORS)
}

fn soft_limit(limits: &str) -> Option<usize> {
    let files = |line: &str| Some(line.strip_prefix("Max open files")?.to_owned());
    let line = limits.lines().find_map(files)?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(usize::MAX),
        number => number.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn small() -> Arc<Gate> {
        Gate::with_limits(Limits {
            strangers: 3,
            served: 1,
            served_per_address: 1,
            turn: Duration::ZERO,
            ..limits(USUAL_DESCRIPTORS)
        })
    }

    #[test]
    fn the_systems_limit_is_read() {
        let of = |soft: &str| {
            let line = format!("Max open files            {soft}               524288    files");
            soft_limit(&format!("Limit  Soft Limit  Hard Limit  Units\n{line}\n"))
        };
        assert_eq!(of("1024"), Some(1024));
        assert_eq!(of("unlimited"), Some(usize::MAX));
        assert_eq!(soft_limit("Max processes 1 2 processes\n"), None);
        for (descriptors, strangers) in [
            (0, 256),
            (1024, 384),
            (20_000, 9872),
            (usize::MAX, STRANGERS),
        ] {
            let limits = limits(descriptors);
            assert_eq!(limits.strangers, strangers, "{descriptors} descriptors");
            assert!(limits.served <= strangers && limits.served_per_address * 2 <= limits.served);
        }
    }

    #[tokio::test]
    async fn a_place_is_served_expelled_and_given_on() {
        let gate = small();
        let mut first = gate.enter(HERE);
        assert!(first.served().await);
        let mut second = gate.enter(HERE);
        assert!(!second.is_served());
        let mut watch = first.watch();
        // The first stranger's turn is over, as turns have no length here.
        gate.tick();
        assert!(watch.expelled().await);
        assert!(second.served().await);
        drop(first);
        second.admit(false).unwrap();
        let mut third = gate.enter(HERE);
        assert!(
            third.served().await,
            "who was admitted takes no stranger's place"
        );
        let mut watch = second.watch();
        drop(second);
        assert!(!watch.expelled().await);
    }

    #[tokio::test]
    async fn who_waits_longest_is_expelled_when_there_is_no_place() {
        let gate = small();
        let places: Vec<GateEntry> = (0..3).map(|_| gate.enter(HERE)).collect();
        let last = gate.enter(HERE);
        let mut places = places.into_iter();
        let (served, mut oldest) = (places.next().unwrap(), places.next().unwrap());
        assert!(!oldest.served().await);
        assert!(served.is_served());
        assert!(gate.has_strangers());
        drop((served, oldest, places, last));
        assert!(!gate.has_strangers());
    }
}
