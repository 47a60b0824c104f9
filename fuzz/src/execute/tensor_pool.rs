//! The tensors that a fuzzed program has, and the ops that make more of them.

use burn_backend::{DType, Shape, Slice};
use burn_ir::{
    BaseOperationIr, FlipOpIr, InitOperationIr, OperationIr, ShapeOpIr, SliceOpIr, SwapDimsOpIr,
    TensorId, TensorIr, TensorStatus,
};
use bytes::Bytes;
use tensord_proto::{
    codec::tensor_bytes,
    content::{Content, Entry},
};

use crate::seeds::Rng;

/// Maximum size in bytes of a tensor that is kept or made as an input.
pub(super) const MAX_BYTES: usize = 8 << 10;

/// Maximum number of tensors that are kept for later ops.
const MAX_KEPT: usize = 96;

/// The ops of a frame, and the bytes of the uploads among them.
#[derive(Default)]
pub(super) struct Batch {
    pub(super) ops: Vec<OperationIr>,
    pub(super) uploads: Vec<Entry>,
}

impl Batch {
    pub(super) fn upload(&mut self, out: TensorIr, bytes: Vec<u8>) {
        self.ops.push(OperationIr::Init(InitOperationIr { out }));
        self.uploads.push(Entry::Upload(Content::Inline {
            bytes: Bytes::from(bytes),
            keep: None,
        }));
    }
}

/// The tensors that exist in the session, as far as the program knows.
#[derive(Default)]
pub(super) struct TensorPool {
    live: Vec<TensorIr>,
    ids: u64,
}

impl TensorPool {
    pub(super) fn id(&mut self) -> TensorId {
        self.ids += 1;
        TensorId::new(self.ids)
    }

    /// Returns an existing tensor of any type.
    pub(super) fn any(&self, rng: &mut Rng) -> Option<&TensorIr> {
        match self.live.len() {
            0 => None,
            len => self.live.get(rng.below(len)),
        }
    }

    /// Records a tensor. Returns another one to drop if there are too many.
    pub(super) fn keep(&mut self, tensor: TensorIr, rng: &mut Rng) -> Option<TensorIr> {
        self.live.push(tensor);
        (self.live.len() > MAX_KEPT).then(|| {
            let at = rng.below(self.live.len());
            self.live.swap_remove(at)
        })
    }

    pub(super) fn forget(&mut self, id: TensorId) {
        self.live.retain(|tensor| tensor.id != id);
    }

    /// Returns an existing tensor of this type, or a new one that `batch` then makes.
    /// Returns `None` if a new one would be too large.
    pub(super) fn find(
        &mut self,
        shape: &Shape,
        dtype: DType,
        batch: &mut Batch,
        rng: &mut Rng,
    ) -> Option<TensorId> {
        if rng.below(4) > 0 {
            let len = self.live.len();
            let start = rng.below(len.max(1));
            let mut places = (0..len).map(|i| &self.live[(start + i) % len]);
            let fits = |tensor: &&TensorIr| tensor.dtype == dtype && tensor.shape == *shape;
            if let Some(found) = places.find(fits) {
                return Some(found.id);
            }
        }
        let small = |shape: &Shape| {
            let rank = shape.as_slice().len();
            rank <= 8 && tensor_bytes(shape, dtype).is_some_and(|bytes| bytes <= MAX_BYTES)
        };
        if !small(shape) || matches!(dtype, DType::QFloat(_)) {
            return None;
        }
        let out = TensorIr {
            id: self.id(),
            shape: shape.clone(),
            status: TensorStatus::NotInit,
            dtype,
        };
        let id = out.id;
        match view(&out, rng).filter(|(shape, _)| small(shape)) {
            Some((shape, op)) => {
                let source = TensorIr {
                    id: self.id(),
                    shape,
                    ..out.clone()
                };
                batch.upload(source.clone(), contents(&source, rng));
                let input = TensorIr {
                    status: TensorStatus::ReadWrite,
                    ..source
                };
                batch.ops.push(shown(op, input, out.clone()));
            }
            None => {
                let bytes = contents(&out, rng);
                batch.upload(out.clone(), bytes);
            }
        }
        self.live.push(TensorIr {
            status: TensorStatus::ReadOnly,
            ..out
        });
        Some(id)
    }
}

/// How a tensor is a view of another.
enum View {
    Swap(usize, usize),
    Slice(usize),
    Flip(usize),
    Expand,
}

/// Returns the shape of a tensor of which `out` may be a view, and the kind of view, so that
/// kernels get all kinds of strides and offsets.
fn view(out: &TensorIr, rng: &mut Rng) -> Option<(Shape, View)> {
    let mut dims = out.shape.as_slice().to_vec();
    if dims.is_empty() || rng.below(2) == 0 {
        return None;
    }
    let axis = rng.below(dims.len());
    let view = match rng.below(4) {
        0 => {
            let other = rng.below(dims.len());
            dims.swap(axis, other);
            View::Swap(axis, other)
        }
        1 => {
            // If another dim is 0, this one may have any size.
            let whole = dims[axis].checked_add(3);
            dims[axis] = whole.filter(|&dim| isize::try_from(dim).is_ok())?;
            View::Slice(axis)
        }
        2 => View::Flip(axis),
        _ => {
            dims[axis] = 1;
            View::Expand
        }
    };
    Some((Shape::from(dims), view))
}

/// The op that makes `out` a view of `input`.
fn shown(view: View, input: TensorIr, out: TensorIr) -> OperationIr {
    let dtype = input.dtype;
    let op = match view {
        View::Swap(dim1, dim2) => BaseOperationIr::SwapDims(SwapDimsOpIr {
            input,
            dim1,
            dim2,
            out,
        }),
        View::Slice(axis) => {
            let whole = |i: usize| match i == axis {
                true => Slice::new(1, Some(1 + out.shape.as_slice()[axis] as isize), 1),
                false => Slice::new(0, None, 1),
            };
            let ranges = (0..input.shape.as_slice().len()).map(whole).collect();
            BaseOperationIr::Slice(SliceOpIr {
                tensor: input,
                ranges,
                out,
            })
        }
        View::Flip(axis) => BaseOperationIr::Flip(FlipOpIr {
            input,
            out,
            axes: vec![axis],
        }),
        View::Expand => BaseOperationIr::Expand(ShapeOpIr { input, out }),
    };
    match dtype {
        DType::Bool(_) => OperationIr::BaseBool(op),
        dtype if dtype.is_float() => OperationIr::BaseFloat(op),
        _ => OperationIr::BaseInt(op),
    }
}

/// Returns bytes for a tensor. Indices are mostly within small dims and sometimes far
/// outside; floats are sometimes NaN or infinite.
pub(super) fn contents(tensor: &TensorIr, rng: &mut Rng) -> Vec<u8> {
    let size = tensor_bytes(&tensor.shape, tensor.dtype).unwrap_or(0);
    let width = tensor.dtype.size().max(1);
    let mut bytes = Vec::with_capacity(size);
    let wild = rng.below(6);
    while bytes.len() < size {
        let number = rng.next();
        match tensor.dtype {
            DType::F64 | DType::F32 | DType::Flex32 | DType::F16 | DType::BF16 if wild > 0 => {
                let small = (number % 64) as f32 / 16.0 - 1.5;
                bytes.extend(float(small, tensor.dtype));
            }
            DType::Bool(_) => {
                let truth = u64::from(number.is_multiple_of(2));
                bytes.extend(&truth.to_le_bytes()[..width]);
            }
            _ => {
                let value = match wild {
                    0 => number,
                    1 => number % 9,
                    2 => (number % 9).wrapping_sub(4),
                    _ => number % 2,
                };
                bytes.extend(&value.to_le_bytes()[..width]);
            }
        }
    }
    bytes.truncate(size);
    bytes
}

fn float(value: f32, dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F64 => f64::from(value).to_le_bytes().to_vec(),
        DType::F16 => burn_backend::f16::from_f32(value).to_le_bytes().to_vec(),
        DType::BF16 => burn_backend::bf16::from_f32(value).to_le_bytes().to_vec(),
        _ => value.to_le_bytes().to_vec(),
    }
}
