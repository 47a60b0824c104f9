//! The arguments of `tensord simulate`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use crate::{
    config::values::{Name, Period},
    simulate::{generator::Load, pool_spec::PoolSpec},
};

/// The arguments of a simulation.
#[derive(Args, Debug)]
pub(crate) struct SimulateArgs {
    /// Trace of jobs: a CSV file, which `tensord simulate generate` can make
    #[arg(value_name = "TRACE", required = true)]
    pub(crate) trace: Option<PathBuf>,
    /// Workers of the pool, such as 1000x8:cuda:80GiB,10x4:flex:16GiB: number of workers, devices of each, kind, memory of a device
    #[arg(long, value_name = "SPEC", required = true)]
    pub(crate) pool: Option<PoolSpec>,
    /// TOML file with the tenants, as for `tensord apply` [default: all tenants have weight 1]
    #[arg(long, value_name = "FILE")]
    pub(crate) policy: Option<PathBuf>,
    /// Orders of requests to compare: fair is that of a pool
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "fair"
    )]
    pub(crate) order: Vec<Order>,
    /// Half-life of past usage in the order of the queue; 0s ignores past usage [default: 1d]
    #[arg(long, value_name = "TIME")]
    pub(crate) half_life: Option<Period>,
    /// Time in the queue after which a job reserves devices: others then get these only for leases that can be suspended, may end, or end before the large job could have the devices [default: 10m]
    #[arg(long, value_name = "TIME")]
    pub(crate) reserve_after: Option<Period>,
    /// Time from the end of a job, or its suspension, until its devices are free; 0s for at once
    #[arg(long, value_name = "TIME", default_value = "1s")]
    pub(crate) release: Period,
    /// File for a picture: each job on its devices, up to 16 devices and 100 jobs; else the devices of each tenant over time
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Print JSON instead of tables
    #[arg(long)]
    pub(crate) json: bool,
}

/// An order of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Order {
    /// Guarantees first, then the tenant with the smallest share by weight
    Fair,
    /// By arrival, and a request that fits does not wait for one that does not
    Backfill,
    /// By arrival, and no request overtakes another one
    Fifo,
}

/// The commands on traces.
#[derive(Debug, Subcommand)]
pub(crate) enum SimulateCommand {
    /// Print a synthetic trace
    Generate {
        /// Sort of load
        #[arg(value_name = "LOAD")]
        load: Load,
        /// Number from which the trace is derived: the same one gives the same trace
        #[arg(long, value_name = "N", default_value_t = 1)]
        seed: u64,
        /// Number of jobs
        #[arg(long, value_name = "N", default_value_t = 1000, value_parser = jobs)]
        jobs: u32,
        /// Number of tenants, named team-0, team-1 and so on
        #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1000))]
        tenants: u32,
        /// Number of devices of the pool that the load is for
        #[arg(long, value_name = "N", default_value_t = 64, value_parser = devices)]
        devices: u32,
        /// Devices that the jobs want, on average over time, as a part of the pool's
        #[arg(long, value_name = "PART", default_value_t = 0.9, value_parser = demand)]
        demand: f64,
        /// Mean duration of a job
        #[arg(long, value_name = "TIME", default_value = "10m")]
        duration: Period,
        /// Part of the jobs that have a share of one device, of 0.25 or 0.5, instead of whole devices
        #[arg(long, value_name = "PART", default_value_t = 0.0, value_parser = part)]
        share: f64,
        /// Kind of the devices [default: any]
        #[arg(long, value_name = "KIND")]
        kind: Option<Name>,
    },
}

fn jobs(text: &str) -> Result<u32, String> {
    within(text, crate::simulate::trace::MAX_JOBS as u32)
}

fn devices(text: &str) -> Result<u32, String> {
    within(text, crate::simulate::pool_spec::MAX_DEVICES)
}

/// Parses a number from 1 to `most`.
fn within(text: &str, most: u32) -> Result<u32, String> {
    let number = text.parse().ok().filter(|it| (1..=most).contains(it));
    number.ok_or_else(|| format!("it must be a whole number from 1 to {most}"))
}

fn part(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|it| (0.0..=1.0).contains(it));
    number.ok_or_else(|| "it must be a number from 0 to 1".into())
}

fn demand(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|it| (0.001..=1000.0).contains(it));
    number.ok_or_else(|| "it must be a number from 0.001 to 1000".into())
}
