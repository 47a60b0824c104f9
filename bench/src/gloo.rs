//! Gloo, through PyTorch, as a peer for all-reduces: where Python and PyTorch are
//! there, and never needed.
//!
//! Gloo's ranks find each other by their hosts' own addresses, so they can be
//! measured in namespaces and not behind a relay.

use std::{
    net::SocketAddr,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;
use tempfile::TempDir;
use tensord_tests::cluster::Process;

use crate::{context::Context, network::Network, process::announced_within, stats::Summary};

/// What each rank runs.
const SCRIPT: &str = include_str!("../peers/gloo_allreduce.py");

/// What Python must be able to do.
const NEEDS: &str = "import torch.distributed as d; assert d.is_gloo_available()";

/// How long a sample may take, and a start. Python takes its time where many ranks
/// share few cores.
const DEADLINE: Duration = Duration::from_secs(150);

/// Where rank 0 is found by the others; its host is its own.
const PORT: u16 = 29500;

/// All-reduces of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size {
    /// Of the tensor.
    pub(crate) mib: usize,
    /// All-reduces in a sample, one after the other.
    pub(crate) repetitions: usize,
}

#[derive(Debug, Deserialize)]
struct Sample {
    mib: usize,
    run: usize,
    seconds: f64,
}

/// Whether there is a Python with a PyTorch that has Gloo.
pub(crate) fn available() -> bool {
    let mut command = Command::new("python3");
    command.args(["-c", NEEDS]).stdin(Stdio::null());
    command.output().is_ok_and(|output| output.status.success())
}

/// Seconds of an all-reduce of each of `sizes` between `world` ranks; `None` where
/// Gloo has no part.
///
/// # Errors
///
/// When a rank fails.
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
            let sample: Sample = announced_within(&ranks[0], DEADLINE).context("Gloo")?;
            ensure!(
                (sample.mib, sample.run) == (size.mib, run),
                "Gloo lost count"
            );
            if run > 0 {
                samples.push(sample.seconds);
            }
        }
        found.push(Summary::of(&samples).context("no samples of Gloo")?);
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
    // The host's name may mean another address, and here is the one that counts.
    command.env("GLOO_SOCKET_IFNAME", "eth0");
    Process::spawn(command, dir.path().join(format!("gloo-{rank}.log")))
}
