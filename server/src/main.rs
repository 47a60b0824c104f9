//! `tensord`: scheduler, worker, gateway and command line in one binary.
//!
//! ```text
//! cli ─► config ─► commands ─► scheduler   (drives tensord_scheduler)
//!                     │  ├───► worker      (tensord_worker)
//!                     │  ├───► gateway     (tensord_client)
//!                     │  ├───► demo        (tensord_demo)
//!                     │  ├───► simulate    (tensord_scheduler, under a virtual clock)
//!                     │  ├───► status
//!                     │  └───► devices     (tensord_worker)
//!                     └──────► state, local: the secrets, and the pool that uses them
//! ```
//!
//! A worker starts this program again as the process of each lease, and to describe or test
//! its devices. Such a process runs [`lease_process`] instead of a command.
//!
//! This crate connects the other crates and presents them to users. It handles no tensors
//! and no ops.

mod allocator;
mod audit;
mod cli;
mod commands;
mod config;
mod dates;
mod explanation;
mod failure;
mod grpc_status;
mod human;
#[cfg(target_os = "linux")]
mod lease_process;
mod local;
mod logging;
mod rate;
mod scheduler;
mod shutdown;
mod simulate;
mod state;
mod status;
mod stdout;
mod table;
mod tenant_text;
mod time_budget;

use std::process::ExitCode;

use crate::{
    cli::Parsed,
    config::{Environment, File},
    failure::Failure,
};

fn main() -> ExitCode {
    allocator::set_purge_delay();
    #[cfg(target_os = "linux")]
    if lease_process::is_requested() {
        return lease_process::run();
    }
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

fn run() -> Result<(), Failure> {
    let cli = match cli::parse(std::env::args_os())? {
        Parsed::Run(cli) => cli,
        Parsed::Text(text) => return stdout::print(&text),
    };
    let file = File::read(cli.common.config.as_deref())?;
    logging::start(&config::log_filter(&cli, &file));
    let config = config::resolve(*cli, file, &Environment::capture())?;
    allocator::start_purge_thread().map_err(Failure::system("start a thread"))?;
    let runtime = tokio::runtime::Runtime::new().map_err(Failure::system("start threads"))?;
    let result = runtime.block_on(commands::run(config));
    // Does not wait for blocking tasks that still run, such as one that waits for a lease.
    runtime.shutdown_background();
    result
}
