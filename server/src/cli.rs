//! The command line: its commands, flags and help texts.
//!
//! Nothing is decided here: [`config`](crate::config) merges the flags, the
//! environment and the configuration file.

mod admin;
mod simulate;

use std::{ffi::OsString, path::PathBuf};

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, error::ErrorKind};
use tensord_proto::ids::LeaseId;

use self::admin::lease_id;
pub(crate) use self::admin::{
    ApplyArgs, LeaseCommand, TenantCommand, TenantTerms, TokenCommand, UsageArgs, WorkerCommand,
};
pub(crate) use self::simulate::{Order, SimulateArgs, SimulateCommand};
#[cfg(feature = "demo")]
use crate::config::settings::DemoSettings;
use crate::config::{
    ConfigError,
    settings::{
        AdminSettings, DrainSettings, GatewaySettings, SchedulerSettings, StateSettings,
        UpSettings, UrlSettings, WorkerSettings,
    },
    values::Filter,
};

const EXAMPLES: &str = "\
Examples:
  tensord up --devices 'flex*2'      run a pool on this host, for programs on this host
  tensord scheduler                  run a pool that other hosts can reach
  tensord worker                     offer this host's devices to the pool in TENSORD_URL
  tensord status                     show the pool's workers and devices
  tensord queue                      show what waits for devices
  tensord usage                      show what leases have used of the devices
  tensord token list                 show the tokens that give access to the pool

`tensord up` and `tensord scheduler` print the TENSORD_URL for programs and workers.
Each setting comes from its flag, else the environment, else the file that --config names.";

/// Pools the GPUs of many hosts for Burn programs.
#[derive(Debug, Parser)]
#[command(name = "tensord", version, after_help = EXAMPLES)]
#[command(disable_help_subcommand = true, arg_required_else_help = false)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) common: Common,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Flags of every command.
#[derive(Args, Debug, Default)]
pub(crate) struct Common {
    /// TOML file with settings
    #[arg(
        long,
        global = true,
        display_order = 90,
        value_name = "FILE",
        env = "TENSORD_CONFIG"
    )]
    pub(crate) config: Option<PathBuf>,
    /// Filter for the log on stderr, such as debug or warn,tensord=debug [default: info]
    #[arg(
        long,
        global = true,
        display_order = 90,
        value_name = "FILTER",
        env = "TENSORD_LOG"
    )]
    pub(crate) log: Option<Filter>,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a pool on this host: a scheduler and a worker in one process
    #[command(after_help = "\
Examples:
  tensord up                         offer all GPUs of the first kind found, or else the CPU, to local programs
  tensord up --devices 'flex*4'      offer four devices, to try data-parallel training
  tensord up --listen 0.0.0.0:7461   run a pool that other hosts can reach")]
    Up {
        #[command(flatten)]
        settings: UpSettings,
        #[command(flatten)]
        state: StateSettings,
        #[command(flatten)]
        drain: DrainSettings,
    },
    /// Run a pool's scheduler, for workers and programs on the network
    #[command(after_help = "\
Examples:
  tensord scheduler
  tensord scheduler --advertise pool.example --state /var/lib/tensord")]
    Scheduler {
        #[command(flatten)]
        settings: SchedulerSettings,
        #[command(flatten)]
        state: StateSettings,
    },
    /// Offer this host's devices to the pool in TENSORD_URL, or list, drain and remove workers
    #[command(args_conflicts_with_subcommands = true)]
    #[command(after_help = "\
Examples:
  export TENSORD_URL='...'           the `workers:` line of the scheduler
  tensord worker                     offer all GPUs of the first kind found, or else the CPU
  tensord worker --devices cuda:0,1
  tensord worker --url-file /etc/tensord/url --name gpu-1

A worker needs the URL's token when it first joins. The scheduler then enrols its name, its
key (which the worker keeps in its state directory) and the devices that it offers. After
that, the worker needs a token only to offer more. On the scheduler's host:
  tensord worker list                show the workers that may join
  tensord worker drain gpu-1         move its leases to other workers, and give it no new ones
  tensord worker remove gpu-1        end the worker's leases and free its name")]
    Worker {
        #[command(subcommand)]
        command: Option<WorkerCommand>,
        #[command(flatten)]
        settings: WorkerSettings,
        #[command(flatten)]
        url: UrlSettings,
        #[command(flatten)]
        state: StateSettings,
        #[command(flatten)]
        drain: DrainSettings,
    },
    /// Lease devices and serve them to stock Burn programs over WebSocket
    #[command(after_help = "\
Examples:
  export TENSORD_URL='...'           the `programs:` line of the scheduler
  tensord gateway --devices 2
  tensord gateway --listen 127.0.0.1:3000 --devices 1 --kind cuda
  tensord gateway --share 0.25 --kind cuda --memory 4GiB

Programs must present the token in TENSORD_GATEWAY_TOKEN. If that is not set, the gateway
generates a token and keeps it in the state directory.")]
    Gateway {
        #[command(flatten)]
        settings: GatewaySettings,
        #[command(flatten)]
        url: UrlSettings,
        #[command(flatten)]
        state: StateSettings,
    },
    /// Show the devices that this host can offer to a pool
    #[command(after_help = "\
Examples:
  tensord devices
  tensord devices --json | jq -r '.devices[].device'")]
    Devices {
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
    },
    /// Show the workers and devices of the pool in TENSORD_URL
    #[command(after_help = "\
Examples:
  tensord status
  tensord status --json | jq '.workers[].name'")]
    Status {
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        url: UrlSettings,
    },
    /// List the leases of a pool, move one to another worker, suspend, resume or end one
    #[command(after_help = "\
Examples, on the scheduler's host:
  tensord lease list
  tensord lease list --json | jq -r '.leases[].lease'
  tensord lease move 9a07e170be32795f
  tensord lease suspend 9a07e170be32795f
  tensord lease resume 9a07e170be32795f
  tensord lease end 9a07e170be32795f
  tensord lease priority 4b1e0f6c9d2a7785 5")]
    Lease {
        #[command(subcommand)]
        command: LeaseCommand,
    },
    /// List the leases and requests that wait for devices of a pool
    #[command(after_help = "\
Examples, on the scheduler's host:
  tensord queue
  tensord queue --json | jq -r '.waiting[].id'")]
    Queue {
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        admin: AdminSettings,
    },
    /// Explain why a lease or request waits: which devices are suitable, and which leases have them
    #[command(after_help = "\
Examples, on the scheduler's host:
  tensord why 9a07e170be32795f
  tensord why 9a07e170be32795f --json | jq '.waiting.needs[]?.leased_by'")]
    Why {
        /// Id of the lease or request, as `tensord queue` and `tensord lease list` show it
        #[arg(value_name = "ID", value_parser = lease_id)]
        lease: LeaseId,
        /// Print JSON instead of text
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        admin: AdminSettings,
    },
    /// Show what leases have used of a pool's devices, by tenant, user, lease, kind or day
    #[command(after_help = "\
Examples, on the scheduler's host:
  tensord usage                      the last 7 days, by tenant and user
  tensord usage --since 2026-11-01 --by tenant,kind
  tensord usage --since 12h --by lease
  tensord usage --since 30d --by day,tenant --csv > usage.csv
  tensord usage --json | jq '.total.device_seconds'

Device time is how long leases have had devices, and busy is how long the devices worked for
them. Memory time is the memory of their tensors, summed up over time. Moved is what went to
and from programs and other devices. The time is rounded down to the hour; what ended more
than 90 days ago is known by day, tenant, user and kind only.")]
    Usage {
        #[command(flatten)]
        args: UsageArgs,
    },
    /// Add, change, list and remove the tenants of a pool: their guarantees, limits and weights
    #[command(after_help = "\
Examples, on the scheduler's host:
  tensord tenant add research --guarantee cuda=4 --limit cuda=8
  tensord tenant add students --weight 2 --limit cuda=2,memory=160GiB
  tensord tenant set research --limit none
  tensord tenant list
  tensord token create --name ci --tenant research

Requests within a tenant's guarantee get devices before all others; if devices are missing,
leases beyond the guarantees of other tenants are suspended, and go on later. Of the other
requests, one of the tenant with the smallest share by weight is next. A limit bounds what a
tenant has at a time.")]
    Tenant {
        #[command(subcommand)]
        command: TenantCommand,
    },
    /// Make the tenants of a pool those of a file, and show what changes
    #[command(after_help = "\
Examples, on the scheduler's host:
  tensord apply pool.toml --dry-run  show what would change
  tensord apply pool.toml

The file has all tenants of the pool, with the words of `tensord tenant add`:
  [tenants.default]

  [tenants.research]
  weight = 2
  guarantee = { cuda = 4 }
  limit = { cuda = 8, memory = \"640GiB\" }

A tenant that the file does not have is removed. What the file does not name has the value of
a new tenant. With --force, the tokens of programs of removed tenants are revoked, and the
leases opened with them end; leases beyond a lowered limit go on.")]
    Apply {
        #[command(flatten)]
        args: ApplyArgs,
    },
    /// Create, list, rotate and revoke the tokens of a pool
    #[command(after_help = "\
Examples, on the scheduler's host:
  tensord token list
  tensord token create --name ci --tenant research --expires 7d
  tensord token create --tenant research --user ada --note 'thesis, until summer'
  tensord token create --role worker --uses 5 --expires 1d
  tensord token rotate program --grace 1h
  tensord token revoke ci --keep-leases")]
    Token {
        #[command(subcommand)]
        command: TokenCommand,
    },
    /// Run the scheduler under a virtual clock over a trace of jobs, and show how well it does
    #[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
    #[command(after_help = "\
Examples:
  tensord simulate generate greedy --jobs 5000 --devices 64 > jobs.csv
  tensord simulate jobs.csv --pool 8x8:cuda:80GiB
  tensord simulate jobs.csv --pool 8x8:cuda:80GiB --policy pool.toml --svg timeline.svg
  tensord simulate jobs.csv --pool 8x8:cuda:80GiB --order fair,backfill,fifo --json

A trace has a header and one line for each job, in the order of their arrival:
  arrival,tenant,user,devices,kind,share,memory,duration,priority
  0,research,ada,2,cuda,,40GiB,3600,
  12.5,students,,1,,0.25,,90,5
Times are in seconds. A share is a part of one device. Kind, share, memory and priority may be empty, and so may user.
Three columns may follow in all lines: max_duration (seconds), durable (off, or empty) and spot (yes, or empty).")]
    Simulate {
        #[command(subcommand)]
        command: Option<SimulateCommand>,
        #[command(flatten)]
        args: SimulateArgs,
    },
    /// Train a network on handwritten digits, to demonstrate a pool
    #[cfg(feature = "demo")]
    #[command(after_help = "\
Examples:
  tensord demo                       train on a temporary pool with two workers
  tensord demo --model transformer
  tensord demo --devices 4           train on four devices, two on each worker
  tensord demo --kind cuda           train on a GPU, if this build and host have one
  tensord demo --url                 train on the pool in TENSORD_URL
  tensord demo --chaos               kill workers at random, and compare the losses
  tensord demo --chaos --devices 2   the same while two workers train together
  tensord demo --chaos --kind cuda   the same on a GPU, whose losses may differ if it is not exact
  tensord demo --json | tail -1 | jq .test_accuracy")]
    Demo {
        #[command(flatten)]
        settings: DemoSettings,
        #[command(flatten)]
        url: UrlSettings,
    },
}

/// The result of parsing a command line.
pub(crate) enum Parsed {
    /// A command to run.
    Run(Box<Cli>),
    /// A help or version text to print.
    Text(String),
}

/// Parses a command line.
///
/// # Errors
///
/// [`ConfigError::CommandLine`] if it is malformed; the error names the flag.
pub(crate) fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Parsed, ConfigError> {
    // Help names each flag's variable, but not its current value, which may be private.
    let hide = |command: clap::Command| command.mut_args(|arg| arg.hide_env_values(true));
    let parsed = hide(Cli::command())
        .mut_subcommands(|command| hide(command).mut_subcommands(hide))
        .try_get_matches_from(args)
        .and_then(|matches| Cli::from_arg_matches(&matches));
    match parsed {
        Ok(cli) => Ok(Parsed::Run(Box::new(cli))),
        Err(e) => match e.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => Ok(Parsed::Text(e.to_string())),
            _ => Err(ConfigError::CommandLine(one_line(&e))),
        },
    }
}

/// Returns the error on one line, without the paragraphs on usage and help.
fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let paragraphs = text.split("\n\n").map(|paragraph| {
        let words: Vec<_> = paragraph.split_whitespace().collect();
        words.join(" ")
    });
    let telling = |text: &String| !text.starts_with("Usage:") && !text.starts_with("For more");
    let lines: Vec<_> = paragraphs.filter(telling).collect();
    lines.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(line: &str) -> String {
        let args = line.split_whitespace().map(OsString::from);
        match parse(args) {
            Err(e) => e.to_string(),
            Ok(_) => panic!("{line:?} was accepted"),
        }
    }

    #[test]
    fn definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn an_error_is_one_line_that_names_the_flag() {
        let cases = [
            (
                "tensord up --lisen 127.0.0.1:1",
                "unexpected argument '--lisen' found; tip: a similar argument exists: '--listen'",
            ),
            (
                "tensord scheduler --listen here",
                "invalid value 'here' for '--listen <IP:PORT>': \"here\" is not IP:PORT, such as 0.0.0.0:7461",
            ),
            (
                "tensord gateway --devices two",
                "invalid value 'two' for '--devices <N>': invalid digit found in string",
            ),
            (
                "tensord upp",
                "unrecognized subcommand 'upp'; tip: a similar subcommand exists: 'up'",
            ),
        ];
        for (line, expected) in cases {
            assert_eq!(error(line), expected, "{line}");
        }
    }

    #[test]
    fn without_a_command_the_commands_are_listed() {
        let demo = if cfg!(feature = "demo") { ", demo" } else { "" };
        let expected = format!(
            "'tensord' requires a subcommand but one was not provided \
             [subcommands: up, scheduler, worker, gateway, devices, status, lease, queue, why, usage, tenant, apply, token, simulate{demo}]"
        );
        assert_eq!(error("tensord"), expected);
    }

    #[test]
    fn help_is_not_an_error() {
        let args = ["tensord", "worker", "--help"].map(OsString::from);
        let Ok(Parsed::Text(help)) = parse(args) else {
            panic!("--help must return a text");
        };
        assert!(help.contains("--devices <LIST>"), "{help}");
        assert!(help.contains("TENSORD_DEVICES]"), "{help}");
    }
}
