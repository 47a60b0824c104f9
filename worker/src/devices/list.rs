//! Parses the list of devices for a worker to offer.

use std::fmt;

use super::{AUTO, KINDS};

/// Maximum number of devices of one worker.
const MAX_DEVICES: usize = 64;

/// A device selected by the user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceSelection {
    /// One of [`KINDS`], or [`AUTO`].
    pub kind: String,
    /// Index among the devices of that kind.
    pub index: usize,
}

/// The error for a device list that is malformed or names an unknown kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{problem}; valid lists are auto, flex*2, and cuda:0,1")]
pub struct DeviceParseError {
    problem: String,
}

/// Parses a device list: `auto`, or kinds separated by commas, each with a count (`flex*2`)
/// or indices (`cuda:0,1`). A kind by itself is its first device.
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
                .map_err(|_| wrong(format!("{digits:?} in {text:?} is not a number")))
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
            kind = part;
            0..1
        };
        if kind == AUTO && text.trim() != AUTO {
            return Err(wrong(format!(
                "{AUTO} in {text:?} cannot be combined with other devices"
            )));
        }
        if kind != AUTO && !KINDS.contains(&kind) {
            return Err(wrong(not_built(kind)));
        }
        if devices.len().saturating_add(indices.len()) > MAX_DEVICES {
            return Err(wrong(format!(
                "{text:?} names more than {MAX_DEVICES} devices"
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

/// Returns the message that this build does not support `kind`, and how to build one that
/// does.
fn not_built(kind: &str) -> String {
    let built = KINDS.join(", ");
    let known = ["cuda", "rocm", "metal", "vulkan", "webgpu", "cpu"].contains(&kind);
    match known {
        true => format!(
            "{kind} devices are not in this build, which has {built}; build tensord with `--features {kind}`"
        ),
        false => format!("{kind:?} is not a device kind of this build, which has {built}"),
    }
}

impl DeviceSelection {
    /// Returns whether opening the device may load a driver: true for all kinds but Flex.
    #[cfg(target_os = "linux")]
    pub(crate) fn has_driver(&self) -> bool {
        self.kind != super::FLEX
    }
}

impl fmt::Display for DeviceSelection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind.as_str() {
            AUTO => f.write_str(AUTO),
            kind => write!(f, "{kind}:{}", self.index),
        }
    }
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
    fn device_lists_are_parsed() {
        assert_eq!(parsed("flex"), ["flex:0"]);
        assert_eq!(parsed("auto"), ["auto"]);
        assert_eq!(parsed("flex*3"), ["flex:0", "flex:1", "flex:2"]);
        assert_eq!(parsed("flex:0,2, 5"), ["flex:0", "flex:2", "flex:5"]);
        assert_eq!(parsed("flex*2,flex*1"), ["flex:0", "flex:1", "flex:2"]);
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn error_for_a_missing_kind_names_the_feature() {
        let error = parse_devices("cuda:0").unwrap_err().to_string();
        assert!(
            error.starts_with("cuda devices are not in this build, which has "),
            "{error}"
        );
        assert!(error.contains("`--features cuda`"), "{error}");
    }

    #[test]
    fn errors_name_what_is_wrong() {
        let cases = [
            ("", "\"\" is not a device kind"),
            (
                "tpu:0",
                "\"tpu\" is not a device kind of this build, which has",
            ),
            ("auto,flex", "auto in \"auto,flex\" cannot be combined"),
            ("auto*2", "auto in \"auto*2\" cannot be combined"),
            ("flex*x", "\"x\" in \"flex*x\" is not a number"),
            ("flex*0", "names no device"),
            ("flex*99999999999999999999", "is not a number"),
            ("flex*18446744073709551615", "more than 64 devices"),
            ("flex:0,0", "flex:0 is named twice"),
        ];
        for (text, expected) in cases {
            let error = parse_devices(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
