//! Compares two host tensors and names the first difference.
//!
//! Burn's own `assert_eq` panics, and treats NaN as unequal to itself. Here a difference is
//! a value, so that one run can report all differences.

use std::fmt;

use burn::tensor::{DType, TensorData};

use super::case::Tolerance;

/// Least relative tolerance for the half-precision types.
const HALF_RELATIVE: f64 = 1e-2;

/// The rule of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agreement {
    /// The two devices run the same kind of backend: equal bits, and equal
    /// element types. NaN equals NaN.
    Bitwise,
    /// The two devices run different kinds of backend: each case's tolerance
    /// applies. The element types may differ in width, because each backend chooses
    /// its default integer type.
    Tolerance,
}

/// The first way in which two tensors differ.
#[derive(Clone, Debug, PartialEq)]
pub enum Difference {
    /// Unequal element types: actual, expected.
    DType(DType, DType),
    /// Unequal shapes: actual, expected.
    Shape(Vec<usize>, Vec<usize>),
    /// Unequal values at one position.
    Element {
        /// Index of the element in row-major order.
        position: usize,
        /// The value computed by the device under test.
        actual: Value,
        /// The value computed by the reference.
        expected: Value,
        /// Total number of elements that differ.
        differing: usize,
    },
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DType(actual, expected) => write!(f, "dtype {actual:?}, expected {expected:?}"),
            Self::Shape(actual, expected) => write!(f, "shape {actual:?}, expected {expected:?}"),
            Self::Element {
                position,
                actual,
                expected,
                differing,
            } => write!(
                f,
                "element {position} is {actual}, expected {expected} ({differing} differ)"
            ),
        }
    }
}

/// One element of a tensor, widened without loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// A value of any float type.
    Float(f64),
    /// A value of any signed or unsigned integer type.
    Int(i128),
    /// A value of any boolean store.
    Bool(bool),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Float(value) => write!(f, "{value:?}"),
            Self::Int(value) => write!(f, "{value}"),
            Self::Bool(value) => write!(f, "{value}"),
        }
    }
}

impl Value {
    fn same_bits(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Float(a), Self::Float(b)) => a.to_bits() == b.to_bits() || both_nan(*a, *b),
            _ => self == other,
        }
    }

    fn within(&self, other: &Self, relative: f64, absolute: f64) -> bool {
        match (self, other) {
            (Self::Float(a), Self::Float(b)) => {
                // Equal infinities are equal, although their difference is NaN.
                let near = (a - b).abs() <= absolute.max(relative * a.abs().max(b.abs()));
                a == b || both_nan(*a, *b) || (near && a.is_finite() && b.is_finite())
            }
            _ => self == other,
        }
    }
}

fn both_nan(a: f64, b: f64) -> bool {
    a.is_nan() && b.is_nan()
}

/// Compares a computed tensor with the expected one. The error is the first difference.
pub fn compare(
    actual: &TensorData,
    expected: &TensorData,
    tolerance: Tolerance,
    agreement: Agreement,
) -> Result<(), Difference> {
    let (seen, wanted) = (actual.dtype(), expected.dtype());
    let comparable = match agreement {
        // Workers use the integer type that clients declare, I32. Flex alone makes indices
        // of type I64.
        Agreement::Bitwise => seen == wanted || (seen, wanted) == (DType::I32, DType::I64),
        Agreement::Tolerance => Kind::of(seen) == Kind::of(wanted),
    };
    if !comparable {
        return Err(Difference::DType(seen, wanted));
    }
    if actual.shape() != expected.shape() {
        let dims = |data: &TensorData| data.shape().as_slice().to_vec();
        return Err(Difference::Shape(dims(actual), dims(expected)));
    }

    let (mut relative, absolute) = tolerance.bounds();
    if tolerance != Tolerance::Exact && (seen.size() == 2 || wanted.size() == 2) {
        relative = relative.max(HALF_RELATIVE);
    }
    let same = |a: &Value, b: &Value| match agreement {
        Agreement::Bitwise => a.same_bits(b),
        Agreement::Tolerance => a.within(b, relative, absolute),
    };
    let (actual, expected) = (values(actual), values(expected));
    let mut differing = (0..actual.len()).filter(|&i| !same(&actual[i], &expected[i]));
    match differing.next() {
        None => Ok(()),
        Some(position) => Err(Difference::Element {
            position,
            actual: actual[position],
            expected: expected[position],
            differing: 1 + differing.count(),
        }),
    }
}

/// The kinds of tensor that a comparison distinguishes.
#[derive(PartialEq)]
enum Kind {
    Float,
    Int,
    Bool,
}

impl Kind {
    fn of(dtype: DType) -> Self {
        if dtype.is_float() {
            Self::Float
        } else if dtype.is_bool() {
            Self::Bool
        } else {
            Self::Int
        }
    }
}

fn values(data: &TensorData) -> Vec<Value> {
    match Kind::of(data.dtype()) {
        Kind::Float => data.iter::<f64>().map(Value::Float).collect(),
        Kind::Bool => data.iter::<bool>().map(Value::Bool).collect(),
        Kind::Int if data.dtype().is_uint() => data
            .iter::<u64>()
            .map(|value| Value::Int(value.into()))
            .collect(),
        Kind::Int => data
            .iter::<i64>()
            .map(|value| Value::Int(value.into()))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn differ(actual: TensorData, expected: TensorData, agreement: Agreement) -> Option<String> {
        compare(&actual, &expected, Tolerance::BALANCED, agreement)
            .err()
            .map(|difference| difference.to_string())
    }

    #[test]
    fn bitwise_comparison_finds_every_difference() {
        let cases = [
            (
                TensorData::from([1.0f32, 2.0]),
                TensorData::from([1.0f32, 2.0]),
                None,
            ),
            (
                TensorData::from([f32::NAN]),
                TensorData::from([-f32::NAN]),
                None,
            ),
            (
                TensorData::from([0.0f32]),
                TensorData::from([-0.0f32]),
                Some("element 0 is 0.0, expected -0.0 (1 differ)"),
            ),
            (
                TensorData::from([1.0f32, 2.0, 3.0]),
                TensorData::from([1.0f32, 2.5, 4.0]),
                Some("element 1 is 2.0, expected 2.5 (2 differ)"),
            ),
            (TensorData::from([1i32]), TensorData::from([1i64]), None),
            (
                TensorData::from([1i32]),
                TensorData::from([2i64]),
                Some("element 0 is 1, expected 2 (1 differ)"),
            ),
            (
                TensorData::from([1i64]),
                TensorData::from([1i32]),
                Some("dtype I64, expected I32"),
            ),
            (
                TensorData::from([[1i32, 2]]),
                TensorData::from([1i32, 2]),
                Some("shape [1, 2], expected [2]"),
            ),
            (
                TensorData::from([u64::MAX]),
                TensorData::from([u64::MAX - 1]),
                Some("element 0 is 18446744073709551615, expected 18446744073709551614 (1 differ)"),
            ),
            (
                TensorData::from([true, false]),
                TensorData::from([true, true]),
                Some("element 1 is false, expected true (1 differ)"),
            ),
        ];
        for (actual, expected, difference) in cases {
            assert_eq!(
                differ(actual, expected, Agreement::Bitwise).as_deref(),
                difference
            );
        }
    }

    #[test]
    fn tolerance_allows_only_rounding() {
        let cases = [
            (
                TensorData::from([1.0f32]),
                TensorData::from([1.004f32]),
                true,
            ),
            (
                TensorData::from([1.0f32]),
                TensorData::from([1.006f32]),
                false,
            ),
            (
                TensorData::from([0.0f32]),
                TensorData::from([9e-6f32]),
                true,
            ),
            (
                TensorData::from([f32::INFINITY]),
                TensorData::from([f32::INFINITY]),
                true,
            ),
            (
                TensorData::from([f32::INFINITY]),
                TensorData::from([f32::MAX]),
                false,
            ),
            (
                TensorData::from([f32::NAN]),
                TensorData::from([1.0f32]),
                false,
            ),
            (TensorData::from([7i32]), TensorData::from([7i64]), true),
            (
                TensorData::from([1000i32]),
                TensorData::from([1001i32]),
                false,
            ),
            (TensorData::from([1i32]), TensorData::from([1.0f32]), false),
        ];
        for (actual, expected, agree) in cases {
            let difference = differ(actual, expected, Agreement::Tolerance);
            assert_eq!(difference.is_none(), agree, "{difference:?}");
        }
    }
}
