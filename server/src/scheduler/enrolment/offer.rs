//! What a worker may offer by its enrolment: for each kind of device, the number and the
//! largest memory.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};
use tensord_scheduler::DeviceSpec;

use crate::human;

/// Limits on a worker's device kinds: their number, and the length of a kind's name in
/// bytes. Real workers have fewer kinds with shorter names. The limits bound the size of
/// the file of enrolled workers.
const MAX_KINDS: usize = 8;
const MAX_KIND_BYTES: usize = 32;

/// The maximum that a worker may offer of each kind of device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Offer(BTreeMap<String, KindLimit>);

/// The limits for one kind of device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KindLimit {
    /// The number of devices.
    pub(crate) count: u32,
    /// The memory of the largest device, in bytes.
    pub(crate) memory_bytes: u64,
}

impl Offer {
    /// Returns the offer of a worker with these `devices`, or an error that names the rule
    /// they break.
    pub(crate) fn of(devices: &[DeviceSpec]) -> Result<Self, String> {
        let mut offer = BTreeMap::<String, KindLimit>::new();
        for device in devices {
            let most = offer.entry(device.kind.clone()).or_default();
            most.count = most.count.saturating_add(1);
            most.memory_bytes = most.memory_bytes.max(device.memory_bytes);
        }
        if offer.len() > MAX_KINDS {
            let kinds = offer.len();
            return Err(format!(
                "the worker has {kinds} kinds of devices; the limit is {MAX_KINDS}"
            ));
        }
        match offer.keys().find(|kind| kind.len() > MAX_KIND_BYTES) {
            Some(kind) => Err(format!(
                "the device kind {kind:?} is longer than {MAX_KIND_BYTES} bytes"
            )),
            None => Ok(Self(offer)),
        }
    }

    /// Returns a description of the first part of this offer that exceeds `enrolled`, if
    /// any.
    pub(crate) fn excess_over(&self, enrolled: &Self) -> Option<String> {
        let mut kinds = self.0.iter();
        kinds.find_map(|(kind, most)| {
            let known = enrolled.0.get(kind).copied().unwrap_or_default();
            let is_within = most.count <= known.count && most.memory_bytes <= known.memory_bytes;
            (!is_within).then(|| {
                let (offered, enrolled) = (most.describe(kind), known.describe(kind));
                format!("it offers {offered} and is enrolled with {enrolled}")
            })
        })
    }

    /// Returns each kind with its limits, in the order of kinds.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, KindLimit)> {
        self.0.iter().map(|(kind, most)| (kind.as_str(), *most))
    }
}

impl KindLimit {
    fn describe(self, kind: &str) -> String {
        match self.count {
            0 => format!("no {kind} device"),
            count => {
                let devices = human::plural(count as usize, &format!("{kind} device"));
                format!("{devices} of {} at most", human::bytes(self.memory_bytes))
            }
        }
    }
}

impl fmt::Display for Offer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds = self.iter().map(|(kind, most)| most.describe(kind));
        match kinds.collect::<Vec<_>>().join(", ") {
            none if none.is_empty() => f.write_str("no device"),
            kinds => f.write_str(&kinds),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(devices: &[(&str, u64)]) -> Offer {
        let device = |&(kind, memory_bytes): &(&str, u64)| DeviceSpec {
            kind: kind.into(),
            name: "any".into(),
            memory_bytes,
            fingerprint: None,
            takes_shares: false,
        };
        Offer::of(&devices.iter().map(device).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn excess_is_in_number_memory_or_kind() {
        let enrolled = offer(&[("cuda", 4 << 30), ("cuda", 8 << 30), ("flex", 1 << 30)]);
        for within in [
            &[][..],
            &[("cuda", 8 << 30)],
            &[("flex", 0)],
            &[("cuda", 8 << 30), ("cuda", 8 << 30), ("flex", 1 << 30)],
        ] {
            assert_eq!(offer(within).excess_over(&enrolled), None, "{within:?}");
        }
        for (beyond, expected) in [
            (
                &[("cuda", 1), ("cuda", 1), ("cuda", 1)][..],
                "it offers 3 cuda devices of 1 B at most and is enrolled with 2 cuda devices of 8.0 GiB at most",
            ),
            (
                &[("flex", (1 << 30) + 1)],
                "it offers 1 flex device of 1.0 GiB at most and is enrolled with 1 flex device of 1.0 GiB at most",
            ),
            (
                &[("rocm", 1 << 30)],
                "it offers 1 rocm device of 1.0 GiB at most and is enrolled with no rocm device",
            ),
        ] {
            let excess = offer(beyond).excess_over(&enrolled);
            assert_eq!(excess.as_deref(), Some(expected));
        }
    }

    #[test]
    fn stored_offer_is_bounded() {
        let device = |kind: String| DeviceSpec {
            kind,
            name: "any".into(),
            memory_bytes: 1,
            fingerprint: None,
            takes_shares: false,
        };
        let kinds: Vec<_> = (0..9).map(|n| device(format!("kind{n}"))).collect();
        assert!(Offer::of(&kinds[..8]).is_ok());
        let many = Offer::of(&kinds).unwrap_err();
        assert_eq!(many, "the worker has 9 kinds of devices; the limit is 8");
        let long = Offer::of(&[device("x".repeat(33))]).unwrap_err();
        assert!(long.contains("longer than 32 bytes"), "{long}");
    }
}
