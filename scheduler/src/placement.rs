//! The choice of free devices for a lease.
//!
//! A pure function of the candidates, so that a better rule (racks, links, several gangs at
//! once) can replace it without a change to the engine.
//!
//! The rule: as few workers as possible, because traffic inside a worker crosses no
//! network. Then the tightest fit: the least device memory, then the worker with the least
//! free memory left, so that big devices and whole workers stay free for requests that need
//! them; then the lower worker id. The number of workers is optimal, the rest is greedy.

use std::cmp::Reverse;

use tensord_proto::ids::WorkerId;

use crate::event::DeviceRef;

/// A worker and its free devices that meet the demand.
pub(crate) struct Candidate {
    worker: WorkerId,
    /// Memory in bytes and index of each device, least memory first.
    devices: Vec<(u64, u32)>,
}

impl Candidate {
    /// Creates a candidate; `devices` are memory and index, in any order.
    pub(crate) fn new(worker: WorkerId, mut devices: Vec<(u64, u32)>) -> Self {
        devices.sort_unstable();
        Self { worker, devices }
    }

    /// Returns the total memory of the `n` smallest devices and of the others.
    fn split_memory(&self, n: usize) -> (u128, u128) {
        let sum = |part: &[(u64, u32)]| part.iter().map(|&(memory, _)| u128::from(memory)).sum();
        let (taken, left) = self.devices.split_at(n);
        (sum(taken), sum(left))
    }

    fn device_refs(&self, n: usize) -> impl Iterator<Item = DeviceRef> {
        let worker = self.worker;
        let taken = self.devices.iter().take(n);
        taken.map(move |&(_, index)| DeviceRef { worker, index })
    }
}

/// Chooses `wanted` devices and returns them sorted, or `None` if there are too few.
pub(crate) fn choose(mut candidates: Vec<Candidate>, mut wanted: usize) -> Option<Vec<DeviceRef>> {
    let mut chosen = Vec::new();
    // While no worker has enough devices for the rest, take all devices of the worker with
    // the most: no other choice ends with fewer workers.
    let last = loop {
        if let Some(last) = tightest(&candidates, wanted) {
            break last;
        }
        let whole = candidates.swap_remove(largest(&candidates)?);
        chosen.extend(whole.device_refs(whole.devices.len()));
        wanted -= whole.devices.len();
    };
    chosen.extend(last.device_refs(wanted));
    chosen.sort_unstable();
    Some(chosen)
}

/// Returns the tightest-fitting candidate that has at least `wanted` devices.
fn tightest(candidates: &[Candidate], wanted: usize) -> Option<&Candidate> {
    candidates
        .iter()
        .filter(|candidate| candidate.devices.len() >= wanted)
        .min_by_key(|candidate| (candidate.split_memory(wanted), candidate.worker))
}

/// Returns the position of the candidate with the most devices; on a tie, of the one with
/// the least memory.
fn largest(candidates: &[Candidate]) -> Option<usize> {
    let key = |candidate: &Candidate| {
        let count = candidate.devices.len();
        (
            Reverse(count),
            candidate.split_memory(count),
            candidate.worker,
        )
    };
    (0..candidates.len()).min_by_key(|&i| key(&candidates[i]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asserts the choice. `free[w]` is the memory of each free device of worker w;
    /// `expected` is the worker and index of each chosen device.
    fn check(free: &[&[u64]], wanted: usize, expected: Option<&[(u64, u32)]>) {
        let candidates = (0..).zip(free).map(|(worker, memory)| {
            let devices = memory.iter().copied().zip(0..).collect();
            Candidate::new(WorkerId(worker), devices)
        });
        // The order of the candidates must not matter.
        for reversed in [false, true] {
            let mut candidates: Vec<_> = candidates.clone().collect();
            if reversed {
                candidates.reverse();
            }
            let chosen = choose(candidates, wanted);
            let chosen: Option<Vec<_>> = chosen.map(|device_refs| {
                device_refs
                    .iter()
                    .map(|device_ref| (device_ref.worker.0, device_ref.index))
                    .collect()
            });
            assert_eq!(chosen.as_deref(), expected, "{wanted} of {free:?}");
        }
    }

    #[test]
    fn all_devices_or_none() {
        check(&[], 1, None);
        check(&[&[8, 8], &[8]], 4, None);
        check(&[&[8, 8], &[8]], 3, Some(&[(0, 0), (0, 1), (1, 0)]));
    }

    #[test]
    fn one_worker_is_preferred() {
        check(&[&[1], &[1], &[8, 8]], 2, Some(&[(2, 0), (2, 1)]));
    }

    #[test]
    fn fewest_workers_are_chosen() {
        check(
            &[&[8, 8], &[8, 8, 8], &[8], &[8]],
            4,
            Some(&[(1, 0), (1, 1), (1, 2), (2, 0)]),
        );
    }

    #[test]
    fn smallest_sufficient_devices_are_chosen() {
        check(&[&[80], &[8, 40]], 1, Some(&[(1, 0)]));
        check(&[&[80, 16, 24]], 2, Some(&[(0, 1), (0, 2)]));
    }

    #[test]
    fn tightest_fitting_workers_are_preferred() {
        check(&[&[8, 8, 8, 8], &[8, 8]], 1, Some(&[(1, 0)]));
        check(&[&[8, 8, 8], &[8, 8, 8], &[8], &[8, 8]], 5, {
            Some(&[(0, 0), (0, 1), (0, 2), (3, 0), (3, 1)])
        });
    }

    #[test]
    fn ties_go_to_the_lower_worker_and_index() {
        check(&[&[8, 8], &[8, 8]], 1, Some(&[(0, 0)]));
        check(&[&[8], &[8], &[8]], 2, Some(&[(0, 0), (1, 0)]));
    }
}
