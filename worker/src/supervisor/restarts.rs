//! Decides whether a lease whose process has died goes on in another one.

use std::time::Instant;

use super::recent_deaths::{DEATH_WINDOW, RecentDeaths};

/// Maximum number of deaths in a row without a new snapshot in between.
const MAX_DEATHS_WITHOUT_PROGRESS: u32 = 5;

/// A lease ends when this number of its processes has died within [`DEATH_WINDOW`].
const MAX_DEATHS: usize = 20;

/// An epoch counts the deaths of processes in its lower half, and in its upper half the moves of
/// the lease from one worker to another.
const MOVE_SHIFT: u32 = 32;

/// The deaths of a lease's processes.
#[derive(Debug, Default)]
pub(super) struct Restarts {
    /// Higher for each process of the lease, on whichever worker.
    epoch: u64,
    /// Number of those since the last new snapshot.
    without_progress: u32,
    /// What the devices were executing at the last death. An op's number shows how far its session
    /// has got.
    last_ops: Vec<String>,
    recent: RecentDeaths,
}

impl Restarts {
    /// Creates the record of a lease that has moved to this worker as the last of `moves`.
    pub(super) fn after_moves(moves: u64) -> Self {
        Self {
            epoch: moves << MOVE_SHIFT,
            ..Self::default()
        }
    }

    /// Returns a number that is higher than that of all earlier processes of the lease.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Records a new snapshot: the lease has progressed past the point of the last death.
    pub(super) fn progressed(&mut self) {
        self.without_progress = 0;
    }

    /// Records a death while the devices executed `ops`.
    ///
    /// # Errors
    ///
    /// The reason why the lease must end. So an op that crashes its process does not crash one
    /// process after the other.
    pub(super) fn died(&mut self, now: Instant, ops: &[String]) -> Result<(), String> {
        self.epoch += 1;
        if self.recent.record(now) >= MAX_DEATHS {
            return Err(format!(
                "{MAX_DEATHS} processes have died within {DEATH_WINDOW:?}"
            ));
        }
        self.without_progress += 1;
        if !ops.is_empty() && *ops == self.last_ops {
            let ops = ops.join(" and ");
            return Err(format!("two processes have died in {ops}"));
        }
        if self.without_progress >= MAX_DEATHS_WITHOUT_PROGRESS {
            return Err(format!(
                "{} processes have died since the last snapshot",
                self.without_progress
            ));
        }
        self.last_ops = ops.to_vec();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(number: u64) -> Vec<String> {
        vec![format!("op {number} (Matmul)")]
    }

    #[test]
    fn lease_ends_when_an_op_ends_a_second_process() {
        let now = Instant::now();
        let mut restarts = Restarts::default();
        assert_eq!(restarts.died(now, &op(5)), Ok(()));
        assert_eq!(restarts.died(now, &op(6)), Ok(()));
        // A snapshot of another session.
        restarts.progressed();
        let error = restarts.died(now, &op(6)).unwrap_err();
        assert_eq!(error, "two processes have died in op 6 (Matmul)");
        assert_eq!(restarts.epoch(), 3);
        assert!(Restarts::after_moves(1).epoch() > restarts.epoch());
    }

    #[test]
    fn lease_ends_after_many_deaths_without_progress() {
        let now = Instant::now();
        let mut restarts = Restarts::default();
        // Killed between two ops.
        let die = |restarts: &mut Restarts| {
            for _ in 1..MAX_DEATHS_WITHOUT_PROGRESS {
                assert_eq!(restarts.died(now, &[]), Ok(()));
            }
        };
        die(&mut restarts);
        restarts.progressed();
        die(&mut restarts);
        assert!(restarts.died(now, &[]).is_err());
    }

    #[test]
    fn lease_ends_after_many_deaths_in_a_short_time() {
        let now = Instant::now();
        let mut restarts = Restarts::default();
        let mut die = |at: Instant| {
            restarts.progressed();
            restarts.died(at, &[])
        };
        let slowly = (0..100).map(|number| now + number * DEATH_WINDOW / 10);
        assert!(slowly.into_iter().all(|at| die(at).is_ok()));
        let later = now + 100 * DEATH_WINDOW;
        assert!((1..MAX_DEATHS).all(|_| die(later).is_ok()));
        assert!(die(later).is_err());
    }
}
