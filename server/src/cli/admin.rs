//! The commands of administrators: on tokens, tenants, workers and leases.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use tensord_proto::ids::LeaseId;

use crate::{
    config::{
        Column, Since,
        settings::AdminSettings,
        values::{DeviceLimit, Kinds, Name, Period},
    },
    scheduler::Role,
};

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
        /// Print JSON instead of text
        #[arg(long)]
        json: bool,
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
        /// Print JSON instead of text
        #[arg(long)]
        json: bool,
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
        /// Print JSON instead of text
        #[arg(long)]
        json: bool,
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
        /// Print JSON instead of text
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        admin: AdminSettings,
    },
}

/// The weight, the guarantee and the limit of a tenant.
#[derive(Args, Debug)]
pub(crate) struct TenantTerms {
    /// Weight of the tenant: one with 2 gets twice as much as one with 1 when both want more than there is [default: 1]
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

/// The arguments of `tensord apply`.
#[derive(Args, Debug)]
pub(crate) struct ApplyArgs {
    /// TOML file with all tenants of the pool
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Show what would change, and change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Also remove tenants that have tokens, leases or requests, and set limits below what tenants have
    #[arg(long)]
    pub(crate) force: bool,
    /// Print JSON instead of text
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) admin: AdminSettings,
}

/// The arguments of `tensord usage`.
#[derive(Args, Debug)]
pub(crate) struct UsageArgs {
    /// From when on: a duration such as 12h or 7d, or a date such as 2026-11-01, in UTC
    #[arg(long, value_name = "WHEN", default_value = "7d")]
    pub(crate) since: Since,
    /// Columns by which usage is grouped: tenant, user, lease, kind and day. Usage is kept by lease for 90 days,
    /// or less if there are very many
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "tenant,user"
    )]
    pub(crate) by: Vec<Column>,
    /// Print JSON instead of a table
    #[arg(long)]
    pub(crate) json: bool,
    /// Print comma-separated values instead of a table
    #[arg(long, conflicts_with = "json")]
    pub(crate) csv: bool,
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
pub(super) fn lease_id(text: &str) -> Result<LeaseId, String> {
    let is_id = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let id = is_id.then(|| u64::from_str_radix(text, 16).ok()).flatten();
    id.map(LeaseId)
        .ok_or_else(|| "the id of a lease has 16 hexadecimal digits".into())
}
