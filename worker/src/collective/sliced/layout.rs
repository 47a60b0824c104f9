//! Decides which slice of a tensor each worker reduces.

use std::ops::Range;

/// Tensors up to this size are reduced whole, by the workers in turn: the messages
/// for their slices would cost more than the bytes in them.
const WHOLE_BYTES: usize = 4 << 10;

/// Returns whether a tensor is cut into slices.
pub(super) fn is_cut(size: usize) -> bool {
    size > WHOLE_BYTES
}

/// Returns the range of bytes that `worker_index` of `worker_count` reduces of the tensor of
/// `size` bytes in the `call`-th all-reduce, in whole elements of `element` bytes.
pub(super) fn slice(
    size: usize,
    element: usize,
    call: u64,
    worker_count: usize,
    worker_index: usize,
) -> Range<usize> {
    if !is_cut(size) {
        return match call % worker_count as u64 == worker_index as u64 {
            true => 0..size,
            false => 0..0,
        };
    }
    let count = size / element;
    let (each, more) = (count / worker_count, count % worker_count);
    let start = |worker_index: usize| (worker_index * each + worker_index.min(more)) * element;
    start(worker_index)..start(worker_index + 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn slices_are_whole_elements_and_cover_the_tensor(
            count in 0usize..20_000, power in 1u32..4, call in 0u64..9, worker_count in 1usize..9,
        ) {
            let element = 1usize << power;
            let size = count * element;
            let mut end = 0;
            let mut sizes = Vec::new();
            for worker_index in 0..worker_count {
                let slice = slice(size, element, call, worker_count, worker_index);
                prop_assert_eq!(slice.len() % element, 0);
                if !slice.is_empty() {
                    prop_assert_eq!(slice.start, end);
                    end = slice.end;
                }
                sizes.push(slice.len());
            }
            prop_assert_eq!(end, size);
            if size > WHOLE_BYTES {
                let (least, most) = (sizes.iter().min().unwrap(), sizes.iter().max().unwrap());
                prop_assert!(most - least <= element);
            }
        }
    }
}
