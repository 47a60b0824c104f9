//! `tensord up`: a scheduler and a worker in one process.

use super::worker;
use crate::{
    config::{NodeConfig, UpConfig},
    failure::Failure,
    local::{LocalPool, reachable_host},
    shutdown::Shutdown,
    stdout,
};

/// Runs until a stop is requested. Prints the URLs once the worker has joined, so that
/// a program that uses one finds devices.
pub(super) async fn run(config: UpConfig) -> Result<(), Failure> {
    let UpConfig {
        scheduler: config,
        node,
        drain,
    } = config;
    let mut shutdown = Shutdown::listen().map_err(Failure::system("wait for signals"))?;
    let mut pool = LocalPool::start(&config).await?;
    let node = with_advertised_host(node, config.host_name.as_deref());
    let worker = worker::start(node, pool.urls.own_worker.clone()).await?;
    tokio::select! {
        joined = worker.joined() => joined?,
        () = shutdown.requested() => return Ok(()),
    }
    stdout::print(&pool.urls.banner(&config.state.display_path))?;
    tokio::select! {
        () = shutdown.requested() => {}
        refused = worker.failed() => return Err(refused.into()),
        () = pool.scheduler.ended() => return Err(Failure::SchedulerEnded),
    }
    pool.scheduler.stop_granting().await;
    worker.drain(drain).await;
    pool.stop().await;
    Ok(())
}

/// Returns `node` with the host under which others reach the worker, if neither `advertise`
/// nor `listen` names one. The scheduler cannot derive the host: a worker of its own
/// process connects over loopback.
fn with_advertised_host(node: NodeConfig, host_name: Option<&str>) -> NodeConfig {
    let listening = node.listen.ip();
    let reachable = || {
        listening
            .is_unspecified()
            .then(|| reachable_host(listening, host_name))
    };
    NodeConfig {
        advertise: node.advertise.or_else(reachable),
        ..node
    }
}
