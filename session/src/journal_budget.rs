//! How much memory the journals of all sessions of a process take together.
//!
//! A journal may always take an equal part: what all may take, divided by their number. It may take more as long as
//! the others leave room, up to a limit for each. So a session that sends much has the room of those that send
//! little. A journal with more than an equal part keeps that if its session sends nothing more; so all together take
//! at most twice the budget.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

/// Bytes that all journals of a process may take.
const MAX_BYTES: usize = 256 << 20;

/// Bytes that one journal may take.
pub(crate) const MAX_JOURNAL_BYTES: usize = 128 << 20;

/// The memory of the journals of a process. A clone is the same budget.
#[derive(Debug, Clone, Default)]
pub struct JournalBudget(Arc<Used>);

#[derive(Debug, Default)]
struct Used {
    bytes: AtomicUsize,
    journals: AtomicUsize,
}

/// What one journal takes of a budget. Dropping it gives that back.
#[derive(Debug, Default)]
pub(crate) struct JournalMemory {
    budget: JournalBudget,
    bytes: usize,
    is_counted: bool,
}

impl JournalMemory {
    pub(crate) fn new(budget: JournalBudget) -> Self {
        Self {
            budget,
            ..Self::default()
        }
    }

    /// Counts the journal among those that share the budget.
    pub(crate) fn begin(&mut self) {
        if !std::mem::replace(&mut self.is_counted, true) {
            self.budget.0.journals.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Records that the journal takes `bytes`.
    pub(crate) fn set(&mut self, bytes: usize) {
        let used = &self.budget.0.bytes;
        match bytes >= self.bytes {
            true => used.fetch_add(bytes - self.bytes, Ordering::Relaxed),
            false => used.fetch_sub(self.bytes - bytes, Ordering::Relaxed),
        };
        self.bytes = bytes;
    }

    /// Returns how many bytes the journal may always take.
    pub(crate) fn equal_part(&self) -> usize {
        let journals = self.budget.0.journals.load(Ordering::Relaxed);
        (MAX_BYTES / journals.max(1)).min(MAX_JOURNAL_BYTES)
    }

    /// Returns how many bytes the journal may take now.
    pub(crate) fn limit(&self) -> usize {
        let all = self.budget.0.bytes.load(Ordering::Relaxed);
        let left = MAX_BYTES.saturating_sub(all.saturating_sub(self.bytes));
        left.max(self.equal_part()).min(MAX_JOURNAL_BYTES)
    }
}

impl Drop for JournalMemory {
    fn drop(&mut self) {
        self.set(0);
        if self.is_counted {
            self.budget.0.journals.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn journals_share_what_they_may_take() {
        let budget = JournalBudget::default();
        let mut journals: Vec<_> = (0..4).map(|_| JournalMemory::new(budget.clone())).collect();
        journals.iter_mut().for_each(JournalMemory::begin);
        let limits = |journals: &[JournalMemory]| -> Vec<_> {
            journals.iter().map(|it| it.limit() / MIB).collect()
        };
        assert_eq!(limits(&journals), [128; 4], "nobody takes anything");
        journals[0].set(128 * MIB);
        journals[1].set(50 * MIB);
        // 206, 128, 78 and 78 MiB are left, and each may take 64.
        assert_eq!(limits(&journals), [128, 128, 78, 78]);
        journals[1].set(128 * MIB);
        assert_eq!(limits(&journals), [128, 128, 64, 64]);
        journals[2].set(64 * MIB);
        // Nothing is left, so each may take an equal part only.
        assert_eq!(limits(&journals), [64, 64, 64, 64]);
        journals[0].set(0);
        assert_eq!(limits(&journals), [64, 128, 128, 64]);
    }

    #[test]
    fn journal_that_ends_gives_back_what_it_took() {
        let budget = JournalBudget::default();
        let mut first = JournalMemory::new(budget.clone());
        first.begin();
        first.begin();
        let mut second = JournalMemory::new(budget.clone());
        second.begin();
        second.set(MAX_BYTES);
        assert_eq!(first.limit(), MAX_JOURNAL_BYTES, "its half");
        drop(second);
        let used = &budget.0;
        let used = [&used.bytes, &used.journals].map(|it| it.load(Ordering::Relaxed));
        assert_eq!(used, [0, 1]);
    }
}
