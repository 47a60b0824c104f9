//! A session's queue of work, and when the session is to run.
//!
//! The connection's reader and the cohort add to the queue, the executor takes from it.
//! Each method locks the queue briefly and returns what the caller must do next.

use std::{
    collections::VecDeque,
    mem::take,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use tensord_proto::v1::Error;

use super::{inbound::Item, uploads::Payload};
use crate::{collective::Outcome, locks::lock};

/// Maximum number of a session's reads in flight on the device, and the maximum bytes of
/// their values. At either limit the session pauses. As for replies, a single value may
/// exceed the limit.
pub(super) const MAX_READS_IN_FLIGHT: usize = 1024;
const MAX_READ_BYTES_IN_FLIGHT: usize = super::outbound::OUTBOX_BYTES;

/// Whether the caller must run the session, or put it into the run queue. If so, the
/// session is marked as scheduled.
#[must_use]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Schedule {
    /// The session is scheduled already, or waits for something else.
    No,
    /// The caller must put the session into the run queue.
    Queue,
    /// The caller must run the session itself.
    RunHere,
}

impl Schedule {
    fn queue_if(due: bool) -> Self {
        match due {
            true => Self::Queue,
            false => Self::No,
        }
    }
}

/// What the executor takes at a time.
pub(super) struct Taken {
    pub(super) item: Option<Item>,
    /// Outcomes of all-reduces and transfers, by ticket.
    pub(super) outcomes: Vec<(u64, Outcome)>,
    /// Whether the next round of sharing kept uploads is due.
    pub(super) shares_uploads: bool,
}

/// Whether a session pauses before its next reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pause {
    No,
    /// The session is marked as blocked and not scheduled.
    Blocked,
    /// The session would be blocked, but the caller must call `take` first: the reads in flight may wait for the
    /// round of sharing uploads that is due.
    SharingDue,
}

/// Work of a session that waits for the executor.
#[derive(Default)]
pub(super) struct WorkQueue {
    state: Mutex<State>,
    /// Whether `State::end` is set, readable without the lock.
    is_ending: AtomicBool,
}

#[derive(Default)]
struct State {
    items: VecDeque<Item>,
    payloads: VecDeque<Payload>,
    /// Outcomes of all-reduces and transfers, by ticket. There is at most one per
    /// request.
    outcomes: Vec<(u64, Outcome)>,
    /// Whether the next round of sharing kept uploads is due. It does not wait behind items: these
    /// may be syncs that are answered after that round.
    shares_uploads: bool,
    /// Credit in bytes of chunks that arrived while payloads were queued. It is returned
    /// when the queue is empty. So the queued payloads are bounded, but a payload that
    /// arrives while none is queued may have any size.
    payload_credit: usize,
    /// Whether the session waits for the next payload.
    awaits_payload: bool,
    /// Whether the session is in the run queue or running.
    scheduled: bool,
    /// Whether the session is paused until the client acknowledges replies, a read in flight
    /// completes, or requests are passed on to peers.
    blocked: bool,
    reads_in_flight: ReadsInFlight,
    /// Why the session ends. Set once; no work is executed after that.
    end: Option<Error>,
}

impl State {
    /// Marks the session as scheduled. Returns `false`, and does nothing, if the session is
    /// scheduled already, is blocked, or waits for a payload.
    fn schedule(&mut self) -> bool {
        let due = !self.scheduled && !self.blocked && !self.awaits_payload;
        self.scheduled |= due;
        due
    }
}

/// The number of reads in flight on the device, and the bytes of their values.
#[derive(Default)]
struct ReadsInFlight {
    count: usize,
    bytes: usize,
}

impl ReadsInFlight {
    fn is_full(&self) -> bool {
        self.count >= MAX_READS_IN_FLIGHT || self.bytes >= MAX_READ_BYTES_IN_FLIGHT
    }
}

impl WorkQueue {
    /// Adds an item. If that schedules the session and no other item is queued, `can_run_here`
    /// decides whether the caller runs the session itself. `can_run_here` is called under the
    /// lock and must not block.
    pub(super) fn push(&self, item: Item, can_run_here: impl FnOnce(&Item) -> bool) -> Schedule {
        let mut state = lock(&self.state);
        let due = state.schedule();
        let run_here = due && state.items.is_empty() && can_run_here(&item);
        state.items.push_back(item);
        match run_here {
            true => Schedule::RunHere,
            false => Schedule::queue_if(due),
        }
    }

    /// Adds the payload that a chunk has completed, if it has completed one. The chunk took
    /// `bytes` of credit. Returns the credit to give back now.
    pub(super) fn push_payload(&self, payload: Option<Payload>, bytes: usize) -> (Schedule, usize) {
        let mut state = lock(&self.state);
        let credit = match state.payloads.is_empty() {
            true => bytes,
            false => {
                state.payload_credit += bytes;
                0
            }
        };
        if state.end.is_none() {
            state.payloads.extend(payload);
        }
        if !state.awaits_payload || state.payloads.is_empty() {
            return (Schedule::No, credit);
        }
        state.awaits_payload = false;
        (Schedule::queue_if(state.schedule()), credit)
    }

    /// Adds the outcome of an all-reduce or transfer.
    pub(super) fn push_outcome(&self, ticket: u64, outcome: Outcome) -> Schedule {
        let mut state = lock(&self.state);
        if state.end.is_some() {
            return Schedule::No;
        }
        state.outcomes.push((ticket, outcome));
        Schedule::queue_if(state.schedule())
    }

    /// Makes the next round of sharing kept uploads due.
    pub(super) fn push_sharing(&self) -> Schedule {
        let mut state = lock(&self.state);
        if state.end.is_some() {
            return Schedule::No;
        }
        state.shares_uploads = true;
        Schedule::queue_if(state.schedule())
    }

    /// Ends the pause of a session that was blocked.
    pub(super) fn unblock(&self) -> Schedule {
        let mut state = lock(&self.state);
        let due = take(&mut state.blocked) && state.schedule();
        Schedule::queue_if(due)
    }

    /// Drops all work, as the session ends because of `error`. Later calls have no effect.
    pub(super) fn end(&self, error: Error) -> Schedule {
        self.end_locked(&mut lock(&self.state), error)
    }

    /// Does the same for several sessions at once: no outcome of an all-reduce that fails because
    /// one of them has ended reaches another one. The queues must come in the same order in all
    /// calls, as they are locked together.
    pub(super) fn end_all<'a>(
        queues: impl IntoIterator<Item = &'a Self>,
        error: &Error,
    ) -> Vec<Schedule> {
        let locked = queues.into_iter().map(|queue| (queue, lock(&queue.state)));
        let locked: Vec<_> = locked.collect();
        let ended = locked
            .into_iter()
            .map(|(queue, mut state)| (queue.end_locked(&mut state, error.clone()), state));
        let ended: Vec<_> = ended.collect();
        ended.into_iter().map(|(schedule, _)| schedule).collect()
    }

    fn end_locked(&self, state: &mut State, error: Error) -> Schedule {
        if state.end.is_some() {
            return Schedule::No;
        }
        state.end = Some(error);
        self.is_ending.store(true, Ordering::Release);
        state.items.clear();
        state.payloads.clear();
        state.outcomes.clear();
        state.shares_uploads = false;
        (state.blocked, state.awaits_payload) = (false, false);
        Schedule::queue_if(state.schedule())
    }

    /// Returns whether the session ends, without locking.
    pub(super) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Acquire)
    }

    /// Takes the next item, if `has_room` is true, and all else.
    pub(super) fn take(&self, has_room: bool) -> Taken {
        let mut state = lock(&self.state);
        let item = match has_room {
            true => state.items.pop_front(),
            false => None,
        };
        Taken {
            item,
            outcomes: take(&mut state.outcomes),
            shares_uploads: take(&mut state.shares_uploads),
        }
    }

    /// Takes the next payload. If there is none, the session is marked as not scheduled, and
    /// the next payload schedules it. Also returns the credit to give back to the client now.
    pub(super) fn take_payload(&self) -> (Option<Payload>, usize) {
        let mut state = lock(&self.state);
        let payload = state.payloads.pop_front();
        if payload.is_none() && state.end.is_none() {
            (state.awaits_payload, state.scheduled) = (true, false);
        }
        let credit = match state.payloads.is_empty() {
            true => take(&mut state.payload_credit),
            false => 0,
        };
        (payload, credit)
    }

    /// Returns whether nothing is queued, no read is in flight, and the session is neither scheduled nor paused.
    #[cfg(target_os = "linux")]
    pub(super) fn is_idle(&self) -> bool {
        let state = lock(&self.state);
        let is_waiting = state.scheduled || state.blocked || state.awaits_payload;
        let is_empty = state.items.is_empty() && state.outcomes.is_empty();
        let is_empty = is_empty && !state.shares_uploads;
        is_empty && !is_waiting && state.reads_in_flight.count == 0
    }

    /// Returns whether there is nothing to pass to a waiting runner, which has room for
    /// items if `has_room` is true. If so, the session is marked as not scheduled, and the
    /// next event schedules it.
    pub(super) fn try_go_idle(&self, has_room: bool) -> bool {
        let mut state = lock(&self.state);
        let has_items = !state.items.is_empty() && has_room;
        let has_outcomes = !state.outcomes.is_empty() || state.shares_uploads;
        if has_items || has_outcomes || state.end.is_some() {
            return false;
        }
        state.scheduled = false;
        true
    }

    /// Blocks the session if it must pause: until reads in flight complete, or because
    /// `is_full`, which is called under the lock, returns true.
    pub(super) fn block_if_full(&self, is_full: impl FnOnce() -> bool) -> Pause {
        let mut state = lock(&self.state);
        let is_full = is_full() || state.reads_in_flight.is_full();
        if state.end.is_some() || !is_full {
            return Pause::No;
        }
        if state.shares_uploads {
            return Pause::SharingDue;
        }
        (state.blocked, state.scheduled) = (true, false);
        Pause::Blocked
    }

    /// Marks the session as not scheduled, after its last turn. Returns why it ended.
    pub(super) fn finish(&self) -> Error {
        let mut state = lock(&self.state);
        state.scheduled = false;
        state.end.clone().unwrap_or_default()
    }

    /// Counts a read in flight of `bytes`.
    pub(super) fn begin_read(&self, bytes: usize) {
        let reads = &mut lock(&self.state).reads_in_flight;
        reads.count += 1;
        reads.bytes = reads.bytes.saturating_add(bytes);
    }

    /// Counts a read of `bytes` as no longer in flight, and ends the pause of a session that
    /// was blocked.
    pub(super) fn end_read(&self, bytes: usize) -> Schedule {
        {
            let reads = &mut lock(&self.state).reads_in_flight;
            reads.count -= 1;
            reads.bytes = reads.bytes.saturating_sub(bytes);
        }
        self.unblock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_does_not_pause_before_it_has_begun_a_round_that_is_due() {
        let queue = WorkQueue::default();
        (0..MAX_READS_IN_FLIGHT).for_each(|_| queue.begin_read(0));
        lock(&queue.state).scheduled = true;
        assert_eq!(queue.push_sharing(), Schedule::No);
        assert_eq!(queue.block_if_full(|| false), Pause::SharingDue);
        assert!(!queue.try_go_idle(false));
        assert!(queue.take(false).shares_uploads);
        assert_eq!(queue.block_if_full(|| false), Pause::Blocked);
        // A round that is due while the session is blocked begins when a read completes.
        assert_eq!(queue.push_sharing(), Schedule::No);
        assert_eq!(queue.end_read(0), Schedule::Queue);
        assert!(queue.take(true).shares_uploads);
    }
}
