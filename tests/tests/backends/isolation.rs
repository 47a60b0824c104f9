//! Drivers that fail, at the start or later.

use std::{process::Command, time::Duration};

use burn::tensor::Tensor;
use tensord_client::LeaseRequest;

use tensord_testkit::host;

/// Returns the available kinds that use a graphics driver.
fn kinds() -> impl Iterator<Item = &'static str> {
    let graphics = ["metal", "vulkan", "webgpu"];
    host::kinds()
        .into_iter()
        .filter(move |kind| graphics.contains(kind))
}

/// Returns the ids of the processes that process `id` has started.
fn children(id: u32) -> Vec<u32> {
    let list = format!("/proc/{id}/task/{id}/children");
    let of_main = std::fs::read_to_string(list).unwrap_or_default();
    // Child processes are listed under the thread that started them.
    let tasks = std::fs::read_dir(format!("/proc/{id}/task"))
        .unwrap()
        .flatten();
    let of_tasks =
        tasks.map(|task| std::fs::read_to_string(task.path().join("children")).unwrap_or_default());
    let all: String = of_tasks.chain([of_main]).map(|ids| ids + " ").collect();
    let mut ids: Vec<_> = all.split_whitespace().flat_map(str::parse).collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

#[test]
#[cfg(target_os = "linux")]
fn driver_crash_affects_no_other_device() {
    for kind in kinds() {
        let mut cluster = host::cluster(&[]);
        cluster.add_worker(&format!("flex,{kind}:0"));
        cluster.wait_for_workers(2);
        let pool = cluster.pool();
        let lease = |kind: &str| pool.lease(LeaseRequest::devices(1).kind(kind)).unwrap();
        let (cpu, gpu) = (lease("flex"), lease(kind));
        let tensor = |lease: &tensord_client::Lease| Tensor::<1>::ones([8], &lease.devices()[0]);
        let (on_cpu, on_gpu) = (tensor(&cpu), tensor(&gpu));
        assert_eq!(on_gpu.clone().sum().into_scalar::<f32>(), 8.0);

        let parent = cluster.workers[0].id();
        let [child] = children(parent)[..] else {
            panic!("{:?}", children(parent));
        };
        let crash = Command::new("kill")
            .args(["-ABRT", &child.to_string()])
            .status();
        assert!(crash.unwrap().success());
        assert!(on_gpu.try_into_data().is_err());
        assert_eq!(on_cpu.sum().into_scalar::<f32>(), 8.0);

        // The crashed process is restarted, and its device can be leased again.
        drop(gpu);
        cluster.wait("the device to come back", || {
            let status = pool.status().unwrap();
            let names = status
                .workers
                .iter()
                .filter(|worker| worker.last_beat < Duration::from_secs(2));
            let named = names.filter(|worker| worker.name.ends_with(&format!("{kind}-0")));
            named.count() == 1 && children(parent).iter().any(|id| *id != child)
        });
        let gpu = lease(kind);
        let again = tensor(&gpu);
        assert_eq!(again.sum().into_scalar::<f32>(), 8.0);
        let log = cluster.workers[0].log();
        assert!(
            log.contains(&format!("the process of {kind}:0 ended unexpectedly")),
            "{log}"
        );
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
