//! Lists the host's devices in a separate process, so that a driver's crash does not end the
//! worker.

use std::time::Duration;

use tensord_proto::text::{MESSAGE_CHARS, sanitize};
use tokio::time::timeout;
use tracing::{info, warn};

use super::{
    lease_cgroups::LeaseCgroups,
    process::{Process, Spawner},
};
use crate::{
    devices::{DeviceSelection, FoundDevice, MissingDevice},
    options::ProcessProgram,
    process_message::{Describe, DeviceName, Event, Task},
    start::StartError,
};

/// How long the drivers may take to list the devices.
const DESCRIBE_DEADLINE: Duration = Duration::from_secs(60);

/// The devices of the host as a process has found them.
pub(crate) struct Described {
    pub(crate) found: Vec<FoundDevice>,
    pub(crate) missing: Vec<MissingDevice>,
    pub(super) spawner: Spawner,
}

/// Has a process open the devices of `selections`, as a driver may crash. CPU devices share
/// the host's memory; `memory_bytes` replaces the memory size of each device.
///
/// # Errors
///
/// When no process can be started, or it fails.
pub(crate) async fn describe(
    program: ProcessProgram,
    selections: &[DeviceSelection],
    memory_bytes: Option<u64>,
) -> Result<Described, StartError> {
    // Before the first process, as in version 2 the worker's group must have no processes before
    // its children may have limits.
    let cgroups = match LeaseCgroups::prepare() {
        Ok(cgroups) => Some(cgroups),
        Err(lacking) => {
            info!(
                "the memory of leases' processes is not bounded by the kernel: this worker lacks {lacking}; see docs/security.md"
            );
            None
        }
    };
    let spawner = Spawner::start(program, cgroups)?;
    let failed = |reason: String| StartError::Process(reason);
    let process = Process::start(&spawner).await;
    let mut process = process.map_err(|e| failed(e.to_string()))?;
    let describe = Describe {
        devices: selections.iter().map(DeviceName::from).collect(),
        memory_bytes,
    };
    process
        .send(Task::Describe(describe), None)
        .await
        .map_err(|e| failed(e.to_string()))?;
    let described = match timeout(DESCRIBE_DEADLINE, process.recv()).await {
        Ok(Some(Event::Described(described))) => described,
        Ok(_) => {
            let how = process.exit().await;
            return Err(failed(format!("the process that lists them ended: {how}")));
        }
        Err(_) => {
            return Err(failed(format!(
                "the drivers did not list their devices within {DESCRIBE_DEADLINE:?}"
            )));
        }
    };
    let found = described.found.into_iter().map(|device| FoundDevice {
        selection: device.name.into(),
        name: device.model,
        memory_bytes: device.memory_bytes,
        driver: device.driver,
    });
    for lacking in &described.lacking {
        let lacking = sanitize(lacking, MESSAGE_CHARS);
        warn!(
            "the processes of leases are confined less, as this host's kernel lacks or refuses: {lacking}; see docs/security.md"
        );
    }
    let missing = described.missing.into_iter().map(|missing| MissingDevice {
        what: missing.what,
        reason: missing.reason,
    });
    Ok(Described {
        found: found.collect(),
        missing: missing.collect(),
        spawner,
    })
}
