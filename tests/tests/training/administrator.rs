//! An administrator of a pool, who runs `tensord` on the scheduler's state.

use serde_json::Value;
use tensord_testkit::{cluster::Cluster, host};

pub(super) struct Administrator {
    /// The scheduler's state directory.
    state: String,
}

impl Administrator {
    pub(super) fn of(cluster: &Cluster) -> Self {
        let state = cluster.path("state").into_os_string();
        let state = state.into_string().expect("temporary paths are text");
        Self { state }
    }

    /// Runs a command. Returns its output, or its error.
    pub(super) fn try_run(&self, args: &[&str]) -> Result<String, String> {
        let output = host::run(&[args, &["--state", &self.state]].concat(), &[]);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        match output.status.success() {
            true => Ok(text(&output.stdout)),
            false => Err(text(&output.stderr)),
        }
    }

    /// Runs a command that must succeed, and returns its output.
    pub(super) fn run(&self, args: &[&str]) -> String {
        let ran = self.try_run(args);
        ran.unwrap_or_else(|error| panic!("{args:?}: {error}"))
    }

    /// Returns the leases, as `tensord lease list` shows them.
    pub(super) fn leases(&self) -> Vec<Value> {
        let listed = self.run(&["lease", "list", "--json"]);
        let listed: Value = serde_json::from_str(&listed).unwrap();
        listed["leases"].as_array().unwrap().clone()
    }
}
