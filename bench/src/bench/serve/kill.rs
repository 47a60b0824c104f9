//! Which part of requests is answered in time when a worker is killed.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use tensord_serve::{Batching, Serve, Server};
use tensord_testkit::cluster::Cluster;

use super::{CNN, load_of, model, start};
use crate::{
    context::Context,
    load::{self, LoadResult},
};

/// Returns how many replicas compute, by the server's page of metrics.
fn replicas(server: &Server) -> Option<usize> {
    let mut stream = TcpStream::connect(server.address()).ok()?;
    let request = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).ok()?;
    let mut page = String::new();
    stream.read_to_string(&mut page).ok()?;
    let mut lines = page.lines();
    let line = lines.find(|line| line.starts_with("tensord_serve_replicas{"))?;
    line.rsplit(' ').next()?.parse().ok()
}

/// Kills the worker of one of two replicas while requests arrive at this rate, per second. A third worker is idle.
pub(super) fn kill(context: &Context, rate: f64) -> Result<LoadResult> {
    context.progress.update("serve: killing a worker");
    let cluster = Cluster::start(&["flex", "flex", "flex"]);
    let model = model(CNN, Batching::default()).replicas(2..=2);
    let server = start(Serve::new(cluster.pool()).model(model))?;
    cluster.wait("two replicas compute", || replicas(&server) == Some(2));
    let dir = tempfile::tempdir()?;
    let seconds = context.full_or_quick(10.0, 1.0);
    let load = load_of(&server, CNN, 1, rate, seconds);
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
