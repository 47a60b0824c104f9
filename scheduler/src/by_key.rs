//! Maps from keys to sets and to counts, which have no entry for an empty set or a count of zero.

use std::collections::{BTreeMap, BTreeSet};

/// Adds a member to the set of a key.
pub(crate) fn insert<K: Ord, V: Ord>(sets: &mut BTreeMap<K, BTreeSet<V>>, key: K, member: V) {
    sets.entry(key).or_default().insert(member);
}

/// Removes a member from the set of a key.
pub(crate) fn remove<K: Ord, V: Ord>(sets: &mut BTreeMap<K, BTreeSet<V>>, key: &K, member: &V) {
    if let Some(set) = sets.get_mut(key) {
        set.remove(member);
        if set.is_empty() {
            sets.remove(key);
        }
    }
}

/// Raises the count of a key.
pub(crate) fn increment<K: Ord>(counts: &mut BTreeMap<K, usize>, key: K) {
    *counts.entry(key).or_default() += 1;
}

/// Lowers the count of a key that has one.
pub(crate) fn decrement<K: Ord>(counts: &mut BTreeMap<K, usize>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
}
