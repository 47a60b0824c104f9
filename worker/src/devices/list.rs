//! Which devices this host offers: what was asked for, what there is.

use std::{fmt, sync::Arc};

use burn_flex::{Flex, FlexDevice};
use sysinfo::{MemoryRefreshKind, RefreshKind, System};
use tensord_proto::v1;

use crate::backend::{BurnDevice, Device};

/// Device kinds that this build can run.
pub const KINDS: &[&str] = &["flex"];

/// Most devices of one worker.
const MAX_DEVICES: usize = 64;

/// Share of the host's memory that CPU devices offer: the rest is for the
/// system, the wire and what the accounting does not see.
const HOST_SHARE: f64 = 0.8;

/// One device asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceSelection {
    /// One of [`KINDS`].
    pub kind: String,
    /// Which of that kind.
    pub index: usize,
}

/// Why a device list cannot be served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{problem}; a right one is flex*2, auto, or flex:0,1")]
pub struct DeviceParseError {
    problem: String,
}

/// Reads a device list: `auto`, or kinds separated by commas, each with a count
/// (`flex*2`) or indices (`cuda:0,1`).
///
/// # Errors
///
/// When the list is malformed or names a kind that is not built in.
pub fn parse_devices(text: &str) -> Result<Vec<DeviceSelection>, DeviceParseError> {
    let wrong = |problem: String| DeviceParseError { problem };
    let mut devices: Vec<DeviceSelection> = Vec::new();
    let mut kind = "";
    for part in text.split(',').map(str::trim) {
        let number = |digits: &str| {
            digits
                .parse::<usize>()
                .map_err(|_| wrong(format!("{digits:?} in {text:?} is no number")))
        };
        let indices = if let Some((name, count)) = part.split_once('*') {
            kind = name;
            let first = devices.iter().filter(|d| d.kind == kind).count();
            first..first.saturating_add(number(count)?)
        } else if let Some((name, index)) = part.split_once(':') {
            kind = name;
            let index = number(index)?;
            index..index.saturating_add(1)
        } else if !kind.is_empty() && part.starts_with(|c: char| c.is_ascii_digit()) {
            let index = number(part)?;
            index..index.saturating_add(1)
        } else {
            kind = if part == "auto" { KINDS[0] } else { part };
            0..1
        };
        if !KINDS.contains(&kind) {
            let built = KINDS.join(", ");
            return Err(wrong(format!(
                "{kind:?} is not a device kind of this build, which has {built}"
            )));
        }
        if devices.len().saturating_add(indices.len()) > MAX_DEVICES {
            return Err(wrong(format!(
                "{text:?} is more than {MAX_DEVICES} devices"
            )));
        }
        for index in indices {
            let device = DeviceSelection {
                kind: kind.into(),
                index,
            };
            if devices.contains(&device) {
                return Err(wrong(format!("{device} is named twice in {text:?}")));
            }
            devices.push(device);
        }
    }
    if devices.is_empty() {
        return Err(wrong(format!("{text:?} names no device")));
    }
    Ok(devices)
}

impl fmt::Display for DeviceSelection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kind, self.index)
    }
}

/// A device ready for sessions.
pub(crate) struct OpenedDevice {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) description: v1::Device,
}

/// Opens the devices of `selections`. CPU devices share what memory there is,
/// or `memory_bytes` each where that is given.
pub(crate) fn open(selections: &[DeviceSelection], memory_bytes: Option<u64>) -> Vec<OpenedDevice> {
    let share = || host_memory() / selections.len().max(1) as u64;
    let memory_bytes = memory_bytes.unwrap_or_else(share);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let opened = |selection: &DeviceSelection| OpenedDevice {
        device: BurnDevice::<Flex>::shared(FlexDevice),
        description: v1::Device {
            kind: selection.kind.clone(),
            name: format!("CPU, {cores} cores (Burn Flex)"),
            memory_bytes,
        },
    };
    selections.iter().map(opened).collect()
}

fn host_memory() -> u64 {
    let what = RefreshKind::nothing().with_memory(MemoryRefreshKind::nothing().with_ram());
    (System::new_with_specifics(what).total_memory() as f64 * HOST_SHARE) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Vec<String> {
        parse_devices(text)
            .unwrap()
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn lists_are_understood() {
        assert_eq!(parsed("flex"), ["flex:0"]);
        assert_eq!(parsed("auto"), ["flex:0"]);
        assert_eq!(parsed("flex*3"), ["flex:0", "flex:1", "flex:2"]);
        assert_eq!(parsed("flex:0,2, 5"), ["flex:0", "flex:2", "flex:5"]);
        assert_eq!(parsed("flex*2,flex*1"), ["flex:0", "flex:1", "flex:2"]);
    }

    #[test]
    fn errors_name_what_is_wrong() {
        let cases = [
            ("", "\"\" is not a device kind"),
            (
                "cuda:0",
                "\"cuda\" is not a device kind of this build, which has flex",
            ),
            ("flex*x", "\"x\" in \"flex*x\" is no number"),
            ("flex*0", "names no device"),
            ("flex*99999999999999999999", "is no number"),
            ("flex*18446744073709551615", "more than 64 devices"),
            ("flex:0,0", "flex:0 is named twice"),
        ];
        for (text, expected) in cases {
            let error = parse_devices(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
