//! Assigns the parts of a lease to workers, each to one of its own.

use std::collections::{BTreeMap, BTreeSet};

use tensord_proto::ids::WorkerId;

/// Returns a worker for each part, all different, or `None` if there is no such assignment.
/// `candidates` has the workers that each part could have, the best first; a part gets a later one
/// only if another part needs the earlier ones.
///
/// These are Kuhn's augmenting paths for bipartite matching (H. W. Kuhn, The Hungarian method for the
/// assignment problem, 1955).
pub(super) fn assign(candidates: &[Vec<WorkerId>]) -> Option<Vec<WorkerId>> {
    let mut taken = BTreeMap::new();
    let mut parts = 0..candidates.len();
    if !parts.all(|part| place(part, candidates, &mut taken, &mut BTreeSet::new())) {
        return None;
    }
    let mut workers: Vec<_> = taken
        .into_iter()
        .map(|(worker, part)| (part, worker))
        .collect();
    workers.sort_unstable();
    Some(workers.into_iter().map(|(_, worker)| worker).collect())
}

/// Gives a part a worker, for which other parts may get another one. Returns `false` if that is
/// impossible. `seen` has the workers that were tried.
fn place(
    part: usize,
    candidates: &[Vec<WorkerId>],
    taken: &mut BTreeMap<WorkerId, usize>,
    seen: &mut BTreeSet<WorkerId>,
) -> bool {
    let own = &candidates[part];
    if let Some(free) = own.iter().find(|worker| !taken.contains_key(*worker)) {
        taken.insert(*free, part);
        return true;
    }
    for worker in own {
        if seen.insert(*worker) {
            let other = taken[worker];
            if place(other, candidates, taken, seen) {
                taken.insert(*worker, part);
                return true;
            }
        }
    }
    false
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::collection::{btree_set, vec};
    use proptest::prelude::*;

    use super::*;

    fn check(candidates: &[&[u64]], expected: Option<&[u64]>) {
        let ids = |ids: &&[u64]| ids.iter().copied().map(WorkerId).collect::<Vec<_>>();
        let candidates: Vec<_> = candidates.iter().map(ids).collect();
        assert_eq!(assign(&candidates), expected.as_ref().map(ids));
    }

    #[test]
    fn best_worker_is_given_away_only_if_another_part_needs_it() {
        check(&[], Some(&[]));
        check(&[&[3, 1], &[2, 3]], Some(&[3, 2]));
        check(&[&[3, 1], &[3]], Some(&[1, 3]));
        check(&[&[1, 2], &[1], &[2, 3]], Some(&[2, 1, 3]));
        check(&[&[1, 2], &[1], &[2]], None);
        check(&[&[1], &[]], None);
    }

    /// Returns whether there is an assignment, by trying all.
    pub(crate) fn is_possible(candidates: &[Vec<WorkerId>]) -> bool {
        is_possible_without(candidates, &mut Vec::new())
    }

    fn is_possible_without(candidates: &[Vec<WorkerId>], taken: &mut Vec<WorkerId>) -> bool {
        let Some((first, rest)) = candidates.split_first() else {
            return true;
        };
        first.iter().any(|worker| {
            if taken.contains(worker) {
                return false;
            }
            taken.push(*worker);
            let possible = is_possible_without(rest, taken);
            taken.pop();
            possible
        })
    }

    proptest! {
        #[test]
        fn assignment_is_found_if_there_is_one(
            candidates in vec(btree_set((0..6_u64).prop_map(WorkerId), 0..4), 0..6)
        ) {
            let candidates = candidates.into_iter().map(Vec::from_iter);
            let candidates: Vec<_> = candidates.collect();
            let assigned = assign(&candidates);
            prop_assert_eq!(assigned.is_some(), is_possible(&candidates));
            if let Some(workers) = assigned {
                let different: BTreeSet<_> = workers.iter().collect();
                prop_assert_eq!(different.len(), candidates.len());
                for (worker, own) in workers.iter().zip(&candidates) {
                    prop_assert!(own.contains(worker));
                }
            }
        }
    }
}
