//! Links the program with packed relative relocations, where the system's C library reads them.
//!
//! The program has some 300,000 relocations of 24 bytes, as its kernels and tables of functions
//! have addresses in them. Every process reads them all at its start, so they are resident in the
//! process of each lease: 7 MB. Packed they take 0.1 MB.

use std::{env, process::Command};

/// The first version of glibc that reads packed relocations. A program that has them does not
/// start with an older one.
const GLIBC: (u32, u32) = (2, 36);

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let is_native = env::var("HOST").ok() == env::var("TARGET").ok();
    let is_gnu_linux = env::var("TARGET").is_ok_and(|target| target.ends_with("-linux-gnu"));
    if is_native && is_gnu_linux && glibc_version().is_some_and(|version| version >= GLIBC) {
        println!("cargo:rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}

/// Returns the version of this system's glibc.
fn glibc_version() -> Option<(u32, u32)> {
    let getconf = Command::new("getconf")
        .arg("GNU_LIBC_VERSION")
        .output()
        .ok()?;
    // As in `glibc 2.36`.
    let version = String::from_utf8(getconf.stdout).ok()?;
    let (major, minor) = version.trim().strip_prefix("glibc ")?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}
