//! Drivers that fail, at the start or later.

use std::process::Command;

use burn::tensor::Tensor;
use tensord_client::{Durability, LeaseRequest};

use tensord_testkit::{cluster::Process, host};

/// Returns the available kinds that use a graphics driver.
fn kinds() -> impl Iterator<Item = &'static str> {
    let graphics = ["metal", "vulkan", "webgpu"];
    host::kinds()
        .into_iter()
        .filter(move |kind| graphics.contains(kind))
}

/// Returns the ids of the processes of `worker` that load a graphics driver.
fn processes_with_a_driver(worker: &Process) -> Vec<u32> {
    let loads = |id: &u32| {
        let maps = std::fs::read_to_string(format!("/proc/{id}/maps")).unwrap_or_default();
        maps.contains("vulkan")
    };
    worker.children().into_iter().filter(loads).collect()
}

#[test]
#[cfg(target_os = "linux")]
fn driver_crash_affects_no_other_device() {
    for kind in kinds() {
        let mut cluster = host::cluster(&[]);
        cluster.add_worker(&format!("flex,{kind}:0"));
        cluster.wait_for_workers(1);
        let pool = cluster.pool();
        let lease = |kind: &str| {
            let request = LeaseRequest::devices(1).kind(kind);
            pool.lease(request.durable(Durability::Off)).unwrap()
        };
        let (cpu, gpu) = (lease("flex"), lease(kind));
        let tensor = |lease: &tensord_client::Lease| Tensor::<1>::ones([8], &lease.devices()[0]);
        let (on_cpu, on_gpu) = (tensor(&cpu), tensor(&gpu));
        assert_eq!(on_gpu.clone().sum().into_scalar::<f32>(), 8.0);

        let worker = &cluster.workers[0];
        let [process] = processes_with_a_driver(worker)[..] else {
            panic!("{:?}", processes_with_a_driver(worker));
        };
        let crash = Command::new("kill")
            .args(["-ABRT", &process.to_string()])
            .status();
        assert!(crash.unwrap().success());
        let error = on_gpu.try_into_data().unwrap_err().to_string();
        assert!(error.contains("SIGABRT"), "{error}");
        assert_eq!(on_cpu.sum().into_scalar::<f32>(), 8.0);

        // The device can be leased again.
        drop(gpu);
        let gpu = lease(kind);
        let again = tensor(&gpu);
        assert_eq!(again.sum().into_scalar::<f32>(), 8.0);
        // The worker itself loads no driver.
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", worker.id())).unwrap();
        assert!(!maps.contains("vulkan"), "{maps}");
    }
}

#[test]
fn missing_device_is_one_line_and_exit_code_69() {
    for kind in kinds() {
        let pin = "0".repeat(64);
        let url = format!("tensord://a-token-nobody-has@127.0.0.1:1?ca=sha256:{pin}");
        let url = [("TENSORD_URL", url.as_str())];
        let output = host::run(&["worker", "--devices", &format!("{kind}:63")], &url);
        let errors = String::from_utf8_lossy(&output.stderr);
        let last = errors.lines().last().unwrap_or_default();
        assert_eq!(output.status.code(), Some(69), "{errors}");
        assert!(
            last.contains(&format!("no {kind}:63: this host has {kind}:0")),
            "{errors}"
        );
    }
}

#[test]
fn auto_reports_skipped_devices() {
    let mut cluster = host::cluster(&[]);
    cluster.add_worker("auto");
    cluster.wait_for_workers(1);
    let status = cluster.pool().status().unwrap();
    let chosen = status.workers[0].devices[0].clone();
    if chosen.kind != "flex" {
        return; // With hardware, `auto` takes the first kind.
    }
    let log = cluster.workers[0].log();
    for kind in kinds() {
        let emulated = format!("no {kind} device: its driver only emulates a device");
        assert!(log.contains(&emulated), "{log}");
    }
}
