//! The types of single settings, with their parsers and error messages.
//!
//! A value has the same syntax on the command line, in the environment and in the
//! configuration file, so each type has one parser.

use std::{
    collections::BTreeMap,
    fmt,
    net::{Ipv6Addr, SocketAddr},
    str::FromStr,
    time::Duration,
};

use serde::Deserialize;
use tensord_proto::share::WHOLE_PERMILLE;
use tensord_worker::{DeviceSelection, StoreLocation};
use tracing_subscriber::EnvFilter;

/// Longest name, in bytes: the limit of DNS for host names.
const MAX_NAME_BYTES: usize = 253;

/// Lets a type that implements `FromStr` be deserialized from a TOML string.
macro_rules! from_text {
    ($($name:ident),*) => {$(
        impl TryFrom<String> for $name {
            type Error = String;

            fn try_from(text: String) -> Result<Self, String> {
                text.parse()
            }
        }
    )*};
}

from_text!(
    MemoryOrZero,
    Period,
    Devices,
    Filter,
    Host,
    Listen,
    Memory,
    Name,
    SnapshotStore
);

/// An address to listen on: an IP address of this host and a port, 0 for any free one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Listen(pub(crate) SocketAddr);

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(address) => Ok(Self(address)),
            Err(_) => Err(format!("{text:?} is not IP:PORT, such as 0.0.0.0:7461")),
        }
    }
}

/// The name of a worker, a token, a tenant or a device kind.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Name(pub(crate) String);

impl FromStr for Name {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match is_name(text) {
            true => Ok(Self(text.into())),
            false => Err(format!(
                "{text:?} is not a name of letters, digits and - _ ."
            )),
        }
    }
}

/// A name or address under which other hosts reach this one.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Host(pub(crate) String);

impl FromStr for Host {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match is_name(text) || text.parse::<Ipv6Addr>().is_ok() {
            true => Ok(Self(text.into())),
            false => Err(format!(
                "{text:?} is not a host name or address, such as pool.example or fd00::5; the port is that of --listen"
            )),
        }
    }
}

fn is_name(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    (1..=MAX_NAME_BYTES).contains(&text.len()) && text.chars().all(allowed)
}

/// The devices that a worker offers, such as `flex*2`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Devices(pub(crate) Vec<DeviceSelection>);

impl FromStr for Devices {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match tensord_worker::parse_devices(text) {
            Ok(devices) => Ok(Self(devices)),
            Err(e) => Err(e.to_string()),
        }
    }
}

/// Where a worker keeps snapshots, in addition to memory: a directory or a bucket.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct SnapshotStore(pub(crate) StoreLocation);

impl FromStr for SnapshotStore {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse().map(Self)
    }
}

/// An amount of memory, such as `512MiB` or `16GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Memory {
    pub(crate) size_bytes: u64,
}

impl FromStr for Memory {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unit_at = text
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(text.len());
        let (number, unit) = text.split_at(unit_at);
        let shift = match unit.trim() {
            "KiB" => Some(10),
            "MiB" => Some(20),
            "GiB" => Some(30),
            "TiB" => Some(40),
            _ => None,
        };
        let size_bytes = number
            .parse::<u64>()
            .ok()
            .zip(shift)
            .and_then(|(number, shift)| number.checked_mul(1 << shift))
            .filter(|&bytes| bytes > 0);
        match size_bytes {
            Some(size_bytes) => Ok(Self { size_bytes }),
            None => Err(format!(
                "{text:?} is not an amount of memory, such as 512MiB or 16GiB"
            )),
        }
    }
}

/// A part of a device that a lease has, such as `0.25`; `1` is the whole device.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(try_from = "f64")]
pub(crate) struct Share {
    /// More than 0, and at most 1.
    pub(crate) part: f64,
}

impl Share {
    /// Returns whether it is less than a device.
    pub(crate) fn is_partial(self) -> bool {
        self.part < 1.0
    }
}

impl TryFrom<f64> for Share {
    type Error = String;

    fn try_from(part: f64) -> Result<Self, String> {
        let least = 1.0 / f64::from(WHOLE_PERMILLE);
        let is_share = (least..=1.0).contains(&part);
        is_share
            .then_some(Self { part })
            .ok_or_else(|| no_share(&part.to_string()))
    }
}

impl FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let part = text.parse::<f64>().map_err(|_| no_share(text))?;
        Self::try_from(part).map_err(|_| no_share(text))
    }
}

fn no_share(value: &str) -> String {
    format!("{value:?} is not a share of a device: a number from 0.001 to 1, such as 0.25")
}

/// An amount of memory, or `0` to turn its use off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct MemoryOrZero {
    pub(crate) size_bytes: u64,
}

impl FromStr for MemoryOrZero {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let size_bytes = match text {
            "0" => 0,
            text => text.parse::<Memory>()?.size_bytes,
        };
        Ok(Self { size_bytes })
    }
}

/// Numbers of devices by kind, such as `cuda=4,flex=2`, or `none`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Kinds(pub(crate) BTreeMap<String, u32>);

impl FromStr for Kinds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let entries = entries(text, "cuda=4,flex=2")?;
        let counted = entries.into_iter().map(|(kind, count)| {
            let count = kind_count(&kind, &count)?;
            Ok((kind, count))
        });
        counted.collect::<Result<_, _>>().map(Self)
    }
}

/// A limit of devices by kind, and of their memory, such as `cuda=8,memory=640GiB`, or `none`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceLimit {
    pub(crate) kinds: BTreeMap<String, u32>,
    pub(crate) memory_bytes: Option<u64>,
}

impl FromStr for DeviceLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut limit = Self::default();
        for (name, value) in entries(text, "cuda=8,memory=640GiB")? {
            if name == "memory" {
                limit.memory_bytes = Some(value.parse::<Memory>()?.size_bytes);
            } else {
                let count = kind_count(&name, &value)?;
                limit.kinds.insert(name, count);
            }
        }
        Ok(limit)
    }
}

/// Returns the entries of a list such as `example`, each a name and a value; none for `none`.
fn entries(text: &str, example: &str) -> Result<Vec<(String, String)>, String> {
    if text == "none" {
        return Ok(Vec::new());
    }
    let mut found = Vec::<(String, String)>::new();
    for entry in text.split(',') {
        let wrong = || format!("{text:?} is not a list such as {example}, or none");
        let (name, value) = entry.split_once('=').ok_or_else(wrong)?;
        if !is_name(name) {
            return Err(wrong());
        }
        if found.iter().any(|(known, _)| known == name) {
            return Err(format!("{text:?} has {name} twice"));
        }
        found.push((name.into(), value.into()));
    }
    Ok(found)
}

fn kind_count(kind: &str, count: &str) -> Result<u32, String> {
    let wrong = |_| format!("{count:?} is not a number of devices of kind {kind}, such as 4");
    count.parse().map_err(wrong)
}

/// A duration in whole seconds, from 1 s to a day.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "u64")]
pub(crate) struct Seconds(pub(crate) Duration);

impl TryFrom<u64> for Seconds {
    type Error = String;

    fn try_from(seconds: u64) -> Result<Self, String> {
        match seconds {
            1..=86_400 => Ok(Self(Duration::from_secs(seconds))),
            _ => Err(format!(
                "{seconds} is not a number of seconds from 1 to 86400"
            )),
        }
    }
}

impl FromStr for Seconds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |_| format!("{text:?} is not a number of seconds from 1 to 86400");
        text.parse::<u64>().map_err(wrong)?.try_into()
    }
}

/// A duration with a unit, such as `30s`, `5m`, `1h` or `7d`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Period(pub(crate) Duration);

impl FromStr for Period {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let period = || {
            let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
            let unit_seconds = match unit {
                "s" => 1,
                "m" => 60,
                "h" => 3600,
                "d" => 86_400,
                _ => return None,
            };
            let seconds = number.parse::<u64>().ok()?.checked_mul(unit_seconds)?;
            // More than a hundred years is taken for a typing error.
            (seconds <= 36_500 * 86_400).then_some(Self(Duration::from_secs(seconds)))
        };
        period().ok_or_else(|| format!("{text:?} is not a duration, such as 30s, 5m, 1h or 7d"))
    }
}

/// The number of devices that the demo trains on. It divides the digits of a step evenly.
#[cfg(feature = "demo")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceCount(pub(crate) u32);

#[cfg(feature = "demo")]
impl Default for DeviceCount {
    fn default() -> Self {
        Self(1)
    }
}

#[cfg(feature = "demo")]
impl fmt::Display for DeviceCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(feature = "demo")]
impl FromStr for DeviceCount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let shares = |count: &u32| tensord_demo::DEVICE_COUNTS.contains(count);
        match text.parse().ok().filter(shares) {
            Some(count) => Ok(Self(count)),
            None => Err(format!(
                "the {} digits of a step divide evenly among 1, 2, 4, 8 or 16 devices",
                tensord_demo::BATCH_SIZE
            )),
        }
    }
}

/// A log filter: a level, or levels by target.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Filter(String);

impl Filter {
    /// Returns the filter as the type that the log subscriber takes.
    pub(crate) fn to_env_filter(&self) -> EnvFilter {
        // It logs each attempt of a request; the worker itself logs that its store fails.
        EnvFilter::new(format!("object_store=warn,{}", self.0))
    }
}

impl Default for Filter {
    fn default() -> Self {
        Self("info".into())
    }
}

impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Filter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match EnvFilter::try_new(text) {
            Ok(_) => Ok(Self(text.into())),
            Err(_) => Err(format!(
                "{text:?} is not a log filter, such as debug or warn,tensord=debug"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused<T: FromStr<Err = String> + fmt::Debug>(text: &str) -> String {
        text.parse::<T>().unwrap_err()
    }

    #[test]
    fn a_share_is_a_part_of_a_device() {
        for (text, part) in [("0.25", 0.25), ("0.001", 0.001), ("1", 1.0)] {
            let share: Share = text.parse().unwrap();
            assert_eq!(share, Share { part });
            assert_eq!(Share::try_from(part), Ok(share));
            assert_eq!(share.is_partial(), part < 1.0);
        }
        let rule = "is not a share of a device: a number from 0.001 to 1, such as 0.25";
        for text in ["0", "1.5", "-0.25", "NaN", "25 %", ""] {
            assert_eq!(refused::<Share>(text), format!("{text:?} {rule}"));
        }
        assert_eq!(Share::try_from(1.5).unwrap_err(), format!("\"1.5\" {rule}"));
        assert!(Share::try_from(f64::NAN).is_err());
    }

    #[test]
    fn cache_size_can_be_zero() {
        let bytes = |text: &str| text.parse::<MemoryOrZero>().map(|cache| cache.size_bytes);
        assert_eq!(bytes("0"), Ok(0));
        assert_eq!(bytes("2GiB"), Ok(2 << 30));
        assert!(bytes("none").is_err());
    }

    #[cfg(feature = "demo")]
    #[test]
    fn devices_of_the_demo_share_a_step_evenly() {
        let words = "the 64 digits of a step divide evenly among 1, 2, 4, 8 or 16 devices";
        for count in 0..70 {
            let text = count.to_string();
            match [1, 2, 4, 8, 16].contains(&count) {
                true => assert_eq!(text.parse(), Ok(DeviceCount(count))),
                false => assert_eq!(refused::<DeviceCount>(&text), words),
            }
        }
        assert_eq!(refused::<DeviceCount>("all"), words);
    }

    #[test]
    fn memory_takes_binary_units() {
        let bytes = |text: &str| text.parse::<Memory>().map(|memory| memory.size_bytes);
        assert_eq!(bytes("512MiB"), Ok(512 << 20));
        assert_eq!(bytes("16 GiB"), Ok(16 << 30));
        for wrong in ["", "16", "GiB", "0GiB", "1.5GiB", "16GB", "99999999999TiB"] {
            assert_eq!(
                refused::<Memory>(wrong),
                format!("{wrong:?} is not an amount of memory, such as 512MiB or 16GiB")
            );
        }
    }

    #[test]
    fn an_address_has_a_port() {
        assert_eq!("[::]:0".parse(), Ok(Listen(([0u16; 8], 0).into())));
        assert_eq!(
            refused::<Listen>("0.0.0.0"),
            "\"0.0.0.0\" is not IP:PORT, such as 0.0.0.0:7461"
        );
    }

    #[test]
    fn names_and_hosts_are_safe_to_print_and_to_put_into_a_url() {
        assert_eq!("gpu-1.example".parse(), Ok(Name("gpu-1.example".into())));
        assert_eq!("10.0.0.5".parse(), Ok(Host("10.0.0.5".into())));
        assert_eq!("fd00::5".parse(), Ok(Host("fd00::5".into())));
        for wrong in [
            "",
            "a b",
            "a/b",
            "x@y",
            "\u{1b}[31m",
            "gpu-1:7461",
            "[fd00::5]",
        ] {
            assert_eq!(
                refused::<Name>(wrong),
                format!("{wrong:?} is not a name of letters, digits and - _ .")
            );
            assert_eq!(
                refused::<Host>(wrong),
                format!(
                    "{wrong:?} is not a host name or address, such as pool.example or fd00::5; the port is that of --listen"
                )
            );
        }
    }

    #[test]
    fn a_filter_is_checked_when_it_is_read() {
        assert!("warn,tensord=debug".parse::<Filter>().is_ok());
        assert_eq!(
            refused::<Filter>("tensord=loud"),
            "\"tensord=loud\" is not a log filter, such as debug or warn,tensord=debug"
        );
    }
}
