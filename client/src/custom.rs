//! Ops that a pool's workers have in addition to Burn's: your own kernels, which a
//! program calls like any other op. Workers get them with `tensord_worker::CustomOps`.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use burn::tensor::Tensor;
//! use tensord_client::{CustomOp, LeaseRequest, Pool};
//!
//! let lease = Pool::connect_env()?.lease(LeaseRequest::devices(1))?;
//! let x = Tensor::<2>::ones([64, 10], &lease.devices()[0]);
//! // y = x / (1 + exp(-1.5 x)), computed by the worker's kernel.
//! let y: Tensor<2> = CustomOp::new("swish").input(x).scalar(1.5).call([64, 10]);
//! # drop(y); Ok(()) }
//! ```

use burn::{
    backend::{Remote, tensor::FloatTensor},
    tensor::{DType, Device, Shape, Tensor},
};
use burn_backend::Scalar;
use burn_ir::{CustomOpIr, ScalarIr, TensorIr};

use crate::{
    bridge::{forward, leased},
    data::{self, Kind},
};

/// A call of an op that workers have in addition to Burn's. Such an op has no
/// gradient: its outputs do not track gradients, even where its inputs do.
#[derive(Debug)]
pub struct CustomOp {
    name: String,
    inputs: Vec<FloatTensor<Remote>>,
    scalars: Vec<ScalarIr>,
    device: Option<Device>,
}

impl CustomOp {
    /// A call of the op that workers have registered as `name`.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            inputs: Vec::new(),
            scalars: Vec::new(),
            device: None,
        }
    }

    /// The device to run the op on. Needed only if the op has no inputs.
    #[must_use]
    pub fn on(mut self, device: &Device) -> Self {
        self.device = Some(device.clone());
        self
    }

    /// Adds the next input.
    ///
    /// # Panics
    ///
    /// When the tensor is not on a remote device, as every leased device is.
    #[must_use]
    pub fn input<const D: usize, K: Kind>(mut self, tensor: Tensor<D, K>) -> Self {
        self.device.get_or_insert_with(|| tensor.device());
        self.inputs.push(data::handle(tensor));
        self
    }

    /// Adds the next scalar argument.
    #[must_use]
    pub fn scalar(mut self, scalar: impl Into<Scalar>) -> Self {
        self.scalars.push(scalar.into().into());
        self
    }

    /// Calls the op, which has one output of the device's default element type.
    ///
    /// # Panics
    ///
    /// As [`call_for`](Self::call_for), and when `shape` does not have `D` dimensions.
    pub fn call<const D: usize, K: Kind>(self, shape: impl Into<Shape>) -> Tensor<D, K> {
        let device = self.leased_device();
        let outputs = vec![(shape.into(), K::default_dtype(&device))];
        self.call_for(outputs).take()
    }

    /// Calls the op, which has outputs of these shapes and element types. Nothing is
    /// checked here: if the worker does not have the op, or the op returns an error or
    /// other outputs, reading an output fails, with the text of that error.
    ///
    /// ```no_run
    /// use burn::tensor::{DType, Device, Int, Shape, Tensor};
    /// use tensord_client::CustomOp;
    ///
    /// /// Returns the `k` largest values and their indices.
    /// fn top(k: usize, x: Tensor<1>) -> (Tensor<1>, Tensor<1, Int>) {
    ///     let call = CustomOp::new("top").input(x).scalar(k as u64);
    ///     let shape = Shape::new([k]);
    ///     let outputs = vec![(shape.clone(), DType::F32), (shape, DType::I32)];
    ///     let mut outputs = call.call_for(outputs);
    ///     (outputs.take(), outputs.take())
    /// }
    /// ```
    ///
    /// # Panics
    ///
    /// When there is neither an input nor a [device](Self::on), or the device is not
    /// leased.
    pub fn call_for(self, outputs: Vec<(Shape, DType)>) -> CustomOutputs {
        let device = self.leased_device();
        let exchange = leased(&device).expect("the device of a custom op must be leased");
        let client = &exchange.burn().client;
        let outputs: Vec<_> = outputs
            .into_iter()
            .map(|(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape, dtype))
            .collect();
        let inputs: Vec<_> = self
            .inputs
            .into_iter()
            .map(|input| input.into_ir())
            .collect();
        let scalars = forward::pack(&self.name, self.scalars);
        let op = CustomOpIr::with_scalars(forward::FORWARD, &inputs, &outputs, scalars);
        CustomOutputs(client.register(op).into_iter())
    }

    fn leased_device(&self) -> Device {
        let device = self.device.clone();
        let device = device
            .unwrap_or_else(|| panic!("op {} has no inputs: set a device with `on`", self.name));
        device.without_autodiff()
    }
}

/// The outputs of a [`CustomOp`], in order.
#[derive(Debug)]
pub struct CustomOutputs(std::vec::IntoIter<FloatTensor<Remote>>);

impl CustomOutputs {
    /// The next output.
    ///
    /// # Panics
    ///
    /// When no output is left, or it does not have `D` dimensions.
    pub fn take<const D: usize, K: Kind>(&mut self) -> Tensor<D, K> {
        let output = self
            .0
            .next()
            .expect("no output may be taken beyond those requested");
        Tensor::from_primitive::<Remote>(K::of(output))
    }
}
