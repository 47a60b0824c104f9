//! How far the ranks of each group are with its all-reduces, compared with each other.

use std::collections::HashMap;

/// For each group, by its lease ranks in ascending order: how many all-reduces each rank is ahead of
/// the slowest. Groups whose ranks are level have no entry.
#[derive(Debug, Default)]
pub(super) struct Ahead(HashMap<Vec<u32>, Vec<u64>>);

impl Ahead {
    /// Records that the session with `lease_rank` has reached an all-reduce of `group`, which has
    /// lease ranks in ascending order. Does nothing if `lease_rank` is not among them, or one is there twice: the
    /// worker refuses such an all-reduce, on any rank. Returns whether a rank of the group lags behind another one.
    pub(super) fn record(&mut self, group: &[u32], lease_rank: u32) -> bool {
        if !group.is_sorted_by(|a, b| a < b) {
            return false;
        }
        let Ok(rank) = group.binary_search(&lease_rank) else {
            return false;
        };
        let Self(groups) = self;
        let counts = groups
            .entry(group.to_vec())
            .or_insert_with(|| vec![0; group.len()]);
        counts[rank] += 1;
        if counts.iter().all(|count| *count > 0) {
            counts.iter_mut().for_each(|count| *count -= 1);
        }
        let are_level = counts.iter().all(|count| *count == 0);
        if are_level {
            groups.remove(group);
        }
        !are_level
    }

    /// Returns whether all ranks of each group have reached equally many all-reduces.
    pub(super) fn are_level(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the lease ranks of the sessions for which others wait.
    pub(super) fn lagging_ranks(&self) -> Vec<u32> {
        let Self(groups) = self;
        let members = groups
            .iter()
            .flat_map(|(group, counts)| group.iter().zip(counts));
        let mut behind: Vec<u32> = members.filter(|(_, c)| **c == 0).map(|(p, _)| *p).collect();
        behind.sort_unstable();
        behind.dedup();
        behind
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lagging_ranks_are_those_with_fewer_all_reduces() {
        let mut ahead = Ahead::default();
        let both = [1, 4];
        assert!(ahead.lagging_ranks().is_empty());
        ahead.record(&both, 4);
        ahead.record(&both, 4);
        assert_eq!(ahead.lagging_ranks(), [1]);
        ahead.record(&[0, 4], 0);
        assert_eq!(ahead.lagging_ranks(), [1, 4]);
        ahead.record(&both, 1);
        ahead.record(&[0, 4], 4);
        assert_eq!(ahead.lagging_ranks(), [1]);
        ahead.record(&both, 1);
        assert!(ahead.lagging_ranks().is_empty());
        assert!(ahead.0.is_empty());
        // A program names a rank twice.
        for rank in [0, 1, 1] {
            assert!(!ahead.record(&[0, 1, 1], rank));
        }
        assert!(ahead.are_level());
    }
}
