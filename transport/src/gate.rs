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

use crate::admission::{AdmissionLimitError, ConnectionId, GateAction, Limits, PeerAdmission};

/// Maximum number of strangers, where the descriptor limit allows it. A waiting stranger
/// takes a socket and about a kilobyte.
const MAX_UNADMITTED: usize = 16_384;

/// Number of strangers, however few files this process may open.
const MIN_UNADMITTED: usize = 64;

/// File descriptors left to everything but the connections of the gate.
const OTHER_DESCRIPTORS: usize = 256;

/// Assumed descriptor limit of a process where the system does not report one.
const DEFAULT_DESCRIPTORS: usize = 1024;

/// Number of strangers served at once: about 60 KiB each, so 30 MiB.
const MAX_SERVED: usize = 512;

/// Number of strangers served at once from one address, which may be that of a whole
/// office. Under attack from there, 340 strangers are served each second.
const MAX_SERVED_PER_ADDRESS: usize = 256;

/// Number of admitted peers: as many as the streams of clients and workers that the
/// scheduler keeps. A quarter of the places is for workers alone.
const MAX_ADMITTED: usize = 4096;
const RESERVED_PLACES: usize = MAX_ADMITTED / 4;

/// How long a waiting stranger may use the places kept for those that have just come:
/// several ticks, so that an honest peer that finds no free place is still served first.
const NEW_PEER_AGE: Duration = Duration::from_secs(1);

/// How long a stranger is served while others wait. A handshake and a call take four
/// round trips: this is enough for them across an ocean, and short enough that under
/// attack a new peer is served at once.
const TIME_SLICE: Duration = Duration::from_millis(750);

/// Time limit from the start of a peer's handshake to its first authorized call.
const ADMISSION_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval between checks for strangers that were served for too long.
const TICK_INTERVAL: Duration = Duration::from_millis(50);

/// Number of strangers from which on carriers that can validate a peer's address must do
/// so.
const BUSY_THRESHOLD: usize = 32;

/// Minimum interval between two log lines about expelled connections.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Admission control for the connections of one listener.
pub(crate) struct Gate(Mutex<GateState>);

struct GateState {
    admission: PeerAdmission,
    stages: HashMap<ConnectionId, watch::Sender<EntryStage>>,
    expelled: u64,
    reported: Option<Instant>,
}

/// State of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EntryStage {
    Waiting,
    Served,
    Expelled,
}

impl Gate {
    /// Creates a gate with limits that fit this process's descriptor limit.
    pub(crate) fn new() -> Arc<Self> {
        Self::with_limits(limits(descriptor_limit()))
    }

    fn with_limits(limits: Limits) -> Arc<Self> {
        Arc::new(Self(Mutex::new(GateState {
            admission: PeerAdmission::new(limits),
            stages: HashMap::new(),
            expelled: 0,
            reported: None,
        })))
    }

    /// Adds a connection from `address`.
    pub(crate) fn enter(self: &Arc<Self>, address: IpAddr) -> GateEntry {
        let (sender, stage) = watch::channel(EntryStage::Waiting);
        let mut state = self.state();
        let (id, actions) = state.admission.accepted(address.into(), Instant::now());
        state.stages.insert(id, sender);
        state.apply(actions);
        GateEntry {
            gate: self.clone(),
            id,
            stage,
        }
    }

    /// Returns whether there are at least [`BUSY_THRESHOLD`] strangers.
    pub(crate) fn is_busy(&self) -> bool {
        let (served, waiting) = self.state().admission.unadmitted();
        served + waiting >= BUSY_THRESHOLD
    }

    /// Returns a timer for [`tick`](Self::tick). The task that accepts connections must
    /// poll it while there are strangers.
    pub(crate) fn ticks() -> Interval {
        let mut ticks = interval(TICK_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks
    }

    /// Returns whether there are strangers, for whom [`tick`](Self::tick) must be called.
    pub(crate) fn has_unadmitted(&self) -> bool {
        self.state().admission.unadmitted() != (0, 0)
    }

    /// Expels the strangers whose time is over.
    pub(crate) fn tick(&self) {
        let mut state = self.state();
        let actions = state.admission.tick(Instant::now());
        state.apply(actions);
        state.report();
    }

    fn state(&self) -> MutexGuard<'_, GateState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GateState {
    fn apply(&mut self, actions: Vec<GateAction>) {
        for action in actions {
            match action {
                GateAction::Serve(id) => {
                    if let Some(stage) = self.stages.get(&id) {
                        stage.send_replace(EntryStage::Served);
                    }
                }
                GateAction::Close(id) => {
                    self.expelled += 1;
                    if let Some(stage) = self.stages.remove(&id) {
                        stage.send_replace(EntryStage::Expelled);
                    }
                }
            }
        }
    }

    /// Logs how many connections were expelled, at most once every [`REPORT_INTERVAL`].
    fn report(&mut self) {
        let due = |reported: Instant| reported.elapsed() >= REPORT_INTERVAL;
        if self.expelled > 0 && self.reported.is_none_or(due) {
            let (served, waiting) = self.admission.unadmitted();
            let expelled = std::mem::take(&mut self.expelled);
            self.reported = Some(Instant::now());
            warn!(
                served,
                waiting,
                "closed {expelled} connections whose peers presented no valid token or certificate"
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
    id: ConnectionId,
    stage: watch::Receiver<EntryStage>,
}

impl GateEntry {
    /// Returns whether the connection is served now.
    pub(crate) fn is_served(&self) -> bool {
        *self.stage.borrow() == EntryStage::Served
    }

    /// Waits until the connection is served. Returns `false` if it must be closed
    /// instead.
    pub(crate) async fn wait_until_served(&mut self) -> bool {
        let over = |stage: &EntryStage| *stage != EntryStage::Waiting;
        // The sender is dropped only after it has sent the final stage.
        let stage = self.stage.wait_for(over).await;
        stage.is_ok_and(|stage| *stage == EntryStage::Served)
    }

    /// Returns a watch on this entry that does not keep the place.
    pub(crate) fn watch(&self) -> ExpulsionWatch {
        ExpulsionWatch(self.stage.clone())
    }

    /// Admits the peer. A peer with a `reserved` place is admitted even when the other
    /// places are taken. A second call has no effect.
    ///
    /// # Errors
    ///
    /// When no place is free for the peer.
    pub(crate) fn admit(&self, reserved: bool) -> Result<(), AdmissionLimitError> {
        let mut state = self.gate.state();
        let actions = state.admission.admit(self.id, reserved, Instant::now())?;
        state.apply(actions);
        Ok(())
    }
}

impl Drop for GateEntry {
    fn drop(&mut self) {
        let mut state = self.gate.state();
        state.stages.remove(&self.id);
        let actions = state.admission.closed(self.id, Instant::now());
        state.apply(actions);
    }
}

/// Watches a [`GateEntry`].
#[derive(Debug)]
pub(crate) struct ExpulsionWatch(watch::Receiver<EntryStage>);

impl ExpulsionWatch {
    /// Waits until the connection must be closed. Returns `false` if the entry was
    /// dropped instead.
    pub(crate) async fn wait_until_expelled(&mut self) -> bool {
        let expelled = |stage: &EntryStage| *stage == EntryStage::Expelled;
        self.0.wait_for(expelled).await.is_ok()
    }
}

fn limits(descriptor_limit: usize) -> Limits {
    // A connection takes two descriptors once its handshake is over.
    let unadmitted = (descriptor_limit / 2).saturating_sub(OTHER_DESCRIPTORS / 2);
    let unadmitted = unadmitted.clamp(MIN_UNADMITTED, MAX_UNADMITTED);
    Limits {
        unadmitted,
        served: MAX_SERVED.min(unadmitted),
        served_per_address: MAX_SERVED_PER_ADDRESS.min(unadmitted / 2),
        admitted: MAX_ADMITTED,
        reserved: RESERVED_PLACES,
        new_peer_age: NEW_PEER_AGE,
        time_slice: TIME_SLICE,
        admission_timeout: ADMISSION_TIMEOUT,
    }
}

/// Returns how many file descriptors this process may have open.
fn descriptor_limit() -> usize {
    // Linux reports it here; elsewhere there is no way without unsafe code.
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    soft_limit(&limits).unwrap_or(DEFAULT_DESCRIPTORS)
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

    const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn small() -> Arc<Gate> {
        Gate::with_limits(Limits {
            unadmitted: 3,
            served: 1,
            served_per_address: 1,
            time_slice: Duration::ZERO,
            ..limits(DEFAULT_DESCRIPTORS)
        })
    }

    #[test]
    fn descriptor_limit_is_parsed() {
        let of = |soft: &str| {
            let line = format!("Max open files            {soft}               524288    files");
            soft_limit(&format!("Limit  Soft Limit  Hard Limit  Units\n{line}\n"))
        };
        assert_eq!(of("1024"), Some(1024));
        assert_eq!(of("unlimited"), Some(usize::MAX));
        assert_eq!(soft_limit("Max processes 1 2 processes\n"), None);
        for (descriptor_limit, unadmitted) in [
            (0, MIN_UNADMITTED),
            (256, MIN_UNADMITTED),
            (1024, 384),
            (20_000, 9872),
            (usize::MAX, MAX_UNADMITTED),
        ] {
            let limits = limits(descriptor_limit);
            assert_eq!(
                limits.unadmitted, unadmitted,
                "{descriptor_limit} descriptors"
            );
            assert!(limits.served <= unadmitted && limits.served_per_address * 2 <= limits.served);
        }
    }

    #[tokio::test]
    async fn expelled_entry_frees_its_place_for_the_next() {
        let gate = small();
        let mut first = gate.enter(LOCALHOST);
        assert!(first.wait_until_served().await);
        let mut second = gate.enter(LOCALHOST);
        assert!(!second.is_served());
        let mut watch = first.watch();
        // The first stranger's time slice is over, as time slices have no length here.
        gate.tick();
        assert!(watch.wait_until_expelled().await);
        assert!(second.wait_until_served().await);
        drop(first);
        second.admit(false).unwrap();
        let mut third = gate.enter(LOCALHOST);
        assert!(
            third.wait_until_served().await,
            "who was admitted takes no stranger's place"
        );
        let mut watch = second.watch();
        drop(second);
        assert!(!watch.wait_until_expelled().await);
    }

    #[tokio::test]
    async fn longest_waiting_entry_is_expelled_when_the_gate_is_full() {
        let gate = small();
        let entries: Vec<GateEntry> = (0..3).map(|_| gate.enter(LOCALHOST)).collect();
        let last = gate.enter(LOCALHOST);
        let mut entries = entries.into_iter();
        let (served, mut oldest) = (entries.next().unwrap(), entries.next().unwrap());
        assert!(!oldest.wait_until_served().await);
        assert!(served.is_served());
        assert!(gate.has_unadmitted());
        drop((served, oldest, entries, last));
        assert!(!gate.has_unadmitted());
    }
}
