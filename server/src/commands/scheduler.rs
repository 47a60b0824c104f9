//! `tensord scheduler`: a pool without devices of its own.

use crate::{
    config::SchedulerConfig, failure::Failure, local::LocalPool, shutdown::Shutdown, stdout,
};

/// Runs until asked to stop. There is nothing to drain: sessions go on without
/// a scheduler, and whoever waits for a lease asks the next one again.
pub(super) async fn run(config: SchedulerConfig) -> Result<(), Failure> {
    let mut shutdown = Shutdown::listen().map_err(Failure::system("wait for signals"))?;
    let mut pool = LocalPool::start(&config).await?;
    stdout::print(&pool.urls.banner(&config.state.shown))?;
    tokio::select! {
        () = shutdown.requested() => {}
        () = pool.scheduler.ended() => return Err(Failure::SchedulerEnded),
    }
    pool.stop().await;
    Ok(())
}
