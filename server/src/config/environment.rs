//! The environment of the process, read once.
//!
//! Resolving a configuration is a pure function of the command line, the
//! configuration file and an [`Environment`], so tests can use any environment.

use std::{fs, path::PathBuf};

use tensord_transport::Secret;

/// Environment variables and host properties that affect the configuration. The
/// command line parser reads the variables that belong to flags.
#[derive(Clone, Debug, Default)]
pub(crate) struct Environment {
    /// `TENSORD_URL`, which is printed as `***` because it may have a token.
    pub(crate) url: Option<Secret>,
    /// `TENSORD_GATEWAY_TOKEN`.
    pub(crate) gateway_token: Option<Secret>,
    /// `XDG_STATE_HOME`.
    pub(crate) state_home: Option<PathBuf>,
    /// `HOME`.
    pub(crate) home: Option<PathBuf>,
    /// The name of this host.
    pub(crate) host_name: Option<String>,
}

impl Environment {
    /// Reads the environment of this process.
    pub(crate) fn capture() -> Self {
        let text = |key| std::env::var(key).ok().filter(|value| !value.is_empty());
        let path = |key| {
            text(key)
                .map(PathBuf::from)
                .filter(|path| path.is_absolute())
        };
        Self {
            url: text("TENSORD_URL").map(Secret::new),
            gateway_token: text("TENSORD_GATEWAY_TOKEN").map(Secret::new),
            state_home: path("XDG_STATE_HOME"),
            home: path("HOME"),
            host_name: host_name().or_else(|| text("HOSTNAME")),
        }
    }

    /// Returns the default state directory, or `None` if neither `XDG_STATE_HOME` nor
    /// `HOME` is set.
    pub(crate) fn default_state(&self) -> Option<PathBuf> {
        let home = || Some(self.home.as_ref()?.join(".local/state"));
        let base = self.state_home.clone().or_else(home)?;
        Some(base.join("tensord"))
    }
}

/// Returns the host's name from the kernel or the system's configuration.
fn host_name() -> Option<String> {
    ["/proc/sys/kernel/hostname", "/etc/hostname"]
        .into_iter()
        .filter_map(|path| fs::read_to_string(path).ok())
        .map(|name| name.trim().to_owned())
        .find(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_goes_where_the_xdg_base_directories_say() {
        let mut environment = Environment::default();
        assert_eq!(environment.default_state(), None);
        environment.home = Some("/home/ada".into());
        let home = environment.default_state();
        assert_eq!(home, Some("/home/ada/.local/state/tensord".into()));
        environment.state_home = Some("/var/state".into());
        assert_eq!(
            environment.default_state(),
            Some("/var/state/tensord".into())
        );
    }
}
