//! Errors in a configuration. Each is one line that names the setting.

use std::{io, path::PathBuf};

use tensord_transport::url::UrlError;

use super::pool_file::MAX_POOL_FILE_BYTES;
use crate::scheduler::TenantError;

/// Why a configuration was refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    /// The command line, or the environment variable of a flag, is wrong.
    #[error("{0}")]
    CommandLine(String),
    /// The configuration file cannot be read.
    #[error("--config: cannot read {}: {source}", path.display())]
    FileUnreadable {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The configuration file has an error.
    #[error("{}:{line}: {problem}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The problem, with the name of the key.
        problem: String,
    },
    /// The file of `tensord apply` cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    PoolFileUnreadable {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file of `tensord apply` is too large.
    #[error(
        "{} has more than {MAX_POOL_FILE_BYTES} bytes, which is the limit for the tenants of a pool; is it the right file?", path.display()
    )]
    PoolFileTooLarge {
        /// The file.
        path: PathBuf,
    },
    /// The trace of `tensord simulate` cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    TraceUnreadable {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The trace of `tensord simulate` is too large.
    #[error("{} has more than {most_bytes} bytes, which is the limit for a trace", path.display())]
    TraceTooLarge {
        /// The file.
        path: PathBuf,
        /// The limit.
        most_bytes: u64,
    },
    /// The tenants for `tensord simulate` break a rule.
    #[error("{}: tenant {tenant}: {source}", path.display())]
    Tenant {
        /// The file.
        path: PathBuf,
        /// The tenant.
        tenant: String,
        /// The rule.
        source: TenantError,
    },
    /// A setting that has no default is missing.
    #[error("{0}")]
    Missing(&'static str),
    /// The pool URL is malformed.
    #[error("{origin}: {source}")]
    Url {
        /// The variable, flag or file that the URL comes from.
        origin: String,
        /// The part that is wrong.
        source: UrlError,
    },
    /// The pool URL has no token.
    #[error(
        "{origin}: the URL has no token; copy the whole line that `tensord up` or `tensord scheduler` prints"
    )]
    UrlWithoutToken {
        /// The variable, flag or file that the URL comes from.
        origin: String,
    },
    /// The file with the pool URL cannot be read.
    #[error("--url-file: cannot read {}: {source}", path.display())]
    UrlFileUnreadable {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The gateway would send tensors over a network without encryption.
    #[error(
        "--listen: other hosts can reach {0}, and stock Burn programs connect over ws://, which is not encrypted; listen on 127.0.0.1, or accept plaintext with --allow-plaintext"
    )]
    Plaintext(std::net::SocketAddr),
    /// A share of several devices was requested.
    #[error(
        "--share: {part} with --devices {devices}; a share is a part of one device, so leave --devices out, or --share"
    )]
    ShareOfSeveral {
        /// The part of a device.
        part: f64,
        /// The number of devices.
        devices: u32,
    },
    /// The gateway's token breaks the rule for tokens.
    #[error("TENSORD_GATEWAY_TOKEN: a token must have {rule}", rule = crate::state::TOKEN_RULE)]
    GatewayToken,
}
