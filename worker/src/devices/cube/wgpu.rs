//! Devices that a graphics API lists.

use burn_cubecl::{
    CubeDevice,
    cubecl::{
        device::{WgpuBackend, WgpuDevice, WgpuDeviceKind},
        wgpu::wgpu::{AdapterInfo, Backend, DeviceType, Instance, InstanceDescriptor},
    },
};
use burn_std::future::block_on;

use super::Candidate;

/// The order in which devices of an API are numbered.
const DEVICE_TYPE_ORDER: [DeviceType; 5] = [
    DeviceType::DiscreteGpu,
    DeviceType::IntegratedGpu,
    DeviceType::VirtualGpu,
    DeviceType::Other,
    DeviceType::Cpu,
];

/// Returns the APIs for a kind of device, the preferred one first, as wgpu's and CubeCL's
/// constants.
fn apis(kind: &str) -> &'static [(Backend, WgpuBackend)] {
    match kind {
        "vulkan" => &[(Backend::Vulkan, WgpuBackend::Vulkan)],
        "metal" => &[(Backend::Metal, WgpuBackend::Metal)],
        _ => &[
            (Backend::Metal, WgpuBackend::Metal),
            (Backend::Vulkan, WgpuBackend::Vulkan),
            (Backend::Dx12, WgpuBackend::Dx12),
            (Backend::Gl, WgpuBackend::Gl),
        ],
    }
}

/// Returns the devices of `kind`, at least one.
pub(super) fn find(kind: &str) -> Result<Vec<Candidate>, String> {
    let lists = apis(kind).iter().map(|(api, pin)| (adapters(*api), *pin));
    let first = lists.into_iter().find(|(list, _)| !list.is_empty());
    let Some((list, pin)) = first else {
        let none = match kind {
            "vulkan" => "no Vulkan driver lists a device; run `vulkaninfo --summary` for details",
            "metal" => "Metal exists only on Apple's systems",
            _ => "no driver for Metal, Vulkan, DirectX 12 or OpenGL lists a device",
        };
        return Err(none.into());
    };
    let mut found: Vec<Candidate> = Vec::new();
    for device_type in DEVICE_TYPE_ORDER {
        let of_type = list.iter().filter(|info| info.device_type == device_type);
        for (index, info) in of_type.enumerate() {
            let device = WgpuDevice::new(device_kind(device_type, index)).on(pin);
            found.push(Candidate {
                device: CubeDevice::Wgpu(device),
                driver: driver(info),
                is_software: device_type == DeviceType::Cpu,
                unusable_reason: unusable_reason(info),
            });
            // CubeCL has only one id for all CPU devices.
            if device_type == DeviceType::Cpu {
                break;
            }
        }
    }
    Ok(found)
}

fn adapters(api: Backend) -> Vec<AdapterInfo> {
    let instance = Instance::new(InstanceDescriptor {
        backends: api.into(),
        ..InstanceDescriptor::new_without_display_handle()
    });
    let adapters = block_on(instance.enumerate_adapters(api.into()));
    adapters.iter().map(|adapter| adapter.get_info()).collect()
}

fn device_kind(device_type: DeviceType, index: usize) -> WgpuDeviceKind {
    match device_type {
        DeviceType::DiscreteGpu => WgpuDeviceKind::DiscreteGpu(index),
        DeviceType::IntegratedGpu => WgpuDeviceKind::IntegratedGpu(index),
        DeviceType::VirtualGpu => WgpuDeviceKind::VirtualGpu(index),
        DeviceType::Other => WgpuDeviceKind::Other(index),
        DeviceType::Cpu => WgpuDeviceKind::Cpu,
    }
}

fn driver(info: &AdapterInfo) -> String {
    let words = [info.driver.as_str(), info.driver_info.as_str()];
    let parts: Vec<_> = words.into_iter().filter(|word| !word.is_empty()).collect();
    match parts.is_empty() {
        true => format!("{:?}", info.backend),
        false => parts.join(" "),
    }
}

/// Returns why a driver must not be used, if a problem is known: Mesa's CPU driver crashes
/// the process when it compiles some matrix products from SPIR-V (seen with 22.3.6 and
/// 25.0.7).
fn unusable_reason(info: &AdapterInfo) -> Option<String> {
    let is_mesa_cpu = info.driver == "llvmpipe" || info.name.starts_with("llvmpipe");
    let as_spirv = cfg!(feature = "vulkan") && info.backend == Backend::Vulkan;
    (is_mesa_cpu && as_spirv).then(|| {
        format!(
            "its driver, {}, is known to crash on SPIR-V kernels, which the feature `vulkan` \
             generates; use a build with `--features webgpu`, which generates WGSL",
            driver(info)
        )
    })
}
