//! Custom ops in addition to Burn's: the plug-in point for kernels.
//!
//! A worker with custom ops is a program of a few lines: it creates a [`CustomOps`], puts
//! it into `tensord_worker::WorkerOptions` and starts a `tensord_worker::Worker`.
//! `worker/examples/custom_op.rs` is an example. Programs call the ops with
//! `tensord_client::CustomOp`.

use std::{collections::BTreeMap, error::Error, fmt, sync::Arc};

use burn_backend::BackendTypes;
#[cfg(feature = "cube")]
use burn_cubecl::CubeBackend;
use burn_flex::Flex;
use burn_ir::{BackendIr, CustomOpIr, HandleContainer};

/// The tensors by id, from which an op takes its inputs, and in which it registers its
/// outputs.
pub type Tensors<B> = HandleContainer<<B as BackendIr>::Handle>;

/// What a custom op returns. After an error, the outputs of the call have no value and
/// reads of them return the error's text; the session continues. Any error converts with
/// `?`, and a text with `into`.
pub type OpResult = Result<(), Box<dyn Error + Send + Sync>>;

/// The handler of an op on backend `B`. It takes the inputs that the call names, and
/// registers the outputs with the shapes and types that the call declares.
pub(crate) type Handler<B> = Arc<
    dyn Fn(&mut Tensors<B>, &CustomOpIr, &<B as BackendTypes>::Device) -> OpResult + Send + Sync,
>;

/// The panic payload by which the error of a custom op leaves Burn's interpreter, whose
/// handlers return nothing.
pub struct FailedCustomOp(pub String);

/// Ops for one backend, by name.
pub(crate) type Handlers<B> = BTreeMap<String, Handler<B>>;

/// An op written against Burn's `Backend`, so that it runs on every device.
pub trait PortableOp: Clone + Send + Sync + 'static {
    /// Executes `call`, as the function given to [`CustomOps::flex`] does.
    ///
    /// # Errors
    ///
    /// When the op cannot execute the call. The error becomes the call's fault.
    fn run<B: BackendIr>(
        &self,
        tensors: &mut Tensors<B>,
        call: &CustomOpIr,
        device: &B::Device,
    ) -> OpResult;
}

/// The custom ops of a worker, by name and backend.
#[derive(Clone, Default)]
pub struct CustomOps {
    pub(crate) flex: Handlers<Flex>,
    #[cfg(feature = "cube")]
    pub(crate) cube: Handlers<CubeBackend>,
}

impl CustomOps {
    /// Creates an empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an op for every backend of this build. It replaces ops of the same name.
    #[must_use]
    pub fn portable(self, name: &str, op: impl PortableOp) -> Self {
        #[cfg(feature = "cube")]
        let all = {
            let op = op.clone();
            self.cube(name, move |tensors, call, device| {
                op.run::<CubeBackend>(tensors, call, device)
            })
        };
        #[cfg(not(feature = "cube"))]
        let all = self;
        all.flex(name, move |tensors, call, device| {
            op.run::<Flex>(tensors, call, device)
        })
    }

    /// Adds an op for Flex devices. It replaces an op of the same name.
    ///
    /// `run` takes the inputs that the call names from the tensors, and registers the
    /// outputs there with the shapes and types that the call declares. If it returns an
    /// error or panics, its outputs have no value and reads of them return the fault; the
    /// session continues.
    ///
    /// ```
    /// use burn_backend::ops::FloatTensorOps;
    /// use burn_flex::Flex;
    /// use tensord_backend::CustomOps;
    ///
    /// let ops = CustomOps::new().flex("negate", |tensors, call, _device| {
    ///     let ([x], [y]) = (&call.inputs[..], &call.outputs[..]) else {
    ///         return Err("negate has one input and one output".into());
    ///     };
    ///     let x = tensors.get_float_tensor::<Flex>(x);
    ///     tensors.register_float_tensor::<Flex>(&y.id, Flex::float_neg(x));
    ///     Ok(())
    /// });
    /// # drop(ops);
    /// ```
    #[must_use]
    pub fn flex<F>(mut self, name: &str, run: F) -> Self
    where
        F: Fn(&mut Tensors<Flex>, &CustomOpIr, &<Flex as BackendTypes>::Device) -> OpResult
            + Send
            + Sync
            + 'static,
    {
        self.flex.insert(name.into(), Arc::new(run));
        self
    }

    /// Adds an op for the devices of CubeCL's runtimes. It replaces an op of the same name.
    /// `run` is as for [`flex`](Self::flex), but its tensors are CubeCL's, so that it can
    /// launch its own kernels on them.
    #[cfg(feature = "cube")]
    #[must_use]
    pub fn cube<F>(mut self, name: &str, run: F) -> Self
    where
        F: Fn(&mut Tensors<CubeBackend>, &CustomOpIr, &burn_cubecl::CubeDevice) -> OpResult
            + Send
            + Sync
            + 'static,
    {
        self.cube.insert(name.into(), Arc::new(run));
        self
    }
}

impl fmt::Debug for CustomOps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ops = f.debug_struct("CustomOps");
        ops.field("flex", &self.flex.keys());
        #[cfg(feature = "cube")]
        ops.field("cube", &self.cube.keys());
        ops.finish()
    }
}
