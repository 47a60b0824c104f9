//! Where the parts of the picture are: intervals of time, of the height of a device, and rows.

/// An interval: its start, and its end, which is not included.
type Interval = (u64, u64);

/// A part of the height of a device, in thousandths.
pub(super) type Part = (u32, u32);

/// Returns the row of each extent, so that no two of a row overlap: the first one that is free. The extents are in
/// the order of their rows.
pub(super) fn rows(extents: &[(f64, f64)]) -> Vec<usize> {
    let mut ends = Vec::<f64>::new();
    let rows = extents.iter().map(|&(from, to)| {
        let free = ends.iter().position(|end| *end <= from);
        let row = free.unwrap_or(ends.len());
        match ends.get_mut(row) {
            Some(end) => *end = to,
            None => ends.push(to),
        }
        row
    });
    rows.collect()
}

/// Returns the union of intervals: sorted ones that neither overlap nor touch.
pub(super) fn union(mut intervals: Vec<Interval>) -> Vec<Interval> {
    intervals.retain(|(from, to)| from < to);
    intervals.sort_unstable();
    let mut union = Vec::<Interval>::new();
    for (from, to) in intervals {
        match union.last_mut() {
            Some(last) if from <= last.1 => last.1 = last.1.max(to),
            _ => union.push((from, to)),
        }
    }
    union
}

/// Returns what of one union of intervals is not in another one.
pub(super) fn without(intervals: &[Interval], removed: &[Interval]) -> Vec<Interval> {
    let mut left = Vec::new();
    for &(mut from, to) in intervals {
        for &(removed_from, removed_to) in removed {
            if removed_to <= from || to <= removed_from {
                continue;
            }
            left.push((from, removed_from));
            from = removed_to;
        }
        left.push((from, to));
    }
    left.retain(|(from, to)| from < to);
    left
}

/// Returns where `permille` of a device is drawn whose parts `taken` are: the first free part with room for all of it,
/// or else several. It is less than `permille` if there is less.
pub(super) fn free_parts(mut taken: Vec<Part>, permille: u32) -> Vec<Part> {
    taken.sort_unstable();
    let mut free = Vec::new();
    let mut from = 0;
    for (start, end) in taken.into_iter().chain([(1000, 1000)]) {
        if start > from {
            free.push((from, start));
        }
        from = from.max(end);
    }
    if let Some(whole) = free.iter().find(|(from, to)| to - from >= permille) {
        return vec![(whole.0, whole.0 + permille)];
    }
    let mut missing = permille;
    let parts = free.into_iter().map(|(from, to)| {
        let size = missing.min(to - from);
        missing -= size;
        (from, from + size)
    });
    parts.filter(|(from, to)| from < to).collect()
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    #[test]
    fn what_overlaps_is_in_different_rows() {
        let check = |extents: &[(f64, f64)], expected: &[usize]| {
            assert_eq!(rows(extents), expected, "{extents:?}");
        };
        check(&[], &[]);
        check(&[(0.0, 2.0), (2.0, 3.0)], &[0, 0]);
        check(&[(0.0, 2.0), (1.0, 3.0), (2.0, 4.0)], &[0, 1, 0]);
        check(&[(0.0, 9.0), (1.0, 9.0), (2.0, 3.0)], &[0, 1, 2]);
    }

    #[test]
    fn intervals_are_joined_and_removed() {
        let joined = union(vec![(5, 7), (1, 3), (3, 4), (6, 9), (2, 2)]);
        assert_eq!(joined, [(1, 4), (5, 9)]);
        let cases: [(&[Interval], &[Interval]); 5] = [
            (&[], &[(1, 4), (5, 9)]),
            (&[(0, 10)], &[]),
            (&[(2, 3), (8, 12)], &[(1, 2), (3, 4), (5, 8)]),
            (&[(4, 5)], &[(1, 4), (5, 9)]),
            (&[(3, 6)], &[(1, 3), (6, 9)]),
        ];
        for (removed, expected) in cases {
            assert_eq!(without(&joined, removed), expected, "{removed:?}");
        }
    }

    #[test]
    fn a_share_is_drawn_in_one_part_where_there_is_room() {
        let cases: [(&[Part], u32, &[Part]); 5] = [
            (&[], 250, &[(0, 250)]),
            (&[(0, 250)], 750, &[(250, 1000)]),
            (&[(750, 1000), (0, 250)], 500, &[(250, 750)]),
            (&[(0, 100), (300, 600)], 400, &[(600, 1000)]),
            (&[(250, 750)], 500, &[(0, 250), (750, 1000)]),
        ];
        for (taken, permille, expected) in cases {
            assert_eq!(free_parts(taken.to_vec(), permille), expected, "{taken:?}");
        }
    }

    proptest! {
        #[test]
        fn shares_that_fit_never_overlap(shares in vec(1_u32..400, 1..12), kept in vec(any::<bool>(), 12)) {
            let mut taken = Vec::<Vec<Part>>::new();
            for (share, is_kept) in shares.into_iter().zip(kept) {
                let used: Vec<Part> = taken.iter().flatten().copied().collect();
                let sum: u32 = used.iter().map(|(from, to)| to - from).sum();
                if sum + share > 1000 {
                    taken.remove(0);
                    continue;
                }
                let parts = free_parts(used.clone(), share);
                prop_assert_eq!(parts.iter().map(|(from, to)| to - from).sum::<u32>(), share);
                for (from, to) in &parts {
                    prop_assert!(used.iter().all(|part| *to <= part.0 || part.1 <= *from));
                }
                taken.push(parts);
                if !is_kept {
                    taken.remove(0);
                }
            }
        }
    }
}
