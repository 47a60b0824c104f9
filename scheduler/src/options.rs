//! What an operator may choose: how long to wait for whom, and how many may
//! wait.

use std::time::Duration;

/// The engine's timeouts and bounds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// How long after its last beat a worker whose stream broke is lost, and
    /// its leases with it.
    ///
    /// 5 s: several beats long, and enough to reconnect after a dropped
    /// connection; short enough that a run on a dead host starts again soon.
    pub worker_timeout: Duration,

    /// How long a lease outlives its client's stream, and waits for workers that have yet
    /// to join after the scheduler was away.
    ///
    /// 30 s: longer than a network change or a suspended laptop lid takes to
    /// recover, shorter than the team that waits for the devices would mind.
    pub lease_expiry: Duration,

    /// How long after its start the engine believes in leases it does not
    /// know, told by a worker that still runs them or a client that holds
    /// their token. After that, an unknown lease is one that has ended.
    ///
    /// 60 s, twice `lease_expiry`: a client may take one expiry to attach, and
    /// its claim may take another to see its workers join. Without an end to
    /// it, old tokens would be a way past the queue.
    pub adoption_window: Duration,

    /// How many requests may wait in the pool.
    ///
    /// 4096: far more than teams make by hand, and few enough that trying
    /// them all after a release takes milliseconds.
    pub max_waiting: usize,

    /// How many requests of one client may wait.
    ///
    /// 64: a program that sweeps over settings has room, and it takes 64 such
    /// programs to fill the queue.
    pub max_waiting_per_client: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            worker_timeout: Duration::from_secs(5),
            lease_expiry: Duration::from_secs(30),
            adoption_window: Duration::from_secs(60),
            max_waiting: 4096,
            max_waiting_per_client: 64,
        }
    }
}
