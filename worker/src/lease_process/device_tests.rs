//! Opens devices for a short time: to describe them, or to test one.

use std::collections::BTreeMap;

use tokio::runtime::Handle;

use super::confinement::{Lacking, Needs, restrict_to};
use crate::{
    device_slot,
    devices::{self, DeviceSelection, OpenedDevice, resolve_devices},
    process_message::{
        Describe, Described, DescribedDevice, DeviceName, Empty, Event, Missing, OfferedDevice,
    },
};
use tensord_backend::CustomOps;

/// Opens the devices, and reports which can be opened, and what the kernel lacks to confine
/// processes. `calls` is the result of restricting this process's system calls.
pub(super) async fn describe_devices(
    describe: Describe,
    custom_ops: &CustomOps,
    calls: Result<Lacking, String>,
) -> Event {
    let names = describe.devices.into_iter();
    let selections: Vec<_> = names.map(DeviceSelection::from).collect();
    let resolving = tokio::task::spawn_blocking(move || resolve_devices(&selections));
    let selections = resolving.await.unwrap_or_default();
    let (opened, missing) = open(selections, describe.memory_bytes, custom_ops).await;
    let found = opened.into_iter().map(|device| DescribedDevice {
        name: DeviceName::from(&device.found.selection),
        model: device.found.name,
        memory_bytes: device.found.memory_bytes,
        driver: device.found.driver,
    });
    let missing = missing.into_iter().map(|missing| Missing {
        what: missing.what,
        reason: missing.reason,
    });
    Event::Described(Described {
        found: found.collect(),
        missing: missing.collect(),
        lacking: lacking_protections(calls),
    })
}

/// Returns the protections that this host's kernel lacks, or refuses. A thread finds out that
/// restricts its own files.
fn lacking_protections(calls: Result<Lacking, String>) -> Vec<String> {
    let has_filters = calls == Ok(None);
    let trying = std::thread::spawn(move || restrict_to(&Needs::default(), has_filters));
    let files = trying.join().unwrap_or(Ok(None));
    let lacking = |result: Result<Lacking, String>| match result {
        Ok(lacking) => lacking.map(str::to_owned),
        Err(reason) => Some(reason),
    };
    [files, calls].into_iter().filter_map(lacking).collect()
}

/// Opens a device and runs a test op on it.
pub(super) async fn probe_device(device: OfferedDevice, custom_ops: &CustomOps) -> Event {
    let opened = match open_offered(&[device], custom_ops).await {
        Ok(opened) => opened,
        Err(reason) => return Event::Failed(reason),
    };
    let probing = tokio::task::spawn_blocking(move || {
        let mut devices = opened.into_values();
        devices.try_for_each(|opened| device_slot::run_probe(&*opened.device, &Handle::current()))
    });
    match probing.await {
        Ok(Ok(())) => Event::Passed(Empty {}),
        Ok(Err(reason)) => Event::Failed(reason),
        Err(e) => Event::Failed(e.to_string()),
    }
}

/// Opens devices on a thread that may block, as loading a driver may take long.
async fn open(
    selections: Vec<DeviceSelection>,
    memory_bytes: Option<u64>,
    custom_ops: &CustomOps,
) -> (Vec<OpenedDevice>, Vec<devices::MissingDevice>) {
    let custom_ops = custom_ops.clone();
    let opening =
        tokio::task::spawn_blocking(move || devices::open(&selections, memory_bytes, &custom_ops));
    opening.await.unwrap_or_else(|e| {
        let missing = devices::MissingDevice {
            what: "device".into(),
            reason: e.to_string(),
        };
        (Vec::new(), vec![missing])
    })
}

/// Opens all of `offered`, with their memory limits. Returns them by their indices on the
/// worker.
pub(super) async fn open_offered(
    offered: &[OfferedDevice],
    custom_ops: &CustomOps,
) -> Result<BTreeMap<u32, OpenedDevice>, String> {
    let selections = offered.iter().map(|device| device.name.clone().into());
    // With a limit, the memory of the host need not be known.
    let limit = offered.first().map(|device| device.memory_bytes);
    let (opened, missing) = open(selections.collect(), limit, custom_ops).await;
    if let Some(missing) = missing.first() {
        return Err(missing.to_string());
    }
    let with_limit = |(offered, mut opened): (&OfferedDevice, OpenedDevice)| {
        opened.found.memory_bytes = offered.memory_bytes;
        (offered.index, opened)
    };
    Ok(offered.iter().zip(opened).map(with_limit).collect())
}

impl From<DeviceName> for DeviceSelection {
    fn from(name: DeviceName) -> Self {
        Self {
            kind: name.kind,
            index: name.index as usize,
        }
    }
}

impl From<&DeviceSelection> for DeviceName {
    fn from(selection: &DeviceSelection) -> Self {
        Self {
            kind: selection.kind.clone(),
            index: selection.index as u32,
        }
    }
}
