//! Changes an op, so that it becomes invalid or just different.
//!
//! Tensors, scalars and ranges are changed in place. All other arguments are changed in the
//! op's serialized bytes, so no argument of any variant is left out.

use burn_backend::{BoolStore, DType, Shape, Slice};
use burn_ir::{IrVisitorMut, OperationIr, ScalarIr, TensorIr};

use super::each_tensor;
use crate::seeds::Rng;

/// Dims to try: the sizes of kernels' blocks, and their neighbours.
const DIMS: [usize; 14] = [0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 64];

/// Dims that no tensor can have.
const HUGE: [usize; 8] = [
    1 << 16,
    1 << 31,
    (1 << 32) + 1,
    1 << 44,
    1 << 61,
    isize::MAX as usize,
    usize::MAX - 1,
    usize::MAX,
];

const DTYPES: [DType; 16] = [
    DType::F64,
    DType::F32,
    DType::Flex32,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::I32,
    DType::I16,
    DType::I8,
    DType::U64,
    DType::U32,
    DType::U16,
    DType::U8,
    DType::Bool(BoolStore::Native),
    DType::Bool(BoolStore::U8),
    DType::Bool(BoolStore::U32),
];

const SCALARS: [ScalarIr; 14] = [
    ScalarIr::Int(0),
    ScalarIr::Int(-1),
    ScalarIr::Int(i64::MIN),
    ScalarIr::Int(i64::MAX),
    ScalarIr::Int(64),
    ScalarIr::UInt(u64::MAX),
    ScalarIr::Bool(true),
    ScalarIr::Float(0.0),
    ScalarIr::Float(-1.5),
    ScalarIr::Float(1e300),
    ScalarIr::Float(f64::NAN),
    ScalarIr::Float(f64::INFINITY),
    ScalarIr::Float(f64::NEG_INFINITY),
    ScalarIr::Float(5e-324),
];

const BOUNDS: [isize; 8] = [0, 1, -1, 2, -3, 9, isize::MIN, isize::MAX];

/// Returns an element of `all`.
fn one_of<T: Copy>(rng: &mut Rng, all: &[T]) -> T {
    all[rng.below(all.len())]
}

/// Changes one property of `op`: of one tensor, or of all tensors that share its value.
pub(super) fn mutate(op: &mut OperationIr, rng: &mut Rng) {
    match rng.below(16) {
        0..=4 => dim(op, rng),
        5 | 6 => dtype(op, rng),
        7 => rank(op, rng),
        8 => scalar(op, rng),
        9 => range(op, rng),
        _ => argument(op, rng),
    }
}

fn tensors(op: &mut OperationIr) -> Vec<TensorIr> {
    let mut tensors = Vec::new();
    each_tensor(op, |tensor| tensors.push(tensor.clone()));
    tensors
}

/// Returns a random tensor of `op` and its index.
fn pick(op: &mut OperationIr, rng: &mut Rng) -> Option<(usize, TensorIr)> {
    let mut tensors = tensors(op);
    if tensors.is_empty() {
        return None;
    }
    let at = rng.below(tensors.len());
    Some((at, tensors.swap_remove(at)))
}

/// Calls `change` with tensor number `at` of `op`, or with all tensors if `at` is `None`.
fn change(op: &mut OperationIr, at: Option<usize>, mut change: impl FnMut(&mut TensorIr)) {
    let mut number = 0;
    each_tensor(op, |tensor| {
        if at.is_none_or(|at| at == number) {
            change(tensor);
        }
        number += 1;
    });
}

/// Returns `None` (all tensors) two times in three, so that the changed op often is
/// consistent again.
fn scope(at: usize, rng: &mut Rng) -> Option<usize> {
    (rng.below(3) == 0).then_some(at)
}

fn dim(op: &mut OperationIr, rng: &mut Rng) {
    let Some((at, tensor)) = pick(op, rng) else {
        return;
    };
    let dims = tensor.shape.as_slice();
    if dims.is_empty() {
        return;
    }
    let axis = rng.below(dims.len());
    let from = dims[axis];
    let (to, scope) = match rng.below(12) {
        0 => (one_of(rng, &HUGE), Some(at)),
        1 => (from.wrapping_add(1), scope(at, rng)),
        2 => (from.saturating_sub(1), scope(at, rng)),
        _ => (one_of(rng, &DIMS), scope(at, rng)),
    };
    change(op, scope, |tensor| {
        let mut dims = tensor.shape.as_slice().to_vec();
        match scope {
            Some(_) => dims[axis] = to,
            None => dims
                .iter_mut()
                .filter(|dim| **dim == from)
                .for_each(|dim| *dim = to),
        }
        tensor.shape = Shape::from(dims);
    });
}

fn dtype(op: &mut OperationIr, rng: &mut Rng) {
    let Some((at, tensor)) = pick(op, rng) else {
        return;
    };
    let to = one_of(rng, &DTYPES);
    let scope = scope(at, rng);
    change(op, scope, |one| {
        if one.dtype == tensor.dtype {
            one.dtype = to;
        }
    });
}

/// Changes the number of dims, or their order.
fn rank(op: &mut OperationIr, rng: &mut Rng) {
    let Some((at, _)) = pick(op, rng) else {
        return;
    };
    let how = rng.below(4);
    let scope = scope(at, rng);
    change(op, scope, |tensor| {
        let mut dims = tensor.shape.as_slice().to_vec();
        match how {
            0 => dims.insert(0, 1),
            1 => dims.push(2),
            2 => drop(dims.pop()),
            _ => dims.reverse(),
        }
        tensor.shape = Shape::from(dims);
    });
}

/// Changes every scalar, or one range in two.
struct Arguments<'a> {
    rng: &'a mut Rng,
    scalars: bool,
}

impl IrVisitorMut for Arguments<'_> {
    fn visit_scalar_mut(&mut self, scalar: &mut ScalarIr) {
        if self.scalars {
            *scalar = one_of(self.rng, &SCALARS);
        }
    }

    fn visit_range_mut(&mut self, range: &mut Slice) {
        if self.scalars || self.rng.below(2) == 0 {
            return;
        }
        match self.rng.below(3) {
            0 => range.start = one_of(self.rng, &BOUNDS),
            1 => {
                let end = one_of(self.rng, &BOUNDS);
                range.end = (self.rng.below(4) > 0).then_some(end);
            }
            _ => range.step = one_of(self.rng, &BOUNDS),
        }
    }
}

fn scalar(op: &mut OperationIr, rng: &mut Rng) {
    op.visit_mut(&mut Arguments { rng, scalars: true });
}

fn range(op: &mut OperationIr, rng: &mut Rng) {
    op.visit_mut(&mut Arguments {
        rng,
        scalars: false,
    });
}

/// Changes a byte of the serialized op, or replaces it with a large number.
fn argument(op: &mut OperationIr, rng: &mut Rng) {
    let bytes = postcard::to_stdvec(&*op).expect("ops serialize without failing");
    // The first two bytes are the variant.
    if bytes.len() < 3 {
        return;
    }
    // Some changes give bytes that are no op.
    for _ in 0..4 {
        let at = 2 + rng.below(bytes.len() - 2);
        let mut changed = bytes.clone();
        match rng.below(8) {
            0 => changed[at] = rng.next() as u8,
            1 => changed[at] ^= 1 << rng.below(8),
            2 => {
                let wide = postcard::to_stdvec(&one_of(rng, &HUGE));
                let wide = wide.expect("numbers serialize without failing");
                changed.splice(at..=at, wide);
            }
            3 => changed[at] = changed[at].wrapping_add(1),
            4 => changed[at] = changed[at].wrapping_sub(1),
            _ => changed[at] = rng.below(10) as u8,
        }
        if let Ok(other) = postcard::from_bytes::<OperationIr>(&changed) {
            *op = other;
            return;
        }
    }
}
