//! A model that is served: its declaration, how it is loaded onto a device, and how much of the pool it may use.

use std::{error::Error, fmt, ops::RangeInclusive, sync::Arc, time::Duration};

use burn::tensor::{Device, TensorData};
use tensord_client::LeaseRequest;

use crate::{
    limits::LONGEST,
    signature::{Ports, Reading, TensorSpec},
};

/// Why a model could not be loaded.
pub type LoadError = Box<dyn Error + Send + Sync>;

/// A loaded model: uploads the values of its inputs, computes, and begins to read its outputs.
pub(crate) type Runner = Box<dyn Fn(Vec<TensorData>, &Device) -> Vec<Reading>>;

type Load = dyn Fn(&Device) -> Result<Runner, LoadError> + Send + Sync;

/// A model to serve.
///
/// ```no_run
/// use burn::{nn::LinearConfig, tensor::Tensor};
/// use tensord_serve::{BATCH, Batching, Model, Port};
///
/// let model = Model::new(
///     "digits",
///     Port::f32("image", [BATCH, 64]),
///     Port::f32("scores", [BATCH, 10]),
///     |device| {
///         // Runs for each replica, on its device: make the module here, and load its weights.
///         let linear = LinearConfig::new(64, 10).init(device);
///         Ok::<_, std::convert::Infallible>(move |images: Tensor<2>| linear.forward(images))
///     },
/// )
/// .version("3")
/// .replicas(1..=4)
/// .batching(Batching { max_size: 64, ..Batching::default() });
/// # let _ = model;
/// ```
#[must_use = "a model is served once it is given to Serve::model"]
pub struct Model {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) inputs: Vec<TensorSpec>,
    pub(crate) outputs: Vec<TensorSpec>,
    /// Whether requests are put together.
    pub(crate) has_batches: bool,
    pub(crate) load: Arc<Load>,
    pub(crate) replicas: RangeInclusive<usize>,
    pub(crate) batching: Batching,
    pub(crate) deadline: Duration,
    pub(crate) idle_after: Duration,
    pub(crate) checks_finite: bool,
    pub(crate) lease: Arc<dyn Fn() -> LeaseRequest + Send + Sync>,
}

impl Model {
    /// Declares a model that takes and returns these tensors.
    ///
    /// `load` runs for each replica, on the thread of the replica and with its device. It returns the function that
    /// computes a batch, which need not be `Send`. If either panics, that is an error of the replica, or of the requests.
    ///
    /// If every input and output has [`BATCH`](crate::BATCH) as its first dimension, requests are put together along it.
    /// Otherwise each request is computed alone.
    pub fn new<I, O, L, F, E>(name: impl Into<String>, inputs: I, outputs: O, load: L) -> Self
    where
        I: Ports,
        O: Ports,
        L: Fn(&Device) -> Result<F, E> + Send + Sync + 'static,
        F: Fn(I::Tensors) -> O::Tensors + 'static,
        E: Into<LoadError>,
    {
        let load = move |device: &Device| {
            let forward = load(device).map_err(Into::into)?;
            let run = move |values: Vec<TensorData>, device: &Device| {
                let inputs = I::upload(&mut values.into_iter(), device);
                let mut readings = Vec::new();
                O::read(forward(inputs), &mut readings);
                readings
            };
            Ok(Box::new(run) as Runner)
        };
        let (inputs, outputs) = (inputs.specs(), outputs.specs());
        let mut ports = inputs.iter().chain(&outputs);
        let has_batches = ports.all(TensorSpec::has_batch);
        Self {
            name: name.into(),
            version: "1".into(),
            inputs,
            outputs,
            has_batches,
            load: Arc::new(load),
            replicas: 1..=1,
            batching: Batching::default(),
            deadline: Duration::from_secs(10),
            idle_after: Duration::from_secs(60),
            checks_finite: false,
            lease: Arc::new(|| LeaseRequest::devices(1)),
        }
    }

    /// Sets the version, which is `1` otherwise. Several versions of a model can be served at a time; a request without
    /// a version gets the highest one: of numbers the greatest, of other texts the last in alphabetical order.
    pub fn version(mut self, version: impl Into<String>) -> Self {
        self.version = version.into();
        self
    }

    /// Sets the least and the most replicas, each on a leased device; 1 otherwise. Within these, there are as many as
    /// keep requests from waiting. If the least is 0, the first request after an idle time waits until there is one.
    pub fn replicas(mut self, replicas: RangeInclusive<usize>) -> Self {
        self.replicas = replicas;
        self
    }

    /// Sets how requests are put together.
    pub fn batching(mut self, batching: Batching) -> Self {
        let max_delay = batching.max_delay.min(LONGEST);
        self.batching = Batching {
            max_delay,
            ..batching
        };
        self
    }

    /// Sets how long a request may take that has no timeout of its own; 10 s otherwise.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline.min(LONGEST);
        self
    }

    /// Sets after which time a replica that is not needed gives its device back; a minute otherwise.
    pub fn idle_after(mut self, idle_after: Duration) -> Self {
        self.idle_after = idle_after.min(LONGEST);
        self
    }

    /// Answers a request with an error if its outputs have a NaN or an infinity.
    pub fn check_finite(mut self) -> Self {
        self.checks_finite = true;
        self
    }

    /// Sets what is leased for a replica; one device of any kind otherwise. The model runs on the first device of the
    /// lease. The callback of [`LeaseRequest::on_event`] is the server's.
    ///
    /// ```no_run
    /// # use tensord_client::LeaseRequest;
    /// # fn set(model: tensord_serve::Model) -> tensord_serve::Model {
    /// // A quarter of a GPU's time, and 4 GiB of its memory.
    /// model.lease(|| LeaseRequest::devices(1).kind("cuda").share(0.25).memory_bytes(4 << 30))
    /// # }
    /// ```
    pub fn lease(mut self, lease: impl Fn() -> LeaseRequest + Send + Sync + 'static) -> Self {
        self.lease = Arc::new(lease);
        self
    }
}

impl Model {
    /// Returns the most rows that are computed together: a request to a model without batches counts as one row, and is
    /// computed alone.
    pub(crate) fn most_rows(&self) -> usize {
        match self.has_batches {
            true => self.batching.max_size,
            false => 1,
        }
    }
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model")
            .field("name", &self.name)
            .field("version", &self.version)
            .field("inputs", &self.inputs)
            .field("outputs", &self.outputs)
            .field("replicas", &self.replicas)
            .field("batching", &self.batching)
            .finish_non_exhaustive()
    }
}

/// How requests are put together to batches.
///
/// A replica that has nothing to do takes the requests that wait once there are `max_size` rows, or the first has waited
/// for `max_delay`. While it computes, a further batch follows as soon as it is full.
///
/// A batch is filled up with zeros to the next power of two, and at most to `max_size`, so that there are few sizes: for
/// each of them, the device has compiled its kernels, and the pool sends the ops of later batches in a few bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batching {
    /// Most rows of a batch. A request with more rows is refused.
    pub max_size: usize,
    /// How long the first request of a batch waits for others.
    pub max_delay: Duration,
    /// Most rows that wait. A request beyond it is answered with HTTP's 429, or gRPC's `RESOURCE_EXHAUSTED`, and so
    /// is one that would wait beyond its deadline.
    pub max_queue: usize,
}

impl Default for Batching {
    /// Batches of up to 32 rows, which wait for at most 2 ms, and a queue of 512 rows.
    fn default() -> Self {
        Self {
            max_size: 32,
            max_delay: Duration::from_millis(2),
            max_queue: 512,
        }
    }
}
