//! The command line.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Result, bail};
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::{
    against::COMPARABLE,
    bench::Bench,
    network::Shape,
    relay::{Route, mesh::Endpoint},
};

/// Default of `--runs`: the fewest measurements that give a meaningful median.
const DEFAULT_RUNS: usize = 7;

/// Measures local Burn, Burn's own remote backend and tensord, side by side; or, with
/// `--against`, this build of tensord and an earlier one.
///
/// All processes run on this host and communicate over loopback. Every contender is
/// measured several times, in turn with the others; tables and JSON show medians.
#[derive(Debug, Parser)]
#[command(
    name = "tensord-bench",
    version,
    args_conflicts_with_subcommands = true
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    /// Benchmarks to run [default: all]
    #[arg(value_enum, value_name = "BENCH")]
    benches: Vec<Choice>,
    /// Print all figures as one JSON object, on the last line
    #[arg(long)]
    pub(crate) json: bool,
    /// Number of measurements of each contender [default: 7]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    runs: Option<u16>,
    /// Use small sizes and one run, only to check that everything works
    #[arg(long)]
    pub(crate) quick: bool,
    /// Measure only contenders of `durability` whose "TITLE: KEY" contains TEXT, such as `reclaim_ms` or
    /// "16 MiB: durable_ms": the title as it is shown while they are measured, and the key in JSON. Can be given several
    /// times
    #[arg(long, value_name = "TEXT", conflicts_with = "against")]
    pub(crate) only: Vec<String>,
    /// Lease without durability, so that no snapshots are taken. The bench `durability` measures both in any case
    #[arg(long)]
    pub(crate) without_snapshots: bool,
    /// Compare this build with an earlier one, whose `tensord` and `tensord-bench` are in DIR. The
    /// leases of this build are not durable
    #[arg(long, value_name = "DIR")]
    pub(crate) against: Option<PathBuf>,
    /// Percent by which a median may be worse than that of the earlier build
    #[arg(long, value_name = "PERCENT", default_value_t = 5.0, requires = "against",
        value_parser = percent)]
    pub(crate) tolerance: f64,
}

fn percent(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(percent) if (0.0..100.0).contains(&percent) => Ok(percent),
        _ => Err("the tolerance must be at least 0 and less than 100".into()),
    }
}

/// What else this binary does.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Draws the main figures of earlier runs, as SVG
    Plot {
        /// Files with the JSON of runs
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        /// Directory for the pictures
        #[arg(short, long, value_name = "DIR")]
        out: PathBuf,
    },
    /// Serves Flex by Burn's remote backend over WebSocket
    #[command(hide = true)]
    ServeWebsocket,
    /// Serves Flex by Burn's remote backend over Iroh
    #[command(hide = true)]
    ServeIroh,
    /// Receives and sends bytes over TCP and TLS
    #[command(hide = true)]
    ServePlain,
    /// Requests inferences at a given rate
    #[command(hide = true)]
    Load {
        /// The task, as JSON
        task: String,
    },
    /// Sends frames back over tensord's links
    #[command(hide = true)]
    ServeEcho,
    /// Forwards connections with a delay
    #[command(hide = true)]
    Relay(RelayOptions),
    /// Forwards connections between hosts with a delay and a limited rate
    #[command(hide = true)]
    Mesh(MeshOptions),
    /// Holds a network namespace open
    #[command(hide = true)]
    HoldNamespace,
    /// Receives and sends bytes to measure a link
    #[command(hide = true)]
    Probe {
        #[arg(long)]
        listen: SocketAddr,
    },
    /// Measures for another process
    #[command(hide = true)]
    Part {
        #[arg(value_enum)]
        bench: Choice,
        /// File with the task
        task: PathBuf,
    },
}

/// See [`Route`].
#[derive(Debug, Args)]
pub(crate) struct RelayOptions {
    #[arg(long)]
    listen: SocketAddr,
    #[arg(long)]
    to: SocketAddr,
    #[arg(long)]
    delay_us: u64,
}

impl RelayOptions {
    /// Returns the relay's addresses and delay.
    pub(crate) fn route(&self) -> Route {
        Route {
            listen: self.listen,
            to: self.to,
            delay: Duration::from_micros(self.delay_us),
        }
    }
}

/// See [`mesh`](crate::relay::mesh).
#[derive(Debug, Args)]
pub(crate) struct MeshOptions {
    #[arg(long)]
    pub(crate) relay: IpAddr,
    #[arg(long)]
    rate_mbit: u64,
    #[arg(long)]
    delay_us: u64,
    #[arg(long = "endpoint", value_name = "PORT:PROCESS")]
    pub(crate) endpoints: Vec<Endpoint>,
}

impl MeshOptions {
    /// Returns the rate and latency of the links.
    pub(crate) fn shape(&self) -> Shape {
        Shape {
            rate_mbit: self.rate_mbit,
            latency: Duration::from_micros(self.delay_us),
        }
    }
}

/// A bench, or all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice {
    /// All benches.
    All,
    /// One bench.
    One(Bench),
}

impl Choice {
    /// Returns the bench.
    ///
    /// # Errors
    ///
    /// If the choice is all benches.
    pub(crate) fn one(self) -> Result<Bench> {
        match self {
            Self::One(bench) => Ok(bench),
            Self::All => bail!("name one benchmark, not all"),
        }
    }
}

impl ValueEnum for Choice {
    fn value_variants<'a>() -> &'a [Self] {
        static CHOICES: std::sync::LazyLock<Vec<Choice>> = std::sync::LazyLock::new(|| {
            let benches = Bench::ALL.into_iter().map(Choice::One);
            benches.chain([Choice::All]).collect()
        });
        &CHOICES
    }

    fn to_possible_value(&self) -> Option<clap::builder::PossibleValue> {
        Some(match self {
            Self::All => clap::builder::PossibleValue::new("all").help("All benchmarks"),
            Self::One(bench) => clap::builder::PossibleValue::new(bench.name()).help(bench.title()),
        })
    }
}

impl Cli {
    /// Returns the benches to run, in order and without duplicates.
    ///
    /// # Errors
    ///
    /// If `--only` chooses contenders of other benches than [`Bench::Durability`]: these compare all of theirs with each
    /// other, and take minutes.
    pub(crate) fn benches(&self) -> Result<Vec<Bench>> {
        let all = self.benches.is_empty() || self.benches.contains(&Choice::All);
        let chosen = |bench: &Bench| all || self.benches.contains(&Choice::One(*bench));
        let benches: Vec<_> = Bench::ALL.into_iter().filter(chosen).collect();
        if !self.only.is_empty() && benches != [Bench::Durability] {
            bail!(
                "--only chooses contenders of durability alone; name that benchmark and no other"
            );
        }
        Ok(benches)
    }

    /// Returns the benches to run against an earlier build, in order and without
    /// duplicates.
    ///
    /// # Errors
    ///
    /// If a chosen bench cannot be compared.
    pub(crate) fn comparable_benches(&self) -> Result<Vec<Bench>> {
        let named = |bench: &Bench| self.benches.contains(&Choice::One(*bench));
        let other = Bench::ALL
            .into_iter()
            .find(|b| named(b) && !COMPARABLE.contains(b));
        if let Some(other) = other {
            let known = COMPARABLE.map(Bench::name).join(", ");
            bail!("--against can compare {known}, but not {}", other.name());
        }
        let all = !COMPARABLE.iter().any(named);
        Ok(COMPARABLE.into_iter().filter(|b| all || named(b)).collect())
    }

    /// Returns the number of measurements of each contender.
    pub(crate) fn runs(&self) -> usize {
        let default = if self.quick { 1 } else { DEFAULT_RUNS };
        self.runs.map_or(default, usize::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn benches_are_chosen_by_name() {
        let chosen = |line: &str| Cli::parse_from(line.split(' ')).benches().unwrap();
        assert_eq!(chosen("tensord-bench"), Bench::ALL);
        assert_eq!(chosen("tensord-bench all --json"), Bench::ALL);
        assert_eq!(chosen("tensord-bench step"), [Bench::Step]);
        assert!(Cli::try_parse_from(["tensord-bench", "nonsense"]).is_err());
    }

    #[test]
    fn runs_have_a_default() {
        let runs = |line: &str| Cli::parse_from(line.split(' ')).runs();
        assert_eq!(runs("tensord-bench"), DEFAULT_RUNS);
        assert_eq!(runs("tensord-bench --quick"), 1);
        assert_eq!(runs("tensord-bench --quick --runs 3"), 3);
        assert!(Cli::try_parse_from(["tensord-bench", "--runs", "0"]).is_err());
    }

    #[test]
    fn contenders_of_one_bench_can_be_chosen() {
        let parsed = |line: &str| Cli::try_parse_from(line.split(' '));
        let only = parsed("tensord-bench durability --only a --only b").unwrap();
        assert_eq!(only.only, ["a", "b"]);
        assert_eq!(only.benches().unwrap(), [Bench::Durability]);
        for others in ["", " step", " durability step"] {
            let only = parsed(&format!("tensord-bench{others} --only a")).unwrap();
            assert!(only.benches().is_err(), "{others}");
        }
        let both = parsed("tensord-bench durability --only a --against old");
        assert!(both.is_err(), "--against compares whole benches");
    }

    #[test]
    fn snapshots_are_taken_unless_switched_off() {
        let parsed = |line: &str| Cli::parse_from(line.split(' ')).without_snapshots;
        assert!(!parsed("tensord-bench allreduce"));
        assert!(parsed("tensord-bench allreduce --without-snapshots"));
    }

    #[test]
    fn against_runs_only_comparable_benches() {
        let parsed = |line: &str| Cli::try_parse_from(line.split(' '));
        let comparable_benches = |line: &str| parsed(line).unwrap().comparable_benches();
        assert_eq!(
            comparable_benches("tensord-bench --against old").unwrap(),
            COMPARABLE
        );
        let some = comparable_benches("tensord-bench --against old attach ops").unwrap();
        assert_eq!(some, [Bench::Ops, Bench::Attach]);
        let refused = comparable_benches("tensord-bench --against old ops ddp").unwrap_err();
        assert!(refused.to_string().ends_with("but not ddp"), "{refused}");
        let tolerance = |line: &str| parsed(line).map(|cli| cli.tolerance).ok();
        assert_eq!(tolerance("tensord-bench --against old"), Some(5.0));
        let line = "tensord-bench --against old --tolerance 2.5";
        assert_eq!(tolerance(line), Some(2.5));
        assert_eq!(tolerance("tensord-bench --tolerance 2"), None);
        assert_eq!(tolerance("tensord-bench --against old --tolerance x"), None);
    }

    #[test]
    fn command_line_definition_is_valid() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }
}
