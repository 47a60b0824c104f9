//! The roles of tokens.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// The role of a token: what its holder may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    /// An administrator, who creates and revokes tokens.
    Admin,
    /// A program that leases devices.
    #[serde(rename = "program")]
    Client,
    /// A host that enrols workers.
    Worker,
}

impl Role {
    /// Returns a phrase for error messages: the place of the URL with a token of this role.
    pub(super) fn source(self) -> &'static str {
        match self {
            Self::Admin => {
                "from the scheduler's state directory, which `tensord token` reads there, or create one with `tensord token create --role admin`"
            }
            Self::Client => "of the `programs:` line that the scheduler prints",
            Self::Worker => "of the `workers:` line that the scheduler prints",
        }
    }

    /// Returns the role's name, which commands, the audit log and error messages use.
    pub(in crate::scheduler) fn name(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::Client => "program",
            Self::Worker => "worker",
        }
    }

    /// Returns the name of the token's holder in error messages.
    pub(super) fn holder(self) -> &'static str {
        match self {
            Self::Admin => "an administrator",
            Self::Client => "a program",
            Self::Worker => "a worker",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
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
                "{other:?} is not a role; a role is program, worker or admin"
            )),
        }
    }
}
