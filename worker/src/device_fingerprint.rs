//! The fingerprint of a device: what the bits of its results depend on.
//!
//! Two devices with equal fingerprints give every op the same bits if both are
//! [exact](DeviceFingerprint::is_exact). A session can then be computed again on the other one. The
//! version of tensord is not a part: otherwise a session could never be computed again on a worker
//! of another version.
//!
//! An unknown part contains an id of this boot of the host, so that the fingerprints of two hosts
//! with unknown parts differ.

use std::{fmt, fs, path::Path, sync::OnceLock};

use tensord_backend::{ARE_GPUS_EXACT, COMPILER, CUBE_CRATES, FLEX_CRATES};
use tensord_proto::v1;

use crate::devices::{FLEX, FoundDevice};

/// The languages in which this build gives kernels to graphics drivers.
const SHADERS: &str = match (cfg!(feature = "vulkan"), cfg!(feature = "metal")) {
    (true, true) => "WGSL, SPIR-V, MSL",
    (true, false) => "WGSL, SPIR-V",
    (false, true) => "WGSL, MSL",
    (false, false) => "WGSL",
};

/// Bytes of the hash.
pub const HASH_BYTES: usize = 16;

/// Bytes of the hash that people see.
const SHORT_BYTES: usize = 6;

/// What the bits of a device's results depend on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFingerprint {
    parts: Vec<(&'static str, String)>,
    is_exact: bool,
}

impl DeviceFingerprint {
    /// Returns the fingerprint of a device of this host, in a worker of this build.
    pub(crate) fn of(device: &FoundDevice) -> Self {
        let is_flex = device.selection.kind == FLEX;
        let crates = match is_flex {
            true => FLEX_CRATES,
            false => CUBE_CRATES,
        };
        let mut parts = vec![
            ("kind", device.selection.kind.clone()),
            ("crates", known(crates)),
            ("compiler", known(COMPILER)),
            ("instructions", instructions()),
            ("caches", caches()),
            ("libm", libm()),
        ];
        if !is_flex {
            parts.push(("model", device.name.clone()));
            parts.push(("driver", driver(device)));
            parts.push(("shaders", SHADERS.into()));
            if ARE_GPUS_EXACT {
                parts.push(("kernels", "fixed".into()));
            }
        }
        Self {
            parts,
            is_exact: is_flex || ARE_GPUS_EXACT,
        }
    }

    /// Returns the parts, by name.
    pub fn parts(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.parts
            .iter()
            .map(|(name, value)| (*name, value.as_str()))
    }

    /// Returns whether a program gives the same bits each time on devices of this fingerprint: on
    /// `flex`, and on others in a build without the feature `tuning`. With it, the other backends choose
    /// kernels by measurements, fuse ops by what ran before, and add up with atomics.
    pub fn is_exact(&self) -> bool {
        self.is_exact
    }

    /// Returns a hash of the parts, in this order.
    pub fn hash(&self) -> [u8; HASH_BYTES] {
        let mut hasher = blake3::Hasher::new();
        for (name, value) in &self.parts {
            for text in [name, value.as_str()] {
                hasher.update(&(text.len() as u64).to_le_bytes());
                hasher.update(text.as_bytes());
            }
        }
        let mut hash = [0; HASH_BYTES];
        hash.copy_from_slice(&hasher.finalize().as_bytes()[..HASH_BYTES]);
        hash
    }

    /// Returns the fingerprint for the pool.
    pub(crate) fn description(&self) -> v1::DeviceFingerprint {
        v1::DeviceFingerprint {
            hash: self.hash().to_vec().into(),
            is_exact: self.is_exact,
        }
    }
}

/// The first bytes of the hash, in hexadecimal.
impl fmt::Display for DeviceFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut bytes = self.hash().into_iter().take(SHORT_BYTES);
        bytes.try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Returns the name of a device's driver with its version. A driver that does not report its version counts as
/// [`unknown`], as that of another host may have another version. CubeCL's own CPU runtime has no version.
fn driver(device: &FoundDevice) -> String {
    let is_versioned = device.driver.contains(|c: char| c.is_ascii_digit());
    match is_versioned || device.selection.kind == "cpu" {
        true => device.driver.clone(),
        false => unknown(),
    }
}

/// Returns `value`, or [`unknown`] if it is empty.
fn known(value: &str) -> String {
    match value {
        "" => unknown(),
        value => value.into(),
    }
}

/// Returns a text that is the same in all processes of this host until it restarts.
fn unknown() -> String {
    static HOST: OnceLock<String> = OnceLock::new();
    let host = HOST.get_or_init(|| {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id");
        boot.map_or_else(
            |_| format!("{:x}", rand::random::<u128>()),
            |id| id.trim().into(),
        )
    });
    format!("unknown on {host}")
}

/// Returns the instruction sets between which kernels choose while they run.
fn instructions() -> String {
    #[cfg(target_arch = "x86_64")]
    macro_rules! detected {
        ($($name:tt)*) => {
            [$(($name, std::arch::is_x86_feature_detected!($name))),*]
        };
    }
    #[cfg(target_arch = "x86_64")]
    let sets = detected!(
        "sse4.1" "sse4.2" "avx" "avx2" "fma" "f16c" "avx512f" "avx512bw" "avx512cd" "avx512dq"
        "avx512vl" "avx512bf16" "avx512fp16" "avx512vnni" "avxvnni"
    );
    #[cfg(target_arch = "aarch64")]
    let sets = [
        ("neon", std::arch::is_aarch64_feature_detected!("neon")),
        ("fp16", std::arch::is_aarch64_feature_detected!("fp16")),
        ("bf16", std::arch::is_aarch64_feature_detected!("bf16")),
        ("sve", std::arch::is_aarch64_feature_detected!("sve")),
    ];
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let sets: [(&str, bool); 0] = [];
    let has = sets.iter().filter(|(_, has)| *has).map(|(name, _)| *name);
    [std::env::consts::ARCH]
        .into_iter()
        .chain(has)
        .collect::<Vec<_>>()
        .join(" ")
}

/// Returns the sizes of the caches, by which matrix products are cut into blocks.
fn caches() -> String {
    let root = Path::new("/sys/devices/system/cpu/cpu0/cache");
    let read = |index: usize, name: &str| {
        let text = fs::read_to_string(root.join(format!("index{index}")).join(name)).ok()?;
        Some(text.trim().to_owned())
    };
    let cache = |index| {
        let [level, kind, size, ways] =
            ["level", "type", "size", "ways_of_associativity"].map(|name| read(index, name));
        Some(format!("L{} {} {} of {} ways", level?, kind?, size?, ways?))
    };
    let caches: Vec<_> = (0..).map_while(cache).collect();
    known(&caches.join(", "))
}

/// Identifies the mathematical functions of the C library by a hash of their file.
fn libm() -> String {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let path = maps.lines().find_map(|line| {
        let path = line.split_whitespace().nth(5)?;
        let name = Path::new(path).file_name()?.to_str()?;
        (name.starts_with("libm.") || name.starts_with("libm-")).then_some(path)
    });
    let content = path.and_then(|path| fs::read(path).ok());
    match content {
        Some(content) => blake3::hash(&content).to_hex()[..2 * HASH_BYTES].into(),
        None if cfg!(target_env = "musl") => "in the program".into(),
        None => unknown(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::parse_devices;

    fn device(kind: &str, driver: &str) -> FoundDevice {
        FoundDevice {
            selection: parse_devices(kind).unwrap().remove(0),
            name: "a device".into(),
            memory_bytes: 1,
            driver: driver.into(),
        }
    }

    #[test]
    fn what_computes_is_in_the_fingerprint() {
        let fingerprint = DeviceFingerprint::of(&device("flex", "Burn Flex"));
        assert!(fingerprint.is_exact());
        let part = |name| {
            fingerprint
                .parts()
                .find(|(part, _)| *part == name)
                .unwrap()
                .1
        };
        for expected in ["burn-flex 0.22.1", "gemm-common ", "libm "] {
            assert!(part("crates").contains(expected), "{}", part("crates"));
        }
        assert!(
            part("compiler").starts_with("rustc 1."),
            "{}",
            part("compiler")
        );
        assert!(!part("crates").contains("tensord"), "an upgrade changes it");
        #[cfg(target_os = "linux")]
        for name in ["caches", "libm"] {
            assert!(!part(name).starts_with("unknown"), "{name}");
        }
    }

    #[test]
    fn each_part_changes_the_hash() {
        let fingerprint = DeviceFingerprint::of(&device("flex", "Burn Flex"));
        assert_eq!(
            fingerprint,
            DeviceFingerprint::of(&device("flex:1", "another"))
        );
        for index in 0..fingerprint.parts.len() {
            let mut changed = fingerprint.clone();
            changed.parts[index].1.push('1');
            assert_ne!(
                changed.hash(),
                fingerprint.hash(),
                "{:?}",
                changed.parts[index]
            );
        }
        assert_eq!(fingerprint.to_string().len(), 2 * SHORT_BYTES);
    }

    #[test]
    fn unknown_parts_are_never_equal_by_ignorance() {
        assert_eq!(known("x"), "x");
        assert!(known("").len() > "unknown on ".len() + 16, "{}", known(""));
    }

    #[cfg(feature = "webgpu")]
    #[test]
    fn a_driver_without_a_version_is_unknown() {
        let driver = |name| {
            let fingerprint = DeviceFingerprint::of(&device("webgpu", name));
            assert_eq!(fingerprint.is_exact(), ARE_GPUS_EXACT);
            let mut parts = fingerprint.parts();
            parts
                .find(|(part, _)| *part == "driver")
                .unwrap()
                .1
                .to_owned()
        };
        assert_eq!(driver("Mesa 25.0.7"), "Mesa 25.0.7");
        assert!(driver("Mesa").starts_with("unknown"), "{}", driver("Mesa"));
    }
}
