//! The build under test, and the kinds of devices that are available on this host.
//!
//! `TENSORD_BINARY` names the build. The default is the build made along with the tests,
//! which has only CPU devices. Tests skip a kind that is not available and print the
//! reason, or fail if `TENSORD_REQUIRE` (such as `vulkan,cuda`) names the kind.
//! `TENSORD_KERNELS` names a directory that keeps compiled kernels from run to run.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::LazyLock,
    time::Duration,
};

use crate::cluster::{self, Cluster};
use serde_json::Value;

/// Returns the path of the `tensord` binary under test.
pub fn binary() -> PathBuf {
    std::env::var_os("TENSORD_BINARY").map_or_else(cluster::binary, PathBuf::from)
}

/// Runs the build under test to its end and returns its output and exit status.
///
/// # Panics
///
/// If the binary cannot be run.
pub fn run(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(binary());
    command.args(args).env_remove("TENSORD_DEVICES");
    let output = command.envs(variables.iter().copied()).output();
    output.unwrap_or_else(|e| panic!("cannot run {}: {e}", binary().display()))
}

/// Output of `tensord devices` on this host.
static DEVICES: LazyLock<Value> = LazyLock::new(|| {
    let output = run(&["devices", "--json"], &[]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "tensord devices: {errors}");
    serde_json::from_slice(&output.stdout).expect("JSON")
});

/// How long an op may take on a device other than the CPU. The first op of a kind compiles its
/// kernels and tries them, which takes Mesa's driver for the CPU minutes.
pub const COMPILE_DEADLINE: Duration = Duration::from_secs(600);

/// Kinds of devices other than the CPU.
pub const KINDS: [&str; 5] = ["cuda", "rocm", "metal", "vulkan", "webgpu"];

/// Returns whether this host has a device of `kind`. If it has none, prints why.
///
/// # Panics
///
/// If there is none and `TENSORD_REQUIRE` names `kind`.
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
    assert!(!is_required(kind), "no {kind} device: {reason}");
    println!("left out, as there is no {kind} device: {reason}");
    false
}

/// Returns whether `TENSORD_REQUIRE` names `what`.
pub fn is_required(what: &str) -> bool {
    let required = std::env::var("TENSORD_REQUIRE").unwrap_or_default();
    required.split(',').any(|one| one.trim() == what)
}

/// Returns the available kinds. Leaves out `webgpu` where its devices have the same names
/// as those of `vulkan`: they are the same kernels on the same driver.
///
/// # Panics
///
/// Under the conditions of [`has`].
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

/// Starts a pool of workers of the build under test.
///
/// # Panics
///
/// If the pool does not start.
pub fn cluster(workers: &[&str]) -> Cluster {
    Cluster::start_with(binary(), workers)
}

/// Returns the path of the example `name` that was built along with the build under test.
pub fn example(name: &str) -> PathBuf {
    let binary = binary();
    let dir = binary.parent().unwrap_or(Path::new("."));
    dir.join("examples").join(name)
}
