//! Finds and opens the devices that this host offers, and reports which are missing and
//! why.

#[cfg(feature = "cube")]
mod cube;
mod list;

use std::{path::Path, sync::Arc};

use sysinfo::{MemoryRefreshKind, RefreshKind, System};
use tensord_backend::{CustomOps, Device, flex_device};
use tensord_proto::v1;
use tracing::warn;

pub use self::list::{DeviceParseError, DeviceSelection, parse_devices};
use crate::{cgroup, device_fingerprint::DeviceFingerprint};

/// Device kinds that this build supports, in the order in which `auto` prefers them.
pub const KINDS: &[&str] = &[
    #[cfg(feature = "cuda")]
    "cuda",
    #[cfg(feature = "rocm")]
    "rocm",
    #[cfg(feature = "metal")]
    "metal",
    #[cfg(any(feature = "vulkan", feature = "webgpu"))]
    "vulkan",
    #[cfg(feature = "webgpu")]
    "webgpu",
    #[cfg(feature = "cpu")]
    "cpu",
    FLEX,
];

/// The kind that lets the worker choose: all devices of the first kind that has hardware,
/// or one CPU device.
pub const AUTO: &str = "auto";

/// The kind that is available on every host.
pub(crate) const FLEX: &str = "flex";

/// Share of the host's or container's memory that CPU devices offer. The rest is for the
/// system, the network and memory outside the accounting.
const HOST_MEMORY_FRACTION: f64 = 0.8;

/// Share of a device's own memory that is offered. The rest is for kernels, the runtime's
/// buffers, and fragmentation of its pools.
#[cfg(feature = "cube")]
const DEVICE_MEMORY_FRACTION: f64 = 0.95;

/// A device of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundDevice {
    /// The selection that names this device.
    pub selection: DeviceSelection,
    /// The name that the manufacturer gives the device.
    pub name: String,
    /// Memory for sessions, in bytes.
    pub memory_bytes: u64,
    /// Name of the driver, with the version.
    pub driver: String,
}

/// A device, or a whole kind of devices, that is missing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no {what}: {reason}")]
pub struct MissingDevice {
    /// The device or kind that is missing.
    pub what: String,
    /// The reason, and which devices exist instead.
    pub reason: String,
}

/// A device ready for sessions.
pub(crate) struct OpenedDevice {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) found: FoundDevice,
}

impl FoundDevice {
    /// Returns what the bits of the device's results depend on, in a worker of this build.
    pub fn fingerprint(&self) -> DeviceFingerprint {
        DeviceFingerprint::of(self)
    }

    /// Returns the description of the device for the pool.
    pub(crate) fn description(&self) -> v1::Device {
        v1::Device {
            kind: self.selection.kind.clone(),
            name: self.name.clone(),
            memory_bytes: self.memory_bytes,
            fingerprint: Some(self.fingerprint().description()),
        }
    }
}

/// Configures where the runtimes cache kernels and tuning results. It has an effect only
/// before the first device is opened.
pub(crate) fn configure(kernel_cache: Option<&Path>) {
    #[cfg(feature = "cube")]
    cube::configure(kernel_cache);
    #[cfg(not(feature = "cube"))]
    let _ = kernel_cache;
}

/// Returns every device on this host that this build supports, and the kinds and devices
/// that are missing.
pub fn discover() -> (Vec<FoundDevice>, Vec<MissingDevice>) {
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for kind in KINDS {
        let mut candidates = Candidates::default();
        match candidates.count(kind) {
            Err(reason) => missing.push(missing_kind(kind, reason)),
            Ok(count) => {
                let all: Vec<_> = (0..count).map(|index| selection(kind, index)).collect();
                let (opened, failed) = candidates.open_all(&all, None, &CustomOps::new());
                found.extend(opened.into_iter().map(|device| device.found));
                missing.extend(failed);
            }
        }
    }
    (found, missing)
}

/// Resolves `selections` on this host. They are returned unchanged unless they are
/// [`AUTO`]; then the drivers are queried, which takes a moment, and the log names the
/// kinds without a device, with the reasons.
pub fn resolve_devices(selections: &[DeviceSelection]) -> Vec<DeviceSelection> {
    match selections {
        [one] if one.kind == AUTO => {
            let (resolve_devices, missing) = choose_auto(&mut Candidates::default());
            for missing in missing {
                warn!("{missing}");
            }
            resolve_devices
        }
        _ => selections.to_vec(),
    }
}

/// Opens the devices of `selections`, which were resolved by [`resolve_devices`], and returns those
/// that were opened and those that were not. CPU devices share the host's memory.
/// `memory_bytes` replaces the memory size of each device.
pub(crate) fn open(
    selections: &[DeviceSelection],
    memory_bytes: Option<u64>,
    custom_ops: &CustomOps,
) -> (Vec<OpenedDevice>, Vec<MissingDevice>) {
    Candidates::default().open_all(selections, memory_bytes, custom_ops)
}

/// Returns the devices that `auto` selects, and the preferred kinds without a device.
fn choose_auto(candidates: &mut Candidates) -> (Vec<DeviceSelection>, Vec<MissingDevice>) {
    let mut missing = Vec::new();
    for kind in KINDS.iter().filter(|kind| !["cpu", FLEX].contains(kind)) {
        match candidates.count(kind) {
            Ok(count) => {
                let hardware = (0..count).filter(|index| candidates.is_hardware(kind, *index));
                let hardware: Vec<_> = hardware.map(|index| selection(kind, index)).collect();
                if !hardware.is_empty() {
                    return (hardware, missing);
                }
                let reason = "its driver only emulates a device, and auto skips emulated devices";
                missing.push(missing_kind(kind, reason.into()));
            }
            Err(reason) => missing.push(missing_kind(kind, reason)),
        }
    }
    (vec![selection(FLEX, 0)], missing)
}

fn missing_kind(kind: &str, reason: String) -> MissingDevice {
    let what = format!("{kind} device");
    MissingDevice { what, reason }
}

fn selection(kind: &str, index: usize) -> DeviceSelection {
    let kind = kind.into();
    DeviceSelection { kind, index }
}

/// The devices of each kind, queried once.
#[derive(Default)]
struct Candidates {
    #[cfg(feature = "cube")]
    cube: std::collections::HashMap<String, Result<Vec<cube::Candidate>, String>>,
}

impl Candidates {
    /// Returns the number of devices of `kind`, or why there are none.
    fn count(&mut self, kind: &str) -> Result<usize, String> {
        match kind {
            FLEX => Ok(1),
            #[cfg(feature = "cube")]
            _ => self.cube(kind).map(<[_]>::len),
            #[cfg(not(feature = "cube"))]
            _ => Err(format!("{kind} is not in this build")),
        }
    }

    #[cfg(feature = "cube")]
    fn cube(&mut self, kind: &str) -> Result<&[cube::Candidate], String> {
        let found = self.cube.entry(kind.into());
        let found = found.or_insert_with(|| cube::find(kind));
        found.as_deref().map_err(Clone::clone)
    }

    /// Returns whether the device is hardware, not an emulation.
    #[cfg_attr(not(feature = "cube"), expect(unused_variables, clippy::unused_self))]
    fn is_hardware(&mut self, kind: &str, index: usize) -> bool {
        #[cfg(feature = "cube")]
        if let Ok(found) = self.cube(kind) {
            return found.get(index).is_some_and(|device| !device.is_software);
        }
        false
    }

    fn open_all(
        &mut self,
        selections: &[DeviceSelection],
        memory_bytes: Option<u64>,
        custom_ops: &CustomOps,
    ) -> (Vec<OpenedDevice>, Vec<MissingDevice>) {
        let share = memory_bytes.unwrap_or_else(|| {
            let offered = (host_memory() as f64 * HOST_MEMORY_FRACTION) as u64;
            offered / selections.len().max(1) as u64
        });
        let (mut opened, mut missing) = (Vec::new(), Vec::new());
        for selection in selections {
            match self.open(selection, share, custom_ops) {
                Ok(mut device) => {
                    if let Some(memory_bytes) = memory_bytes {
                        device.found.memory_bytes = memory_bytes;
                    }
                    opened.push(device);
                }
                Err(reason) => missing.push(MissingDevice {
                    what: selection.to_string(),
                    reason,
                }),
            }
        }
        (opened, missing)
    }

    fn open(
        &mut self,
        selection: &DeviceSelection,
        share: u64,
        custom_ops: &CustomOps,
    ) -> Result<OpenedDevice, String> {
        if selection.kind == FLEX {
            return Ok(flex(selection, share, custom_ops));
        }
        let count = self.count(&selection.kind)?;
        if selection.index >= count {
            let there: Vec<_> = (0..count)
                .map(|index| format!("{}:{index}", selection.kind))
                .collect();
            return Err(format!("this host has {}", there.join(", ")));
        }
        #[cfg(feature = "cube")]
        return self.cube(&selection.kind)?[selection.index].open(selection, share, custom_ops);
        #[cfg(not(feature = "cube"))]
        unreachable!("only flex is in this build");
    }
}

fn flex(selection: &DeviceSelection, share: u64, custom_ops: &CustomOps) -> OpenedDevice {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    OpenedDevice {
        device: flex_device(custom_ops),
        found: FoundDevice {
            selection: selection.clone(),
            name: format!("CPU, {cores} cores (Burn Flex)"),
            memory_bytes: share,
            driver: "Burn Flex".into(),
        },
    }
}

/// Returns the memory that this process may use in bytes: the host's, or its container's if
/// that is less.
pub(crate) fn host_memory() -> u64 {
    let what = RefreshKind::nothing().with_memory(MemoryRefreshKind::nothing().with_ram());
    let host = System::new_with_specifics(what).total_memory();
    cgroup::memory_limit().map_or(host, |limit| host.min(limit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flex_devices_share_the_memory_of_the_host() {
        let asked = parse_devices("flex*4").unwrap();
        let (opened, missing) = open(&asked, None, &CustomOps::new());
        assert_eq!(missing, []);
        let memory: u64 = opened.iter().map(|device| device.found.memory_bytes).sum();
        assert!(memory <= host_memory() && memory > host_memory() / 2);
        let (opened, _) = open(&asked, Some(1 << 20), &CustomOps::new());
        assert!(
            opened
                .iter()
                .all(|device| device.found.memory_bytes == 1 << 20)
        );
    }

    #[test]
    fn auto_selects_at_least_one_device() {
        let resolve_devices = resolve_devices(&parse_devices("auto").unwrap());
        let (opened, _) = open(&resolve_devices, None, &CustomOps::new());
        assert!(!opened.is_empty());
    }

    #[test]
    fn every_device_of_the_host_can_be_selected() {
        let (found, _) = discover();
        assert!(
            found
                .iter()
                .any(|device| device.selection == selection(FLEX, 0))
        );
        for device in found {
            let (opened, missing) = open(
                std::slice::from_ref(&device.selection),
                None,
                &CustomOps::new(),
            );
            assert_eq!((opened.len(), missing), (1, vec![]));
        }
    }
}
