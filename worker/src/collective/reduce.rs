//! The arithmetic of collectives, on plain bytes.
//!
//! Values are added in the order they are given, in `f64` for `f64` and in `f32`
//! for all other types, and rounded once at the end. So the same parts in the same
//! order give the same bits on every worker.

use burn_backend::DType;
use burn_std::{bf16, f16};

/// Elements added up at a time: a block of the accumulator stays in the cache
/// while all parts are added to it.
const BLOCK_ELEMENTS: usize = 2048;

/// The element types that collectives support.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Element {
    F64,
    F32,
    F16,
    Bf16,
}

impl Element {
    /// Returns the element type of tensors of `dtype`, if collectives support it.
    pub(crate) fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F64 => Some(Self::F64),
            DType::F32 => Some(Self::F32),
            DType::F16 => Some(Self::F16),
            DType::BF16 => Some(Self::Bf16),
            _ => None,
        }
    }

    /// Returns the size of an element in bytes.
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// Returns the sum of `parts`, divided by `divisor` if there is one. All parts consist of
/// the same number of whole elements.
pub(crate) fn reduce(element: Element, parts: &[&[u8]], divisor: Option<u32>) -> Vec<u8> {
    match element {
        Element::F64 => sum(
            parts,
            divisor.map(f64::from),
            f64::from_le_bytes,
            f64::to_le_bytes,
        ),
        Element::F32 => sum(
            parts,
            divisor.map(|n| n as f32),
            f32::from_le_bytes,
            f32::to_le_bytes,
        ),
        Element::F16 => sum(
            parts,
            divisor.map(|n| n as f32),
            |bytes| f16::from_le_bytes(bytes).to_f32(),
            |value| f16::from_f32(value).to_le_bytes(),
        ),
        Element::Bf16 => sum(
            parts,
            divisor.map(|n| n as f32),
            |bytes| bf16::from_le_bytes(bytes).to_f32(),
            |value| bf16::from_f32(value).to_le_bytes(),
        ),
    }
}

fn sum<const N: usize, A>(
    parts: &[&[u8]],
    divisor: Option<A>,
    read: impl Fn([u8; N]) -> A,
    write: impl Fn(A) -> [u8; N],
) -> Vec<u8>
where
    A: Copy + Default + std::ops::AddAssign + std::ops::DivAssign,
{
    let Some((first, rest)) = parts.split_first() else {
        return Vec::new();
    };
    let mut out = vec![0; first.len()];
    let mut totals = [A::default(); BLOCK_ELEMENTS];
    for (block, out) in out.chunks_mut(BLOCK_ELEMENTS * N).enumerate() {
        let start = block * BLOCK_ELEMENTS * N;
        let end = start + out.len();
        for (total, value) in totals.iter_mut().zip(first[start..end].as_chunks::<N>().0) {
            *total = read(*value);
        }
        for part in rest {
            for (total, value) in totals.iter_mut().zip(part[start..end].as_chunks::<N>().0) {
                *total += read(*value);
            }
        }
        for (out, total) in out.as_chunks_mut::<N>().0.iter_mut().zip(&mut totals) {
            if let Some(divisor) = divisor {
                *total /= divisor;
            }
            *out = write(*total);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    #[test]
    fn parts_are_summed_in_rank_order_then_divided() {
        let parts = [bytes(&[1e8, 1.0]), bytes(&[1.0, 2.0]), bytes(&[-1e8, 6.0])];
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        // In f32, 1e8 + 1 is 1e8: in another order the first sum would be 1.
        assert_eq!(reduce(Element::F32, &parts, None), bytes(&[0.0, 9.0]));
        assert_eq!(reduce(Element::F32, &parts, Some(3)), bytes(&[0.0, 3.0]));
    }

    #[test]
    fn half_types_are_rounded_once() {
        // f16 has no 2049 but has 2050: rounded at each step, the sum would stay 2048.
        let half = |value: f32| f16::from_f32(value).to_le_bytes().to_vec();
        let parts = [half(2048.0), half(1.0), half(1.0)];
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        assert_eq!(reduce(Element::F16, &parts, None), half(2050.0));
        let half = |value: f32| bf16::from_f32(value).to_le_bytes().to_vec();
        let parts = [half(256.0), half(1.0), half(1.0)];
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        assert_eq!(reduce(Element::Bf16, &parts, None), half(258.0));
    }

    #[test]
    fn blocks_give_the_same_result_as_the_whole() {
        let count = 2 * BLOCK_ELEMENTS + 5;
        let values: Vec<f64> = (0..count).map(|i| i as f64).collect();
        let part: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let sums: Vec<u8> = values
            .iter()
            .flat_map(|v| (2.0 * v).to_le_bytes())
            .collect();
        assert_eq!(reduce(Element::F64, &[&part, &part], None), sums);
        assert_eq!(reduce(Element::F64, &[&part, &part], Some(2)), part);
    }
}
