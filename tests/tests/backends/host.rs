//! The build under test, and which of its kinds of devices are here.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::LazyLock,
};

use serde_json::Value;
use tensord_tests::cluster::{self, Cluster};

/// The build under test.
pub(crate) fn binary() -> PathBuf {
    std::env::var_os("TENSORD_BINARY").map_or_else(cluster::binary, PathBuf::from)
}

/// What a run of the build under test came to.
pub(crate) fn run(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(binary());
    command.args(args).env_remove("TENSORD_DEVICES");
    let output = command.envs(variables.iter().copied()).output();
    output.unwrap_or_else(|e| panic!("cannot run {}: {e}", binary().display()))
}

/// What `tensord devices` tells of this host.
static DEVICES: LazyLock<Value> = LazyLock::new(|| {
    let output = run(&["devices", "--json"], &[]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "tensord devices: {errors}");
    serde_json::from_slice(&output.stdout).expect("JSON")
});

/// Whether there is a device of `kind`. If not, and it need not be, says why.
pub(crate) fn has(kind: &str) -> bool {
    let listed = |list: &str, key: &str| -> Vec<&Value> {
        let all = DEVICES[list].as_array().expect("a list");
        let named = |one: &&Value| one[key].as_str().is_some_and(|name| name.starts_with(kind));
        all.iter().filter(named).collect()
    };
    if !listed("devices", "kind").is_empty() {
        return true;
    }
    let missing = listed("missing", "what");
    let reason = missing
        .first()
        .and_then(|missing| missing["reason"].as_str());
    let reason = reason.unwrap_or("it is not in this build");
    let required = std::env::var("TENSORD_REQUIRE").unwrap_or_default();
    let is_required = required.split(',').any(|one| one.trim() == kind);
    assert!(!is_required, "no {kind} device: {reason}");
    println!("left out, as there is no {kind} device: {reason}");
    false
}

/// A pool of workers of the build under test.
pub(crate) fn cluster(workers: &[&str]) -> Cluster {
    Cluster::start_with(binary(), workers)
}

/// An example that was built along with the build under test.
pub(crate) fn example(name: &str) -> PathBuf {
    let binary = binary();
    let dir = binary.parent().unwrap_or(Path::new("."));
    dir.join("examples").join(name)
}
