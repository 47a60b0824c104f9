//! The pool of a simulation, such as `1000x8:cuda:80GiB,10x4:flex:16GiB`.

use std::str::FromStr;

use tensord_scheduler::{DeviceFingerprint, DeviceSpec};

use crate::config::values::{Memory, Name};

/// The most workers of a simulated pool.
const MAX_WORKERS: u32 = 10_000;

/// The most devices of a simulated pool.
pub(crate) const MAX_DEVICES: u32 = 100_000;

/// The workers of a simulated pool: a list of groups of equal workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PoolSpec {
    groups: Vec<Group>,
}

/// Workers that have the same number of equal devices.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Group {
    workers: u32,
    devices: u32,
    kind: String,
    memory_bytes: u64,
}

impl PoolSpec {
    /// Returns the devices of each worker.
    pub(crate) fn workers(&self) -> impl Iterator<Item = Vec<DeviceSpec>> {
        self.groups.iter().flat_map(|group| {
            let devices = vec![group.device(); group.devices as usize];
            std::iter::repeat_n(devices, group.workers as usize)
        })
    }

    /// Returns the name of each device, such as `cuda:0`, or `w2 cuda:0` if there are several workers.
    pub(crate) fn device_names(&self) -> Vec<String> {
        let has_several = self.worker_count() > 1;
        let workers = (1..).zip(self.workers());
        let names = workers.flat_map(|(worker, devices)| {
            (0..)
                .zip(devices)
                .map(move |(index, device)| match has_several {
                    true => format!("w{worker} {}:{index}", device.kind),
                    false => format!("{}:{index}", device.kind),
                })
        });
        names.collect()
    }

    /// Returns the number of workers.
    pub(crate) fn worker_count(&self) -> u64 {
        self.groups
            .iter()
            .map(|group| u64::from(group.workers))
            .sum()
    }
}

impl Group {
    /// Returns one of the devices. Those of one kind compute in the same way.
    fn device(&self) -> DeviceSpec {
        let mut hash = [0; 16];
        for (byte, of_kind) in hash.iter_mut().zip(self.kind.bytes()) {
            *byte = of_kind;
        }
        DeviceSpec {
            kind: self.kind.clone(),
            name: format!("simulated {}", self.kind),
            memory_bytes: self.memory_bytes,
            fingerprint: Some(DeviceFingerprint {
                hash,
                is_exact: true,
            }),
            takes_shares: true,
        }
    }
}

impl FromStr for PoolSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let groups = text.split(',').map(|group| {
            parse_group(group).ok_or_else(|| {
                format!("{group:?} is not WORKERSxDEVICES:KIND:MEMORY, such as 10x8:cuda:80GiB")
            })
        });
        let groups = groups.collect::<Result<Vec<_>, _>>()?;
        let workers = groups.iter().map(|group| u64::from(group.workers));
        let devices = groups
            .iter()
            .map(|group| u64::from(group.workers) * u64::from(group.devices));
        if workers.sum::<u64>() > MAX_WORKERS.into() || devices.sum::<u64>() > MAX_DEVICES.into() {
            return Err(format!(
                "a simulated pool has at most {MAX_WORKERS} workers and {MAX_DEVICES} devices"
            ));
        }
        Ok(Self { groups })
    }
}

fn parse_group(text: &str) -> Option<Group> {
    let (counts, rest) = text.split_once(':')?;
    let (workers, devices) = counts.split_once('x')?;
    let (kind, memory) = rest.split_once(':')?;
    let count = |text: &str| text.parse().ok().filter(|count: &u32| *count > 0);
    Some(Group {
        workers: count(workers)?,
        devices: count(devices)?,
        kind: kind.parse::<Name>().ok()?.0,
        memory_bytes: memory.parse::<Memory>().ok()?.size_bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_is_a_list_of_groups_of_workers() {
        let pool: PoolSpec = "2x3:cuda:80GiB,1x1:flex:512MiB".parse().unwrap();
        let workers: Vec<_> = pool.workers().collect();
        let sizes: Vec<_> = workers.iter().map(Vec::len).collect();
        assert_eq!((sizes.as_slice(), pool.worker_count()), (&[3, 3, 1][..], 3));
        assert_eq!(workers[0][2].memory_bytes, 80 << 30);
        assert_eq!(workers[2][0].kind, "flex");
        assert_ne!(workers[0][0].fingerprint, workers[2][0].fingerprint);
    }

    #[test]
    fn devices_are_named_by_worker_kind_and_index() {
        let names = |spec: &str| spec.parse::<PoolSpec>().unwrap().device_names();
        assert_eq!(names("1x2:cuda:80GiB"), ["cuda:0", "cuda:1"]);
        let several = ["w1 cuda:0", "w1 cuda:1", "w2 flex:0"];
        assert_eq!(names("1x2:cuda:80GiB,1x1:flex:1GiB"), several);
    }

    #[test]
    fn a_wrong_pool_is_refused_with_the_rule() {
        for group in [
            "",
            "8:cuda:80GiB",
            "0x8:cuda:80GiB",
            "1x8:cu da:80GiB",
            "1x8:cuda:80GB",
        ] {
            let error = format!("1x1:flex:1GiB,{group}")
                .parse::<PoolSpec>()
                .unwrap_err();
            let expected =
                format!("{group:?} is not WORKERSxDEVICES:KIND:MEMORY, such as 10x8:cuda:80GiB");
            assert_eq!(error, expected);
        }
        let expected = "a simulated pool has at most 10000 workers and 100000 devices";
        for large in ["10001x1:cuda:1GiB", "1x100001:cuda:1GiB"] {
            assert_eq!(large.parse::<PoolSpec>().unwrap_err(), expected);
        }
    }
}
