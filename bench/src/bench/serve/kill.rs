//! Which part of requests is answered in time when a worker is killed.

use std::{thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use tensord_serve::{Batching, Serve};
use tensord_testkit::cluster::Cluster;

use super::{CNN, DEADLINE_MS, READY_WITHIN, model};
use crate::{
    context::Context,
    load::{self, Load, LoadResult},
};

/// Kills the worker of one of two replicas while requests arrive at this rate, per second. A third worker is idle.
pub(super) fn kill(context: &Context, rate: f64) -> Result<LoadResult> {
    context.progress.update("serve: killing a worker");
    let cluster = Cluster::start(&["flex", "flex", "flex"]);
    let server = Serve::new(cluster.pool())
        .model(model(CNN, Batching::default()).replicas(2..=2))
        .plaintext_on_loopback()
        .without_token_on_loopback()
        .bind("127.0.0.1:0")?;
    ensure!(server.wait_ready(READY_WITHIN), "the server is not ready");
    cluster.wait("two replicas compute", || {
        cluster.pool().status().is_ok_and(|it| it.leases == 2)
    });
    let dir = tempfile::tempdir()?;
    let seconds = context.full_or_quick(10.0, 1.0);
    let load = Load {
        address: server.address(),
        model: CNN.into(),
        rows: 1,
        rate,
        seconds,
        deadline_ms: DEADLINE_MS,
    };
    thread::scope(|scope| {
        let loaded = scope.spawn(|| load::run(&load, &dir));
        thread::sleep(Duration::from_secs_f64(seconds / 3.0));
        let victim = cluster.worker_of_lease();
        let victim = victim.context("no worker has a lease")?;
        cluster.workers[victim].signal_all("KILL");
        loaded
            .join()
            .map_err(|_| anyhow::anyhow!("the thread of the load panicked"))?
    })
}
