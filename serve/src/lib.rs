//! Serves [Burn](https://burn.dev) models from the devices of a [tensord](https://crates.io/crates/tensord) pool.
//!
//! A model is code: a function from tensors to tensors, with the names, types and shapes of these. The server leases a
//! device for each of its replicas, puts requests together to batches, and answers them by the [Open Inference
//! Protocol](https://github.com/kserve/open-inference-protocol), version 2, over HTTP and gRPC on one port. Clients of
//! KServe and of NVIDIA's Triton work with it.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use burn::{nn::LinearConfig, tensor::Tensor};
//! use tensord_client::Pool;
//! use tensord_serve::{BATCH, Model, Port, Serve};
//!
//! let digits = Model::new(
//!     "digits",
//!     Port::f32("image", [BATCH, 64]),
//!     Port::f32("scores", [BATCH, 10]),
//!     |device| {
//!         let linear = LinearConfig::new(64, 10).init(device);
//!         Ok::<_, std::convert::Infallible>(move |images: Tensor<2>| linear.forward(images))
//!     },
//! );
//! let server = Serve::new(Pool::connect_env()?)
//!     .model(digits.replicas(1..=4))
//!     .bind("127.0.0.1:8000")?;
//! println!("serving at {}", server.url());
//! server.run_until_signal();
//! # Ok(()) }
//! ```
//!
//! - [`Model`] declares what a model takes and returns, with a [`Port`] for each tensor; how it is loaded; how many
//!   replicas it may have; and how requests are put together ([`Batching`]).
//! - [`Serve`] has the models, the certificate and the tokens; [`Server`] is one that runs.
//!
//! # What a client may rely on
//!
//! Each request gets an answer, or an error with the reason. It is computed once, unless its
//! replica is lost or takes very long; then another replica computes it, too. A replica that
//! is lost is replaced, and its requests are computed by another one. Requests wait in a queue with a bound. A request that
//! could not be answered by its deadline is refused, and one whose client has gone is not computed.

mod access;
mod answering;
mod api;

mod connection;
mod declarations;
mod error;
mod fleet;
mod grpc;
mod http;
mod integers;
mod job;
mod limits;
mod listener;
mod metrics;
mod model;
mod offload;
mod pace;
mod protocol;
mod queue;
mod replica;
mod scaling;
mod served;
mod server;
mod signature;
#[cfg(feature = "testing")]
pub mod testing;
mod tls;

pub use self::{
    limits::Limits,
    model::{Batching, LoadError, Model},
    server::{Serve, ServeError, Server},
    signature::{BATCH, Port, PortKind, Ports},
};
