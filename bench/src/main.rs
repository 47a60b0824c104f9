//! `tensord-bench`: local Burn, Burn's own remote backend and tensord, side by side.
//!
//! Each bench in [`mod@bench`] is a list of contenders that [`race`] measures in turn.
//! Results are printed as a table, and with `--json` as one line of JSON. [`mod@against`]
//! compares this build with an earlier one. Work that needs a process of its own runs in
//! this binary again, started by a hidden command, or in the `tensord` built along with it.

mod against;
mod bench;
mod cli;
mod context;
mod counted;
mod data;
mod discard;
mod fleet;
mod gloo;
mod hostile;
mod link;
mod load;
mod loopback;
mod models;
mod namespace_entry;
mod network;
mod part;
mod peer;
mod plain;
mod plot;
mod pool;
mod probe;
mod process;
mod progress;
mod race;
mod relay;
mod remote;
mod report;
mod stats;
mod trainer;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use serde_json::{Map, Value};

use crate::{
    cli::{Cli, Command},
    context::{Context, machine, runtime},
    namespace_entry::NetworkFeatures,
    part::Work,
    pool::set_durable,
    relay::mesh,
    report::Report,
};

fn main() -> Result<ExitCode> {
    let cli = Cli::parse();
    if let (None, Some(dir)) = (&cli.command, &cli.against) {
        return against::run(&cli, dir);
    }
    work(&cli)?;
    Ok(ExitCode::SUCCESS)
}

fn work(cli: &Cli) -> Result<()> {
    match &cli.command {
        None => run(cli),
        Some(Command::Plot { files, out }) => {
            let written = plot::plot(files, out)?;
            written
                .iter()
                .for_each(|path| println!("{}", path.display()));
            Ok(())
        }
        Some(Command::ServeWebsocket) => remote::serve_websocket(&runtime()?),
        Some(Command::ServeIroh) => remote::serve_iroh(&runtime()?),
        Some(Command::ServePlain) => plain::serve(&runtime()?),
        Some(Command::Load { task }) => load::serve(task, &runtime()?),
        Some(Command::ServeEcho) => link::serve_echo(&runtime()?),
        Some(Command::Relay(options)) => relay::run(options.route()),
        Some(Command::Mesh(options)) => {
            mesh::run(options.relay, options.shape(), &options.endpoints)
        }
        Some(Command::HoldNamespace) => network::hold_namespace(),
        Some(Command::Probe { listen }) => probe::serve(*listen),
        Some(Command::Part { bench, task }) => part::serve(bench.one()?, task),
    }
}

/// Runs the chosen benches, one after the other.
fn run(cli: &Cli) -> Result<()> {
    set_durable(!cli.without_snapshots);
    let context = Context::new(cli.runs(), cli.quick, cli.only.clone())?;
    let mut json = Map::new();
    json.insert("machine".into(), machine());
    for bench in cli.benches()? {
        let report: Report = part::run(
            &context,
            bench,
            Work::Bench,
            &[],
            NetworkFeatures::default(),
        )?;
        context.progress.print(&format!(
            "{}: {}\n{}\n",
            bench.name(),
            bench.title(),
            report.table
        ));
        json.insert(bench.name().into(), report.json);
    }
    drop(context);
    if cli.json {
        println!("{}", Value::from(json));
    }
    Ok(())
}
