//! Why a configuration was refused: always one line, which names the setting.

use std::{io, path::PathBuf};

use tensord_transport::url::UrlError;

/// Why a configuration was refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    /// The command line, or an environment variable that stands for a flag.
    #[error("{0}")]
    CommandLine(String),
    /// The configuration file cannot be read.
    #[error("--config: cannot read {}: {source}", path.display())]
    FileUnreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The configuration file says something wrong.
    #[error("{}:{line}: {problem}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong there, beginning with the key.
        problem: String,
    },
    /// A setting that has no default is missing.
    #[error("{0}")]
    Missing(&'static str),
    /// The pool URL is malformed.
    #[error("{origin}: {source}")]
    Url {
        /// Where the URL stands.
        origin: String,
        /// Which part is wrong.
        source: UrlError,
    },
    /// The pool URL has no token.
    #[error(
        "{origin}: the URL has no token; copy the whole line that `tensord up` or `tensord scheduler` prints"
    )]
    UrlWithoutToken {
        /// Where the URL stands.
        origin: String,
    },
    /// The file with the pool URL cannot be read.
    #[error("--url-file: cannot read {}: {source}", path.display())]
    UrlFileUnreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The gateway would send tensors over a network in plain text.
    #[error(
        "--listen: {0} is open to the network, and a stock Burn program speaks ws://, which anyone on the way can read; listen on 127.0.0.1, or accept that with --allow-plaintext"
    )]
    Plaintext(std::net::SocketAddr),
    /// The gateway's token is not one a program can send.
    #[error("TENSORD_GATEWAY_TOKEN: a token is {rule}", rule = crate::state::TOKEN_RULE)]
    GatewayToken,
}
