//! A barrier before each step of a data-parallel training, at which its ranks wait for each
//! other.
//!
//! The server with which Burn 0.22.1 collects a step's gradients mixes up two steps, and
//! then waits for ever, when one rank begins a step before another has ended the previous
//! one. A rank takes its batch at the beginning of a step, on its own thread, so the
//! batcher is where ranks can wait for each other.

use std::{
    cell::RefCell,
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

use burn::{data::dataloader::batcher::Batcher, tensor::Device};

/// How long ranks wait for each other by default. Between two epochs the first rank
/// validates while the others wait, so this is longer than a validation takes.
const DEFAULT_DEADLINE: Duration = Duration::from_secs(30 * 60);

/// A batcher for Burn's data-parallel training, with which the ranks wait for each other
/// before each step.
///
/// It wraps the batcher of the training data. Every rank must make its batches on its own
/// thread, as Burn's data loaders do unless `num_workers` is set.
///
/// A rank whose thread has ended, by itself or by a panic, is no longer waited for. The
/// others then run without it, and Burn's next all-reduce fails with the rank's name.
///
/// ```no_run
/// # use burn::{data::dataloader::batcher::Batcher, prelude::*};
/// # struct MyBatcher;
/// # impl Batcher<f32, Tensor<1>> for MyBatcher {
/// #     fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<1> {
/// #         Tensor::from_floats(&items[..], device)
/// #     }
/// # }
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use burn::data::{dataloader::DataLoaderBuilder, dataset::InMemDataset};
/// use tensord_client::{LeaseRequest, LockstepBatcher, Pool};
///
/// let lease = Pool::connect_env()?.lease(LeaseRequest::devices(4))?;
/// let batcher = LockstepBatcher::new(MyBatcher, lease.devices().len());
/// let train = DataLoaderBuilder::new(batcher)
///     .batch_size(64 / lease.devices().len())
///     .build(InMemDataset::new(vec![0.0; 1024]));
/// # drop(train); Ok(()) }
/// ```
#[derive(Debug)]
pub struct LockstepBatcher<B> {
    batcher: B,
    meeting: Arc<Meeting>,
}

impl<B> LockstepBatcher<B> {
    /// Creates a batcher that makes batches with `batcher`, for `ranks` ranks: the number
    /// of devices of the training.
    pub fn new(batcher: B, ranks: usize) -> Self {
        let meeting = Arc::new(Meeting::new(ranks, DEFAULT_DEADLINE));
        Self { batcher, meeting }
    }

    /// Sets how long a rank waits for the others, which is 30 minutes by default. It must
    /// be longer than the validation between two epochs, for which only the first rank is
    /// needed. After this time, all ranks panic, which ends the training.
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        let meeting = Arc::new(Meeting::new(self.meeting.ranks, deadline));
        Self { meeting, ..self }
    }
}

impl<I, O, B: Batcher<I, O>> Batcher<I, O> for LockstepBatcher<B> {
    /// Waits for the other ranks, then makes the batch.
    ///
    /// # Panics
    ///
    /// When a rank has not come within the [deadline](LockstepBatcher::deadline), or more
    /// threads than ranks make batches.
    fn batch(&self, items: Vec<I>, device: &Device) -> O {
        if let Err(reason) = self.meeting.wait() {
            panic!("{reason}");
        }
        self.batcher.batch(items, device)
    }
}

/// The barrier at which the ranks of a training wait for each other. A rank is a thread.
struct Meeting {
    ranks: usize,
    deadline: Duration,
    attendance: Mutex<Attendance>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Attendance {
    /// Ranks that have [joined](Meeting::join), and whose threads still run.
    present: usize,
    /// Ranks whose threads have ended.
    ended: usize,
    /// Ranks that wait.
    waiting: usize,
    /// How often all ranks have met.
    met: u64,
    /// Why the training failed, if it did.
    failed: Option<String>,
}

impl Attendance {
    /// Releases the waiting ranks if no rank is missing. Returns whether they are released; the
    /// caller must then notify [`Meeting::changed`].
    fn meet(&mut self, ranks: usize) -> bool {
        let complete =
            self.failed.is_none() && self.waiting > 0 && self.waiting + self.ended >= ranks;
        if complete {
            self.waiting = 0;
            self.met += 1;
        }
        complete
    }
}

thread_local! {
    /// The meetings that this thread takes part in.
    static MEMBERSHIPS: RefCell<Vec<Membership>> = const { RefCell::new(Vec::new()) };
}

/// A thread's part in a meeting. The thread drops it when it ends, after a panic too.
struct Membership(Weak<Meeting>);

impl Drop for Membership {
    fn drop(&mut self) {
        if let Some(meeting) = self.0.upgrade() {
            meeting.leave();
        }
    }
}

impl Meeting {
    fn new(ranks: usize, deadline: Duration) -> Self {
        Self {
            ranks,
            deadline,
            attendance: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Attendance> {
        // No foreign code runs under this lock.
        self.attendance
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all ranks wait or have ended.
    ///
    /// # Errors
    ///
    /// When one has done neither within the deadline, or there are too many ranks.
    fn wait(self: &Arc<Self>) -> Result<(), String> {
        self.join()?;
        let mut attendance = self.lock();
        attendance.waiting += 1;
        if attendance.meet(self.ranks) {
            self.changed.notify_all();
            return Ok(());
        }
        let met = attendance.met;
        let until = Instant::now().checked_add(self.deadline);
        loop {
            if let Some(reason) = &attendance.failed {
                return Err(reason.clone());
            }
            if attendance.met != met {
                return Ok(());
            }
            // A deadline later than an `Instant` can represent counts as no deadline.
            let left = until.map_or(Duration::MAX, |until| {
                until.saturating_duration_since(Instant::now())
            });
            if left.is_zero() {
                let missing = self.ranks - attendance.waiting - attendance.ended;
                let reason = format!(
                    "{missing} of {} ranks did not begin the next step within {:?}",
                    self.ranks, self.deadline
                );
                attendance.failed = Some(reason);
                self.changed.notify_all();
                continue;
            }
            attendance = self
                .changed
                .wait_timeout(attendance, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Counts this thread as a rank, unless it is counted already. Returns an error if there
    /// are too many ranks with it.
    fn join(self: &Arc<Self>) -> Result<(), String> {
        MEMBERSHIPS.with_borrow_mut(|memberships| {
            memberships.retain(|membership| membership.0.strong_count() > 0);
            let this = Arc::downgrade(self);
            if memberships.iter().any(|known| known.0.ptr_eq(&this)) {
                return Ok(());
            }
            let mut attendance = self.lock();
            if attendance.present == 0 && attendance.ended > 0 {
                // All ranks of a training have ended, so this is the next training.
                *attendance = Attendance::default();
            }
            if attendance.present + attendance.ended >= self.ranks {
                return Err(format!(
                    "a LockstepBatcher for {} ranks got a batch to make on one thread more; \
                     let each rank make its batches on its own thread, without `num_workers`",
                    self.ranks
                ));
            }
            attendance.present += 1;
            memberships.push(Membership(this));
            Ok(())
        })
    }

    /// Counts a rank as ended.
    fn leave(&self) {
        let mut attendance = self.lock();
        attendance.present -= 1;
        attendance.ended += 1;
        if attendance.meet(self.ranks) {
            self.changed.notify_all();
        }
    }
}

impl fmt::Debug for Meeting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meeting")
            .field("ranks", &self.ranks)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            atomic::{AtomicUsize, Ordering},
            mpsc,
        },
        thread,
    };

    use super::*;

    /// Longer than any of these tests takes.
    const LONG: Duration = Duration::from_secs(60);

    fn meeting(ranks: usize, deadline: Duration) -> Arc<Meeting> {
        Arc::new(Meeting::new(ranks, deadline))
    }

    /// Runs a thread that meets the other ranks `steps` times, then ends.
    fn rank(meeting: &Arc<Meeting>, steps: usize) -> thread::JoinHandle<Result<(), String>> {
        let meeting = meeting.clone();
        thread::spawn(move || (0..steps).try_for_each(|_| meeting.wait()))
    }

    #[test]
    fn no_rank_begins_a_step_before_all_have_ended_the_previous() {
        const RANKS: usize = 4;
        const STEPS: usize = 200;
        let meeting = meeting(RANKS, LONG);
        let ended_steps = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..RANKS {
                scope.spawn(|| {
                    for step in 0..STEPS {
                        meeting.wait().unwrap();
                        assert!(ended_steps.load(Ordering::SeqCst) >= step * RANKS);
                        ended_steps.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
        });
        assert_eq!(ended_steps.into_inner(), RANKS * STEPS);
    }

    #[test]
    fn ranks_that_end_or_panic_are_not_waited_for() {
        let meeting = meeting(3, LONG);
        let long = rank(&meeting, 50);
        let short = rank(&meeting, 20);
        let panics = {
            let meeting = meeting.clone();
            thread::spawn(move || {
                meeting.wait().unwrap();
                std::panic::resume_unwind(Box::new("this rank fails"));
            })
        };
        assert!(panics.join().is_err());
        short.join().unwrap().unwrap();
        long.join().unwrap().unwrap();
        // The next training with this batcher waits for all of its ranks.
        let (first_sender, first) = mpsc::channel();
        let first_rank = {
            let meeting = meeting.clone();
            thread::spawn(move || first_sender.send(meeting.wait()))
        };
        assert!(first.recv_timeout(Duration::from_millis(100)).is_err());
        let others = [rank(&meeting, 1), rank(&meeting, 1)];
        assert_eq!(first.recv_timeout(LONG), Ok(Ok(())));
        first_rank.join().unwrap().unwrap();
        for other in others {
            other.join().unwrap().unwrap();
        }
    }

    #[test]
    fn all_ranks_fail_when_one_does_not_come_in_time() {
        let meeting = meeting(3, Duration::from_millis(50));
        let waiting = [rank(&meeting, 1), rank(&meeting, 1)];
        for rank in waiting {
            let reason = rank.join().unwrap().unwrap_err();
            assert!(reason.contains("1 of 3 ranks"), "{reason}");
        }
    }

    #[test]
    fn a_batch_on_a_thread_beyond_the_ranks_is_an_error() {
        let meeting = meeting(1, LONG);
        let other = meeting.clone();
        meeting.wait().unwrap();
        meeting.wait().unwrap();
        let second = rank(&other, 1).join().unwrap();
        assert!(second.unwrap_err().contains("num_workers"));
    }
}
