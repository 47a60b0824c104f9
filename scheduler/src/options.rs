//! The operator's settings: timeouts, bounds on the queue, and the order of its requests.

use std::time::Duration;

/// The order in which requests that wait get devices.
///
/// Limits of tenants hold in each order. Their guarantees and weights, and the priorities of requests, count
/// in [`Fair`](Self::Fair) only, so nothing is reclaimed in the other orders, which are there to compare with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum RequestOrder {
    /// Requests within guarantees first, then each time one of the tenant with the smallest share by weight. A
    /// request that fits does not wait for an earlier one that does not.
    #[default]
    Fair,
    /// By arrival, whichever tenant a request is of. A request that fits does not wait for an earlier one that
    /// does not.
    Backfill,
    /// By arrival, and no request is granted before an earlier one, also if that waits because of the limit of
    /// its tenant.
    Fifo,
}

/// The engine's timeouts and bounds, and the order of requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The time after its last heartbeat at which a worker without a stream is lost,
    /// together with its leases.
    ///
    /// 5 s: several heartbeats, and enough to reconnect after a dropped connection; short
    /// enough that a run on a dead host restarts soon.
    pub worker_timeout: Duration,

    /// How long a lease outlives its client's stream, and how long it waits for workers
    /// that have not joined yet after a scheduler restart.
    ///
    /// 30 s: longer than recovery from a network change or a suspended laptop takes, and
    /// short for the team that waits for the devices.
    pub lease_expiry: Duration,

    /// How long a durable lease waits for devices after a worker or a process of it was lost, unless its
    /// request sets a limit.
    ///
    /// 1 h: enough for a device of the worker that has its snapshots to become free, or for
    /// somebody to repair the worker's network.
    pub recovery_timeout: Duration,

    /// The shortest limit that a request can set. A shorter one is lengthened to it.
    ///
    /// 10 s: the old processes of a lease on several workers may take 6 s to end.
    pub min_recovery_timeout: Duration,

    /// The longest limit that a request can set. A longer one is shortened to it.
    ///
    /// A day: the workers that have the snapshots keep them for an hour longer.
    pub max_recovery_timeout: Duration,

    /// How long a client must have reported that it cannot reach the worker of a durable lease,
    /// while the scheduler can, until the lease moves to its keeper.
    ///
    /// 10 s: longer than most interruptions of a network, and shorter than a session goes on
    /// trying to reach its worker (60 s).
    pub unreachable_timeout: Duration,

    /// How long a lease runs at least until it is suspended for a request within another tenant's guarantee.
    ///
    /// 10 s: long enough that a program gets ahead between two suspensions, whose snapshots and moves take a
    /// second or two, and short for a tenant that waits within its guarantee.
    pub min_run_time: Duration,

    /// How long a request waits at most until small requests that come later do not take devices any more for
    /// which it is next, unless their leases can be suspended.
    ///
    /// 10 min: most requests get devices earlier without that, and a job that needs many devices runs for
    /// hours.
    pub reserve_after: Duration,

    /// How long a lease must have been idle until it is suspended for others that wait for its devices.
    /// Zero: it never is.
    ///
    /// 10 min: longer than a program prepares data or evaluates a model on its host, and shorter than a person
    /// leaves a notebook alone.
    pub idle_timeout: Duration,

    /// What a tenant had this long ago counts half as much as what it has now, in whose request is next. If it
    /// is zero, the past does not count.
    ///
    /// 1 day: a team that had the pool for a night gives way in the morning, and starts anew after a few days.
    pub half_life: Duration,

    /// How long after its start the engine adopts leases that it does not know, reported by
    /// a worker that still runs them or by a client that holds their token. After that, an
    /// unknown lease counts as ended.
    ///
    /// 60 s, twice `lease_expiry`: a client may take one expiry to attach, and its claim
    /// may take another until its workers have joined. Without this limit, clients could
    /// use old tokens to bypass the queue.
    pub adoption_window: Duration,

    /// The largest number of pending requests in the pool. One tenant can have three quarters of them, and less
    /// if others have some.
    ///
    /// 16,384: more than sweeps of several teams make, and few enough to put all in order once a second,
    /// which takes a few milliseconds.
    pub max_waiting: usize,

    /// The largest number of pending requests of one client.
    ///
    /// 64: enough for a program that sweeps over settings, and it takes 256 such programs to
    /// fill the queue.
    pub max_waiting_per_client: usize,

    /// The order in which requests that wait get devices.
    pub order: RequestOrder,

    /// How often clients are sent the positions of their requests if more than 64 wait in the pool. Each time
    /// costs a pass over all of them.
    ///
    /// 1 s: as often as a person looks.
    pub position_interval: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            worker_timeout: Duration::from_secs(5),
            lease_expiry: Duration::from_secs(30),
            recovery_timeout: Duration::from_secs(3600),
            min_recovery_timeout: Duration::from_secs(10),
            max_recovery_timeout: Duration::from_secs(24 * 3600),
            unreachable_timeout: Duration::from_secs(10),
            min_run_time: Duration::from_secs(10),
            reserve_after: Duration::from_secs(600),
            idle_timeout: Duration::from_secs(600),
            half_life: Duration::from_secs(24 * 3600),
            adoption_window: Duration::from_secs(60),
            max_waiting: 16_384,
            max_waiting_per_client: 64,
            order: RequestOrder::default(),
            position_interval: Duration::from_secs(1),
        }
    }
}
