//! Devices of CubeCL's runtimes. Drivers are loaded at run time, so on a host without a
//! driver this code reports the missing driver and does not fail to start.

#[cfg(feature = "wgpu")]
mod wgpu;

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
};

use burn_cubecl::{
    CubeDevice,
    cubecl::{
        config::{CubeClRuntimeConfig, RuntimeConfig, cache::CacheConfig},
        device::{AmdDevice, CpuDevice, CudaDevice},
    },
};
use tensord_backend::{CustomOps, cube_device, panic_message};

use super::{DEVICE_MEMORY_FRACTION, DeviceSelection, FoundDevice, OpenedDevice};

/// A device that a driver lists.
pub(super) struct Candidate {
    device: CubeDevice,
    /// Name of the driver, with the version if it is known.
    driver: String,
    /// Whether the device is emulated in software.
    pub(super) is_software: bool,
    /// Why the device must not be opened, if it must not.
    unusable_reason: Option<String>,
}

/// Sets `cache` as the directory for compiled kernels and tuning results, unless the user's
/// `cubecl.toml` or `burn.toml` sets one. `None` disables the cache of tuning results.
pub(super) fn configure(cache: Option<&Path>) {
    if let Some(cache) = cache {
        // CubeCL reports an error if it cannot write there.
        let _ = private_directory(cache);
    }
    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    match cache {
        Some(cache) if matches!(config.environment.path, CacheConfig::Target) => {
            config.environment.path = CacheConfig::Directory(cache.into());
        }
        Some(_) => {}
        None => config.autotune.disable_cache = true,
    }
    // An error means that an earlier worker in this process has set it.
    let _ = CubeClRuntimeConfig::try_set(config);
}

/// Creates a directory that only its owner can access.
fn private_directory(path: &Path) -> std::io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

/// Returns the devices of `kind`, at least one.
///
/// # Errors
///
/// If there is none: the reason.
pub(super) fn find(kind: &str) -> Result<Vec<Candidate>, String> {
    let found = catch_unwind(AssertUnwindSafe(|| match kind {
        "cuda" => list_devices(
            CubeDevice::Cuda(CudaDevice::new(0)),
            &cuda_driver(),
            "the NVIDIA driver (libcuda.so) is missing or has no device; run `nvidia-smi` for details",
        ),
        "rocm" => list_devices(
            CubeDevice::Hip(AmdDevice::new(0)),
            "HIP",
            "ROCm (libamdhip64.so) is missing or has no device; run `rocminfo` for details",
        ),
        "cpu" => list_devices(
            CubeDevice::Cpu(CpuDevice),
            "CubeCL CPU",
            "CubeCL was built without its CPU runtime",
        ),
        #[cfg(feature = "wgpu")]
        _ => wgpu::find(kind),
        #[cfg(not(feature = "wgpu"))]
        _ => Err("it is not in this build".into()),
    }));
    found.unwrap_or_else(|panic| Err(format!("the driver failed: {}", text(panic.as_ref()))))
}

/// Returns all devices of the same type as `first`, as the runtime lists them, or the error
/// `none` if there are none.
fn list_devices(first: CubeDevice, driver: &str, none: &str) -> Result<Vec<Candidate>, String> {
    let ids = CubeDevice::enumerate(first.to_id());
    let candidate = |id| Candidate {
        device: CubeDevice::from_id(id),
        driver: driver.into(),
        is_software: false,
        unusable_reason: None,
    };
    let found: Vec<_> = ids.into_iter().map(candidate).collect();
    match found.is_empty() {
        true => Err(none.into()),
        false => Ok(found),
    }
}

/// Returns the name of NVIDIA's driver, with the version if Linux reports one.
fn cuda_driver() -> String {
    let version_file = std::fs::read_to_string("/sys/module/nvidia/version");
    version_file.map_or("NVIDIA".into(), |version| {
        format!("NVIDIA {}", version.trim())
    })
}

impl Candidate {
    /// Opens the device. `share` is its share of the host's memory in bytes, used if the
    /// device has no memory of its own or is emulated.
    pub(super) fn open(
        &self,
        selection: &DeviceSelection,
        share: u64,
        custom_ops: &CustomOps,
    ) -> Result<OpenedDevice, String> {
        if let Some(unusable_reason) = &self.unusable_reason {
            return Err(unusable_reason.clone());
        }
        let client = catch_unwind(AssertUnwindSafe(|| self.device.client()));
        let client = client.map_err(|panic| {
            let driver = &self.driver;
            format!(
                "{driver} could not open the device: {}",
                text(panic.as_ref())
            )
        })?;
        let properties = client.properties();
        let own = properties.memory.max_memory();
        let memory_bytes = own.map_or(share, |bytes| {
            (bytes as f64 * DEVICE_MEMORY_FRACTION) as u64
        });
        Ok(OpenedDevice {
            device: cube_device(self.device.clone(), custom_ops),
            found: FoundDevice {
                selection: selection.clone(),
                name: properties.identity.name.clone(),
                memory_bytes: match self.is_software {
                    true => share.min(memory_bytes),
                    false => memory_bytes,
                },
                driver: self.driver.clone(),
            },
        })
    }
}

/// Returns the message of a panic on one line.
fn text(panic: &(dyn Any + Send)) -> String {
    panic_message(panic)
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
}
