//! A test program: it trains an MLP with Adam.

use burn_ir::{
    ActivationOperationIr, BaseOperationIr, DimOpIr, MatmulOpIr, ReduceDimOpIr, ScalarIr,
    ScalarOpIr, ShapeOpIr, SwapDimsOpIr, TensorStatus, UnaryOpIr,
};

use super::*;

/// Records the ops of a training program, step by step.
#[derive(Default)]
pub(super) struct Program {
    next: u64,
    steps: i32,
    layers: Vec<Layer>,
    /// A tensor that is created once and used in every step.
    mask: Option<TensorIr>,
    pub(super) ops: Vec<OperationIr>,
}

#[derive(Clone)]
struct Layer {
    weight: Param,
    bias: Param,
}

/// A parameter and its two moments of Adam.
#[derive(Clone)]
struct Param([TensorIr; 3]);

const WIDTHS: [usize; 4] = [784, 256, 128, 10];
const BATCH: usize = 64;

impl Program {
    pub(super) fn new() -> Self {
        let mut program = Self::default();
        for pair in WIDTHS.windows(2) {
            let weight = program.param([pair[0], pair[1]]);
            let bias = program.param([1, pair[1]]);
            program.layers.push(Layer { weight, bias });
        }
        program.mask = Some(program.made([BATCH, WIDTHS[1]]));
        program
    }

    fn tensor(&mut self, shape: [usize; 2]) -> TensorIr {
        self.next += 1;
        TensorIr::uninit(TensorId::new(self.next), Shape::new(shape), DType::F32)
    }

    /// Returns a tensor that was created before.
    fn made(&mut self, shape: [usize; 2]) -> TensorIr {
        TensorIr {
            status: TensorStatus::ReadOnly,
            ..self.tensor(shape)
        }
    }

    fn param(&mut self, shape: [usize; 2]) -> Param {
        Param([(); 3].map(|()| self.made(shape)))
    }

    /// Records the op that `build` returns for a new tensor, and returns the tensor.
    fn out(&mut self, shape: [usize; 2], build: impl FnOnce(TensorIr) -> OperationIr) -> TensorIr {
        let mut out = self.tensor(shape);
        self.ops.push(build(out.clone()));
        out.status = TensorStatus::ReadOnly;
        out
    }

    fn matmul(&mut self, lhs: &TensorIr, rhs: &TensorIr) -> TensorIr {
        let (lhs, rhs) = (lhs.clone(), rhs.clone());
        self.out([lhs.shape[0], rhs.shape[1]], |out| {
            OperationIr::Float(
                DType::F32,
                FloatOperationIr::Matmul(MatmulOpIr { lhs, rhs, out }),
            )
        })
    }

    fn transpose(&mut self, input: &TensorIr) -> TensorIr {
        let (input, dim1, dim2) = (input.clone(), 0, 1);
        self.out([input.shape[1], input.shape[0]], |out| {
            let swap = SwapDimsOpIr {
                input,
                out,
                dim1,
                dim2,
            };
            OperationIr::BaseFloat(BaseOperationIr::SwapDims(swap))
        })
    }

    fn binary(
        &mut self,
        lhs: &TensorIr,
        rhs: &TensorIr,
        op: fn(BinaryOpIr) -> NumericOperationIr,
    ) -> TensorIr {
        let (lhs, rhs) = (lhs.clone(), rhs.clone());
        self.out([lhs.shape[0], lhs.shape[1]], |out| {
            OperationIr::NumericFloat(DType::F32, op(BinaryOpIr { lhs, rhs, out }))
        })
    }

    fn scalar(
        &mut self,
        lhs: &TensorIr,
        rhs: f32,
        op: fn(ScalarOpIr) -> NumericOperationIr,
    ) -> TensorIr {
        let (lhs, rhs) = (lhs.clone(), ScalarIr::Float(rhs.into()));
        self.out([lhs.shape[0], lhs.shape[1]], |out| {
            OperationIr::NumericFloat(DType::F32, op(ScalarOpIr { lhs, rhs, out }))
        })
    }

    fn unary(&mut self, input: &TensorIr, op: fn(UnaryOpIr) -> OperationIr) -> TensorIr {
        let input = input.clone();
        self.out([input.shape[0], input.shape[1]], |out| {
            op(UnaryOpIr { input, out })
        })
    }

    fn drop_all(&mut self, tensors: impl IntoIterator<Item = TensorIr>) {
        self.ops.extend(tensors.into_iter().map(OperationIr::Drop));
    }

    /// Records one step; returns the id of the batch that it uploads.
    pub(super) fn step(&mut self) -> u64 {
        self.ops.clear();
        self.steps += 1;
        let batch = self.made([BATCH, WIDTHS[0]]);
        let id = batch.id.value();
        let mut inputs = vec![batch];
        for (i, layer) in self.layers.clone().iter().enumerate() {
            let [weight, bias] = [&layer.weight, &layer.bias].map(|param| &param.0[0]);
            let product = self.matmul(&inputs[i], weight);
            let bias = self.expand(bias, [BATCH, WIDTHS[i + 1]]);
            let sum = self.binary(&product, &bias, NumericOperationIr::Add);
            let relu = |unary| OperationIr::Activation(ActivationOperationIr::Relu(unary));
            let mut output = self.unary(&sum, relu);
            self.drop_all([product, bias, sum]);
            if i == 0 {
                let mask = self.mask.clone().unwrap();
                output = self.binary(&output, &mask, NumericOperationIr::Mul);
            }
            inputs.push(output);
        }
        let grad = self.loss(&inputs[3]);
        self.backward(inputs, grad);
        id
    }

    fn expand(&mut self, input: &TensorIr, shape: [usize; 2]) -> TensorIr {
        let input = input.clone();
        self.out(shape, |out| {
            OperationIr::BaseFloat(BaseOperationIr::Expand(ShapeOpIr { input, out }))
        })
    }

    fn loss(&mut self, output: &TensorIr) -> TensorIr {
        let (input, axis) = (output.clone(), 1);
        let softmax = self.out([BATCH, WIDTHS[3]], |out| {
            let softmax = DimOpIr { input, out, axis };
            OperationIr::Activation(ActivationOperationIr::Softmax(softmax))
        });
        let scaled = self.scalar(&softmax, 1.0 / BATCH as f32, NumericOperationIr::MulScalar);
        self.drop_all([softmax]);
        scaled
    }

    fn backward(&mut self, inputs: Vec<TensorIr>, mut grad: TensorIr) {
        for i in (0..self.layers.len()).rev() {
            let Layer { weight, bias } = self.layers[i].clone();
            let across = self.transpose(&inputs[i]);
            let weight_grad = self.matmul(&across, &grad);
            let input = grad.clone();
            let bias_grad = self.out([1, WIDTHS[i + 1]], |out| {
                let (axis, accumulator_len) = (0, BATCH);
                let sum = ReduceDimOpIr {
                    input,
                    out,
                    axis,
                    accumulator_len,
                };
                OperationIr::NumericFloat(DType::F32, NumericOperationIr::SumDim(sum))
            });
            let across_weight = self.transpose(&weight.0[0]);
            let next = self.matmul(&grad, &across_weight);
            self.drop_all([across, across_weight, grad]);
            let weight = self.adam(weight, weight_grad);
            let bias = self.adam(bias, bias_grad);
            self.layers[i] = Layer { weight, bias };
            grad = next;
        }
        self.drop_all(inputs.into_iter().chain([grad]));
    }

    fn adam(&mut self, Param([param, first, second]): Param, grad: TensorIr) -> Param {
        use NumericOperationIr::{Add, AddScalar, Div, DivScalar, Mul, MulScalar, Sub};
        let moment = |program: &mut Self, old: TensorIr, grad: &TensorIr, beta: f32| {
            let kept = program.scalar(&old, beta, MulScalar);
            let added = program.scalar(grad, 1.0 - beta, MulScalar);
            let new = program.binary(&kept, &added, Add);
            let corrected = program.scalar(&new, 1.0 - beta.powi(program.steps), DivScalar);
            program.drop_all([kept, added, old]);
            (new, corrected)
        };
        let (first, mean) = moment(self, first, &grad, 0.9);
        let square = self.binary(&grad, &grad, Mul);
        let (second, variance) = moment(self, second, &square, 0.999);
        let root = self.unary(&variance, |unary| {
            OperationIr::Float(DType::F32, FloatOperationIr::Sqrt(unary))
        });
        let root = self.scalar(&root, 1e-5, AddScalar);
        let step = self.binary(&mean, &root, Div);
        let step = self.scalar(&step, 1e-3, MulScalar);
        let new = self.binary(&param, &step, Sub);
        self.drop_all([grad, mean, square, variance, root, step, param]);
        Param([new, first, second])
    }
}
