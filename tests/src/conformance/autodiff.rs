//! Helpers that run gradient cases and module cases.
//!
//! The loss weighs every element of the output differently, so that the suite detects a
//! backward pass that permutes or drops gradients. Module parameters are set by formula
//! before they are initialised, so that no case draws from the random generator by
//! accident.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Device, Gradients, Tensor, TensorData};

use super::data::{between, floats, values};

/// Returns a tracked leaf of floats in `[-2, 2)` on the device.
pub(super) fn leaf<const D: usize>(device: &Device, shape: [usize; D], seed: u32) -> Tensor<D> {
    floats(&device.clone().autodiff(), shape, seed).require_grad()
}

/// Returns the gradients of a loss that weighs every element of `y` differently.
pub(super) fn backward<const D: usize>(y: &Tensor<D>) -> Gradients {
    let weights = between(&y.device(), y.dims(), 77, 0.5, 1.5);
    (y.clone() * weights).sum().backward()
}

/// Returns the gradient of one input.
pub(super) fn grad_of<const D: usize>(x: &Tensor<D>, grads: &Gradients) -> TensorData {
    let grad = x.grad(grads).expect("the input should have a gradient");
    grad.into_data()
}

/// Returns `f(x)` without autodiff, `f(x)` with autodiff, and the gradient of `x`. The
/// first two take different paths: some ops are one kernel without autodiff and several
/// with it.
pub(super) fn grad<const D: usize, const E: usize>(
    device: &Device,
    shape: [usize; D],
    f: impl Fn(Tensor<D>) -> Tensor<E>,
) -> Vec<TensorData> {
    let x = leaf(device, shape, 1);
    let (plain, y) = (f(x.clone().inner()), f(x.clone()));
    let grads = backward(&y);
    vec![plain.into_data(), y.into_data(), grad_of(&x, &grads)]
}

/// Like [`grad`], for two inputs.
pub(super) fn grad2<const A: usize, const B: usize, const E: usize>(
    device: &Device,
    a: [usize; A],
    b: [usize; B],
    f: impl Fn(Tensor<A>, Tensor<B>) -> Tensor<E>,
) -> Vec<TensorData> {
    let (a, b) = (leaf(device, a, 1), leaf(device, b, 2));
    let plain = f(a.clone().inner(), b.clone().inner());
    let y = f(a.clone(), b.clone());
    let grads = backward(&y);
    let [plain, y] = [plain, y].map(Tensor::into_data);
    vec![plain, y, grad_of(&a, &grads), grad_of(&b, &grads)]
}

/// Like [`grad`], for three inputs.
pub(super) fn grad3<const A: usize, const B: usize, const C: usize, const E: usize>(
    device: &Device,
    a: [usize; A],
    b: [usize; B],
    c: [usize; C],
    f: impl Fn(Tensor<A>, Tensor<B>, Tensor<C>) -> Tensor<E>,
) -> Vec<TensorData> {
    let (a, b, c) = (leaf(device, a, 1), leaf(device, b, 2), leaf(device, c, 3));
    let plain = f(a.clone().inner(), b.clone().inner(), c.clone().inner());
    let y = f(a.clone(), b.clone(), c.clone());
    let grads = backward(&y);
    let [plain, y] = [plain, y].map(Tensor::into_data);
    let (a, b, c) = (
        grad_of(&a, &grads),
        grad_of(&b, &grads),
        grad_of(&c, &grads),
    );
    vec![plain, y, a, b, c]
}

/// Applies a module to one input. Returns the output and the gradients of the input and of
/// every parameter in training mode, then the output in validation mode.
pub(super) fn module<M: Module, const D: usize, const E: usize>(
    device: &Device,
    init: impl Fn(&Device) -> M,
    shape: [usize; D],
    forward: impl Fn(&M, Tensor<D>) -> Tensor<E>,
) -> Vec<TensorData> {
    let x = leaf(device, shape, 1);
    let module = fill(init(&x.device()));
    let y = forward(&module, x.clone());
    let grads = backward(&y);
    let mut outputs = vec![y.into_data(), grad_of(&x, &grads)];
    outputs.extend(param_grads(&module, &grads));
    outputs.push(forward(&module.valid(), floats(device, shape, 4)).into_data());
    outputs
}

/// Returns the gradients of all parameters of a module, in the order of its fields.
pub(super) fn param_grads<M: Module>(module: &M, grads: &Gradients) -> Vec<TensorData> {
    let mut visitor = Grads {
        grads,
        outputs: Vec::new(),
    };
    module.visit(&mut visitor);
    visitor.outputs
}

struct Grads<'a> {
    grads: &'a Gradients,
    outputs: Vec<TensorData>,
}

impl ModuleVisitor for Grads<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let grad = param.val().grad(self.grads);
        self.outputs.extend(grad.map(Tensor::into_data));
    }
}

/// Returns the values of all parameters of a module, in the order of its fields.
pub(super) fn parameters<M: Module>(module: &M) -> Vec<TensorData> {
    let mut visitor = Values(Vec::new());
    module.visit(&mut visitor);
    visitor.0
}

struct Values(Vec<TensorData>);

impl ModuleVisitor for Values {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(param.val().into_data());
    }
}

/// Sets every uninitialised parameter by formula. Running statistics are always
/// initialised, so they are not changed.
pub(super) fn fill<M: Module>(module: M) -> M {
    module.map(&mut Fill { seed: 100 })
}

struct Fill {
    seed: u32,
}

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if param.is_initialized() {
            return param;
        }
        self.seed += 1;
        let data = values(param.lazy_shape().as_slice(), self.seed, -0.5, 0.7);
        Param::from_tensor(Tensor::from_data(data, &param.lazy_device()))
    }
}
