//! Finds out which compiler and which versions of the crates that compute go into this build, for
//! the fingerprints of devices (`src/device_fingerprint.rs`).

use std::{
    collections::{BTreeSet, HashMap},
    env, fs, iter,
    path::{Path, PathBuf},
    process::Command,
};

/// The crates whose code computes on each kind of backend, with their dependencies.
const ROOTS: [(&str, &[&str]); 2] = [
    ("TENSORD_FLEX_CRATES", &["burn-flex", "burn-router"]),
    (
        "TENSORD_CUBE_CRATES",
        &["burn-cubecl", "burn-fusion", "burn-router"],
    ),
];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let lock = lock_file();
    if let Some(path) = &lock {
        println!("cargo:rerun-if-changed={}", path.display());
    }
    let text = lock.and_then(|path| fs::read_to_string(path).ok());
    let packages = text.map(|text| packages(&text)).unwrap_or_default();
    for (name, roots) in ROOTS {
        println!("cargo:rustc-env={name}={}", versions(&packages, roots));
    }
    println!("cargo:rustc-env=TENSORD_COMPILER={}", compiler());
}

/// Returns the nearest lock file in this crate's directory or above: the workspace's. A crate from a
/// registry has a lock file of its own, whose versions may not be those that are built. The path
/// is relative to the crate's directory, in which Cargo runs this: an absolute one would have the
/// crate compiled again in every other checkout.
fn lock_file() -> Option<PathBuf> {
    let depth = env::current_dir().ok()?.ancestors().count();
    let above = iter::successors(Some(PathBuf::new()), |path| {
        Some(Path::new("..").join(path))
    });
    above
        .take(depth)
        .map(|directory| directory.join("Cargo.lock"))
        .find(|path| path.exists())
}

/// A package of a lock file.
#[derive(Default)]
struct Package {
    version: String,
    dependencies: Vec<String>,
}

/// Parses a lock file. Returns the packages of each name, one for each version.
fn packages(lock: &str) -> HashMap<String, Vec<Package>> {
    let mut packages: HashMap<String, Vec<Package>> = HashMap::new();
    for section in lock.split("[[package]]").skip(1) {
        let quoted = |line: &str| line.split('"').nth(1).map(str::to_owned);
        let field = |key: &str| {
            let mut lines = section.lines();
            lines.find(|line| line.starts_with(key)).and_then(quoted)
        };
        let (Some(name), Some(version)) = (field("name = "), field("version = ")) else {
            continue;
        };
        // One in each line, as in `"name"` or `"name version"`.
        let list = section.split("dependencies = [").nth(1).unwrap_or_default();
        let list = list.split(']').next().unwrap_or_default();
        let names = list.lines().filter_map(quoted);
        let dependencies = names
            .filter_map(|name| name.split(' ').next().map(str::to_owned))
            .collect();
        packages.entry(name).or_default().push(Package {
            version,
            dependencies,
        });
    }
    packages
}

/// Returns the names and versions of `roots` and all that they depend on, or nothing if a root is
/// unknown.
fn versions(packages: &HashMap<String, Vec<Package>>, roots: &[&str]) -> String {
    let mut open: Vec<String> = roots.iter().map(|&root| root.to_owned()).collect();
    if !open.iter().all(|root| packages.contains_key(root)) {
        return String::new();
    }
    let (mut seen, mut found) = (BTreeSet::new(), BTreeSet::new());
    while let Some(name) = open.pop() {
        if !seen.insert(name.clone()) {
            continue;
        }
        for package in packages.get(&name).into_iter().flatten() {
            found.insert(format!("{name} {}", package.version));
            open.extend(package.dependencies.iter().cloned());
        }
    }
    found.into_iter().collect::<Vec<_>>().join(", ")
}

/// Returns the compiler's version, target, optimisation level, target features and flags.
fn compiler() -> String {
    let variable = |name: &str| env::var(name).unwrap_or_default();
    let rustc = Command::new(variable("RUSTC")).arg("--version").output();
    let version = rustc
        .ok()
        .and_then(|output| String::from_utf8(output.stdout).ok());
    [
        version.unwrap_or_default().trim(),
        &variable("TARGET"),
        &format!("opt-level {}", variable("OPT_LEVEL")),
        &variable("CARGO_CFG_TARGET_FEATURE"),
        &variable("CARGO_ENCODED_RUSTFLAGS").replace('\x1f', " "),
    ]
    .into_iter()
    .filter(|part| !part.is_empty())
    .collect::<Vec<_>>()
    .join("; ")
}
