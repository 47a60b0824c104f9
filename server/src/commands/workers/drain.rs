//! `tensord worker drain`: moves leases away from a worker, which gets no new ones.

use std::time::{Duration, Instant};

use tensord_proto::v1::{DrainWorkerRequest, LeaseInfo};
use tensord_transport::PoolUrl;
use tokio::time::sleep;

use crate::{
    commands::{
        admin::{self, error::AdminError, into_reply, with_token},
        leases::{self, lease_name},
    },
    failure::Failure,
    stdout,
};

/// Interval of the checks while the command waits.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Drains the worker called `name`, or, with `undo`, lets it get leases again. Waits for at most
/// `wait` until it has no lease left, and prints what happens.
pub(super) async fn run(
    url: &PoolUrl,
    name: &str,
    undo: bool,
    wait: Option<Duration>,
) -> Result<(), Failure> {
    let begun = Instant::now();
    let drained = admin::with_deadline(url, drain(url, name, undo)).await?;
    stdout::print(&text(name, undo, &drained))?;
    let Some(wait) = wait else {
        return Ok(());
    };
    let mut shown = None;
    loop {
        let all = admin::with_deadline(url, leases::list(url)).await?;
        let left = all.iter();
        let left: Vec<_> = left
            .filter(|lease| is_at(lease, name) || is_only_held_at(lease, name))
            .collect();
        if left.is_empty() {
            return stdout::print(&format!("worker {name} has no lease left\n"));
        }
        if begun.elapsed() >= wait {
            let name = name.to_owned();
            let leases = left.len();
            return Err(AdminError::NotDrained { name, leases, wait }.into());
        }
        if shown.replace(left.len()) != Some(left.len()) {
            stdout::print(&format!("{} left\n", count(left.len())))?;
        }
        sleep(CHECK_INTERVAL).await;
    }
}

async fn drain(url: &PoolUrl, name: &str, undo: bool) -> Result<Vec<LeaseInfo>, AdminError> {
    let mut admin = admin::connect(url).await?;
    let name = name.to_owned();
    let request = with_token(DrainWorkerRequest { name, undo }, url)?;
    let drained = admin.drain_worker(request).await;
    Ok(into_reply(url, drained)?.leases)
}

fn is_at(lease: &LeaseInfo, worker: &str) -> bool {
    lease.places.iter().any(|place| place.worker == worker)
}

/// Returns whether a lease is suspended, and nobody but `worker` has its state. Leases in several parts
/// do not count, as the pool does not list all workers that have a part.
fn is_only_held_at(lease: &LeaseInfo, worker: &str) -> bool {
    !lease.in_store && lease.suspended_at == [worker]
}

fn count(leases: usize) -> String {
    match leases {
        1 => "1 lease".into(),
        _ => format!("{leases} leases"),
    }
}

/// Returns what has happened, and what will, to each of the `leases` that the worker had.
fn text(name: &str, undo: bool, leases: &[LeaseInfo]) -> String {
    if undo {
        return format!("worker {name} gets leases again\n");
    }
    let mut text = format!("worker {name} gets no new leases\n");
    for lease in leases {
        let id = lease_name(lease);
        text += &match (is_at(lease, name), lease.places.first()) {
            (false, Some(place)) => format!("lease {id} has moved to worker {}\n", place.worker),
            _ if lease.cannot_move.is_empty() => format!("lease {id} moves\n"),
            _ => format!("lease {id} stays for now: {}\n", lease.cannot_move),
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use tensord_proto::v1::LeasePlace;

    use super::*;

    #[test]
    fn suspended_lease_is_left_until_another_worker_has_its_state() {
        let held_at = |holders: &[&str]| LeaseInfo {
            suspended_at: holders.iter().map(ToString::to_string).collect(),
            ..LeaseInfo::default()
        };
        assert!(is_only_held_at(&held_at(&["gpu-1"]), "gpu-1"));
        assert!(!is_only_held_at(&held_at(&["gpu-1", "gpu-2"]), "gpu-1"));
        assert!(!is_only_held_at(&held_at(&["gpu-2"]), "gpu-1"));
        assert!(!is_only_held_at(&held_at(&[]), "gpu-1"));
        let in_store = LeaseInfo {
            in_store: true,
            ..held_at(&["gpu-1"])
        };
        assert!(!is_only_held_at(&in_store, "gpu-1"));
    }

    #[test]
    fn each_lease_is_a_line_with_what_happens_to_it() {
        let lease = |lease_id, worker: &str, cannot_move: &str| LeaseInfo {
            lease_id,
            places: vec![LeasePlace {
                worker: worker.into(),
                ..LeasePlace::default()
            }],
            cannot_move: cannot_move.into(),
            ..LeaseInfo::default()
        };
        let leases = [
            lease(0x9a, "gpu-2", ""),
            lease(0x9b, "gpu-1", "it has devices of several workers"),
        ];
        let expected = "\
worker gpu-1 gets no new leases
lease 000000000000009a has moved to worker gpu-2
lease 000000000000009b stays for now: it has devices of several workers
";
        assert_eq!(text("gpu-1", false, &leases), expected);
        assert_eq!(text("gpu-1", true, &[]), "worker gpu-1 gets leases again\n");
    }
}
