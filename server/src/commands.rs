//! The commands. Each connects the parts that it needs and runs until it ends.
//!
//! Every command takes a validated configuration and prints its result to stdout. Commands
//! that keep running shut down in an orderly way on the first SIGINT or SIGTERM.

pub(crate) mod admin;
mod apply;
#[cfg(feature = "demo")]
pub(crate) mod demo;
mod devices;
pub(crate) mod gateway;
mod leases;
mod queue;
mod scheduler;
mod simulate;
mod status;
pub(crate) mod tenants;
mod token;
mod up;
mod usage;
mod worker;
mod workers;

use crate::{config::Config, failure::Failure};

/// Runs a command to its end.
pub(crate) async fn run(config: Config) -> Result<(), Failure> {
    match config {
        Config::Up(config) => up::run(config).await,
        Config::Scheduler(config) => scheduler::run(config).await,
        Config::Worker(config) => worker::run(config).await,
        Config::Workers(config) => workers::run(config).await,
        Config::Leases(config) => leases::run(config).await,
        Config::Queue(config) => queue::run(config).await,
        Config::Usage(config) => usage::run(config).await,
        Config::Gateway(config) => gateway::run(config).await,
        Config::Devices(config) => devices::run(config).await,
        Config::Status(config) => status::run(config).await,
        Config::Tenants(config) => tenants::run(config).await,
        Config::Apply(config) => apply::run(config).await,
        Config::Simulate(config) => simulate::run(config).await,
        Config::Token(config) => token::run(config).await,
        #[cfg(feature = "demo")]
        Config::Demo(config) => demo::run(config).await,
    }
}
