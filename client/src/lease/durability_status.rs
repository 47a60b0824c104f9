//! What a lease could go on from if it lost its processes or workers now.

use std::time::Duration;

/// What a lease could go on from if it lost its processes or workers now.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tensord_client::{LeaseRequest, Pool};
///
/// let lease = Pool::connect_env()?.lease(LeaseRequest::devices(1))?;
/// // … some steps of the training …
/// match lease.durability_status().since_commit {
///     Some(age) => println!("a loss would repeat the ops of {} s", age.as_secs_f32()),
///     None => println!("a loss would end the lease"),
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct DurabilityStatus {
    /// Number of times so far that the snapshots of all devices were kept, so that the lease can go on
    /// from them. 0 if none was, or the lease has no snapshots.
    pub commits: u64,
    /// Age of the state from which the lease would go on: the ops since then would be executed again.
    /// `None` if it could not go on.
    pub since_commit: Option<Duration>,
    /// Bytes of ops and tensors that this process keeps, so that it can send them again.
    pub journal_bytes: u64,
}

impl DurabilityStatus {
    /// Returns the status of several devices from that of each.
    pub(crate) fn of_all(devices: impl IntoIterator<Item = Self>) -> Self {
        let all = devices.into_iter().reduce(|a, b| Self {
            commits: a.commits.min(b.commits),
            since_commit: a.since_commit.zip(b.since_commit).map(|(a, b)| a.max(b)),
            journal_bytes: a.journal_bytes + b.journal_bytes,
        });
        all.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(commits: u64, seconds: Option<u64>, journal_bytes: u64) -> DurabilityStatus {
        DurabilityStatus {
            commits,
            since_commit: seconds.map(Duration::from_secs),
            journal_bytes,
        }
    }

    #[test]
    fn all_devices_must_have_committed() {
        let of_all = |all: &[DurabilityStatus]| DurabilityStatus::of_all(all.iter().copied());
        let one = status(3, Some(2), 10);
        assert_eq!(of_all(&[]), status(0, None, 0));
        assert_eq!(of_all(&[one]), one);
        let both = of_all(&[one, status(2, Some(5), 7)]);
        assert_eq!(both, status(2, Some(5), 17));
        assert_eq!(of_all(&[one, status(0, None, 1)]), status(0, None, 11));
    }
}
