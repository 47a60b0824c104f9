//! The replicas of a model: leases devices for as many as there should be, replaces those that are lost, and gives back
//! what is not needed.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    thread::Builder,
    time::{Duration, Instant},
};

use tensord_client::{LeaseEvent, Pool};
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
};
use tracing::{info, warn};

use crate::{
    replica::{self, ReplicaEvent},
    scaling::{Load, Scaling},
    served::Served,
};

/// The time between decisions how many replicas there should be.
const TICK: Duration = Duration::from_millis(250);

/// After this time without devices, a replica no longer counts as one.
const AWAY_AFTER: Duration = Duration::from_secs(5);

/// For how long the server waits after a replica could not be started, the first time and at most.
const RETRY: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));

/// A replica that was lost sooner than this after it was ready is not replaced at once: its model may be the reason.
const STABLE_AFTER: Duration = Duration::from_secs(10);

/// How long requests may wait beyond the time in which they are put together, before there is one replica more.
const WAIT_MARGIN: Duration = Duration::from_millis(50);

/// Number of events of a lease that its replica has not handled.
const LEASE_EVENTS: usize = 16;

/// Number of events of replicas that the fleet has not handled.
const EVENTS: usize = 64;

/// The replicas of a model.
pub(crate) struct Fleet {
    served: Arc<Served>,
    pool: Pool,
    scaling: Scaling,
    replicas: BTreeMap<u64, Replica>,
    next_id: u64,
    events: mpsc::Receiver<(u64, Event)>,
    sender: mpsc::Sender<(u64, Event)>,
    /// When the next replica may be started, after one could not be, and how long to wait after the next failure.
    retry_at: Option<Instant>,
    retry_after: Duration,
    /// When it was last decided how many replicas there should be, and for how long they had computed by then.
    decided: (Instant, Duration),
}

/// A replica, as far as its model's fleet is concerned.
struct Replica {
    standing: Standing,
    /// When it was ready first.
    ready_at: Option<Instant>,
    stop: watch::Sender<bool>,
    /// Waits for the lease, and returns whether it has started the replica's thread. The last event of the thread is
    /// `Stopped` or `Lost`.
    leasing: JoinHandle<bool>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// It waits for its lease, or loads the model.
    Starting,
    Ready,
    /// Its lease has no devices since then.
    Away(Instant),
    Stopping,
}

/// What happens to a replica.
pub(crate) enum Event {
    /// The request for its lease waits in the pool's queue, for this reason.
    Queued(String),
    /// It has no lease, or no thread.
    NotStarted(String),
    /// It was stopped before it had a lease.
    Withdrawn,
    Replica(ReplicaEvent),
}

/// Reports what happens to a replica to its fleet.
#[derive(Clone)]
pub(crate) struct Reports {
    id: u64,
    fleet: mpsc::Sender<(u64, Event)>,
}

impl Reports {
    /// Waits until the fleet can take the event. A fleet that has ended needs none.
    pub(crate) async fn send(&self, event: ReplicaEvent) {
        let _ = self.fleet.send((self.id, Event::Replica(event))).await;
    }

    /// As [`send`](Self::send), for a thread without a runtime.
    pub(crate) fn blocking_send(&self, event: Event) {
        let _ = self.fleet.blocking_send((self.id, event));
    }
}

impl Fleet {
    pub(crate) fn new(served: Arc<Served>, pool: Pool) -> Self {
        let scaling = Scaling::new(served.model.replicas.clone(), served.model.idle_after);
        let (sender, events) = mpsc::channel(EVENTS);
        Self {
            served,
            pool,
            scaling,
            replicas: BTreeMap::new(),
            next_id: 1,
            events,
            sender,
            retry_at: None,
            retry_after: RETRY.0,
            decided: (Instant::now(), Duration::ZERO),
        }
    }

    /// Keeps as many replicas as there should be, until `stop` is set; then lets them finish and gives their devices
    /// back.
    pub(crate) async fn run(mut self, mut stop: watch::Receiver<bool>) {
        let mut ticks = tokio::time::interval(TICK);
        while !*stop.borrow() {
            tokio::select! {
                Some((id, event)) = self.events.recv() => self.on_event(id, event),
                _ = ticks.tick() => {}
                () = self.served.wants_replica.notified() => {}
                changed = stop.changed() => if changed.is_err() { break },
            }
            self.decide();
        }
        self.end().await;
    }

    fn on_event(&mut self, id: u64, event: Event) {
        let model = &self.served.model;
        let (name, version) = (&model.name, &model.version);
        let Some(replica) = self.replicas.get_mut(&id) else {
            return;
        };
        match event {
            Event::Queued(reason) => info!(
                name,
                version, id, "a replica waits for its device: {reason}"
            ),
            Event::NotStarted(reason) => {
                self.replicas.remove(&id);
                self.failed(&reason);
            }
            Event::Replica(ReplicaEvent::Ready) => {
                info!(name, version, id, "a replica is ready");
                replica.stand(Standing::Ready);
                replica.ready_at = Some(Instant::now());
                if replica.standing == Standing::Ready {
                    self.retry_at = None;
                }
            }
            Event::Replica(ReplicaEvent::Away(reason)) => {
                warn!(
                    name,
                    version, id, "a replica has no device for now: {reason}"
                );
                replica.stand(Standing::Away(Instant::now()));
            }
            Event::Replica(ReplicaEvent::Back) => {
                info!(name, version, id, "a replica computes again");
                replica.stand(Standing::Ready);
            }
            Event::Replica(ReplicaEvent::Stopped) => {
                info!(name, version, id, "a replica has given its device back");
                self.replicas.remove(&id);
            }
            Event::Withdrawn => {
                info!(
                    name,
                    version, id, "a replica is not needed any more, and was not started"
                );
                self.replicas.remove(&id);
            }
            Event::Replica(ReplicaEvent::Lost(reason)) => {
                let ready_at = replica.ready_at;
                self.replicas.remove(&id);
                match ready_at {
                    Some(ready_at) => {
                        warn!(name, version, id, "a replica was lost: {reason}");
                        self.lost(ready_at.elapsed());
                    }
                    None => self.failed(&reason),
                }
            }
        }
    }

    /// Decides when a replica is replaced that was lost so long after it was ready.
    fn lost(&mut self, lived: Duration) {
        if lived >= STABLE_AFTER {
            self.retry_after = RETRY.0;
            return;
        }
        self.wait_before_retry();
    }

    fn wait_before_retry(&mut self) {
        self.retry_at = Some(Instant::now() + self.retry_after);
        self.retry_after = (2 * self.retry_after).min(RETRY.1);
    }

    /// Waits before the next replica is started.
    fn failed(&mut self, reason: &str) {
        let model = &self.served.model;
        warn!(
            model.name,
            model.version,
            retry_after = ?self.retry_after,
            "a replica could not be started: {reason}"
        );
        self.wait_before_retry();
        self.served.set_outage(Some(reason.into()));
    }

    /// Starts or stops a replica if there should be more or fewer.
    fn decide(&mut self) {
        let now = Instant::now();
        let count = |is_one: fn(Standing) -> bool| {
            self.replicas
                .values()
                .filter(|it| is_one(it.standing))
                .count()
        };
        let ready = count(|it| it == Standing::Ready);
        let starting = count(|it| it == Standing::Starting);
        let away = self
            .replicas
            .values()
            .filter(|it| it.is_away_shortly(now))
            .count();
        self.served.set_ready(ready);
        let present = ready + starting + away;
        let (decided_at, busy_then) = self.decided;
        let busy = self.served.busy();
        let passed = now.saturating_duration_since(decided_at).as_secs_f64();
        let load = Load {
            oldest_wait: self.served.oldest_wait(),
            most_wait: self.served.model.batching.max_delay + WAIT_MARGIN,
            busy: busy.saturating_sub(busy_then).as_secs_f64() / passed.max(TICK.as_secs_f64()),
        };
        if passed >= TICK.as_secs_f64() {
            self.decided = (now, busy);
        }
        let wanted = self.scaling.wanted(now, present, ready, load);
        self.end_backoff(now, present);
        // The first replica uploads the weights, and others on its host find them there.
        let is_first_loading = ready == 0 && starting > 0;
        let may_start = self.retry_at.is_none_or(|at| now >= at) && !is_first_loading;
        if wanted > present
            && may_start
            && self.replicas.len() < 2 * self.served.model.replicas.end()
        {
            self.start();
        } else if wanted < present {
            self.stop_one(ready > wanted);
        }
    }

    /// Forgets failures once a replica has run for long enough; and has the next request start one, if the model needs
    /// none without requests.
    fn end_backoff(&mut self, now: Instant, present: usize) {
        let is_stable = |it: &Replica| it.ready_at.is_some_and(|at| now >= at + STABLE_AFTER);
        if self.replicas.values().any(is_stable) {
            self.retry_after = RETRY.0;
        }
        if self.retry_at.is_some_and(|at| now >= at) {
            self.retry_at = None;
        }
        // This is looked at with each decision, as a replica that was present at the end of the pause may be lost later.
        let may_have_none = *self.served.model.replicas.start() == 0;
        if self.retry_at.is_none() && present == 0 && may_have_none {
            self.served.set_outage(None);
        }
    }

    /// Leases a device and starts a replica on it.
    fn start(&mut self) {
        let id = self.next_id;
        self.next_id += 1;
        let (stop, stopping) = watch::channel(false);
        let reports = Reports {
            id,
            fleet: self.sender.clone(),
        };
        let leasing = tokio::spawn(start(
            self.served.clone(),
            self.pool.clone(),
            stopping,
            reports,
        ));
        let replica = Replica {
            standing: Standing::Starting,
            ready_at: None,
            stop,
            leasing,
        };
        self.replicas.insert(id, replica);
    }

    /// Stops the latest replica that has not started yet, or else, if it `may_be_ready`, the latest that computes.
    fn stop_one(&mut self, may_be_ready: bool) {
        let mut stopped = None;
        for (_, replica) in self.replicas.iter_mut().rev() {
            match replica.standing {
                Standing::Starting => return replica.stop(),
                Standing::Ready if may_be_ready && stopped.is_none() => stopped = Some(replica),
                Standing::Ready | Standing::Away(_) | Standing::Stopping => {}
            }
        }
        if let Some(replica) = stopped {
            replica.stop();
        }
    }

    /// Stops all replicas, and waits for those that compute.
    async fn end(mut self) {
        let mut with_thread = BTreeSet::new();
        for (id, mut replica) in self.replicas {
            replica.stop();
            replica.leasing.abort();
            if matches!(replica.leasing.await, Ok(true)) {
                with_thread.insert(id);
            }
        }
        drop(self.sender);
        while !with_thread.is_empty() {
            let Some((id, event)) = self.events.recv().await else {
                return;
            };
            if matches!(
                event,
                Event::Replica(ReplicaEvent::Stopped | ReplicaEvent::Lost(_))
            ) {
                with_thread.remove(&id);
            }
        }
    }
}

impl Replica {
    fn stop(&mut self) {
        self.standing = Standing::Stopping;
        self.stop.send_replace(true);
    }

    fn stand(&mut self, standing: Standing) {
        if self.standing != Standing::Stopping {
            self.standing = standing;
        }
    }

    /// Returns whether its lease has no devices, and may well have some again soon.
    fn is_away_shortly(&self, now: Instant) -> bool {
        matches!(self.standing, Standing::Away(since) if now < since + AWAY_AFTER)
    }
}

/// Waits for a lease, and starts the thread of the replica. Returns whether it has.
async fn start(
    served: Arc<Served>,
    pool: Pool,
    stop: watch::Receiver<bool>,
    reports: Reports,
) -> bool {
    let (events, received) = mpsc::channel(LEASE_EVENTS);
    let on_queued = reports.clone();
    // The callback runs on a thread of its own, which may wait.
    let request = (served.model.lease)().on_event(move |event| match event {
        LeaseEvent::Queued { .. } => on_queued.blocking_send(Event::Queued(event.to_string())),
        event => drop(events.blocking_send(event)),
    });
    let mut stopped = stop.clone();
    let leased = tokio::select! {
        leased = pool.lease_async(request) => leased,
        () = async { drop(stopped.wait_for(|is_stopped| *is_stopped).await) } => {
            let _ = reports.fleet.send((reports.id, Event::Withdrawn)).await;
            return false;
        }
    };
    let started = match leased {
        Ok(lease) => {
            let name = format!("serve-{}-{}", served.model.name, reports.id);
            let own = reports.clone();
            let run = move || replica::run(served, lease, received, stop, &own);
            let thread = Builder::new().name(name).spawn(run);
            thread.map_err(|error| format!("cannot start the thread of a replica: {error}"))
        }
        Err(error) => Err(error.to_string()),
    };
    let Err(reason) = started else {
        return true;
    };
    let _ = reports
        .fleet
        .send((reports.id, Event::NotStarted(reason)))
        .await;
    false
}
