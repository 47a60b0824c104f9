//! The command line: its commands, flags and help texts.
//!
//! Nothing is decided here: [`config`](crate::config) merges the flags, the
//! environment and the configuration file.

use std::{ffi::OsString, path::PathBuf};

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, error::ErrorKind};
use tensord_proto::ids::LeaseId;

#[cfg(feature = "demo")]
use crate::config::settings::DemoSettings;
use crate::config::{
    ConfigError,
    settings::{
        AdminSettings, DrainSettings, GatewaySettings, SchedulerSettings, StateSettings,
        UpSettings, UrlSettings, WorkerSettings,
    },
    values::{DeviceLimit, Filter, Kinds, Name, Period},
};
use crate::scheduler::Role;

const EXAMPLES: &str = "\
Examples:
  tensord up --devices flex*2        run a pool on this host, for programs on this host
  tensord scheduler                  run a pool that other hosts can reach
  tensord worker                     offer this host's devices to the pool in TENSORD_URL
  tensord status                     show the pool's workers and devices
  tensord queue                      show what waits for devices
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
  tensord up                         offer this host's GPUs, or else its CPU, to programs on it
  tensord up --devices flex*4        offer four devices, to try data-parallel training
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
  tensord worker                     offer every GPU, or else the CPU
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
  tensord demo --json | tail -1 | jq .test_accuracy")]
    Demo {
        #[command(flatten)]
        settings: DemoSettings,
        #[command(flatten)]
        url: UrlSettings,
    },
}

/// The commands on tokens.
#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Create a token, and print the URL with it, which is not shown again
    Create {
        /// Role of the token's holder: program, worker or admin
        #[arg(long, value_name = "ROLE", default_value_t = Role::Client)]
        role: Role,
        /// Name of the token [default: the role and a number]
        #[arg(long, value_name = "NAME")]
        name: Option<Name>,
        /// Tenant of the token, which must exist; programs of one tenant share cached uploads and see each other's leases [default: default]
        #[arg(long, value_name = "NAME")]
        tenant: Option<Name>,
        /// Person or program that gets the token: letters, digits and - _ .
        #[arg(long, value_name = "NAME")]
        user: Option<Name>,
        /// What the token is for
        #[arg(long, value_name = "TEXT")]
        note: Option<String>,
        /// Lifetime of the token, such as 12h or 7d [default: unlimited]
        #[arg(long, value_name = "TIME")]
        expires: Option<Period>,
        /// Number of workers that may enrol with the token [default: unlimited]
        #[arg(long, value_name = "N")]
        uses: Option<u64>,
        #[command(flatten)]
        admin: AdminSettings,
    },
    /// Show every token, without its secret
    List {
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        admin: AdminSettings,
    },
    /// Replace a token, and print the URL with the new token, which is not shown again
    Rotate {
        /// Name of the token
        #[arg(value_name = "NAME")]
        name: String,
        /// Time for which the old token stays valid, such as 30m [default: 1h]
        #[arg(long, value_name = "TIME")]
        grace: Option<Period>,
        #[command(flatten)]
        admin: AdminSettings,
    },
    /// Revoke a token, and end the leases and streams that were opened with it
    Revoke {
        /// Name of the token
        #[arg(value_name = "NAME")]
        name: String,
        /// Keep the leases that were opened with the token
        #[arg(long)]
        keep_leases: bool,
        #[command(flatten)]
        admin: AdminSettings,
    },
}

/// The commands on a pool's tenants.
#[derive(Debug, Subcommand)]
pub(crate) enum TenantCommand {
    /// Add a tenant
    Add {
        /// Name of the tenant
        #[arg(value_name = "NAME")]
        name: Name,
        #[command(flatten)]
        terms: TenantTerms,
    },
    /// Change a tenant; an option that is left out keeps its value, and a list replaces the earlier one
    Set {
        /// Name of the tenant
        #[arg(value_name = "NAME")]
        name: Name,
        #[command(flatten)]
        terms: TenantTerms,
    },
    /// Show every tenant: its weight, guarantee and limit, and what it has
    List {
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        admin: AdminSettings,
    },
    /// Show a tenant
    Show {
        /// Name of the tenant
        #[arg(value_name = "NAME")]
        name: Name,
        /// Print JSON instead of text
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        admin: AdminSettings,
    },
    /// Remove a tenant that has no valid token, no lease and no request
    Remove {
        /// Name of the tenant
        #[arg(value_name = "NAME")]
        name: Name,
        #[command(flatten)]
        admin: AdminSettings,
    },
}

/// The weight, the guarantee and the limit of a tenant.
#[derive(Args, Debug)]
pub(crate) struct TenantTerms {
    /// Divides its share when that is compared with other tenants': with 2, it may get twice as much [default: 1]
    #[arg(long, value_name = "N")]
    pub(crate) weight: Option<u32>,
    /// Devices for which its requests come first, such as cuda=4,flex=2, or none [default: none]
    #[arg(long, value_name = "LIST")]
    pub(crate) guarantee: Option<Kinds>,
    /// The most that it may have at a time, such as cuda=8,memory=640GiB, or none [default: none]
    #[arg(long, value_name = "LIST")]
    pub(crate) limit: Option<DeviceLimit>,
    /// Print JSON instead of text
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) admin: AdminSettings,
}

/// The commands on a pool's workers.
#[derive(Debug, Subcommand)]
pub(crate) enum WorkerCommand {
    /// Show every worker that may join the pool
    List {
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        admin: AdminSettings,
    },
    /// Give a worker no new leases, and move those that can move to other workers
    Drain {
        /// Name of the worker
        #[arg(value_name = "NAME")]
        name: String,
        /// Let the worker get leases again
        #[arg(long)]
        undo: bool,
        /// Wait until the worker has no lease left, for at most this time, such as 5m
        #[arg(long, value_name = "TIME", conflicts_with = "undo")]
        wait: Option<Period>,
        #[command(flatten)]
        admin: AdminSettings,
    },
    /// Remove a worker's enrolment and end its leases; the worker can enrol again
    Remove {
        /// Name of the worker
        #[arg(value_name = "NAME")]
        name: String,
        #[command(flatten)]
        admin: AdminSettings,
    },
}

/// The commands on a pool's leases.
#[derive(Debug, Subcommand)]
pub(crate) enum LeaseCommand {
    /// Show every lease: who has it, where, and whether it could move
    List {
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        admin: AdminSettings,
    },
    /// Move a lease to the worker that keeps its snapshots; its program goes on there
    Move {
        /// Id of the lease, as `tensord lease list` shows it
        #[arg(value_name = "LEASE", value_parser = lease_id)]
        lease: LeaseId,
        #[command(flatten)]
        admin: AdminSettings,
    },
    /// Have a lease give its devices back and keep its state; its program waits
    Suspend {
        /// Id of the lease, as `tensord lease list` shows it
        #[arg(value_name = "LEASE", value_parser = lease_id)]
        lease: LeaseId,
        #[command(flatten)]
        admin: AdminSettings,
    },
    /// Let a suspended lease go on, as soon as there are devices for it
    Resume {
        /// Id of the lease, as `tensord lease list` shows it
        #[arg(value_name = "LEASE", value_parser = lease_id)]
        lease: LeaseId,
        #[command(flatten)]
        admin: AdminSettings,
    },
    /// End a lease, or refuse a request that waits; its program gets an error
    End {
        /// Id of the lease or request, as `tensord lease list` and `tensord queue` show it
        #[arg(value_name = "ID", value_parser = lease_id)]
        lease: LeaseId,
        #[command(flatten)]
        admin: AdminSettings,
    },
    /// Change the priority of a request that waits, among those of its tenant
    Priority {
        /// Id of the request, as `tensord queue` shows it
        #[arg(value_name = "ID", value_parser = lease_id)]
        lease: LeaseId,
        /// The priority: a request with a higher one comes first; a new request has 0
        #[arg(value_name = "N", allow_negative_numbers = true)]
        priority: i32,
        #[command(flatten)]
        admin: AdminSettings,
    },
}

/// Parses the id of a lease: 16 hexadecimal digits.
fn lease_id(text: &str) -> Result<LeaseId, String> {
    let is_id = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let id = is_id.then(|| u64::from_str_radix(text, 16).ok()).flatten();
    id.map(LeaseId)
        .ok_or_else(|| "the id of a lease has 16 hexadecimal digits".into())
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
             [subcommands: up, scheduler, worker, gateway, devices, status, lease, queue, why, tenant, token{demo}]"
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
