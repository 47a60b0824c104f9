//! Decides whether a lease whose process has died goes on in another one.

use std::{
    collections::{BTreeMap, HashMap},
    time::Instant,
};

use tensord_proto::ids::SessionId;

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
    /// Number of deaths since the last new snapshot.
    without_progress: u32,
    /// The latest mark of each session that has a snapshot.
    latest_marks: HashMap<SessionId, u64>,
    /// What each device was executing at the last death, by its position in the lease. An op's
    /// number shows how far its session has got.
    last_ops: BTreeMap<usize, String>,
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

    /// Records that the lease goes on here after its last move.
    pub(super) fn moved(self, moves: u64) -> Self {
        let epoch = Self::after_moves(moves).epoch;
        Self { epoch, ..self }
    }

    /// Returns a number that is higher than that of all earlier processes of the lease.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Records a snapshot of a session at `mark`. If the session had none at this mark or a later
    /// one, the lease has progressed. A process that was restored comes to the marks again that
    /// are in the client's journal.
    pub(super) fn kept(&mut self, session: SessionId, mark: u64) {
        let latest = self.latest_marks.entry(session).or_default();
        if mark > *latest {
            *latest = mark;
            self.without_progress = 0;
        }
    }

    /// Returns whether the lease goes on if a process dies once more without progress. That too many die
    /// within a minute of the real clock is not considered.
    #[cfg(feature = "testing")]
    pub(super) fn may_die(&self) -> bool {
        self.without_progress + 1 < MAX_DEATHS_WITHOUT_PROGRESS
    }

    pub(super) fn session_ended(&mut self, session: SessionId) {
        self.latest_marks.remove(&session);
    }

    /// Records a death while the devices executed `ops`: each op's text, by the position of its
    /// device.
    ///
    /// # Errors
    ///
    /// The reason why the lease must end, so that an op that crashes its process does not crash each new one.
    pub(super) fn died(
        &mut self,
        now: Instant,
        ops: &BTreeMap<usize, String>,
    ) -> Result<(), String> {
        self.epoch += 1;
        if self.recent.record(now) >= MAX_DEATHS {
            return Err(format!(
                "{MAX_DEATHS} processes have died within {DEATH_WINDOW:?}"
            ));
        }
        self.without_progress += 1;
        // Compared by device: one of them executed the op that ended the process, and the others may have been at any.
        let mut repeated = ops.iter();
        if let Some((_, op)) = repeated.find(|(device, op)| self.last_ops.get(device) == Some(op)) {
            return Err(format!("two processes have died in {op}"));
        }
        if self.without_progress >= MAX_DEATHS_WITHOUT_PROGRESS {
            return Err(format!(
                "{} processes have died since the last snapshot",
                self.without_progress
            ));
        }
        self.last_ops.clone_from(ops);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SESSION: SessionId = SessionId(1);

    /// The ops of the first devices.
    fn ops(numbers: &[u64]) -> BTreeMap<usize, String> {
        let text = |number: &u64| format!("op {number} (Matmul)");
        numbers.iter().map(text).enumerate().collect()
    }

    #[test]
    fn lease_ends_when_an_op_ends_a_second_process() {
        let now = Instant::now();
        let mut restarts = Restarts::default();
        assert_eq!(restarts.died(now, &ops(&[5])), Ok(()));
        assert_eq!(restarts.died(now, &ops(&[6])), Ok(()));
        // A snapshot of another session.
        restarts.kept(SESSION, 1);
        let error = restarts.died(now, &ops(&[6])).unwrap_err();
        assert_eq!(error, "two processes have died in op 6 (Matmul)");
        assert_eq!(restarts.epoch(), 3);
        assert!(Restarts::after_moves(1).epoch() > restarts.epoch());
    }

    #[test]
    fn lease_ends_whatever_the_other_devices_execute() {
        let now = Instant::now();
        let mut restarts = Restarts::default();
        assert_eq!(restarts.died(now, &ops(&[7, 5])), Ok(()));
        // The second device is where the first one was.
        assert_eq!(restarts.died(now, &ops(&[8, 7])), Ok(()));
        let error = restarts.died(now, &ops(&[9, 7])).unwrap_err();
        assert_eq!(error, "two processes have died in op 7 (Matmul)");
    }

    #[test]
    fn lease_ends_after_many_deaths_without_progress() {
        let now = Instant::now();
        let mut restarts = Restarts::default();
        // Killed between two ops.
        let die = |restarts: &mut Restarts| restarts.died(now, &BTreeMap::new());
        let live_on = |restarts: &mut Restarts, deaths: u32| {
            assert!((0..deaths).all(|_| die(restarts).is_ok()));
        };
        live_on(&mut restarts, MAX_DEATHS_WITHOUT_PROGRESS - 1);
        restarts.kept(SESSION, 1);
        live_on(&mut restarts, MAX_DEATHS_WITHOUT_PROGRESS - 2);
        // The session comes to this mark again each time.
        restarts.kept(SESSION, 1);
        live_on(&mut restarts, 1);
        assert!(die(&mut restarts).is_err());
    }

    #[test]
    fn lease_ends_after_many_deaths_in_a_short_time() {
        let now = Instant::now();
        let mut restarts = Restarts::default();
        let mut mark = 0;
        let mut die = |at: Instant| {
            mark += 1;
            restarts.kept(SESSION, mark);
            restarts.died(at, &BTreeMap::new())
        };
        let slowly = (0..100).map(|number| now + number * DEATH_WINDOW / 10);
        assert!(slowly.into_iter().all(|at| die(at).is_ok()));
        let later = now + 100 * DEATH_WINDOW;
        assert!((1..MAX_DEATHS).all(|_| die(later).is_ok()));
        assert!(die(later).is_err());
    }
}
