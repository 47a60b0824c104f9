//! Reads that were answered, and whose answers another process repeats when it goes on from a
//! mark. A repeated answer is compared with the first one, and not given to the program again.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    hash::{BuildHasher, Hasher},
    mem,
};

use burn_backend::DType;
use foldhash::quality::FixedState;

use super::pending_reads::{BadAnswer, unexpected};

/// The reads since the last committed mark that were answered.
#[derive(Debug, Default)]
pub(super) struct AnsweredReads {
    /// Whether answers are kept.
    is_kept: bool,
    /// Whether repeated answers may differ from the first ones.
    may_differ: bool,
    /// Whether one has differed since the session went on last.
    has_differed: bool,
    /// The warning about the first answer that differed, until it is taken.
    difference: Option<String>,
    reads: BTreeMap<u64, AnsweredRead>,
    /// The reads whose answers the process has still to repeat. Each may be repeated once.
    unrepeated: BTreeSet<u64>,
    /// Bytes of the values of `unrepeated`.
    unrepeated_bytes: usize,
}

/// A read, as people can find it in their program.
#[derive(Debug, Clone, Copy)]
pub(super) struct Read {
    /// The size of the value.
    pub(super) bytes: usize,
    pub(super) dtype: DType,
    /// The number of ops that the session had recorded before it.
    pub(super) after_ops: u64,
}

impl fmt::Display for Read {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (dtype, after_ops) = (self.dtype.name(), self.after_ops);
        let elements = self.bytes / self.dtype.size().max(1);
        write!(f, "{elements} {dtype}, after {after_ops} ops")
    }
}

/// A read that was answered.
#[derive(Debug, Clone, Copy)]
struct AnsweredRead {
    read: Read,
    /// Hash of the value; `None` for a fault.
    hash: Option<u64>,
}

impl AnsweredReads {
    /// Without answers.
    pub(super) fn new(may_differ: bool) -> Self {
        Self {
            may_differ,
            ..Self::default()
        }
    }

    /// Sets whether later answers are kept until they are [forgotten](Self::forget).
    pub(super) fn keep(&mut self, is_kept: bool) {
        self.is_kept = is_kept;
        if !is_kept {
            let unrepeated = &self.unrepeated;
            self.reads.retain(|id, _| unrepeated.contains(id));
        }
    }

    /// Records the answer to a read: the value, or `None` for a fault.
    pub(super) fn add(&mut self, request: u64, read: Read, value: Option<&[u8]>) {
        if self.is_kept {
            let hash = value.map(hash);
            self.reads.insert(request, AnsweredRead { read, hash });
        }
    }

    /// Forgets the answers to reads up to `request`, which no process will repeat.
    pub(super) fn forget(&mut self, request: u64) {
        self.reads = self.reads.split_off(&request.saturating_add(1));
    }

    /// Expects all answers once more, from another process.
    pub(super) fn restored(&mut self) {
        self.has_differed = false;
        self.unrepeated = self.reads.keys().copied().collect();
        self.unrepeated_bytes = self.reads.values().map(|it| it.read.bytes).sum();
    }

    /// Returns whether the answer to a read is to be repeated.
    pub(super) fn is_unrepeated(&self, request: u64) -> bool {
        self.unrepeated.contains(&request)
    }

    /// Returns the id of the first read whose answer is to be repeated.
    pub(super) fn first_unrepeated(&self) -> Option<u64> {
        self.unrepeated.first().copied()
    }

    /// Returns the number of answers that are to be repeated.
    pub(super) fn unrepeated_count(&self) -> u64 {
        self.unrepeated.len() as u64
    }

    /// Returns the bytes of all values that are to be repeated.
    pub(super) fn unrepeated_bytes(&self) -> usize {
        self.unrepeated_bytes
    }

    /// Returns the bytes of the value of a read.
    pub(super) fn bytes_of(&self, request: u64) -> Option<usize> {
        self.reads.get(&request).map(|it| it.read.bytes)
    }

    /// Checks a repeated answer: the value, or `None` for a fault. If answers may differ, a warning about the
    /// first one that differs is kept for [`take_difference`](Self::take_difference).
    ///
    /// # Errors
    ///
    /// When the first answer was another one and answers may not differ, or when the answer is
    /// repeated a second time.
    pub(super) fn repeated(&mut self, request: u64, value: Option<&[u8]>) -> Result<(), BadAnswer> {
        let answered = self.reads.get(&request).copied();
        let answered = answered.filter(|_| self.unrepeated.remove(&request));
        let AnsweredRead { read, hash: first } =
            answered.ok_or_else(|| unexpected("read", request))?;
        self.unrepeated_bytes -= read.bytes;
        if !self.is_kept {
            self.reads.remove(&request);
        }
        let is_same = first == value.map(hash);
        if !is_same && self.may_differ {
            if !mem::replace(&mut self.has_differed, true) {
                self.difference = Some(format!(
                    "the session went on in another process, which computed another value for read {request} ({read}): later values may differ from those of an undisturbed run"
                ));
            }
            return Ok(());
        }
        match is_same {
            true => Ok(()),
            false => Err(BadAnswer::Diverged(format!(
                "the session went on in another process, which computed another value for read {request} ({read}); with Durability::Continue, the session would go on with other values"
            ))),
        }
    }

    /// Takes the warning about an answer that differed, if there is one that was not taken before.
    pub(super) fn take_difference(&mut self) -> Option<String> {
        self.difference.take()
    }
}

/// Returns a hash by which answers are compared. It need not withstand a worker that looks for
/// collisions.
fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = FixedState::default().build_hasher();
    hasher.write(bytes);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: usize) -> Read {
        Read {
            bytes,
            dtype: DType::U8,
            after_ops: 17,
        }
    }

    fn answered() -> AnsweredReads {
        let mut answered = AnsweredReads::default();
        answered.keep(true);
        answered.add(1, read(3), Some(b"one"));
        answered.add(2, read(4), None);
        answered.add(5, read(4), Some(b"five"));
        answered
    }

    #[test]
    fn answer_is_repeated_once_and_must_be_the_same() {
        let mut answered = answered();
        assert!(answered.repeated(1, Some(b"one")).is_err(), "not restored");
        answered.forget(1);
        answered.restored();
        assert_eq!(answered.first_unrepeated(), Some(2));
        assert_eq!(
            (answered.unrepeated_count(), answered.unrepeated_bytes()),
            (2, 8)
        );
        assert_eq!(answered.repeated(2, None), Ok(()));
        assert!(answered.repeated(2, None).is_err(), "a second time");
        assert!(answered.repeated(1, Some(b"one")).is_err(), "forgotten");
        let diverged = "the session went on in another process, which computed another value for read 5 (4 u8, after 17 ops); with Durability::Continue, the session would go on with other values";
        let diverged = Err(BadAnswer::Diverged(diverged.into()));
        assert_eq!(answered.repeated(5, Some(b"FIVE")), diverged);
        assert_eq!(
            (answered.first_unrepeated(), answered.unrepeated_bytes()),
            (None, 0)
        );
        // Another process dies.
        answered.restored();
        assert_eq!(answered.unrepeated_count(), 2);
        assert_eq!(answered.repeated(5, Some(b"five")), Ok(()));
    }

    #[test]
    fn answers_may_differ_if_the_session_may_go_on_with_others() {
        let mut answered = AnsweredReads {
            may_differ: true,
            ..answered()
        };
        answered.restored();
        assert_eq!(answered.repeated(1, Some(b"ONE")), Ok(()));
        let difference = "the session went on in another process, which computed another value for read 1 (3 u8, after 17 ops): later values may differ from those of an undisturbed run";
        assert_eq!(answered.take_difference().as_deref(), Some(difference));
        assert_eq!(answered.repeated(2, Some(b"no fault")), Ok(()));
        assert_eq!(answered.take_difference(), None, "the first one is logged");
        assert!(answered.repeated(2, None).is_err(), "a second time");
        assert!(answered.repeated(7, None).is_err(), "never answered");
    }

    #[test]
    fn answers_that_are_not_kept_are_still_repeated() {
        let mut answered = answered();
        answered.restored();
        answered.repeated(2, None).unwrap();
        answered.keep(false);
        answered.add(6, read(1), Some(b"6"));
        assert_eq!(answered.repeated(1, Some(b"one")), Ok(()));
        assert_eq!(answered.repeated(5, Some(b"five")), Ok(()));
        answered.restored();
        assert_eq!(answered.unrepeated_count(), 0);
    }
}
