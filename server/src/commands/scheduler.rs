//! `tensord scheduler`: a pool's scheduler, without devices of its own.

use crate::{
    config::SchedulerConfig, failure::Failure, local::LocalPool, shutdown::Shutdown, stdout,
};

/// Runs until a stop is requested. There is nothing to drain: sessions go on without
/// a scheduler, and clients that wait for a lease request it again from the next one.
pub(super) async fn run(config: SchedulerConfig) -> Result<(), Failure> {
    let mut shutdown = Shutdown::listen().map_err(Failure::system("wait for signals"))?;
    let mut pool = LocalPool::start(&config).await?;
    stdout::print(&pool.urls.banner(&config.state.display_path))?;
    tokio::select! {
        () = shutdown.requested() => {}
        () = pool.scheduler.ended() => return Err(Failure::SchedulerEnded),
    }
    pool.stop().await;
    Ok(())
}
