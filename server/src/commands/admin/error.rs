//! Why an administrator's call failed.

use std::time::Duration;

use tensord_proto::ids::LeaseId;
use tensord_transport::dial::DialError;
use tonic::metadata::errors::InvalidMetadataValue;

use super::DEADLINE;
use crate::human::plural;

/// Why an administrator's call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AdminError {
    /// No URL is given, and no scheduler has run on this host's state.
    #[error(
        "no scheduler has used the state directory {0}; run this command on the scheduler's host, name the scheduler's state directory with --state, or give a URL with an admin token in TENSORD_URL or with --url"
    )]
    NoScheduler(String),
    /// The scheduler cannot be reached.
    #[error("cannot reach the pool: {0}")]
    Dial(#[from] DialError),
    /// The scheduler refused the call.
    #[error("the scheduler at {address} refused the call: {reason}")]
    Refused {
        /// The scheduler's address.
        address: String,
        /// The scheduler's reason.
        reason: String,
    },
    /// The scheduler did not reply in time.
    #[error(
        "the scheduler at {address} did not answer within {DEADLINE:?}, so the change may or may not have been made; list the tokens, workers, tenants or leases to find out"
    )]
    Timeout {
        /// The scheduler's address.
        address: String,
    },
    /// A worker that is drained still has leases when the wait is over.
    #[error(
        "worker {name} still has leases after {} s ({leases}); `tensord lease list` shows why they stay, and draining goes on", wait.as_secs()
    )]
    NotDrained {
        /// The worker's name.
        name: String,
        /// The number of its leases.
        leases: usize,
        /// How long the command has waited.
        wait: Duration,
    },
    /// The change of a tenant concerns what is in use.
    #[error(
        "nothing was applied: {} in use; correct the file, or repeat the command with --force, which revokes the tokens of programs of removed tenants, ends the leases opened with them, and lets leases beyond a lowered limit go on", are(*tenants)
    )]
    TenantsInUse {
        /// The number of these tenants.
        tenants: usize,
    },
    /// A tenant that a file does not have cannot be removed.
    #[error(
        "nothing was applied: the file does not have tenant {name:?}, which has admin or worker tokens ({tokens}); add `[tenants.{}]` to the file, or revoke the tokens first with `tensord token revoke`, as --force does not revoke them",
        toml_key(name)
    )]
    TenantHasTokens {
        /// The tenant's name.
        name: String,
        /// The names of the tokens.
        tokens: String,
    },
    /// There is no such lease or request.
    #[error(
        "the pool has no lease or request {0}; it may be over, or a new request of its program; `tensord queue` and `tensord lease list` show what there is"
    )]
    NothingWithId(LeaseId),
    /// The token has characters that a header cannot carry.
    #[error(
        "the token in the pool URL contains characters that a token cannot have; copy the URL again"
    )]
    Token(#[from] InvalidMetadataValue),
}

/// Returns the subject and the verb of a sentence about tenants.
fn are(tenants: usize) -> String {
    let verb = if tenants == 1 { "is" } else { "are" };
    format!("{} {verb}", plural(tenants, "tenant"))
}

/// Returns the name of a tenant as a key of the file.
fn toml_key(name: &str) -> String {
    match name.contains('.') {
        true => format!("{name:?}"),
        false => name.to_owned(),
    }
}
