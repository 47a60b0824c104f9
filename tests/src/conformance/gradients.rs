//! Gradients of the tensor ops. The themes of activations, modules and losses check
//! their gradients together with the forward pass.

use burn::tensor::{DType, FloatDType, IndexingUpdateOp, Int, Tensor, TensorData, s};

use super::autodiff::{backward, grad, grad_of, grad2, grad3, leaf};
use super::case::Case;
use super::data::{bools, floats, ints};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = elementwise();
    cases.extend(binary());
    cases.extend(reductions());
    cases.extend(movements());
    cases.extend(indexing());
    cases.extend(graphs());
    cases
}

const SHAPE: [usize; 3] = [2, 3, 4];

type Unary = fn(Tensor<3>) -> Tensor<3>;

fn unary(name: &'static str, f: Unary) -> Case {
    Case::approx(name, move |d| grad(d, SHAPE, f))
}

fn elementwise() -> Vec<Case> {
    vec![
        unary("grad.exp", |x| x.exp()),
        unary("grad.log", |x| (x + 2.5).log()),
        unary("grad.log1p", |x| (x + 1.5).log1p()),
        unary("grad.sqrt", |x| (x + 2.5).sqrt()),
        unary("grad.square", |x| x.square()),
        unary("grad.recip", |x| (x + 3.0).recip()),
        unary("grad.erf", |x| x.erf()),
        unary("grad.sin", |x| x.sin()),
        unary("grad.cos", |x| x.cos()),
        unary("grad.tan", |x| (x * 0.5).tan()),
        unary("grad.sinh", |x| x.sinh()),
        unary("grad.cosh", |x| x.cosh()),
        unary("grad.tanh", |x| x.tanh()),
        unary("grad.asin", |x| (x * 0.4).asin()),
        unary("grad.acos", |x| (x * 0.4).acos()),
        unary("grad.atan", |x| x.atan()),
        unary("grad.asinh", |x| x.asinh()),
        unary("grad.acosh", |x| (x + 4.0).acosh()),
        unary("grad.atanh", |x| (x * 0.4).atanh()),
        unary("grad.abs", |x| x.abs()),
        unary("grad.neg", |x| -x),
        unary("grad.sign", |x| x.clone().sign() * x),
        unary("grad.round", |x| {
            x.clone().round() + x.clone().floor() + x.clone().ceil() * x
        }),
        unary("grad.clamp", |x| x.clamp(-0.75, 1.25)),
        unary("grad.powf_scalar", |x| (x + 2.5).powf_scalar(1.7)),
        unary("grad.powi_scalar", |x| x.powi_scalar(3)),
        unary("grad.scalars", |x| {
            ((x * 1.5 + 0.3) / 0.7 - 2.0).remainder_scalar(1.3)
        }),
        unary("grad.cumsum", |x| x.cumsum(1)),
        unary("grad.cumprod", |x| x.cumprod(2)),
        unary("grad.cummax", |x| x.clone().cummax(1) + x.cummin(2)),
    ]
}

fn binary() -> Vec<Case> {
    vec![
        Case::approx("grad.add", |d| grad2(d, SHAPE, [1, 3, 1], |a, b| a + b)),
        Case::approx("grad.sub", |d| grad2(d, [2, 1, 4], SHAPE, |a, b| a - b)),
        Case::approx("grad.mul", |d| grad2(d, [2, 3, 1], [1, 3, 4], |a, b| a * b)),
        Case::approx("grad.div", |d| {
            grad2(d, SHAPE, [2, 1, 1], |a, b| a / (b + 3.0))
        }),
        Case::approx("grad.remainder", |d| {
            grad2(d, SHAPE, SHAPE, |a, b| a.remainder(b + 3.0))
        }),
        Case::approx("grad.powf", |d| {
            grad2(d, SHAPE, SHAPE, |a, b| (a + 2.5).powf(b))
        }),
        Case::approx("grad.atan2", |d| grad2(d, SHAPE, SHAPE, |a, b| a.atan2(b))),
        Case::approx("grad.hypot", |d| grad2(d, SHAPE, SHAPE, |a, b| a.hypot(b))),
        Case::approx("grad.max_pair", |d| {
            grad2(d, SHAPE, SHAPE, |a, b| {
                a.clone().max_pair(b.clone()) + a.min_pair(b) * 0.3
            })
        }),
        Case::approx("grad.matmul", |d| {
            grad2(d, [3, 5], [5, 4], |a, b| a.matmul(b))
        }),
        Case::approx("grad.matmul/broadcast", |d| {
            grad2(d, [2, 3, 4, 5], [1, 3, 5, 2], |a, b| a.matmul(b))
        }),
        Case::approx("grad.matmul/transposed", |d| {
            grad2(d, [5, 3], [4, 5], |a, b| {
                a.transpose().matmul(b.transpose())
            })
        }),
        Case::approx("grad.matmul/vectors", |d| {
            grad2(d, [1, 6], [6, 1], |a, b| a.matmul(b))
        }),
        Case::approx("grad.dot", |d| grad2(d, [7], [7], |a, b| a.dot(b))),
        Case::approx("grad.cross", |d| {
            grad2(d, [4, 3], [4, 3], |a, b| a.cross(b, 1))
        }),
    ]
}

fn reductions() -> Vec<Case> {
    vec![
        Case::approx("grad.sum", |d| grad(d, SHAPE, |x| x.square().sum())),
        Case::approx("grad.mean", |d| grad(d, SHAPE, |x| x.square().mean())),
        Case::approx("grad.prod", |d| grad(d, [2, 4], |x| x.prod())),
        Case::approx("grad.max", |d| {
            grad(d, SHAPE, |x| x.clone().max() - x.min() * 2.0)
        }),
        unary("grad.sum_dim", |x| x.clone().sum_dim(1) * x),
        unary("grad.mean_dim", |x| x.clone().mean_dim(2) * x),
        unary("grad.prod_dim", |x| x.prod_dim(1)),
        unary("grad.max_dim", |x| x.max_dim(2)),
        unary("grad.min_dim", |x| x.min_dim(0)),
        unary("grad.max_dim_with_indices", |x| x.max_dim_with_indices(1).0),
        unary("grad.var", |x| x.clone().var(1) + x.var_bias(1)),
        unary("grad.topk", |x| x.topk(2, 1)),
        unary("grad.sort", |x| x.sort(2)),
        unary("grad.sort_descending_with_indices", |x| {
            x.sort_descending_with_indices(1).0
        }),
    ]
}

fn movements() -> Vec<Case> {
    vec![
        Case::exact("grad.reshape", |d| grad(d, SHAPE, |x| x.reshape([6, 4]))),
        unary("grad.transpose", |x| x.transpose()),
        unary("grad.permute", |x| x.permute([2, 0, 1])),
        unary("grad.flip", |x| x.flip([0, 2])),
        unary("grad.roll", |x| x.roll(&[1, 2], &[1, 2])),
        Case::approx("grad.expand", |d| {
            grad(d, [1, 3, 1], |x| x.expand([2, 3, 4]))
        }),
        Case::exact("grad.squeeze", |d| {
            grad(d, [2, 1, 3], |x| {
                x.squeeze_dim::<2>(1).unsqueeze_dim::<3>(2)
            })
        }),
        Case::approx("grad.repeat_dim", |d| {
            grad(d, SHAPE, |x| x.repeat_dim(1, 3))
        }),
        Case::exact("grad.cat", |d| {
            grad3(d, [2, 1, 4], SHAPE, [2, 2, 4], |a, b, c| {
                Tensor::cat(vec![a, b, c], 1)
            })
        }),
        Case::exact("grad.stack", |d| {
            grad2(d, SHAPE, SHAPE, |a, b| Tensor::stack::<4>(vec![a, b], 1))
        }),
        Case::approx("grad.split", |d| {
            grad(d, [3, 7], |x| {
                let parts = x.split(3, 1);
                parts[2].clone() * 3.0 + parts[0].clone().narrow(1, 2, 1)
            })
        }),
        unary("grad.pad", |x| x.pad((1, 2, 0, 1), 0.5)),
        Case::approx("grad.unfold", |d| {
            grad(d, [2, 7], |x| x.unfold::<3, _>(1, 3, 2))
        }),
        unary("grad.triu", |x| x.triu(1)),
    ]
}

fn indexing() -> Vec<Case> {
    use IndexingUpdateOp::Add;
    vec![
        unary("grad.slice", |x| x.slice(s![.., 1.., ..;2])),
        Case::approx("grad.slice_assign", |d| {
            grad2(d, SHAPE, [1, 2, 4], |a, b| {
                a.slice_assign([1..2, 0..2, 0..4], b)
            })
        }),
        unary("grad.select", |x| {
            let rows = Tensor::<1, Int>::from_ints([2, 0, 2], &x.device());
            x.select(1, rows)
        }),
        Case::approx("grad.select_assign", |d| {
            grad2(d, SHAPE, [2, 2, 4], |a, b| {
                let rows = Tensor::<1, Int>::from_ints([2, 0], &a.device());
                a.select_assign(1, rows, b, Add)
            })
        }),
        unary("grad.gather", |x| {
            let at = ints(&x.device(), [2, 3, 6], 5, 0, 4);
            x.gather(2, at)
        }),
        Case::approx("grad.scatter", |d| {
            grad2(d, SHAPE, [2, 3, 6], |a, b| {
                let at = ints(&a.device(), [2, 3, 6], 5, 0, 4);
                a.scatter(2, at, b, Add)
            })
        }),
        Case::approx("grad.mask_where", |d| {
            grad2(d, SHAPE, SHAPE, |a, b| {
                let mask = bools(&a.device(), SHAPE, 5);
                a.mask_where(mask, b)
            })
        }),
        unary("grad.mask_fill", |x| {
            let mask = bools(&x.device(), SHAPE, 5);
            x.mask_fill(mask, 9.0)
        }),
    ]
}

/// Cases about the paths through a graph instead of single ops.
fn graphs() -> Vec<Case> {
    vec![
        // One tensor reaches the loss on several paths.
        unary("grad.shared_input", |x| {
            x.clone().exp() * x.clone() + x.clone().sum_dim(1) / (x + 5.0)
        }),
        unary("grad.long_chain", |x| {
            (0..30).fold(x, |x, _| x.clone() * 0.9 + x.tanh() * 0.1)
        }),
        unary("grad.detach", |x| x.clone().detach() * x),
        Case::approx("grad.checkpointing", |d| {
            let device = d.clone().autodiff().gradient_checkpointing();
            let x = floats(&device, SHAPE, 1).require_grad();
            let y = (x.clone().exp() + x.clone()).sin().cos() * x.clone();
            let grads = backward(&y);
            vec![y.into_data(), grad_of(&x, &grads)]
        }),
        Case::approx("grad.intermediate", |d| {
            let x = leaf(d, SHAPE, 1);
            let middle = x.clone().exp();
            let grads = backward(&(middle.clone() * middle.clone()));
            let kept = TensorData::from([middle.grad(&grads).is_some()]);
            vec![grad_of(&x, &grads), kept]
        }),
        Case::approx("grad.untracked", |d| {
            let (x, constant) = (leaf(d, SHAPE, 1), floats(&d.clone().autodiff(), SHAPE, 2));
            let grads = backward(&(x.clone() * constant.clone()));
            let has_grad = [&x, &constant].map(|leaf| leaf.grad(&grads).is_some());
            vec![grad_of(&x, &grads), TensorData::from(has_grad)]
        }),
        Case::approx("grad.two_graphs", |d| {
            let x = leaf(d, SHAPE, 1);
            let first = backward(&x.clone().sin());
            let second = backward(&x.clone().cos());
            vec![grad_of(&x, &second), grad_of(&x, &first)]
        }),
        Case::approx("grad.cast", |d| {
            grad(d, SHAPE, |x| {
                (x.cast(FloatDType::F16) * 3.0).cast(FloatDType::F32)
            })
        })
        .needs(&[DType::F16]),
        Case::approx("grad.grad_replace", |d| {
            let x = leaf(d, SHAPE, 1);
            let mut grads = backward(&x.clone().exp());
            x.grad_replace(&mut grads, floats(d, SHAPE, 2));
            let replaced = grad_of(&x, &grads);
            let removed = x.grad_remove(&mut grads).map(Tensor::into_data);
            let gone = TensorData::from([x.grad(&grads).is_none()]);
            vec![
                replaced,
                removed.expect("the gradient should be there"),
                gone,
            ]
        }),
        Case::approx("grad.inner", |d| {
            let x = leaf(d, SHAPE, 1).inner();
            let tracked = TensorData::from([x.is_autodiff()]);
            (x.exp(), tracked)
        }),
    ]
}
