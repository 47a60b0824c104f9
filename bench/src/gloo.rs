//! Gloo, through PyTorch, as an optional peer for all-reduces, used where Python and
//! PyTorch are installed.
//!
//! Gloo's ranks find each other by their hosts' own addresses, so Gloo can be measured in
//! namespaces but not behind a relay.

use std::{
    net::SocketAddr,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;
use tempfile::TempDir;
use tensord_testkit::cluster::Process;

use crate::{
    context::Context, network::Network, process::read_announcement_within, stats::Summary,
};

/// The script that each rank runs.
const SCRIPT: &str = include_str!("../peers/gloo_allreduce.py");

/// A Python program that succeeds if Gloo is available.
const AVAILABILITY_CHECK: &str = "import torch.distributed as d; assert d.is_gloo_available()";

/// Timeout of a sample, and of the start. Python is slow where many ranks share few cores.
const DEADLINE: Duration = Duration::from_secs(150);

/// Port at which the other ranks find rank 0, on rank 0's host.
const PORT: u16 = 29500;

/// All-reduces of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size {
    /// Size of the tensor in MiB.
    pub(crate) mib: usize,
    /// Number of all-reduces in a sample, one after the other.
    pub(crate) repetitions: usize,
}

#[derive(Debug, Deserialize)]
struct Sample {
    mib: usize,
    run: usize,
    seconds: f64,
}

/// Returns whether there is a Python with a PyTorch that has Gloo.
pub(crate) fn available() -> bool {
    let mut command = Command::new("python3");
    command
        .args(["-c", AVAILABILITY_CHECK])
        .stdin(Stdio::null());
    command.output().is_ok_and(|output| output.status.success())
}

/// Measures an all-reduce of each of `sizes` between `world` ranks, in seconds. Returns
/// `None` if the network has no namespaces.
///
/// # Errors
///
/// If a rank fails.
pub(crate) fn measure(
    network: &Network,
    world: usize,
    sizes: &[Size],
    context: &Context,
) -> Result<Option<Vec<Summary>>> {
    let Network::Namespaces(_) = network else {
        return Ok(None);
    };
    let runs = context.runs;
    let dir = tempfile::tempdir()?;
    let script = dir.path().join("gloo_allreduce.py");
    std::fs::write(&script, SCRIPT)?;
    let ranks = 0..world;
    let ranks = ranks.map(|rank| start(network, (rank, world), sizes, runs, &script, &dir));
    let ranks: Vec<Process> = ranks.collect();
    let mut found = Vec::new();
    for size in sizes {
        let mut samples = Vec::new();
        for run in 0..=runs {
            context.progress.update(&format!(
                "allreduce {world} × {} MiB: {run}/{runs} Gloo",
                size.mib
            ));
            let sample: Sample = read_announcement_within(&ranks[0], DEADLINE).context("Gloo")?;
            ensure!(
                (sample.mib, sample.run) == (size.mib, run),
                "Gloo returned a sample of another size or run"
            );
            if run > 0 {
                samples.push(sample.seconds);
            }
        }
        found.push(Summary::of(&samples).context("Gloo returned no samples")?);
    }
    Ok(Some(found))
}

fn start(
    network: &Network,
    (rank, world): (usize, usize),
    sizes: &[Size],
    runs: usize,
    script: &Path,
    dir: &TempDir,
) -> Process {
    let mut command = network.command(rank, Path::new("python3"));
    let store = SocketAddr::new(network.listen_address(0), PORT).to_string();
    command.arg(script).args(["--rank", &rank.to_string()]);
    command.args(["--world", &world.to_string(), "--store", &store]);
    command.args(["--runs", &runs.to_string()]);
    command.args(
        sizes
            .iter()
            .map(|size| format!("{}:{}", size.mib, size.repetitions)),
    );
    // By default Gloo takes the address of the host's name, which may be another one.
    command.env("GLOO_SOCKET_IFNAME", "eth0");
    Process::spawn(command, dir.path().join(format!("gloo-{rank}.log")))
}
