//! The build whose devices are tested, and which of its kinds are here.
//!
//! `TENSORD_BINARY` names the build; without it, it is the one built along, which has
//! none but the CPU. A kind that is not there is left out with the reason, or fails if
//! `TENSORD_REQUIRE` (such as `vulkan,cuda`) names it. `TENSORD_KERNELS` names a
//! directory that keeps compiled kernels from run to run.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::LazyLock,
};

use crate::cluster::{self, Cluster};
use serde_json::Value;

/// The build under test.
pub fn binary() -> PathBuf {
    std::env::var_os("TENSORD_BINARY").map_or_else(cluster::binary, PathBuf::from)
}

/// What a run of the build under test came to.
///
/// # Panics
///
/// When it cannot be run.
pub fn run(args: &[&str], variables: &[(&str, &str)]) -> Output {
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

/// Kinds of devices that are not the CPU.
pub const KINDS: [&str; 5] = ["cuda", "rocm", "metal", "vulkan", "webgpu"];

/// Whether there is a device of `kind`. If not, says why.
///
/// # Panics
///
/// When there is none and `TENSORD_REQUIRE` names it.
pub fn has(kind: &str) -> bool {
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

/// The kinds that are here. `webgpu` is among them only where it is not `vulkan` by
/// another name, with the same kernels for the same driver.
///
/// # Panics
///
/// As [`has`].
pub fn kinds() -> Vec<&'static str> {
    let names = |kind: &str| -> Vec<&Value> {
        let all = DEVICES["devices"].as_array().expect("a list").iter();
        all.filter(|device| device["kind"] == kind)
            .map(|device| &device["name"])
            .collect()
    };
    let is_double = names("vulkan") == names("webgpu");
    let distinct = KINDS
        .into_iter()
        .filter(|kind| !(is_double && *kind == "webgpu"));
    distinct.filter(|kind| has(kind)).collect()
}

/// A pool of workers of the build under test.
///
/// # Panics
///
/// When it does not come up.
pub fn cluster(workers: &[&str]) -> Cluster {
    Cluster::start_with(binary(), workers)
}

/// An example that was built along with the build under test.
pub fn example(name: &str) -> PathBuf {
    let binary = binary();
    let dir = binary.parent().unwrap_or(Path::new("."));
    dir.join("examples").join(name)
}
