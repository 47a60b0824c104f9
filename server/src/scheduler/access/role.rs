//! What a token lets its holder be.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// What a token lets its holder be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    /// Someone who makes and revokes tokens.
    Admin,
    /// A program that leases devices.
    #[serde(rename = "program")]
    Client,
    /// A host that enrols workers.
    Worker,
}

impl Role {
    /// Where the URL with such a token is to be had.
    pub(super) fn source(self) -> &'static str {
        match self {
            Self::Admin => {
                "that `tensord token` finds in the scheduler's state directory, or make one with `tensord token create --role admin`"
            }
            Self::Client => "of the `programs:` line that the scheduler prints",
            Self::Worker => "of the `workers:` line that the scheduler prints",
        }
    }

    /// What errors call the token.
    pub(in crate::scheduler) fn name(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::Client => "client",
            Self::Worker => "worker",
        }
    }

    /// What errors call the one who shows it.
    pub(super) fn holder(self) -> &'static str {
        match self {
            Self::Admin => "an administrator",
            Self::Client => "a client",
            Self::Worker => "a worker",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Admin => "admin",
            Self::Client => "program",
            Self::Worker => "worker",
        })
    }
}

impl FromStr for Role {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "admin" => Ok(Self::Admin),
            "program" => Ok(Self::Client),
            "worker" => Ok(Self::Worker),
            other => Err(format!(
                "{other:?} is no role; it must be program, worker or admin"
            )),
        }
    }
}
