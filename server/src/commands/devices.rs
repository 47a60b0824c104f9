//! `tensord devices`: the devices that this host could offer to a pool.

use std::collections::BTreeMap;

use serde::Serialize;
use tensord_worker::{DeviceFingerprint, FoundDevice, MissingDevice};

use crate::{config::DevicesConfig, failure::Failure, human, stdout, table};

const HEADER: [&str; 5] = ["DEVICE", "NAME", "MEMORY", "DRIVER", "FINGERPRINT"];

/// Columns of numbers, which are aligned right.
const RIGHT: [usize; 1] = [2];

/// The JSON for this host. Programs depend on the field names.
#[derive(Serialize)]
struct HostReport<'a> {
    devices: Vec<Device<'a>>,
    missing: Vec<Missing<'a>>,
}

#[derive(Serialize)]
struct Device<'a> {
    /// The device in the syntax of `--devices`.
    device: String,
    kind: &'a str,
    index: usize,
    name: &'a str,
    memory_bytes: u64,
    driver: &'a str,
    fingerprint: FingerprintReport,
}

/// What the bits of a device's results depend on.
#[derive(Serialize)]
struct FingerprintReport {
    /// In hexadecimal.
    hash: String,
    exact: bool,
    parts: BTreeMap<&'static str, String>,
}

#[derive(Serialize)]
struct Missing<'a> {
    what: &'a str,
    reason: &'a str,
}

/// Looks for devices and prints them.
pub(super) async fn run(config: DevicesConfig) -> Result<(), Failure> {
    let look = tokio::task::spawn_blocking(tensord_worker::discover);
    let look = look.await.map_err(std::io::Error::other);
    let (found, missing) = look.map_err(Failure::system("look for devices"))?;
    stdout::print(&match config.json {
        true => json(&found, &missing),
        false => text(&found, &missing),
    })
}

fn text(found: &[FoundDevice], missing: &[MissingDevice]) -> String {
    let row = |device: &FoundDevice| {
        [
            device.selection.to_string(),
            device.name.clone(),
            human::bytes(device.memory_bytes),
            device.driver.clone(),
            device.fingerprint().to_string(),
        ]
    };
    let mut text = table::text(HEADER, &RIGHT, found.iter().map(row));
    if !missing.is_empty() {
        text.push('\n');
    }
    for missing in missing {
        text.push_str(&format!("{missing}\n"));
    }
    text
}

fn json(found: &[FoundDevice], missing: &[MissingDevice]) -> String {
    let host = HostReport {
        devices: found.iter().map(device).collect(),
        missing: missing.iter().map(absent).collect(),
    };
    stdout::json(&host)
}

fn device(found: &FoundDevice) -> Device<'_> {
    Device {
        device: found.selection.to_string(),
        kind: &found.selection.kind,
        index: found.selection.index,
        name: &found.name,
        memory_bytes: found.memory_bytes,
        driver: &found.driver,
        fingerprint: fingerprint(&found.fingerprint()),
    }
}

fn fingerprint(fingerprint: &DeviceFingerprint) -> FingerprintReport {
    let parts = fingerprint.parts();
    FingerprintReport {
        hash: human::hex(&fingerprint.hash()),
        exact: fingerprint.is_exact(),
        parts: parts
            .map(|(name, value)| (name, value.to_owned()))
            .collect(),
    }
}

fn absent(missing: &MissingDevice) -> Missing<'_> {
    Missing {
        what: &missing.what,
        reason: &missing.reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> (Vec<FoundDevice>, Vec<MissingDevice>) {
        let found = |list, name: &str, gib: u64, driver: &str| FoundDevice {
            selection: tensord_worker::parse_devices(list).unwrap().remove(0),
            name: name.into(),
            memory_bytes: gib << 30,
            driver: driver.into(),
        };
        let missing = MissingDevice {
            what: "rocm device".into(),
            reason: "no ROCm".into(),
        };
        let devices = vec![
            found("flex", "CPU, 8 cores (Burn Flex)", 25, "Burn Flex"),
            found("flex:1", "CPU", 1, "Burn Flex"),
        ];
        (devices, vec![missing])
    }

    #[test]
    fn text_output_is_a_table_with_reasons() {
        let (found, missing) = host();
        let hash = found[0].fingerprint().to_string();
        let expected = format!(
            "\
DEVICE  NAME                        MEMORY  DRIVER     FINGERPRINT
flex:0  CPU, 8 cores (Burn Flex)  25.0 GiB  Burn Flex  {hash}
flex:1  CPU                        1.0 GiB  Burn Flex  {hash}

no rocm device: no ROCm
"
        );
        assert_eq!(text(&found, &missing), expected);
    }

    #[test]
    fn json_output_has_devices_and_reasons() {
        let (found, missing) = host();
        let parsed: serde_json::Value = serde_json::from_str(&json(&found, &missing)).unwrap();
        assert_eq!(parsed["devices"][0]["device"], "flex:0");
        assert_eq!(parsed["devices"][1]["memory_bytes"], 1u64 << 30);
        let fingerprint = &parsed["devices"][0]["fingerprint"];
        assert_eq!(fingerprint["hash"].as_str().map(str::len), Some(32));
        assert_eq!(fingerprint["exact"], true);
        assert!(fingerprint["parts"]["crates"].is_string());
        assert_eq!(parsed["missing"][0]["reason"], "no ROCm");
    }
}
